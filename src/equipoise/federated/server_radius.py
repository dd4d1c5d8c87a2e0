"""RMS-adaptive clipping at a client: the server sets the radius, from the noised mean squares of all.

A round has two phases. Every client releases its mean of min(|g|^2 / U, 1) at the global model, noised; the
server makes a radius of the mean of these and sends it; every client takes K steps of DP-SGD at that radius.

Source: Fukami, Murata and Niwa, TMLR 2025, "AdaptDP-FedAvg".
"""

from __future__ import annotations

import math
import sys
from typing import Any, ClassVar

from equipoise.federated.errors import Refused
from equipoise.federated.hooks import RoundHooks
from equipoise.methods import AdaptiveRMS, Context, State

__all__ = ["ServerRMS", "agreed"]

_ROUNDING = 1 + 1e-6

#: Below it noise in float32 could vanish among the denormals.
SMALLEST_RADIUS = 1e-25


class ServerRMS(RoundHooks, AdaptiveRMS):
    """The client's half of AdaptDP-FedAvg.

    Args:
        clip_norm: G > 0, the largest radius that the client accepts.
        round_length: K, local steps a round.
        settings: further arguments of `AdaptiveRMS`; `variant` is always "round".

    Example:
        >>> ServerRMS(0.5, round_length=3).variant
        'round'
    """

    name: ClassVar[str] = "adaptive-rms-client"

    def __init__(self, clip_norm: float = 1.0, *, round_length: int = 1, **settings: Any) -> None:
        super().__init__(clip_norm, round_length=round_length, **{"variant": "round"} | settings)

    @property
    def follows_clip_norm(self) -> bool:
        """The server's radius."""
        return True

    @property
    def answers_query(self) -> bool:
        """The noised mean square."""
        return True

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
