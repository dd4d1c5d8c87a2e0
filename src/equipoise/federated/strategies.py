"""What the server computes: the instructions of a round, and the next global model from the answers.

`FedAvg` averages the clients' parameters with equal weights: x' = (1/P) sum_p y_p over the P that answered.
Weights by size would be public too, but the sizes are then part of the claim; equal ones ask for nothing.
With clients that clip at a fixed or learned radius this is DP-FedAvg, with `Proximal` clients FedProx.

`AdaptDPFedAvg` asks every client of the round for its noised mean square at the global model first, makes
the radius of the round of these, and sends it along. With variant="fused" it asks nothing: the clients send
the noised mean square of their local steps beside the parameters, and it sets the radius of the next round.

The server holds released values alone; nothing here is private, and nothing here adds noise.

Sources: McMahan et al. 2017; Fukami, Murata and Niwa, TMLR 2025.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from equipoise.federated.methods.server_radius import SQUARES
from equipoise.methods.adaptive_rms.radius import RadiusState, RMSRadius
from equipoise.methods.base import Parameters
from equipoise.methods.checks import require_one_of, require_positive

__all__ = ["AdaptDPFedAvg", "Asker", "FedAvg", "Reply", "Strategy"]


@dataclass(frozen=True)
class Reply:
    """A client's released mean square, the answer to a query or beside the parameters.

    Attributes:
        mean: released mean of min(|g|^2 / U, 1).
        noise: standard deviation of its noise, public.
    """

    mean: float
    noise: float

    def refusal(self) -> str | None:
        """Why it cannot be used, or None; squares and sums of usable numbers stay finite."""
        values = (self.mean, self.noise)
        if not all(isinstance(v, int | float) and abs(v) <= _LARGEST_REPLY for v in values) or self.noise < 0:
            return "it sent a number that is not finite or beyond all bounds, or noise below zero"
        return None


_LARGEST_REPLY = 1e100
_SPARE = 1e-6  # of the largest float: sums over a million answers, and steps of 1e-6 into them, stay finite

Asker = Callable[[float], Sequence[Reply]]
"""square limit U -> the answers of the clients that take part in the round and could be reached."""


class Strategy(ABC):
    """A server's side of the training."""

    @abstractmethod
    def instructions(self, ask: Asker) -> dict[str, Any]:
        """Arguments of `Client.train` for the round that begins; may ask the round's clients first."""

    @abstractmethod
    def aggregate(self, params: Parameters, answers: Sequence[Parameters]) -> dict[str, Tensor]:
        """The next global model, from the parameters of those that answered (at least one)."""

    def refusal(self, params: Parameters, answer: Any) -> str | None:
        """Why a client's answer cannot be used, or None; such a client is out of the round."""
        if not isinstance(answer, Mapping) or not answer:
            return f"it sent a {type(answer).__name__} for named tensors"
        for name, value in answer.items():
            dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
            if not dense or value.is_meta:
                return f"it sent something else than a dense tensor for {name!r:.80}"
            try:
                usable = not value.is_complex() and bool(torch.isfinite(value).all())
            except RuntimeError:  # a type that torch does not compute with
                usable = False
            if not usable:
                return f"it sent numbers for {name!r:.80} that are not finite or not real"
        return None

    def metrics(self) -> Mapping[str, float]:
        """Public numbers of the round under way."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What it carries from round to round, as tensors and plain values, for a server that restarts."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        if state:
            raise ValueError(
                f"state has {sorted(state)}, but {type(self).__name__} carries nothing: the folder belongs "
                "to another strategy"
            )


class FedAvg(Strategy):
    """The unweighted mean of the clients' parameters.

    Args:
        server_rate: the step from the global model to the mean; 1 goes all the way.

    Example:
        >>> mean = FedAvg().aggregate({"w": torch.zeros(1)}, [{"w": torch.ones(1)}, {"w": 3 * torch.ones(1)}])
        >>> mean["w"].item()
        2.0
    """

    def __init__(self, server_rate: float = 1.0) -> None:
        require_positive("server_rate", server_rate)
        self.server_rate = float(server_rate)

    def instructions(self, ask: Asker) -> dict[str, Any]:
        """None."""
        return {}

    def received(self, params: Parameters, answer: Parameters) -> Parameters:
        """The parameters of a client, from what it sent: here they are what it sent."""
        return answer

    def refusal(self, params: Parameters, answer: Any) -> str | None:
        """Also where what it sent does not make parameters of the model's names, shapes and finite values."""
        found = super().refusal(params, answer)
        if found is not None:
            return found
        try:
            end = self.received(params, answer)
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
            return f"what it sent does not fit the model ({type(error).__name__})"
        for name, value in params.items():
            got = end.get(name)
            if got is None or got.shape != value.shape or got.dtype != value.dtype:
                return f"what it sent for {name!r} has not the model's shape and type"
            if not bool((got.abs() <= _SPARE * torch.finfo(got.dtype).max).all()):
                return f"what it sent for {name!r} is not finite, or so large that sums overflow"
        return None

    def aggregate(self, params: Parameters, answers: Sequence[Parameters]) -> dict[str, Tensor]:
        """The mean, name by name; of one answer, that answer bit for bit."""
        if not answers:
            raise ValueError("answers is empty: keep the global model where nobody answered")
        ends = [self.received(params, answer) for answer in answers]
        mean = {
            name: torch.stack([end[name] for end in ends]).mean(0) if len(ends) > 1 else ends[0][name].clone()
            for name in params
        }
        if self.server_rate == 1:
            return mean
        return {name: value + self.server_rate * (mean[name] - value) for name, value in params.items()}


class AdaptDPFedAvg(FedAvg):
    """FedAvg with a clipping radius that follows the clients' mean squared gradient norm.

    Args:
        radius: the rule; `RMSRadius(g_hat, offset="paper")` is the published one.
        rounds: R, and
        clients: P, for the paper's offset, which counts all R P released numbers.
        variant: as at the clients' `ServerRMS`: "round", or "fused", whose radius is a round late.
        initial_clip_norm: radius of the first round of variant "fused"; G when None.

    Raises:
        ValueError: an argument out of range, or one that the variant does not have.

    Example:
        >>> strategy = AdaptDPFedAvg(RMSRadius(1.0, offset="none"), rounds=10, clients=2)
        >>> answers = [Reply(0.1, 0.0), Reply(0.3, 0.0)]
        >>> round(strategy.instructions(lambda limit: answers)["clip_norm"], 6)  # sqrt(2 * 0.2)
        0.632456
        >>> fused = AdaptDPFedAvg(RMSRadius(1.0, offset="none"), rounds=10, clients=2, variant="fused")
        >>> fused.instructions(lambda limit: [])
        {'clip_norm': 1.0, 'square_limit': 1.0}
    """

    def __init__(
        self,
        radius: RMSRadius,
        rounds: int,
        clients: int,
        *,
        variant: Literal["round", "fused"] = "round",
        initial_clip_norm: float | None = None,
    ) -> None:
        super().__init__()
        require_one_of("variant", variant, ("round", "fused"))
        if initial_clip_norm is not None and variant == "round":
            raise ValueError(
                f"initial_clip_norm={initial_clip_norm!r} belongs to variant='fused': a round of variant="
                "'round' begins with a radius of its own"
            )
        self.radius, self.variant, self._releases = radius, variant, rounds * clients
        self._state: RadiusState = radius.start(initial_clip_norm)
        self._used = self._state["clip_norm"]
        self._relative_noise: float | None = None

    def instructions(self, ask: Asker) -> dict[str, Any]:
        """The radius of the round; of variant "fused" also U, in whose units squares are to be sent."""
        own = {}
        if self.variant == "round":
            self._follow(ask(self._state["square_limit"]))
        else:
            own["square_limit"] = self._state["square_limit"]
        self._used = self._state["clip_norm"]
        return {"clip_norm": self._used, **own}

    def refusal(self, params: Parameters, answer: Any) -> str | None:
        """Of variant "fused" also where there is no usable mean square beside the parameters."""
        found = super().refusal(params, answer)
        if found is not None or self.variant == "round":
            return found
        reply = _beside(answer)
        return f"it sent no mean and noise for {SQUARES!r}" if reply is None else reply.refusal()

    def aggregate(self, params: Parameters, answers: Sequence[Parameters]) -> dict[str, Tensor]:
        """The mean of the parameters; the radius of variant "fused" follows."""
        if self.variant == "fused":
            self._follow([reply for answer in answers if (reply := _beside(answer)) is not None])
        return super().aggregate(params, answers)

    def _follow(self, replies: Sequence[Reply]) -> None:
        """The radius after these answers.

        The number of valid ones takes the place of P in the noise of their mean. Without any the radius
        stays.
        """
        limit = self._state["square_limit"]
        replies = [reply for reply in replies if reply.refusal() is None]
        if not replies:
            return
        mean = limit * math.fsum(reply.mean for reply in replies) / len(replies)
        noise = limit * math.sqrt(math.fsum(reply.noise**2 for reply in replies)) / len(replies)
        doubt = self.radius.doubt(noise / limit)
        if doubt is not None and self.radius.doubt(self._relative_noise or 0.0) is None:
            warnings.warn(doubt, stacklevel=3)
        self._relative_noise = noise / limit
        self._state = self.radius.update(self._state, mean, noise, self._releases)

    def metrics(self) -> Mapping[str, float]:
        """The round's radius; where it scales itself also s / U, which decides whether it may collapse."""
        own = {"radius": self._used}
        if self.radius.scale == "self" and self._relative_noise is not None:
            own["radius_noise"] = self._relative_noise
        return own

    def state_dict(self) -> dict[str, Any]:
        """The variant, the radius, the scale of the squares and their average."""
        return {"variant": self.variant, **self._state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ValueError: it is another strategy's, or that of the other variant.
        """
        if set(state) != set(self.state_dict()):
            raise ValueError(f"state has {sorted(state)}, a radius has {sorted(self.state_dict())}")
        if state["variant"] != self.variant:
            raise ValueError(
                f"variant={self.variant!r}: the state is of variant={state['variant']!r}, whose clients "
                "answer otherwise; give that one to go on with it, or another folder to start anew"
            )
        self._state = {name: state[name] for name in self._state}
        self._used = self._state["clip_norm"]


def _beside(answer: Parameters) -> Reply | None:
    """The mean square beside the parameters."""
    sent = answer.get(SQUARES)
    return None if sent is None or sent.shape != (2,) else Reply(float(sent[0]), float(sent[1]))
