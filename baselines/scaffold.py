"""SCAFFOLD: local steps are corrected by what the clients' directions differ by.

    local step:        y <- y - rate (estimate(y) + c - c_p)
    end of a round:    c_p <- c_p - c + (x - y) / (K rate)          (option II)
    server:            x <- x + rate_g mean_p (y_p - x),   c <- c + (|S| / P) mean_p (change of c_p)

x is the global model of the round, c_p the client's control variate, c the server's. Both are computed from
displacements, which came out of noised steps: they cost nothing, and the change of c_p need not be sent,
since the server finds it from y_p as the client does. What comes down is c with x.

If an answer is lost on its way, the client's control has changed and the server's has not.

Source: Karimireddy, Kale, Mohri, Reddi, Stich and Suresh 2020, "SCAFFOLD: Stochastic Controlled Averaging
for Federated Learning".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise import _validate
from equipoise.federated import Extra, FedAvg, Reply, RoundWrapper
from equipoise.federated.messages import check_tensors
from equipoise.federated.registry import FederatedMethod, dp_sgd
from equipoise.methods import Context, State
from equipoise.methods.base import Parameters
from equipoise.methods.card import Card
from equipoise.methods.configuration import Count, Positive
from equipoise.methods.named_tensors import copied

__all__ = ["SCAFFOLD", "Scaffold", "ScaffoldAverage"]


@dataclass(frozen=True)
class Scaffold(RoundWrapper):
    """The client's half: any method, corrected by control variates.

    Args:
        inner: estimates the gradient.
        local_steps: K, steps per round.
        learning_rate: of the local steps, which are plain SGD.

    Example:
        >>> from equipoise.methods import DPSGD
        >>> Scaffold(DPSGD(clip_norm=0.1), local_steps=5, learning_rate=0.5).config()["local_steps"]
        5
    """

    name: ClassVar[str] = "scaffold"
    card: ClassVar[Card] = Card(
        summary="Any method, its local steps corrected by control variates.",
        claim="Keeps clients with different data from drifting apart; with noised displacements the controls "
        "carry the noise of a whole round.",
        source="Karimireddy et al. 2020, SCAFFOLD",
        guarantee="proven",
        cost="that of the inner method, three copies of the parameters, and c sent down",
        use_when="Clients differ, rounds have many local steps, and the noise of a round is small.",
        avoid_when="Noise is heavy: the controls then add it to every step of the next round.",
    )

    _: KW_ONLY
    local_steps: Count
    learning_rate: Positive

    def takes(self, kind: str) -> Mapping[str, Extra] | None:
        """Also the server's control variate; without one it is zero."""
        inner = super().takes(kind)
        if inner is None or kind != "train":
            return inner
        return {**inner, "control": Extra(partial(check_tensors, "control"), required=False)}

    def init(self, context: Context) -> State:
        nothing = _zeros(context.params)
        return {**super().init(context), "own": nothing, "server": nothing}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        estimate, state = super().step(context, state)
        own, server = state["own"], state["server"]
        return {name: value + (server[name] - own[name]) for name, value in estimate.items()}, state

    def follow(self, state: State, extras: Mapping[str, Any]) -> State:
        control = copied(extras["control"]) if "control" in extras else _zeros(state["own"])
        return {**super().follow(state, extras), "server": control}

    def end_round(self, state: State, end: Parameters) -> State:
        state = super().end_round(state, end)
        moved = control_change(state["start"], end, state["server"], self.local_steps * self.learning_rate)
        return {**state, "own": {name: value + moved[name] for name, value in state["own"].items()}}


class ScaffoldAverage(FedAvg):
    """The server's half.

    Args:
        clients: P, all clients, also those that are not picked for a round.
        local_steps, learning_rate: those of the clients.
        server_rate: rate_g.

    Example:
        >>> server = ScaffoldAverage(clients=2, local_steps=1, learning_rate=0.5)
        >>> replies = [Reply({"w": torch.zeros(1)}), Reply({"w": torch.full((1,), 0.5)})]
        >>> server.aggregate({"w": torch.ones(1)}, replies)["w"].item()
        0.25
        >>> server.extras()["control"]["w"].item()  # the mean of 2 and 1
        1.5
    """

    def __init__(
        self, clients: int, *, local_steps: int, learning_rate: float, server_rate: float = 1.0
    ) -> None:
        super().__init__(server_rate)
        _validate.count(clients=clients)
        self.clients, self._length = clients, local_steps * learning_rate
        self._control: dict[str, Tensor] | None = None

    def extras(self) -> dict[str, Any]:
        return {} if self._control is None else {"control": self._control}

    def aggregate(self, params: Parameters, replies: Sequence[Reply]) -> dict[str, Tensor]:
        # Replies were made with the control that was sent, so that the changes are computed with that one.
        now = self._control or _zeros(params)
        changes = [control_change(params, reply.params, now, self._length) for reply in replies]
        self._control = {
            name: value + torch.stack([change[name] for change in changes]).sum(0) / self.clients
            for name, value in now.items()
        }
        return super().aggregate(params, replies)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._control is None else {"control": self._control}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not set(state) <= {"control"}:
            raise ValueError(f"state has {sorted(state)}, SCAFFOLD has a control variate")
        self._control = dict(state["control"]) if state else None


def control_change(
    start: Parameters, end: Parameters, server: Parameters, length: float
) -> dict[str, Tensor]:
    """The change of a client's control variate: (x - y) / (K rate) - c."""
    return {name: (value - end[name]) / length - server[name] for name, value in start.items()}


def _zeros(like: Parameters) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value) for name, value in like.items()}


SCAFFOLD = FederatedMethod(
    "DP-SGD corrected by control variates from noised displacements",
    lambda setup: Scaffold(dp_sgd(setup), local_steps=setup.local_steps, learning_rate=setup.learning_rate),
    lambda setup: ScaffoldAverage(
        setup.clients, local_steps=setup.local_steps, learning_rate=setup.learning_rate
    ),
)
