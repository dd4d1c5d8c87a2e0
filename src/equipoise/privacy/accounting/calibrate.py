"""Calibration: the least noise that meets a budget.

epsilon falls as the noise grows. The common scale s of a plan's multipliers is the root of

    log epsilon(s) - log target,   in log s,

found from the side where epsilon is small enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import dp_accounting

from equipoise import _validate
from equipoise._roots import NoCrossing, crossing
from equipoise._rounding import plain
from equipoise.privacy.accounting.epsilon import check_delta, costs, epsilon
from equipoise.privacy.errors import BudgetError
from equipoise.privacy.mechanisms import Gaussian
from equipoise.privacy.plan import PrivacyPlan, Release
from equipoise.privacy.sampling import Sampling
from equipoise.privacy.unit import RECORD, Unit

# Scales of noise between which a budget is sought. Choices: noise multipliers below the first spend epsilons
# in the hundred thousands, and above the second no gradient is left to learn from. A budget outside is
# refused.
_SMALLEST, _LARGEST = 1e-3, 1e6


@dataclass(frozen=True)
class Budget:
    """The privacy budget of a run, or of all runs that share a journal.

    Args:
        epsilon: positive.
        delta: in (0, 1), and well below 1/population; it must be given.
        runs: how many runs of one journal it is for, those before and those to come. Each run then gets the
            noise at which it and as many like it as are left spend what the runs before it left. 1 leaves
            the whole rest to the run that begins.

    Example:
        >>> from equipoise.privacy import Gaussian, Poisson
        >>> def week(scale):
        ...     return PrivacyPlan([Release("gradient", 1.0, Gaussian(scale))], Poisson(50, 400, 20))
        >>> first = calibrate(week, Budget(3.0, 1e-4, runs=3))
        >>> second = calibrate(week, Budget(3.0, 1e-4, runs=3), other_events=[first.event()])
        >>> [round(plan["gradient"].noise_multiplier, 1) for plan in (first, second)]
        [1.5, 1.5]
    """

    epsilon: float
    delta: float = math.nan
    runs: int = 1

    def __post_init__(self) -> None:
        _validate.positive(_validate.NO_NOISE, epsilon=self.epsilon)
        _validate.count("the number of runs that share the budget", runs=self.runs)
        if math.isnan(self.delta):
            raise TypeError(
                f"Budget(epsilon={self.epsilon:g}) needs delta, a number well below 1/population: "
                f"Budget({self.epsilon:g}, delta=1e-5) for fewer than 100,000 records, a power of ten less "
                "for each ten times as many"
            )
        check_delta(self.delta)

    def whole(
        self, event: dp_accounting.DpEvent, other_events: Sequence[dp_accounting.DpEvent]
    ) -> dp_accounting.DpEvent:
        """What the other runs cost, a run of this event, and as many like it as are left."""
        like_it = dp_accounting.SelfComposedDpEvent(event, max(1, self.runs - self.begun(other_events)))
        return dp_accounting.ComposedDpEvent([*other_events, like_it])

    def begun(self, other_events: Collection[dp_accounting.DpEvent]) -> int:
        """How many other runs have a part of it: those that were closed before a release cost nothing."""
        return sum(costs(event) for event in other_events)


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
        `plan_of_scale(s)` with 0.99 * budget.epsilon <= epsilon <= budget.epsilon, the other runs included
        and those that the budget leaves room for.

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

    def spent(log_scale: float) -> float:
        plan = plan_of_scale(math.exp(log_scale))
        whole = budget.whole(plan.event(), other_events)
        return epsilon(whole, budget.delta, plan.relation, cross_check=False).value

    # 1e-12: so much noise that the accountant gives 0, which has no logarithm.
    goal = math.log(0.999 * budget.epsilon)

    def excess(log_scale: float) -> float:
        return math.log(max(spent(log_scale), 1e-12)) - goal

    limits = {"least": math.log(_SMALLEST), "most": math.log(_LARGEST)}
    try:
        below, scale = crossing(excess, math.log(start), math.log(2), tolerance=2e-4, **limits)
    except NoCrossing as error:
        raise _out_of_reach(budget, spent(limits["most"]), error.above) from None
    if spent(scale) >= 0.99 * budget.epsilon:
        return plan_of_scale(math.exp(scale))
    raise BudgetError(
        f"no scale gives an epsilon within 1% below {budget.epsilon}: at scale {math.exp(scale):.4g} the "
        f"plan's epsilon falls from {spent(below):.4g} to {spent(scale):.4g}. "
        "Let the noise grow continuously with the scale, or give a budget of one of these two"
    )


def _out_of_reach(budget: Budget, least: float, above: bool) -> BudgetError:
    if not above:
        return BudgetError(
            f"epsilon={budget.epsilon} is out of reach from below: noise of scale {_SMALLEST} spends less; "
            "such a budget protects nothing: lower epsilon"
        )
    return BudgetError(
        f"epsilon={budget.epsilon} at delta={plain(budget.delta)} is out of reach: even noise of scale "
        f"{_LARGEST:g} spends {least:.4g}; raise epsilon or delta, take fewer steps, smaller batches or a "
        "larger population, or lower the share of releases whose noise does not scale; other runs over the "
        "same records count too"
    )


def calibrate_noise_multiplier(
    sampling: Sampling,
    budget: Budget,
    relation: str = "add_or_remove_one",
    replace_ratio: float = 2.0,
    unit: Unit = RECORD,
) -> float:
    """The noise multiplier of one release per step (DP-SGD) that meets the budget.

    Args:
        sampling, budget: of the run.
        relation, replace_ratio: as for `PrivacyPlan` and `Release`.
        unit: whose privacy: one record's, or one user's (`Unit("user", records=4)`).

    Example:
        >>> from equipoise.privacy import Poisson
        >>> z = calibrate_noise_multiplier(Poisson(256, 60_000, 4700), Budget(1.571, 1e-5))
        >>> 0.99 < z < 1.01
        True
    """

    def plan(scale: float) -> PrivacyPlan:
        release = Release("gradient", 1.0, Gaussian(scale), replace_ratio=replace_ratio)
        return PrivacyPlan([release], sampling, relation, unit=unit)

    return calibrate(plan, budget).releases[0].noise_multiplier


def calibrate_steps(
    sampling: Sampling,
    budget: Budget,
    noise_multiplier: float,
    relation: str = "add_or_remove_one",
    replace_ratio: float = 2.0,
    unit: Unit = RECORD,
) -> int:
    """The most steps of one release each (DP-SGD) that the budget allows at this noise.

    Args:
        sampling: of the run; its own number of steps does not matter.
        budget, relation, replace_ratio, unit: as for `calibrate_noise_multiplier`.
        noise_multiplier: of every release.

    Raises:
        BudgetError: not even one step is within the budget.

    Example:
        >>> from equipoise.privacy import Poisson
        >>> calibrate_steps(Poisson(256, 60_000, steps=1), Budget(1.571, 1e-5), noise_multiplier=1.0) // 10
        470
    """
    release = Release("gradient", 1.0, Gaussian(noise_multiplier), replace_ratio=replace_ratio)

    def is_within(steps: int) -> bool:
        plan = PrivacyPlan([release], replace(sampling, steps=steps), relation, unit=unit)  # type: ignore[type-var]
        return epsilon(plan.event(), budget.delta, relation, cross_check=False).value <= budget.epsilon

    if not is_within(1):
        raise BudgetError(
            f"epsilon={budget.epsilon} at delta={budget.delta} allows no step with noise_multiplier="
            f"{noise_multiplier}: raise the noise or the budget, or draw smaller batches"
        )
    least, most = 1, 2
    while is_within(most):
        least, most = most, 2 * most
    while least + 1 < most:
        middle = (least + most) // 2
        least, most = (middle, most) if is_within(middle) else (least, middle)
    return least
