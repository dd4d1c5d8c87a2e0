"""When an anchor is renewed: the four routines of DP-SVRG and DP-C4, fixed before the training.

With x^k the iterate and w^k the anchor at step k, and m the anchor period,

    routine 1    AtRandom(m)                     w^{k+1} = x^k        with probability 1/m, otherwise w^k
    routine 2    Every(m)                        w^{k+1} = x^k        if k = 1 (mod m), otherwise w^k
    routine 3    AtRandom(m, takes_next=True)    w^{k+1} = x^{k+1}    with probability 1/m, otherwise w^k
    routine 4    Every(m, takes_next=True)       w^{k+1} = x^{k+1}    if k = 1 (mod m), otherwise w^k

The random steps of routines 1 and 3 do not depend on data. All are drawn before the training, so that the
number of releases is known and not merely expected (an average of privacy losses is not the loss of the
average). A renewal after the last step would never be used and is left out, so k runs over 0 ... T - 2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from equipoise.methods.configuration import Option

__all__ = ["AnchorSchedule", "AtRandom", "Every", "Renewal"]


@dataclass(frozen=True)
class Renewal(Option, ABC):
    """When the anchor is renewed.

    Args:
        period: m >= 1; by default half the anchor batch over the batch, so that the anchors cost two passes
            over a batch per step.
        takes_next: the new anchor is the iterate after the step, and not the one before.
        fresh_noise: take new records and new noise for the anchor gradient in every step, and pay for each,
            where it is noised once per anchor otherwise.
    """

    period: float | None = None
    takes_next: bool = False
    fresh_noise: bool = False

    def __post_init__(self) -> None:
        if self.period is not None:
            self._check(self.period)

    @abstractmethod
    def _check(self, period: float) -> None:
        """Raise a ValueError for a period that does not fit."""

    @abstractmethod
    def _renewals(self, steps: int, period: float, rng: torch.Generator) -> set[int]:
        """The steps of 0 ... `steps` - 1 after which the anchor is renewed."""

    def draw(self, steps: int, period: float, rng: torch.Generator) -> AnchorSchedule:
        """The schedule of a training of T = `steps` steps; `rng` is public randomness."""
        self._check(period)
        return AnchorSchedule(steps, self.takes_next, frozenset(self._renewals(steps - 1, period, rng)))


@dataclass(frozen=True)
class Every(Renewal):
    """After every `period`-th step, a whole number: routines 2 and 4.

    Example:
        >>> schedule = Every(3).draw(6, 3, torch.Generator())
        >>> sorted(schedule.renewals), schedule.num_anchors, schedule.num_coupled
        ([1, 4], 3, 5)
    """

    kind: ClassVar[str] = "every"

    def _check(self, period: float) -> None:
        if round(period) != period or period < 1:
            raise ValueError(
                f"period={period!r}: Every renews the anchor every so many steps, so it must be a whole "
                "number of at least 1; AtRandom takes its inverse as a probability"
            )

    def _renewals(self, steps: int, period: float, rng: torch.Generator) -> set[int]:
        return {k for k in range(steps) if k % period == 1 % period}


@dataclass(frozen=True)
class AtRandom(Renewal):
    """After a step with probability 1 / `period`: routines 1 and 3."""

    kind: ClassVar[str] = "at_random"

    def _check(self, period: float) -> None:
        if not period >= 1:
            raise ValueError(f"period={period!r}: its inverse is a probability, so it must be at least 1")

    def _renewals(self, steps: int, period: float, rng: torch.Generator) -> set[int]:
        # In float64, and on the CPU: every machine draws the same schedule from a seed.
        starts = torch.rand(steps, generator=rng, dtype=torch.float64) < 1 / period
        return set(starts.nonzero().flatten().tolist())


@dataclass(frozen=True)
class AnchorSchedule:
    """The steps after which the anchor is renewed.

    Attributes:
        steps: T.
        takes_next: whether a new anchor is the iterate after the step (routines 3 and 4).
        renewals: the steps k, 0 <= k <= T - 2.
    """

    steps: int
    takes_next: bool
    renewals: frozenset[int]

    def coincides(self, step: int) -> bool:
        """Whether iterate and anchor are the same point at this step, so that nothing coupled is released.

        Decided from the schedule: two points that happen to be equal would be a private coincidence at worst
        and rounding at best.
        """
        return step == 0 or (self.takes_next and step - 1 in self.renewals)

    def renews(self, step: int) -> bool:
        return step in self.renewals

    @property
    def num_anchors(self) -> int:
        """K, the anchor points of the whole training, the first one included."""
        return 1 + len(self.renewals)

    @property
    def num_coupled(self) -> int:
        """The steps with a coupled term."""
        return self.steps - (self.num_anchors if self.takes_next else 1)
