"""When an anchor is renewed: the four routines of DP-SVRG and DP-C4, fixed before the training.

With x^k the iterate and w^k the anchor at step k, and m the anchor period,

    routine 1    w^{k+1} = x^k        with probability 1/m, otherwise w^k
    routine 2    w^{k+1} = x^k        if k = 1 (mod m), otherwise w^k
    routine 3    w^{k+1} = x^{k+1}    with probability 1/m, otherwise w^k
    routine 4    w^{k+1} = x^{k+1}    if k = 1 (mod m), otherwise w^k

The coins of routines 1 and 3 do not depend on data; all are drawn before the training, so that the number of
releases is known and not merely expected (an average of privacy losses is not the loss of the average). A
renewal after the last step would never be used and is left out, so k runs over 0 ... T - 2.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from equipoise.methods.configuration import Option

__all__ = ["AnchorSchedule", "AtRandom", "Every", "Renewal", "draw_schedule"]


ROUTINES = (1, 2, 3, 4)


@dataclass(frozen=True)
class Renewal(Option):
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
        # Raises for a period that does not fit.
        draw_schedule(self.routine, 2, 1 if self.period is None else self.period, torch.Generator())

    @property
    @abstractmethod
    def routine(self) -> int:
        """1 to 4."""


@dataclass(frozen=True)
class Every(Renewal):
    """After every `period`-th step, a whole number: routines 2 and 4."""

    kind: ClassVar[str] = "every"

    @property
    def routine(self) -> int:
        return 4 if self.takes_next else 2


@dataclass(frozen=True)
class AtRandom(Renewal):
    """After a step with probability 1 / `period`: routines 1 and 3."""

    kind: ClassVar[str] = "at_random"

    @property
    def routine(self) -> int:
        return 3 if self.takes_next else 1


@dataclass(frozen=True)
class AnchorSchedule:
    """The steps after which the anchor is renewed.

    Attributes:
        steps: T.
        routine: 1 to 4.
        renewals: the steps k, 0 <= k <= T - 2.

    Example:
        >>> schedule = draw_schedule(2, steps=6, period=3)
        >>> sorted(schedule.renewals), schedule.num_anchors, schedule.num_coupled
        ([1, 4], 3, 5)
    """

    steps: int
    routine: int
    renewals: frozenset[int]

    @property
    def takes_next(self) -> bool:
        """Whether a new anchor is the iterate after the step (routines 3 and 4) and not the one before."""
        return self.routine in (3, 4)

    def coincides(self, step: int) -> bool:
        """Whether iterate and anchor are the same point at this step, so that nothing coupled is released.

        Decided from the schedule: two points that happen to be equal would be a private coincidence at worst
        and rounding at best.
        """
        return step == 0 or (self.takes_next and step - 1 in self.renewals)

    def renews(self, step: int) -> bool:
        """Whether the anchor is renewed after this step."""
        return step in self.renewals

    @property
    def num_anchors(self) -> int:
        """K, the anchor points of the whole training, the first one included."""
        return 1 + len(self.renewals)

    @property
    def num_coupled(self) -> int:
        """The steps with a coupled term."""
        return self.steps - (self.num_anchors if self.takes_next else 1)


def draw_schedule(
    routine: int, steps: int, period: float, rng: torch.Generator | None = None
) -> AnchorSchedule:
    """The schedule of a training.

    Args:
        routine: 1 to 4.
        steps: T >= 1.
        period: m >= 1; whole for routines 2 and 4, the inverse of the probability for 1 and 3.
        rng: public randomness for the coins of routines 1 and 3.

    Raises:
        ValueError: an unknown routine, a period that does not fit it, or no randomness for the coins.
    """
    if routine not in ROUTINES:
        raise ValueError(f"routine={routine!r}: the anchor routines are 1, 2, 3 and 4")
    if routine in (2, 4):
        whole = round(period)
        if whole != period or whole < 1:
            raise ValueError(
                f"period={period!r}: routines 2 and 4 renew the anchor every so many steps, so it "
                "must be a whole number of at least 1; routines 1 and 3 take its inverse as a probability"
            )
        renewals = {k for k in range(steps - 1) if k % whole == 1 % whole}
        return AnchorSchedule(steps, routine, frozenset(renewals))
    if not period >= 1:
        raise ValueError(f"period={period!r}: its inverse is a probability, so it must be at least 1")
    if rng is None:
        raise ValueError(f"rng is missing: routine {routine} draws coins; give a generator of public numbers")
    coins = torch.rand(max(steps - 1, 0), generator=rng, dtype=torch.float64) < 1 / period
    return AnchorSchedule(steps, routine, frozenset(coins.nonzero().flatten().tolist()))
