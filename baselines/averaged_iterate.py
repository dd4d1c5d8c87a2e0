"""The averaged iterate: the mean of all points at which a local step began, over steps, clients and rounds.

    at a client, round r:   ybar_p = mean over k < K of y_k,      y_0 = x_{r-1},  y_k the k-th local iterate
    server:                 xout = mean over r of mean over p of ybar_p

The rounds go on from the last iterates as they would without it. It is what the utility theorem of
AdaptDP-FedAvg speaks of (convex losses), and the usual output of averaged SGD. Everything is computed from
noised iterates, so it costs no privacy; every client sends as many numbers again.

Source: Fukami, Murata and Niwa, TMLR 2025, "AdaptDP-FedAvg".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.federated import Reply, Request, RoundWrapper, Strategy
from equipoise.federated.registry import FEDERATED
from equipoise.federated.server import RoundRequests, misfit
from equipoise.methods import Context, State
from equipoise.methods.base import Parameters
from equipoise.methods.card import Card
from equipoise.methods.named_tensors import copied

__all__ = ["ADAPTDP", "AveragedIterate", "IterateAverage"]


#: Before a parameter's name: the mean of its values in a round. No part of a parameter's name is empty.
_MEAN = ".mean."


@dataclass(frozen=True)
class AveragedIterate(RoundWrapper):
    """The client's half: any method; the mean of the points at which its local steps began is sent too.

    Args:
        inner: estimates the gradient.

    Example:
        >>> from equipoise.methods import DPSGD
        >>> AveragedIterate(DPSGD(clip_norm=0.1)).config()["inner"]["name"]
        'dp-sgd'
    """

    name: ClassVar[str] = "averaged-iterate"
    card: ClassVar[Card] = Card(
        summary="Any method; the mean of the local iterates is sent together with the last one.",
        claim="The output that the utility theorem of AdaptDP-FedAvg covers, for convex losses.",
        source="Fukami, Murata and Niwa 2025, TMLR, AdaptDP-FedAvg",
        guarantee="proven",
        cost="that of the inner method, a copy of the parameters, and twice the numbers sent",
        use_when="The noise of the last steps shows in the last iterate, or the theorem is wanted.",
        avoid_when="Training is short: the mean holds the early iterates too.",
    )

    def init(self, context: Context) -> State:
        return _from_here(super().init(context), context.params)

    def rebase(self, state: State, params: Parameters) -> State:
        return _from_here(super().rebase(state, params), params)

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        estimate, state = super().step(context, state)
        mean = _with_one_more(state["mean"], context.params, state["count"])
        return estimate, {**state, "mean": mean, "count": state["count"] + 1}

    def reply(self, state: State, start: Parameters, end: Parameters) -> Reply:
        inner = super().reply(state, start, end)
        means = {_MEAN + name: value for name, value in copied(state["mean"]).items()}
        return Reply({**inner.params, **means}, inner.reports)


class IterateAverage(Strategy):
    """The server's half: any strategy, whose training gives the averaged iterate.

    Clients weigh equally in a round, and rounds with replies among each other. A round that fails does not
    count. `metrics`, requests and rounds are the inner strategy's.

    Args:
        inner: makes the next global model.

    Example:
        >>> from equipoise.federated import FedAvg
        >>> server, start = IterateAverage(FedAvg()), {"w": torch.zeros(1)}
        >>> requests = server.round(1, start)
        >>> request = next(requests)
        >>> reply = Reply({"w": torch.full((1,), 4.0), ".mean.w": torch.ones(1)})
        >>> try:
        ...     requests.send([reply])
        ... except StopIteration as finished:
        ...     print(finished.value, server.output(finished.value))
        {'w': tensor([4.])} {'w': tensor([1.])}
    """

    def __init__(self, inner: Strategy) -> None:
        self.inner = inner
        self._mean: dict[str, Tensor] | None = None
        self._rounds = 0

    @property
    def name(self) -> str:
        return f"{super().name}({self.inner.name})"

    def round(self, number: int, params: Parameters) -> RoundRequests:
        requests, means = self.inner.round(number, params), list[dict[str, Tensor]]()
        request = next(requests)
        while True:
            replies = yield request
            if request.kind == "train":
                means += [_parted(reply)[1] for reply in replies]
            try:
                request = requests.send([_parted(reply)[0] for reply in replies])
            except StopIteration as finished:
                following: Parameters = finished.value
                break
        if means:
            of_round = {name: torch.stack([mean[name] for mean in means]).mean(0) for name in params}
            before = self._mean or {name: torch.zeros_like(value) for name, value in of_round.items()}
            self._mean = _with_one_more(before, of_round, self._rounds)
            self._rounds += 1
        return following

    def refusal(self, request: Request, reply: Any) -> str | None:
        """Also where the mean of a round is missing or does not fit the model."""
        found = super().refusal(request, reply)
        if found is not None:
            return found
        own, mean = _parted(reply)
        found = self.inner.refusal(request, own)
        return found if found is not None or request.kind != "train" else misfit(request.params, mean)

    def output(self, params: Parameters) -> Parameters:
        """The averaged iterate; `params` before the first round with replies."""
        return params if self._mean is None else copied(self._mean)

    def metrics(self) -> Mapping[str, float]:
        return self.inner.metrics()

    def doubt(self, metrics: Sequence[Mapping[str, float]]) -> str | None:
        return self.inner.doubt(metrics)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "mean": self._mean or {}, "rounds": self._rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {"inner", "mean", "rounds"}:
            raise ValueError(f"state has {sorted(state)}, an averaged iterate has inner, mean and rounds")
        self.inner.load_state_dict(state["inner"])
        self._mean, self._rounds = dict(state["mean"]) or None, int(state["rounds"])


def _from_here(state: State, params: Parameters) -> State:
    """The state of a round that begins: a mean of nothing."""
    return {**state, "mean": {name: torch.zeros_like(value) for name, value in params.items()}, "count": 0}


def _with_one_more(mean: Parameters, value: Parameters, count: int) -> dict[str, Tensor]:
    """The mean of `count` values and one more."""
    return {name: old + (value[name] - old) / (count + 1) for name, old in mean.items()}


def _parted(reply: Reply) -> tuple[Reply, dict[str, Tensor]]:
    """The inner method's reply, and the mean of the round."""
    own, mean = dict[str, Tensor](), dict[str, Tensor]()
    for name, value in reply.params.items():
        if name.startswith(_MEAN):
            mean[name.removeprefix(_MEAN)] = value
        else:
            own[name] = value
    return Reply(own, reply.reports), mean


_INNER = FEDERATED["adaptdp-fedavg"]
ADAPTDP = replace(
    _INNER,
    summary=f"{_INNER.summary}; the model is the mean of all local iterates",
    method=lambda setup: AveragedIterate(_INNER.method(setup)),
    strategy=lambda setup: IterateAverage(_INNER.strategy(setup)),
)
