"""Clip thresholds that change over the training, from public knowledge only.

=====================  ====================================================================================
`Fixed`                C_t = C
`ExponentialDecay`     C_t = max(floor, C rate^t)
`LinearDecay`          C_t goes straight from C to a final value
`Schedule`             C_t = f(t) for any public function f
`ReleasedQuantile`     C_t follows a quantile of the gradient norms through a noised count (Andrew et al.
2021,
                       "Differentially Private Learning with Adaptive Clipping")
=====================  ====================================================================================

The quantile threshold releases, jointly with the gradient, ``b = sum_i (1[n_i <= C_t] - 1/2) + N(0,
sigma_b^2)``, the step softened to a ramp from 0.95 C_t to 1.05 C_t (`bounds.counts.soft_indicator`): one
record moves that sum by at most 1/2, so the count is one more coordinate of the same Gaussian query with
multiplier ``2 sigma_b``, and the pair costs what one Gaussian with multiplier ``(z^-2 + (2
sigma_b)^-2)^(-1/2)`` costs. Then, from the *released* value and the public expected batch size B,

    C_{t+1} = C_t exp(-eta (b / B + 1/2 - gamma)),      gamma the wanted share of unclipped records.

Clipping and noise of a step use the same C_t. Nothing here reads a private number.

All but the last are functions of the step alone (`ByStep`), and serve as well where a method multiplies
something by a factor that changes: the scales of DP-C4's thresholds.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from equipoise import _validate
from equipoise.methods.configuration import Count, Option, Positive, Share, UpToOne


class Threshold(Option, ABC):
    """A sequence of clip norms C_0, C_1, ...; what it learns is one float, kept in the method's state."""

    @abstractmethod
    def at(self, step: int, learned: float) -> float:
        """C_t at step t, given the learned value (C_0 at first, what `update` answered afterwards)."""

    def start(self) -> float:
        """C_0."""
        return self.at(0, 0.0)

    def upper(self, steps: int) -> float:
        """The largest C_t that may occur in `steps` steps: the bound of the planned release."""
        # Asked step by step, so that rounding in a schedule's formula never passes its stated end.
        return max(self.at(step, 0.0) for step in range(steps))


class ByStep(Threshold):
    """A sequence of numbers above zero that depends on the step alone."""


def at_step(value: float | ByStep, step: int) -> float:
    """What a number that may change over the training is at a step.

    Example:
        >>> at_step(4.0, 7), at_step(LinearDecay(1.0, final=61.0, steps=3001), 50)
        (4.0, 2.0)
    """
    return value.at(step, 0.0) if isinstance(value, ByStep) else float(value)


@dataclass(frozen=True)
class Fixed(ByStep):
    """The same clip norm at every step.

    Args:
        clip_norm: C > 0.

    Example:
        >>> Fixed(0.1).at(7, 0.1)
        0.1
    """

    kind: ClassVar[str] = "fixed"
    clip_norm: Positive

    def at(self, step: int, learned: float) -> float:
        return float(self.clip_norm)

    def upper(self, steps: int) -> float:
        return float(self.clip_norm)


@dataclass(frozen=True)
class ExponentialDecay(ByStep):
    """The schedule max(floor, C rate^t).

    Args:
        clip_norm: C > 0.
        rate: rho in (0, 1]; 1 means no decay.
        floor: smallest clip norm, >= 0.

    Example:
        >>> ExponentialDecay(1.0, rate=0.5).at(3, 1.0)
        0.125
    """

    kind: ClassVar[str] = "exponential_decay"
    word: ClassVar[str] = "decay"
    clip_norm: Positive
    rate: UpToOne
    floor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.floor <= self.clip_norm:
            raise ValueError(f"floor={self.floor!r}: it must lie between 0 and clip_norm={self.clip_norm!r}")

    def at(self, step: int, learned: float) -> float:
        """max(floor, C rate^step)."""
        # An underflow must not end in a clip norm of zero.
        return max(self.floor, self.clip_norm * self.rate**step, 1e-30)


@dataclass(frozen=True)
class LinearDecay(ByStep):
    """The schedule that goes straight from C at step 0 to `final` at the last of `steps` steps, then stays.

    It rises if `final` is above C.

    Args:
        clip_norm: C > 0.
        final: clip norm of the last step, > 0.
        steps: how many steps the way takes.

    Example:
        >>> [LinearDecay(1.0, final=0.5, steps=3).at(t, 1.0) for t in range(4)]
        [1.0, 0.75, 0.5, 0.5]
    """

    kind: ClassVar[str] = "linear_decay"
    word: ClassVar[str] = "line"
    clip_norm: Positive
    final: Positive
    steps: Count

    def at(self, step: int, learned: float) -> float:
        """C + (final - C) min(1, step / (steps - 1))."""
        return self.clip_norm + (self.final - self.clip_norm) * min(1.0, step / max(1, self.steps - 1))


@dataclass(frozen=True)
class Schedule(ByStep):
    """Any public schedule: a function from the step (0, 1, ...) to the clip norm, fixed before the training.

    The function must depend only on the step; it is asked again after a resume and must answer the same.

    Args:
        function: from the step to the clip norm.

    Example:
        >>> Schedule(lambda step: 1.0 / (1 + step)).at(3, 1.0)
        0.25
    """

    kind: ClassVar[str] = "schedule"
    function: Callable[[int], float]

    def at(self, step: int, learned: float) -> float:
        value = float(self.function(step))
        _validate.positive(**{f"clip_norm schedule at step {step}": value})
        return value


@dataclass(frozen=True)
class ReleasedQuantile(Threshold):
    """The clip norm follows the `quantile` of the gradient norms, learned from noised counts.

    Args:
        initial: C_0 > 0.
        quantile: gamma in (0, 1), the wanted share of records below the threshold.
        learning_rate: eta > 0 of the geometric update; 0.2 in the paper.
        count_noise: sigma_b as a share of the expected batch size B; 1/20 in the paper. Small values make the
            threshold steadier and leave less of the budget for the gradient.
        minimum, maximum: public limits of the threshold; by default C_0 / 10^4 and 10^4 C_0.
    """

    kind: ClassVar[str] = "quantile"
    initial: Positive = 0.1
    quantile: Share = 0.5
    learning_rate: Positive = 0.2
    count_noise: Positive = 0.05
    minimum: float | None = None
    maximum: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.limits
        if not 0 < low <= self.initial <= high:
            raise ValueError(
                f"initial={self.initial!r} must lie between minimum={low!r} and maximum={high!r}, both above "
                "zero"
            )

    @property
    def limits(self) -> tuple[float, float]:
        """The public limits (minimum, maximum) of the threshold."""
        low = self.initial / 1e4 if self.minimum is None else self.minimum
        high = self.initial * 1e4 if self.maximum is None else self.maximum
        return float(low), float(high)

    def start(self) -> float:
        return float(self.initial)

    def at(self, step: int, learned: float) -> float:
        return learned

    def upper(self, steps: int) -> float:
        return self.limits[1]

    def count_noise_multiplier(self, expected_batch_size: float) -> float:
        """2 sigma_b: the multiplier of the count, whose sensitivity is 1/2."""
        return 2 * self.count_noise * expected_batch_size

    def update(self, learned: float, released_count: float, expected_batch_size: float) -> float:
        """C_{t+1} from the released, centred count b of step t.

        Example:
            >>> rule = ReleasedQuantile(initial=1.0, quantile=0.5)
            >>> rule.update(1.0, released_count=50.0, expected_batch_size=100) < 1.0  # all below: go down
            True
        """
        # The noise may carry the share outside [0, 1]; cut, it would push the wrong way on average.
        share = released_count / expected_batch_size + 0.5
        return moved(learned, -self.learning_rate * (share - self.quantile), *self.limits)


def moved(value: float, push: float, low: float, high: float, most: float = 700.0) -> float:
    """value e^push between its limits: the step of every threshold that follows a released statistic.

    Guarantee: post-processing, where `push` is made of released values and `value` is the one before.

    Args:
        value: above zero.
        push: in logarithms, cut at `most` either way; e^700 is still a float.
        low, high: public limits.

    Example:
        >>> moved(1.0, -1e9, 0.1, 10.0), moved(1.0, 0.5, 0.1, 1.2)
        (0.1, 1.2)
    """
    return min(max(value * math.exp(min(max(push, -most), most)), low), high)


def resolve_threshold(clip_norm: float | Callable[[int], float] | Threshold) -> Threshold:
    """A threshold from what a user may write: a number, a function of the step, or a threshold object.

    Example:
        >>> resolve_threshold(0.1)
        Fixed(clip_norm=0.1)
    """
    if isinstance(clip_norm, Threshold):
        return clip_norm
    called = callable(clip_norm) and not isinstance(clip_norm, type)
    if isinstance(clip_norm, bool) or not (isinstance(clip_norm, (int, float)) or called):
        raise TypeError(
            f"{_validate.given('clip_norm', clip_norm)} is {_validate.what_is(clip_norm)}; give a number "
            "above zero, a function from the step to a number, or a threshold such as "
            "ReleasedQuantile(initial=0.1)"
        )
    if isinstance(clip_norm, (int, float)):
        return Fixed(float(clip_norm))
    return Schedule(clip_norm)
