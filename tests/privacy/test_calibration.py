"""Calibration meets its target from below, within 1%."""

import dp_accounting
import pytest

from equipoise import privacy as ep
from equipoise.privacy import calibrate, calibrate_noise_multiplier, calibrate_steps, epsilon

CASES = [
    (ep.Poisson(128, 1437, 80), 3.0, 1e-5, "add_or_remove_one"),
    (ep.Poisson(80, 1600, 400), 0.3, 1e-5, "add_or_remove_one"),
    (ep.Poisson(80, 1600, 400), 2.0, 1e-6, "replace_one"),
    (ep.FullBatch(1000, 50), 1.0, 1e-5, "replace_one"),
    (ep.Poisson(4096, 10**7, 10**5), 8.0, 1e-8, "add_or_remove_one"),
    pytest.param(ep.Poisson(4096, 10**9, 10**6), 0.5, 1e-10, "add_or_remove_one", marks=pytest.mark.slow),
    (ep.FixedEpochs(100, 1000, 30), 8.0, 1e-5, "add_or_remove_one"),
    pytest.param(ep.WithoutReplacement(50, 1000, 20), 2.0, 1e-5, "replace_one", marks=pytest.mark.slow),
    # so little that rounding could be all of it
    (ep.Poisson(256, 60_000, 2), 1e-6, 1e-5, "add_or_remove_one"),
]


@pytest.mark.parametrize(("sampling", "target", "delta", "relation"), CASES)
def test_from_below_within_one_percent(sampling, target, delta, relation):
    z = calibrate_noise_multiplier(sampling, ep.Budget(target, delta), relation)
    value = (
        ep.PrivacyPlan([ep.Release("gradient", 1.0, ep.Gaussian(z))], sampling, relation).epsilon(delta).value
    )
    assert 0.99 * target <= value <= target


@pytest.mark.parametrize(
    ("relation", "more"),
    [
        ("add_or_remove_one", {}),
        ("replace_one", {}),
        ("replace_one", {"replace_ratio": 1.0}),
        ("add_or_remove_one", {"unit": ep.Unit("user", records=2)}),
    ],
    ids=str,
)
def test_steps_are_the_most_that_the_budget_allows(relation, more):
    sampling, budget = ep.FullBatch(1000, 1), ep.Budget(3.0, 1e-5)
    steps = calibrate_steps(sampling, budget, 12.0, relation, **more)
    ratio = more.pop("replace_ratio", 2.0)
    release = ep.Release("gradient", 1.0, ep.Gaussian(12.0), replace_ratio=ratio)
    plans = (ep.PrivacyPlan([release], ep.FullBatch(1000, n), relation, **more) for n in (steps, steps + 1))
    last, beyond = (plan.epsilon(1e-5).value for plan in plans)
    assert last <= 3.0 < beyond
    with pytest.raises(ep.BudgetError, match="no step"):
        calibrate_steps(sampling, budget, 0.5)


@pytest.mark.parametrize("start", [1e-2, 1e3])
def test_one_scale_for_several_releases(start):
    def plan(scale):
        releases = (
            ep.Release("a", 1.0, ep.Gaussian(3 * scale)),
            ep.Release("b", 1.0, ep.Gaussian(12 * scale), count=20),
        )
        return ep.PrivacyPlan([*releases], ep.FullBatch(1000, 200))

    found = calibrate(plan, ep.Budget(1.0, 1e-5), start=start)
    assert found.releases[1].noise_multiplier == pytest.approx(4 * found.releases[0].noise_multiplier)
    assert 0.99 <= found.epsilon(1e-5).value <= 1.0


def test_out_of_reach_teaches():
    fixed = ep.Release("fixed", 1.0, ep.Gaussian(1.0), draw="x")

    def plan(scale):
        return ep.PrivacyPlan([ep.Release("gradient", 1.0, ep.Gaussian(scale)), fixed], ep.FullBatch(10, 7))

    with pytest.raises(ep.BudgetError, match=r"out of reach.*raise epsilon"):
        calibrate(plan, ep.Budget(1.0, 1e-5))
    with pytest.raises(ep.BudgetError, match="protects nothing"):
        calibrate_noise_multiplier(ep.FullBatch(10, 1), ep.Budget(1e9, 1e-5))

    def jumps(scale):
        return ep.PrivacyPlan(
            [ep.Release("gradient", 1.0, ep.Gaussian(1.0 if scale < 5 else 10.0))], ep.FullBatch(10, 1)
        )

    with pytest.raises(
        ep.BudgetError, match=r"at scale 5\S* the plan's epsilon falls from 4\.\d+ to 0\.3\d+"
    ):
        calibrate(jumps, ep.Budget(1.0, 1e-5))


@pytest.mark.parametrize(("epsilon", "delta"), [(0, 1e-5), (-1, 1e-5), (1, 0), (1, 1), (float("inf"), 1e-5)])
def test_bad_budgets(epsilon, delta):
    with pytest.raises(ValueError):
        ep.Budget(epsilon, delta)


@pytest.mark.parametrize("sampling", [ep.FullBatch(1000, 50), ep.Poisson(80, 1600, 40)])
def test_other_runs_share_the_budget(sampling):
    def plan(scale):
        return ep.PrivacyPlan([ep.Release("gradient", 1.0, ep.Gaussian(scale))], sampling)

    budget, earlier = ep.Budget(1.0, 1e-5), plan(40.0).event()
    found = calibrate(plan, budget, other_events=[earlier])
    both = epsilon(dp_accounting.ComposedDpEvent([found.event(), earlier]), 1e-5).value
    assert 0.99 <= both <= 1.0
    assert found.releases[0].noise_multiplier > calibrate(plan, budget).releases[0].noise_multiplier
    with pytest.raises(ep.BudgetError, match="other runs"):
        calibrate(plan, budget, other_events=[plan(0.5).event()])
