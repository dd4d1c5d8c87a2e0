"""A clipping radius that follows the root mean square of the gradient norms, only from released values.

With G a public bound, U the scale at which squared norms were cut, m the released mean of min(|g|^2, U) and
s the standard deviation of its noise,

    C = min(G, sqrt(max(2 tau (m + c s), C_min^2))),

so that under interpolation (every record's loss reaches its minimum at one point) the radius, and with it
the noise, shrinks as the training succeeds: there mean |g|^2 <= 2 L f. The offset c keeps the argument
positive against the noise of m.

With scale="g_hat" U = G^2 for ever: the noise of m keeps that size, and C stalls near
G sqrt(2 tau c s / G^2). With scale="self" U follows the radius, U' = min(G^2, kappa C^2), and nothing stalls;
but if fewer than a share 1 / (2 tau kappa) of the records have a gradient worth mentioning, C collapses, so
that kappa is as large as the noise allows: max(4, 1 / (8 tau s / U)).

Source: Fukami, Murata and Niwa, TMLR 2025, "AdaptDP-FedAvg" (scale="g_hat", offset="paper"); scale="self"
and offset="sd" are this library's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from equipoise import _validate
from equipoise.methods.configuration import Option

__all__ = ["MeanSquareRule", "RMSRadius", "RadiusState"]


RadiusState = dict[str, Any]
"""clip_norm C, square_limit U, and mean: the averaged m, None before the first."""


_SMALLEST = {"g_hat": 1e-6, "self": 1e-15}


@dataclass(frozen=True, kw_only=True)
class MeanSquareRule(Option):
    """How a radius follows the released mean squares, whatever its upper limit.

    Args:
        tau: > 0, factor of the mean square.
        offset: c s added to the mean: "sd" (c = 1), "paper" (c = sqrt(2 ln(2 N / u)) for N released values
            and u = failure), or "none".
        scale: "g_hat" or "self".
        kappa: of scale="self", with 2 tau kappa > 1; by the noise when None.
        ema_beta: in [0, 1), weight of the past in an average of the released means.
        minimum: least radius; 1e-6 G for scale "g_hat", 1e-15 G for "self" when None.
        failure: u of the paper's offset.
    """

    kind: ClassVar[str] = "mean_square"
    tau: float = 1.0
    offset: Literal["sd", "paper", "none"] = "sd"
    scale: Literal["g_hat", "self"] = "g_hat"
    kappa: float | None = None
    ema_beta: float = 0.0
    minimum: float | None = None
    failure: float = 0.01

    def __post_init__(self) -> None:
        _validate.positive(tau=self.tau)
        _validate.one_of(("sd", "paper", "none"), offset=self.offset)
        _validate.one_of(tuple(_SMALLEST), scale=self.scale)
        if self.kappa is not None and self.scale != "self":
            raise ValueError(f"kappa={self.kappa!r} belongs to scale='self'")
        if self.kappa is not None and not (math.isfinite(self.kappa) and 2 * self.tau * self.kappa > 1):
            raise ValueError(
                f"kappa={self.kappa!r}: 2 tau kappa must be above 1 (tau={self.tau!r}), or the radius "
                "shrinks to nothing whatever the gradients are"
            )
        if not 0 <= self.ema_beta < 1:
            raise ValueError(f"ema_beta={self.ema_beta!r}: a weight of the past lies in [0, 1); 0 takes none")
        _validate.positive_if_given(minimum=self.minimum)
        if not 0 < self.failure < 1:
            raise ValueError(f"failure={self.failure!r}: a probability lies in (0, 1)")


@dataclass(frozen=True)
class RMSRadius(MeanSquareRule):
    """The rule with its public upper limit G, which the paper tunes as one tunes a fixed clip norm.

    Args:
        g_hat: G > 0.

    Example:
        >>> rule = RMSRadius(g_hat=10.0, offset="none")
        >>> round(rule.update(rule.start(), mean=(9 + 16 + 0.25) / 3, noise=0.0, releases=1)["clip_norm"], 6)
        4.102845
    """

    g_hat: float

    def __post_init__(self) -> None:
        _validate.positive(g_hat=self.g_hat)
        super().__post_init__()
        if self.minimum is not None and self.minimum > self.g_hat:
            raise ValueError(f"minimum={self.minimum!r} must lie above 0 and at most at g_hat={self.g_hat!r}")

    def doubt(self, relative_noise: float) -> str | None:
        """Why the radius may collapse, or None; `relative_noise` is s / U."""
        if self.scale != "self" or relative_noise <= 1 / 32:
            return None
        return (
            f"the noise of the mean square is {relative_noise:.3g} of its limit, above 1/32: with "
            "scale='self' the radius may collapse. Take larger batches, a larger radius_share, or "
            "scale='g_hat'"
        )

    def start(self, initial: float | None = None) -> RadiusState:
        """The state before anything was released: C = `initial` (G when None), U = G^2.

        Raises:
            ValueError: `initial` is no number in (0, G].
        """
        if initial is not None:
            _validate.positive(initial_clip_norm=initial)
            if initial > self.g_hat:
                raise ValueError(
                    f"initial_clip_norm={initial!r} is above clip_norm={self.g_hat!r}, the largest radius"
                )
        return {"clip_norm": self.g_hat if initial is None else initial, "square_limit": self.g_hat**2,
                "mean": None}  # fmt: skip

    def growth(self, relative_noise: float) -> float:
        """kappa: as given, or max(4, 1 / (8 tau s / U))."""
        if self.kappa is not None:
            return self.kappa
        if relative_noise <= 0:
            return math.inf
        # 2 tau kappa stays above 1: below it the radius would shrink whatever the gradients are.
        return max(4.0, 1 / (8 * self.tau * relative_noise), 0.6 / self.tau)

    def update(self, state: RadiusState, mean: float, noise: float, releases: int) -> RadiusState:
        """The next state, from a released mean.

        Args:
            state: before.
            mean: m, released; of min(|g|^2, U) with the state's U.
            noise: s, standard deviation of the noise of m.
            releases: N of the paper's offset, over the whole training.
        """
        limit = state["square_limit"]
        averaged, factor = mean, 1.0
        if self.ema_beta and state["mean"] is not None:
            averaged = self.ema_beta * state["mean"] + (1 - self.ema_beta) * mean
            # The deviation that an exponential average leaves of independent noises.
            factor = math.sqrt((1 - self.ema_beta) / (1 + self.ema_beta))
        least = self.g_hat * _SMALLEST[self.scale] if self.minimum is None else self.minimum
        kappa = self.growth(noise / limit)
        if self.scale == "self":
            # U is kappa C^2, so that one bad mean can at most halve the radius.
            least = max(least, math.sqrt(limit / (4 * kappa)))
        square = 2 * self.tau * (averaged + factor * self._offset(releases) * noise)
        clip_norm = min(self.g_hat, math.sqrt(max(square, least**2)))
        if self.scale == "self":
            limit = min(self.g_hat**2, kappa * clip_norm**2)
        return {"clip_norm": clip_norm, "square_limit": limit, "mean": averaged}

    def _offset(self, releases: int) -> float:
        if self.offset == "paper":
            return math.sqrt(2 * math.log(2 * releases / self.failure))
        return 1.0 if self.offset == "sd" else 0.0
