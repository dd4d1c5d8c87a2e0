"""Calibration meets its target from below, within 1%."""

import dp_accounting
import pytest

from equipoise.privacy import (
    Budget,
    BudgetError,
    FixedEpochs,
    FullBatch,
    Gaussian,
    Poisson,
    PrivacyPlan,
    Release,
    Unit,
    WithoutReplacement,
    calibrate,
    calibrate_noise_multiplier,
    calibrate_steps,
    epsilon,
)

CASES = [
    (Poisson(128, 1437, 80), 3.0, 1e-5, "add_or_remove_one"),
    (Poisson(80, 1600, 400), 0.3, 1e-5, "add_or_remove_one"),
    (Poisson(80, 1600, 400), 2.0, 1e-6, "replace_one"),
    (FullBatch(1000, 50), 1.0, 1e-5, "add_or_remove_one"),
    (FullBatch(1000, 50), 1.0, 1e-5, "replace_one"),
    (FixedEpochs(100, 1000, 30), 8.0, 1e-5, "add_or_remove_one"),
    pytest.param(WithoutReplacement(50, 1000, 20), 2.0, 1e-5, "replace_one", marks=pytest.mark.slow),
    # so little that rounding could be all of it
    (Poisson(256, 60_000, 2), 1e-6, 1e-5, "add_or_remove_one"),
]


@pytest.mark.parametrize(("sampling", "target", "delta", "relation"), CASES)
def test_from_below_within_one_percent(sampling, target, delta, relation):
    z = calibrate_noise_multiplier(sampling, Budget(target, delta), relation)
    value = PrivacyPlan([Release("gradient", 1.0, Gaussian(z))], sampling, relation).epsilon(delta).value
    assert 0.99 * target <= value <= target


@pytest.mark.parametrize("target", [0.5, 8.0])
@pytest.mark.parametrize(
    ("population", "batch", "steps"),
    [
        (10**4, 256, 10**3),
        (10**6, 1024, 10**5),
        (10**7, 4096, 10**5),
        pytest.param(10**9, 4096, 10**6, marks=pytest.mark.slow),
    ],
)
def test_realistic_settings_from_small_to_large(population, batch, steps, target):
    sampling, delta = Poisson(batch, population, steps), 0.1 / population
    z = calibrate_noise_multiplier(sampling, Budget(target, delta))
    found = epsilon(sampling.event(z, steps), delta, cross_check=False).value
    assert 0.99 * target <= found <= target


@pytest.mark.parametrize(
    ("relation", "more"),
    [
        ("add_or_remove_one", {}),
        ("replace_one", {}),
        ("replace_one", {"replace_ratio": 1.0}),
        ("add_or_remove_one", {"unit": Unit("user", records=2)}),
    ],
    ids=str,
)
def test_steps_are_the_most_that_the_budget_allows(relation, more):
    sampling, budget = FullBatch(1000, 1), Budget(3.0, 1e-5)
    steps = calibrate_steps(sampling, budget, 12.0, relation, **more)
    ratio = more.pop("replace_ratio", 2.0)
    release = Release("gradient", 1.0, Gaussian(12.0), replace_ratio=ratio)
    spent = [
        PrivacyPlan([release], FullBatch(1000, n), relation, **more).epsilon(1e-5).value
        for n in (steps, steps + 1)
    ]
    assert spent[0] <= 3.0 < spent[1]
    with pytest.raises(BudgetError, match="no step"):
        calibrate_steps(sampling, budget, 0.5)


def test_one_scale_for_several_releases():
    sampling = FullBatch(1000, 200)

    def plan(scale):
        return PrivacyPlan(
            [
                Release("gradient", 1.0, Gaussian(3 * scale)),
                Release("norm", 1.0, Gaussian(12 * scale), count=20),
            ],
            sampling,
        )

    found = calibrate(plan, Budget(1.0, 1e-5))
    assert found.releases[1].noise_multiplier == pytest.approx(4 * found.releases[0].noise_multiplier)
    assert 0.99 <= found.epsilon(1e-5).value <= 1.0


@pytest.mark.parametrize("start", [1e-2, 1e3])
def test_start_does_not_matter(start):
    def plan(scale):
        return PrivacyPlan([Release("gradient", 1.0, Gaussian(scale))], FullBatch(10, 7))

    found = calibrate(plan, Budget(1.0, 1e-5), start=start)
    assert 0.99 <= found.epsilon(1e-5).value <= 1.0


def test_out_of_reach_teaches():
    fixed = Release("fixed", 1.0, Gaussian(1.0), draw="x")

    def plan(scale):
        return PrivacyPlan([Release("gradient", 1.0, Gaussian(scale)), fixed], FullBatch(10, 7))

    with pytest.raises(BudgetError, match=r"out of reach.*raise epsilon"):
        calibrate(plan, Budget(1.0, 1e-5))
    with pytest.raises(BudgetError, match="protects nothing"):
        calibrate_noise_multiplier(FullBatch(10, 1), Budget(1e9, 1e-5))


def test_noise_that_jumps_over_the_budget_is_told():
    def plan(scale):
        return PrivacyPlan([Release("gradient", 1.0, Gaussian(1.0 if scale < 5 else 10.0))], FullBatch(10, 1))

    with pytest.raises(BudgetError, match=r"at scale 5\S* the plan's epsilon falls from 4\.\d+ to 0\.3\d+"):
        calibrate(plan, Budget(1.0, 1e-5))


@pytest.mark.parametrize(("epsilon", "delta"), [(0, 1e-5), (-1, 1e-5), (1, 0), (1, 1), (float("inf"), 1e-5)])
def test_bad_budgets(epsilon, delta):
    with pytest.raises(ValueError):
        Budget(epsilon, delta)


@pytest.mark.parametrize("sampling", [FullBatch(1000, 50), Poisson(80, 1600, 40)])
def test_other_runs_share_the_budget(sampling):
    def plan(scale):
        return PrivacyPlan([Release("gradient", 1.0, Gaussian(scale))], sampling)

    budget, earlier = Budget(1.0, 1e-5), plan(40.0).event()
    found = calibrate(plan, budget, other_events=[earlier])
    both = epsilon(dp_accounting.ComposedDpEvent([found.event(), earlier]), 1e-5).value
    assert 0.99 <= both <= 1.0
    assert found.releases[0].noise_multiplier > calibrate(plan, budget).releases[0].noise_multiplier
    with pytest.raises(BudgetError, match="other runs"):
        calibrate(plan, budget, other_events=[plan(0.5).event()])
