"""Noise that changes at steps that are fixed beforehand: what it costs, what it is refused for."""

from __future__ import annotations

from dataclasses import replace

import dp_accounting
import pytest
import torch
from dp_accounting import pld

from equipoise import privacy as ep
from equipoise.privacy import gaussian_epsilon, mechanism_from
from equipoise.privacy.bounds.bounded import make_bounded

DELTA = 1e-5
STAGES = {"starts": (0, 4, 7), "factors": (1.0, 0.8, 0.5)}  # of ten draws
SQUARES = 4 / 4 + 3 / (4 * 0.64) + 3 / (4 * 0.25)  # at z = 2


def plan_of(mechanism, sampling=None, relation="add_or_remove_one", **unit):
    sampling = sampling or ep.FullBatch(100, 10)
    return ep.PrivacyPlan([ep.Release("a", 5.0, mechanism)], sampling, relation, unit=ep.Unit(**unit))


def staged(z=2.0, **changes):
    return ep.Staged(ep.Gaussian(z), **{**STAGES, **changes})


def of_two(**options):
    releases = [ep.Release("a", 1.0, staged()), ep.Release("b", 1.0, ep.Gaussian(3.0), **options)]
    return ep.PrivacyPlan(releases, ep.FullBatch(100, 10))


def take(ledger, parameters=None, size=4000, name="a"):
    draw = ledger.open("batch", parameters)
    zero = {"w": ep.Private(torch.zeros(size), draw)}
    return ledger.release(draw, {name: make_bounded(zero, 1.5, 3.0, draw)})[name]["w"]


def test_the_cost_is_that_of_every_draw_with_its_own_noise():
    assert plan_of(staged()).epsilon(DELTA).value == pytest.approx(gaussian_epsilon(SQUARES**0.5, DELTA))
    replaced = plan_of(staged(4.0), relation="replace_one").epsilon(DELTA).value
    assert replaced == pytest.approx(gaussian_epsilon(SQUARES**0.5, DELTA))
    users = plan_of(staged(6.0), name="user", records=3).epsilon(DELTA).value
    assert users == pytest.approx(gaussian_epsilon(SQUARES**0.5, DELTA))


def test_the_cost_of_sampled_draws_is_that_of_another_accountant():
    sampling = ep.Poisson(600, 6000, 300)
    found = plan_of(ep.Staged(ep.Gaussian(2.0), (0, 100), (1.0, 0.6)), sampling).epsilon(DELTA)
    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
    for z, count in ((2.0, 100), (1.2, 200)):
        gaussian = dp_accounting.GaussianDpEvent(z)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(0.1, gaussian), count)
    assert found.value == pytest.approx(accountant.get_epsilon(DELTA), rel=2e-3)
    # between those of its smallest and its largest multiplier, and not that of their mean
    low, mean, high = (plan_of(ep.Gaussian(z), sampling).epsilon(DELTA).value for z in (2.0, 4.4 / 3, 1.2))
    assert low < mean < found.value * 0.99 < found.value < high
    equal = plan_of(ep.Staged(ep.Gaussian(1.0), (0, 100), (1.0, 1.0)), sampling)
    assert equal.event() == plan_of(ep.Gaussian(1.0), sampling).event()


def test_releases_of_one_draw_share_its_stages():
    plan = of_two()
    assert [(p.count, sorted(p.names)) for p in plan.patterns()] == [(n, ["a", "b"]) for n in (4, 3, 3)]
    square = SQUARES + 10 / 9
    assert plan.epsilon(DELTA).value == pytest.approx(gaussian_epsilon(square**0.5, DELTA))


@pytest.mark.parametrize("sampling", [ep.FixedEpochs(10, 40, 24), ep.CyclicPoisson(5, 40, 24, 4)])
def test_a_record_meets_one_stage_per_epoch(sampling):
    plan = plan_of(ep.Staged(ep.Gaussian(2.0), (0, 8), (1.0, 0.5)), sampling)
    parts = [plan_of(ep.Gaussian(z), replace(sampling, steps=steps)) for z, steps in ((2, 8), (1, 16))]
    whole = dp_accounting.ComposedDpEvent([part.event() for part in parts])
    assert plan.event() == whole


@pytest.mark.parametrize("plan", [plan_of(staged()), plan_of(staged()).hardened()], ids=["floats", "grid"])
def test_every_draw_has_the_noise_of_its_stage(plan):
    ledger = ep.Ledger(plan, secrets=ep.Secrets(reproducible_seed=1))
    found = [float(take(ledger, f"p{i}").std()) / 1.5 for i in range(10)]
    assert found == pytest.approx([2.0] * 4 + [1.6] * 3 + [1.0] * 3, rel=0.05)
    rows = [row for row in ledger.journal.read() if row["type"] == "release"]
    assert [row["multipliers"]["a"] for row in rows] == [2.0] * 4 + [1.6] * 3 + [1.0] * 3
    with pytest.raises(ep.PlanUsedUpError):
        take(ledger, "p10")


@pytest.mark.parametrize(
    ("plan", "made", "square"),
    [
        (plan_of(staged()), (0, 5, 8, 9), 1 / 4 + 1 / (4 * 0.64) + 2 / (4 * 0.25)),
        # two releases of one stage that lie in two epochs, and one of the other
        (
            plan_of(ep.Staged(ep.Gaussian(2.0), (0, 8), (1.0, 0.5)), ep.FixedEpochs(10, 40, 16)),
            (0, 5, 8),
            2 / 4 + 1 / 1,
        ),
    ],
)
def test_draws_that_were_not_released_leave_their_stage(plan, made, square):
    """What was spent is that of the stages in which releases lie, not of so many first draws."""
    ledger = ep.Ledger(plan)
    for step in range(plan.sampling.steps):
        if step in made:
            take(ledger, f"p{step}", size=3)
        else:
            ledger.open("batch", f"p{step}")
    assert ledger.spent(DELTA).value == pytest.approx(gaussian_epsilon(square**0.5, DELTA))
    ledger.close(stop_fixed_beforehand=True)
    other = ep.Ledger(plan_of(ep.Gaussian(50.0)), journal=ledger.journal)
    assert other.spent(DELTA).value == pytest.approx(gaussian_epsilon(square**0.5, DELTA))


REFUSED = [
    (lambda: staged(starts=(0, 4)), ValueError, "as many as the 3 factors"),
    (lambda: staged(starts=(0, 7, 4)), ValueError, "rising"),
    (lambda: staged(starts=(1, 4, 7)), ValueError, "from 0 on"),
    (lambda: staged(factors=(1.0, 0.0, 0.5)), ValueError, "factors"),
    (
        lambda: ep.Staged(ep.BandedGaussian((1, 0.5), 1.0), **STAGES),
        ep.PlanError,
        "banded_gaussian noise cannot",
    ),
    (lambda: ep.Staged(staged(), **STAGES), ep.PlanError, "staged noise cannot change"),
    (lambda: plan_of(staged(), ep.FullBatch(100, 7)), ep.PlanError, "changes at draw 7, and 7 are planned"),
    (
        lambda: plan_of(staged(), ep.FixedEpochs(20, 40, 10)),
        ep.PlanError,
        r"draw 7, within an epoch of 2 draws",
    ),
    (lambda: of_two(count=3), ep.PlanError, r"counts \[3, 10\] and noise in stages"),
    (lambda: mechanism_from(staged().describe() | {"noise_multiplier": 3.0}), ep.PlanError, "first stage's"),
    (lambda: staged().noised({}, None), ep.PlanError, "that of a stage"),
]


@pytest.mark.parametrize(("make", "kind", "message"), REFUSED)
def test_what_is_refused(make, kind, message):
    with pytest.raises(kind, match=message):
        make()
