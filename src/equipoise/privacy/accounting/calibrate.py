"""Calibration: the least noise that meets a budget.

epsilon falls as the noise grows. The common scale s of a plan's multipliers is found on a coarse accountant,
as the root of

    log epsilon_coarse(s) - log target,   in log s.

The exact accountant then tells by how much the coarse one errs there, and the target is moved by as much,
until the exact epsilon lies at most 1% below the budget and never above it. Once or twice is enough, but for
epsilons that the coarse accountant cannot tell from zero: there the root is found on the exact one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import dp_accounting

from equipoise import _validate
from equipoise._roots import NoCrossing, crossing
from equipoise.privacy.accounting.epsilon import check_delta, epsilon, quick_epsilon
from equipoise.privacy.errors import BudgetError
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
        _validate.positive(epsilon=self.epsilon)
        check_delta(self.delta)


def calibrate(
    plan_of_scale: Callable[[float], PrivacyPlan],
    budget: Budget,
    start: float = 1.0,
    other_events: Sequence[dp_accounting.DpEvent] = (),
) -> PrivacyPlan:
    """The plan of least noise within the budget.

    Args:
        plan_of_scale: from a scale s > 0 to a plan whose noise grows with s; ratios between releases are its
            own business.
        budget: the target.
        start: first guess of the scale.
        other_events: what other runs over the same records cost, as in a shared journal: the budget is for
            all of them together.

    Returns:
        `plan_of_scale(s)` with 0.99 * budget.epsilon <= epsilon <= budget.epsilon, the other runs included.

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

    def event_of(plan: PrivacyPlan) -> dp_accounting.DpEvent:
        return dp_accounting.ComposedDpEvent([plan.event(), *other_events]) if other_events else plan.event()

    def quick(log_scale: float) -> float:
        plan = plan_of_scale(math.exp(log_scale))
        return _log(quick_epsilon(event_of(plan), budget.delta, plan.relation))

    def exact(plan: PrivacyPlan) -> float:
        return epsilon(event_of(plan), budget.delta, plan.relation).value

    limits = {"least": math.log(_SMALLEST), "most": math.log(_LARGEST)}
    scale, step, goal = math.log(start), math.log(2), math.log(0.998 * budget.epsilon)
    for _ in range(4):
        # The coarse accountant is called some ten times, the exact one once: that one takes seconds.
        try:
            _, scale = crossing(lambda x, goal=goal: quick(x) - goal, scale, step, tolerance=3e-4, **limits)  # type: ignore[misc]
        except NoCrossing as error:
            raise _out_of_reach(budget, math.exp(quick(math.log(_LARGEST))), error.above) from None
        plan = plan_of_scale(math.exp(scale))
        value = exact(plan)
        # Decided by the exact accountant alone: the coarse one may err on either side.
        if 0.99 * budget.epsilon <= value <= budget.epsilon:
            return plan
        if not 0.5 < value / budget.epsilon < 2:  # the coarse accountant can tell nothing here
            break
        # In the middle of what is allowed, as far as the coarse accountant errs here as it does nearby.
        goal = quick(scale) + math.log(0.996 * budget.epsilon) - _log(value)
        step = 0.05
    # Epsilons near zero are below what the coarse accountant can tell: the exact one takes over.
    goal = math.log(0.996 * budget.epsilon)
    try:
        below, scale = crossing(
            lambda x: _log(exact(plan_of_scale(math.exp(x)))) - goal, scale, 0.5, tolerance=1e-4, **limits
        )
    except NoCrossing as error:
        raise _out_of_reach(budget, exact(plan_of_scale(_LARGEST)), error.above) from None
    plan = plan_of_scale(math.exp(scale))
    if exact(plan) >= 0.99 * budget.epsilon:
        return plan
    raise BudgetError(
        f"no scale gives an epsilon within 1% below {budget.epsilon}: at scale {math.exp(scale):.4g} the "
        f"plan's epsilon falls from {exact(plan_of_scale(math.exp(below))):.4g} to {exact(plan):.4g}. "
        "Let the noise grow continuously with the scale, or give a budget of one of these two"
    )


def _log(value: float) -> float:
    """The logarithm of an epsilon, which may be 0."""
    return math.log(max(value, 1e-12))


def _out_of_reach(budget: Budget, least: float, above: bool) -> BudgetError:
    if not above:
        return BudgetError(
            f"epsilon={budget.epsilon} is out of reach from below: noise of scale {_SMALLEST} spends less; "
            "such a budget protects nothing: lower epsilon"
        )
    return BudgetError(
        f"epsilon={budget.epsilon} at delta={budget.delta} is out of reach: even noise of scale {_LARGEST:g} "
        f"spends {least:.4g}; raise epsilon or delta, take fewer steps, smaller batches or a larger "
        "population, or lower the share of releases whose noise does not scale; other runs over the same "
        "records count too"
    )


def calibrate_noise_multiplier(
    sampling: Sampling, budget: Budget, relation: str = "add_or_remove_one", replace_ratio: float = 2.0
) -> float:
    """The noise multiplier of one release per step (DP-SGD) that meets the budget.

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
