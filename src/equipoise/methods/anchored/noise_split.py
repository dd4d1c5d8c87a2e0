"""How a budget is split between two Gaussian releases: the coupled terms and the anchor gradients.

A step moves the parameters by h + g, with h noised afresh each step (multiplier z_1, threshold C_1, expected
batch B) and g noised once per anchor and used m times (multiplier z_2, threshold C_2, expected batch n_A).
Per step of an anchor period the noise displaces them by a variance proportional to

    r (z_1 / B)^2 + m (z_2 / n_A)^2,     r = E[C_1^2] / E[C_2^2].

z_1 is set to f times the multiplier z_SGD that DP-SGD would need for the same steps and budget; z_2 follows
from the budget by the accountant. The best f depends on r, which no public knowledge fixes: f = 1.15 is the
best for r = 1 at usual sizes, and `LeastDisplacement` scans for a given r.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from equipoise import _validate
from equipoise.methods.configuration import Option
from equipoise.privacy.accounting.calibrate import Budget, calibrate
from equipoise.privacy.errors import BudgetError
from equipoise.privacy.plan import PrivacyPlan

__all__ = ["LeastDisplacement", "NoiseFactor", "NoiseSplit", "anchor_noise", "displacement"]


FACTORS = (1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.6, 2.0, 2.5, 3.0, 4.0)
"""What `LeastDisplacement` tries."""


class NoiseSplit(Option, ABC):
    """How a budget is split between coupled terms and anchor gradients."""

    @abstractmethod
    def choose(
        self,
        plan_of: Callable[[float], PrivacyPlan],
        displacement: Callable[[PrivacyPlan, float | None], float],
    ) -> PrivacyPlan:
        """The plan of the factor that is chosen.

        Args:
            plan_of: from the factor f to the calibrated plan.
            displacement: of a plan, at a ratio r of the squared thresholds; the method's own r when None.

        Raises:
            BudgetError: no plan meets the budget.
        """


@dataclass(frozen=True)
class NoiseFactor(NoiseSplit):
    """z_1 is `factor` times DP-SGD's multiplier for the same budget.

    Args:
        factor: f > 0.
    """

    kind: ClassVar[str] = "factor"
    factor: float = 1.15

    def __post_init__(self) -> None:
        _validate.positive(factor=self.factor)

    def choose(
        self,
        plan_of: Callable[[float], PrivacyPlan],
        displacement: Callable[[PrivacyPlan, float | None], float],
    ) -> PrivacyPlan:
        return plan_of(self.factor)


@dataclass(frozen=True)
class LeastDisplacement(NoiseSplit):
    """The factor of `FACTORS` with the least displacement.

    Args:
        threshold_ratio: r > 0, expected ratio of the squared thresholds, coupled over anchor; the method's
            own when None.
    """

    kind: ClassVar[str] = "least_displacement"
    threshold_ratio: float | None = None

    def __post_init__(self) -> None:
        _validate.positive_if_given("a ratio of squared thresholds", threshold_ratio=self.threshold_ratio)

    def choose(
        self,
        plan_of: Callable[[float], PrivacyPlan],
        displacement: Callable[[PrivacyPlan, float | None], float],
    ) -> PrivacyPlan:
        best: tuple[float, PrivacyPlan] | None = None
        worse = 0
        for factor in FACTORS:
            try:
                plan = plan_of(factor)
            except BudgetError:
                continue  # too little noise on the coupled terms for this budget: larger factors follow
            value = displacement(plan, self.threshold_ratio)
            if best is None or value < best[0]:
                best, worse = (value, plan), 0
            else:
                worse += 1
            if worse == 2:  # one minimum: noise of the anchor falls, noise of the coupled terms rises with f
                break
        if best is None:
            raise BudgetError(
                f"no split with a factor up to {FACTORS[-1]} meets the budget; raise epsilon or count_noise, "
                "or give split=NoiseFactor(...)"
            )
        return best[1]


TwoMultipliers = Callable[[float, float], PrivacyPlan]
"""From (z_1, z_2) to the plan."""


def anchor_noise(with_noise: TwoMultipliers, coupled: float, budget: Budget, start: float) -> PrivacyPlan:
    """The plan whose anchor noise fills what the coupled noise `coupled` leaves of the budget.

    Args:
        with_noise: from (z_1, z_2) to the plan.
        coupled: z_1.
        budget: the target.
        start: first guess of z_2.

    Raises:
        BudgetError: the coupled releases alone (with what else has fixed noise) exceed the budget.
    """
    try:
        return calibrate(lambda scale: with_noise(coupled, scale), budget, start)
    except BudgetError as error:
        raise BudgetError(
            f"the coupled releases with noise multiplier {coupled:.4g} and the counts leave nothing of the "
            f"budget to the anchor gradients: raise the factor of split=NoiseFactor(...), the "
            f"noise_multiplier or count_noise. ({error})"
        ) from error


def displacement(
    coupled: float, anchor: float, batch: float, anchor_batch: float, period: float, ratio: float
) -> float:
    """r (z_1 / B)^2 + m (z_2 / n_A)^2.

    Example:
        >>> round(displacement(1.0, 4.0, batch=256, anchor_batch=4096, period=8, ratio=1.0) * 1e5, 3)
        2.289
    """
    return math.fsum((ratio * (coupled / batch) ** 2, period * (anchor / anchor_batch) ** 2))
