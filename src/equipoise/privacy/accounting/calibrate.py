"""Calibration: the least noise that meets a budget.

epsilon falls as the noise grows, so the common scale of a plan's multipliers is found on a coarse accountant
(a bracket, then the secant method in log epsilon against log scale) and settled on the exact one: the result
lies at most 1% below the target and never above.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from equipoise.privacy.accounting.epsilon import check_delta, epsilon, quick_epsilon
from equipoise.privacy.errors import BudgetError, check_positive
from equipoise.privacy.mechanisms import Gaussian
from equipoise.privacy.plan import PrivacyPlan, Release
from equipoise.privacy.sampling import Sampling

_SMALLEST, _LARGEST = 1e-3, 1e6


@dataclass(frozen=True)
class Budget:
    """The privacy budget of a run, or of all runs that share a journal.

    Args:
        epsilon: positive.
        delta: in (0, 1); choose it below 1/population.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        check_positive("epsilon", self.epsilon)
        check_delta(self.delta)


def calibrate(
    plan_of_scale: Callable[[float], PrivacyPlan], budget: Budget, start: float = 1.0
) -> PrivacyPlan:
    """The plan of least noise within the budget.

    Args:
        plan_of_scale: from a scale s > 0 to a plan whose noise grows with s; ratios between releases are its
            own business.
        budget: the target.
        start: first guess of the scale.

    Returns:
        `plan_of_scale(s)` with 0.99 * budget.epsilon <= epsilon <= budget.epsilon.

    Raises:
        BudgetError: if no scale reaches the target.

    Example:
        >>> from equipoise.privacy import Gaussian, Poisson
        >>> sampling = Poisson(expected_batch_size=256, population=60_000, steps=100)
        >>> def plan_of(scale):
        ...     return PrivacyPlan([Release("gradient", 1.0, Gaussian(scale))], sampling)
        >>> plan = calibrate(plan_of, Budget(1.0, 1e-5))
        >>> 0.99 <= plan.epsilon(1e-5).value <= 1.0
        True
    """
    goal = math.log(budget.epsilon * 0.998)

    def quick(log_scale: float) -> float:
        plan = plan_of_scale(math.exp(log_scale))
        value = quick_epsilon(plan.event(), budget.delta, plan.relation)
        return math.log(max(value, 1e-12)) - goal

    low = high = math.log(start)
    f_low = f_high = quick(low)
    while f_low < 0:  # too little is spent: less noise
        high, f_high = low, f_low
        low -= math.log(2)
        if math.exp(low) < _SMALLEST:
            raise BudgetError(
                f"epsilon={budget.epsilon} is out of reach from below: noise of scale {_SMALLEST} spends "
                "less; "
                "such a budget protects nothing: lower epsilon"
            )
        f_low = quick(low)
    while f_high > 0:  # too much is spent: more noise
        low, f_low = high, f_high
        high += math.log(2)
        if math.exp(high) > _LARGEST:
            raise BudgetError(
                f"epsilon={budget.epsilon} at delta={budget.delta} is out of reach: even noise of scale "
                f"{_LARGEST:g} spends "
                f"{math.exp(f_low + goal):.4g}; raise epsilon or delta, take fewer steps, smaller batches "
                "or a larger "
                "population, or lower the share of releases whose noise does not scale"
            )
        f_high = quick(high)
    scale = _root(quick, low, high, f_low, f_high)
    for _ in range(20):
        plan = plan_of_scale(math.exp(scale))
        value = epsilon(plan.event(), budget.delta, plan.relation).value
        if 0.99 * budget.epsilon <= value <= budget.epsilon:
            return plan
        if value > budget.epsilon:
            low = scale
        else:
            high = scale
        if high <= low:  # the coarse accountant misplaced the bracket
            low, high = scale - 0.1, scale + 0.1
        slope = (f_high - f_low) / (high - low) if high > low else -1.0
        step = (math.log(budget.epsilon * 0.996) - math.log(max(value, 1e-12))) / min(slope, -0.2)
        scale = scale + max(-1.0, min(1.0, step))
    raise BudgetError(
        f"no scale gives an epsilon within 1% below {budget.epsilon}: the plan's epsilon jumps there "
        f"({value:.4g} at "
        f"scale {math.exp(scale):.4g}); check that the plan's noise grows continuously with its scale"
    )


def _root(
    function: Callable[[float], float],
    low: float,
    high: float,
    f_low: float,
    f_high: float,
    tolerance: float = 1e-3,
) -> float:
    """Illinois false position for a falling function; stops where |f| < tolerance."""
    side = 0
    for _ in range(60):
        if high - low < 1e-6:
            return high
        middle = (f_low * high - f_high * low) / (f_low - f_high)
        value = function(middle)
        if abs(value) < tolerance:
            return middle
        if value > 0:
            low, f_low = middle, value
            f_high = f_high / 2 if side == 1 else f_high
            side = 1
        else:
            high, f_high = middle, value
            f_low = f_low / 2 if side == -1 else f_low
            side = -1
    return high


def calibrate_noise_multiplier(
    sampling: Sampling, budget: Budget, relation: str = "add_or_remove_one", replace_ratio: float = 2.0
) -> float:
    """The noise multiplier of one release a step (DP-SGD) that meets the budget.

    Example:
        >>> from equipoise.privacy import Poisson
        >>> z = calibrate_noise_multiplier(Poisson(256, 60_000, 4700), Budget(1.571, 1e-5))
        >>> 0.99 < z < 1.01
        True
    """

    def plan(scale: float) -> PrivacyPlan:
        return PrivacyPlan(
            [Release("gradient", 1.0, Gaussian(scale), replace_ratio=replace_ratio)], sampling, relation
        )

    return calibrate(plan, budget).releases[0].noise_multiplier
