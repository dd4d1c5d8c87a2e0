"""Thresholds of DP-C4 and DP-C4+: for the coupled term and for the anchor gradient.

At step k with iterate x, anchor w, cap C and the released coupled mean h (noise deviation z_1 C_1 / B per
coordinate, d coordinates), the coupled threshold is always

    C_1 = min(C, c_1 L ||x - w||),       never below 1e-30,

and the rules differ in the learned factor L:

==============  =======================================================================================
`Distance`      L = 1: of DP-C4+; a function of public points
`Curvature`     L <- clip(0.9 L + 0.1 R / ||x - w||, L/4, 4 L),  R = sqrt(max(0, ||h||^2 - d (z_1 C_1 / B)^2))
`Tracked`       L <- L exp(-0.2 (b / B + 1/2 - 0.8)),  b a noised count of the rows inside C_1
==============  =======================================================================================

The anchor threshold starts at C; after anchor gradient g (noise deviation s = z_2 C_2 / n_A) it becomes

==============  =======================================================================================
`Quantile`      clip(C_2 exp(-eta (b / n_A + 1/2 - q)), floor, C),  b a noised count of the rows inside C_2
`ReleasedNorm`  clip(max(c_2 R, gamma C_2), floor, C),  R = sqrt(max(0, ||g||^2 - d s^2))
`Constant`      C
==============  =======================================================================================

`R` is the norm of a released vector without the part that its noise adds on average; without it the
threshold could never fall below its own noise. Every rule is a function of released values and public
constants.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from equipoise import _validate
from equipoise._dtensor import norm_of_all
from equipoise.methods.configuration import Option
from equipoise.methods.thresholds import ReleasedQuantile

__all__ = [
    "FLOOR",
    "AnchorRule",
    "Constant",
    "CoupledRule",
    "Curvature",
    "Distance",
    "Quantile",
    "Released",
    "ReleasedNorm",
    "Tracked",
    "distance_between",
    "public_norm",
]


FLOOR = 1e-30
"""No threshold falls below it: a bound of zero could not be noised."""


TRACKED_SHARE, TRACKED_RATE = 0.8, 0.2


@dataclass(frozen=True)
class Released:
    """What left with a release and the public constants that made its noise.

    Attributes:
        norm: of the released mean.
        num_parameters: d.
        noise_std: standard deviation of its noise per coordinate.
        count: released centred count of the rows inside the threshold, or None.
        expected_size: public divisor of the count.
    """

    norm: float
    num_parameters: int
    noise_std: float
    count: float | None
    expected_size: float

    @property
    def debiased(self) -> float:
        """R = sqrt(max(0, norm^2 - d std^2)), the norm without what its noise adds on average.

        Example:
            >>> released = Released(0.5, num_parameters=100, noise_std=0.02, count=None, expected_size=100.0)
            >>> round(released.debiased, 6)
            0.458258
        """
        return math.sqrt(max(0.0, self.norm**2 - self.num_parameters * self.noise_std**2))


@dataclass(frozen=True)
class CoupledRule(Option):
    """How the coupled threshold min(C, c_1 L ||x - w||) learns L; the base class does not.

    Args:
        scale: c_1 > 0; with L = 1 a guess of the losses' smoothness.
    """

    count_noise: ClassVar[float | None] = None
    """Noise of the count of rows inside, as a share of the expected batch; None where none is released."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        _validate.positive("a scale of a threshold", scale=self.scale)

    def threshold(self, cap: float, factor: float, distance: float) -> float:
        """C_1."""
        return max(min(cap, self.scale * (factor * distance)), FLOOR)

    def next_factor(self, factor: float, distance: float, released: Released) -> float:
        """L after a release at this distance ||x - w||."""
        return factor


@dataclass(frozen=True)
class Distance(CoupledRule):
    """L = 1."""

    kind: ClassVar[str] = "distance"


@dataclass(frozen=True)
class Curvature(CoupledRule):
    """L follows the released size of the coupled term over the distance."""

    kind: ClassVar[str] = "curvature"

    def next_factor(self, factor: float, distance: float, released: Released) -> float:
        if distance <= 0:
            return factor
        # Released noise may throw the ratio anywhere; one step moves the factor by at most 4 either way.
        value = min(max(0.9 * factor + 0.1 * released.debiased / distance, factor / 4), 4 * factor)
        return _inside_floats(value)


@dataclass(frozen=True)
class Tracked(CoupledRule):
    """L follows the released share of the rows inside.

    Example:
        >>> inside = Released(norm=1.0, num_parameters=4, noise_std=0.1, count=50.0, expected_size=100.0)
        >>> round(Tracked().next_factor(1.0, 0.1, inside), 4)  # all rows inside: the factor falls
        0.9608
    """

    kind: ClassVar[str] = "tracked"
    count_noise: ClassVar[float | None] = 0.1

    def next_factor(self, factor: float, distance: float, released: Released) -> float:
        assert released.count is not None
        share = released.count / released.expected_size + 0.5
        return _inside_floats(factor * math.exp(-TRACKED_RATE * (share - TRACKED_SHARE)))


def _inside_floats(factor: float) -> float:
    return min(max(factor, FLOOR), 1 / FLOOR)


@dataclass(frozen=True)
class AnchorRule(Option):
    """How the anchor threshold C_2 follows what was released at an anchor.

    Args:
        minimum: floor of C_2.
    """

    minimum: float = 0.0

    def check(self, cap: float) -> None:
        """Raise a ValueError where the rule does not go with the cap C."""
        if not 0 <= self.minimum <= cap:
            raise ValueError(f"minimum={self.minimum!r}: it lies between 0 and clip_norm={cap!r}")

    def count_noise_multiplier(self, expected_size: float) -> float | None:
        """Of the count of rows inside; None where none is released."""
        return None

    @abstractmethod
    def following(self, clip_norm: float, released: Released, cap: float) -> float:
        """C_2 of the next anchor.

        Args:
            clip_norm: C_2 of this anchor.
            released: the anchor release.
            cap: C.
        """

    def _kept(self, value: float, cap: float) -> float:
        return max(min(max(value, self.minimum), cap), FLOOR)


@dataclass(frozen=True)
class Quantile(AnchorRule):
    """C_2 follows a quantile of the anchor rows' norms, through a noised count.

    Args:
        minimum: floor of C_2.
        quantile: q, the wanted share of anchor rows inside.
        learning_rate: eta of the geometric update.
        count_noise: noise of the count as a share of n_A.
    """

    kind: ClassVar[str] = "quantile"
    minimum: float = field(default=0.0, kw_only=True)
    quantile: float = 0.8
    learning_rate: float = 3.0
    count_noise: float = 0.05

    def __post_init__(self) -> None:
        self.rule(1.0)  # refuses what is out of range

    def rule(self, cap: float) -> ReleasedQuantile:
        """The rule of the quantile below the cap C."""
        return ReleasedQuantile(
            initial=cap,
            quantile=self.quantile,
            learning_rate=self.learning_rate,
            count_noise=self.count_noise,
            minimum=min(max(self.minimum, FLOOR), cap),
            maximum=cap,
        )

    def count_noise_multiplier(self, expected_size: float) -> float | None:
        return self.rule(1.0).count_noise_multiplier(expected_size)

    def following(self, clip_norm: float, released: Released, cap: float) -> float:
        assert released.count is not None
        value = self.rule(cap).update(clip_norm, released.count, released.expected_size)
        return self._kept(value, cap)


@dataclass(frozen=True)
class ReleasedNorm(AnchorRule):
    """C_2 follows the norm of the released anchor gradient, without its noise.

    Args:
        minimum: floor of C_2.
        scale: c_2 > 0.
        shrink_limit: gamma in (0, 1], the least ratio of consecutive thresholds; 1 never lets C_2 shrink.

    Example:
        >>> anchor = Released(norm=0.5, num_parameters=100, noise_std=0.02, count=None, expected_size=100.0)
        >>> ReleasedNorm(shrink_limit=0.5).following(1.0, anchor, cap=1.0)
        0.5
        >>> round(ReleasedNorm(shrink_limit=0.25).following(1.0, anchor, cap=1.0), 6)
        0.458258
    """

    kind: ClassVar[str] = "released"
    minimum: float = field(default=0.0, kw_only=True)
    scale: float = 1.0
    shrink_limit: float = 0.5

    def __post_init__(self) -> None:
        _validate.positive("a scale of a threshold", scale=self.scale)
        if not 0 < self.shrink_limit <= 1:
            raise ValueError(
                f"shrink_limit={self.shrink_limit!r}: it lies in (0, 1]; 1 never lets C_2 shrink"
            )

    def following(self, clip_norm: float, released: Released, cap: float) -> float:
        return self._kept(max(self.scale * released.debiased, self.shrink_limit * clip_norm), cap)


@dataclass(frozen=True)
class Constant(AnchorRule):
    """C_2 = C."""

    kind: ClassVar[str] = "constant"

    def following(self, clip_norm: float, released: Released, cap: float) -> float:
        return cap


def public_norm(tensors: Mapping[str, Tensor]) -> float:
    """The Euclidean norm of named public tensors, in float64."""
    return float(norm_of_all(tensors.values(), torch.float64)) if tensors else 0.0


def distance_between(x: Mapping[str, Tensor], w: Mapping[str, Tensor]) -> float:
    """||x - w|| over the named tensors, the differences taken in the tensors' own type.

    Close floats subtract exactly, so nothing is lost when x nears w.
    """
    return public_norm({name: value - w[name] for name, value in x.items()})
