"""RMS-adaptive clipping at a client: the server sets the radius, from the noised mean squares of all.

A round has two phases. Every client releases its mean of min(|g|^2 / U, 1) at the global model, noised; the
server makes a radius of the mean of these and sends it; every client takes K steps of DP-SGD at that radius.

variant="fused": no query. Every local step is one Gaussian release of the clipped gradients and of the
squared norms of the same batch, and what is sent beside the parameters is

    s_p = mean over the round's steps of (sum_i min(|g_i|^2 / U, 1) + N(0, z_C^2)) / B,

with noise of z_C / (B sqrt(K)), which sets the radius of the next round. With query_steps="first" the squares
join the first local step alone, the one at the global model: R steps are Gaussians of multiplier
(z^-2 + z_C^-2)^(-1/2) and the other R (K - 1) of multiplier z, and the noise of s_p is z_C / B. U of a round
is the server's, so that both ends know it, whatever rounds a client has missed.

Source: Fukami, Murata and Niwa, TMLR 2025, "AdaptDP-FedAvg"; variant="fused" is this library's.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from equipoise.federated.errors import Refused
from equipoise.federated.round_protocol import REPORT, RoundProtocol
from equipoise.methods import AdaptiveRMS, Context, State
from equipoise.methods.base import Parameters, Plan, Setting
from equipoise.methods.checks import require_one_of
from equipoise.privacy.plan import PrivacyPlan
from equipoise.privacy.sampling import FixedEpochs, Sampling

__all__ = ["SQUARES", "ServerRMS", "agreed"]


SQUARES = REPORT + "squares"  # [2] the mean of the squared norms in units of U, and its noise


_ROUNDING = 1 + 1e-6


#: Below it noise in float32 could vanish among the denormals.
SMALLEST_RADIUS = 1e-25


class ServerRMS(RoundProtocol, AdaptiveRMS):
    """The client's half of AdaptDP-FedAvg.

    Args:
        clip_norm: G > 0, the largest radius that the client accepts.
        round_length: K, local steps a round.
        variant: "round", a query of its own every round, or "fused".
        query_steps: of variant "fused", which of a round's steps release squares: "all", or the "first".
        settings: further arguments of `AdaptiveRMS`, but for `initial_clip_norm`, which is the server's.

    Raises:
        ValueError: a value out of range, or one that the variant does not have.

    Example:
        >>> ServerRMS(0.5, round_length=3).answers_query
        True
        >>> ServerRMS(0.5, round_length=3, variant="fused").answers_query
        False
    """

    name: ClassVar[str] = "adaptive-rms-client"
    of_rounds: ClassVar[Sequence[str]] = ("radius_sampling_rate",)

    def __init__(
        self,
        clip_norm: float = 1.0,
        *,
        round_length: int = 1,
        variant: Literal["round", "fused"] = "round",
        query_steps: Literal["all", "first"] = "all",
        **settings: Any,
    ) -> None:
        require_one_of("query_steps", query_steps, ("all", "first"))
        if query_steps == "first" and variant == "round":
            raise ValueError(
                f"query_steps={query_steps!r} belongs to variant='fused': the query of variant='round' is no "
                "step's"
            )
        self.query_steps = query_steps
        initial = settings.get("initial_clip_norm")
        if initial is not None:
            raise ValueError(f"initial_clip_norm={initial!r}: the server begins; give it to AdaptDPFedAvg")
        super().__init__(clip_norm, round_length=round_length, variant=variant, **settings)

    @property
    def fused(self) -> bool:
        """Whether squared norms are released with every step."""
        return self.variant == "fused"

    @property
    def follows_clip_norm(self) -> bool:
        """The server's radius."""
        return True

    @property
    def follows_limit(self) -> bool:
        """Fused: the server's scale of the squares."""
        return self.fused

    @property
    def answers_query(self) -> bool:
        """Not fused: the noised mean square."""
        return not self.fused

    @property
    def squares_per_round(self) -> int:
        """How many releases of squares the mean is over that is sent in a round."""
        return self.round_length if self.fused and self.query_steps == "all" else 1

    def radius_noise(self, plan: Plan) -> float:
        """Standard deviation of the mean square that is sent in a round, in units of U."""
        return super().radius_noise(plan) / math.sqrt(self.squares_per_round)

    def _plan(self, setting: Setting, query: Sampling, z: float, radius_z: float) -> PrivacyPlan:
        plan, sampling = super()._plan(setting, query, z, radius_z), setting.sampling
        if not self.fused or self.squares_per_round == self.round_length:
            return plan
        if isinstance(sampling, FixedEpochs):
            raise ValueError(
                f"sampling={sampling!r} with query_steps={self.query_steps!r}: a record meets one step of an "
                "epoch, and must not meet squares by its place in it. Give query_steps='all', or sampling "
                "that amplifies"
            )
        rounds = math.ceil(sampling.steps / self.round_length)
        return PrivacyPlan(
            [plan["gradient"], replace(plan["squares"], count=rounds)], sampling, plan.relation
        )

    def init(self, context: Context) -> State:
        """The first radius, and no squares; fused, the noise of the mean that will be sent."""
        state = self._without_squares(super().init(context))
        return {**state, "noise": self.radius_noise(context.plan)} if self.fused else state

    def rebase(self, state: State, params: Parameters) -> State:
        """A new round: no squares."""
        return self._without_squares(super().rebase(state, params))

    def _without_squares(self, state: State) -> State:
        return {**state, "squares": None} if self.fused else state

    def measures(self, state: State) -> bool:
        """Fused: in every step, or until the round has squares."""
        return self.fused and (self.query_steps == "all" or state["squares"] is None)

    def learn(self, plan: Plan, state: State, mean: float) -> State:
        """The radius stays for the round; the squares are kept for the answer."""
        return {**state, "squares": (state["squares"] or 0.0) + mean}

    def begin_round(self, context: Context, state: State) -> State:
        """The server has set the radius already."""
        return state

    def with_radius(self, state: State, clip_norm: float) -> State:
        """The state with the server's radius.

        Raises:
            Refused: it is no finite number, below `SMALLEST_RADIUS`, or above G.
        """
        return {**state, "clip_norm": agreed("clip_norm", clip_norm, self.radius.g_hat, SMALLEST_RADIUS)}

    def with_limit(self, state: State, square_limit: float) -> State:
        """The state with the server's scale U of the squares.

        Raises:
            Refused: it is no finite number above zero, or above G^2.
        """
        return {**state, "square_limit": agreed("square_limit", square_limit, self.radius.g_hat**2)}

    def answer(self, state: State, start: Parameters, end: Parameters) -> dict[str, Tensor]:
        """The parameters; fused also the mean of the squares that the round's steps have released."""
        sent = super().answer(state, start, end)
        if not self.fused:
            return sent
        mean = [state["squares"] / self.squares_per_round, state["noise"]]
        return {**sent, SQUARES: torch.tensor(mean, dtype=torch.float64)}

    def config(self) -> dict[str, Any]:
        """The settings, as plain values."""
        return {**super().config(), "query_steps": self.query_steps}


def agreed(name: str, value: float, largest: float, least: float = 0.0) -> float:
    """A number of the server, if it lies in (0, largest] and not below `least`.

    Raises:
        Refused: it does not, or is no finite number.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(value, int) and abs(value) > sys.float_info.max:  # it need not have decimal digits either
        raise Refused(f"{name} is a whole number of {value.bit_length()} bits; nothing was spent")
    if not number or not math.isfinite(value):
        raise Refused(f"{name}={value!r:.80} is no finite number; nothing was spent")
    if not (0 < value <= largest * _ROUNDING and value * _ROUNDING >= least):
        low = f"[{least:g}" if least else "(0"
        raise Refused(f"{name}={value!r} lies outside the agreed {low}, {largest:g}]; nothing was spent")
    return min(float(value), largest)
