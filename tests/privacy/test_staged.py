"""Noise that changes at steps that are fixed beforehand: what it costs, what it is refused for."""

from __future__ import annotations

from dataclasses import replace

import dp_accounting
import pytest
import torch
from dp_accounting import pld

from equipoise.privacy import (
    BandedGaussian,
    CyclicPoisson,
    FixedEpochs,
    FullBatch,
    Gaussian,
    GridGaussian,
    Ledger,
    PlanError,
    PlanUsedUpError,
    Poisson,
    PrivacyPlan,
    Private,
    Release,
    Secrets,
    Staged,
    Unit,
    gaussian_epsilon,
    mechanism_from,
)
from equipoise.privacy.bounds.bounded import make_bounded

DELTA = 1e-5
STAGES = {"starts": (0, 4, 7), "factors": (1.0, 0.8, 0.5)}  # of ten draws
SQUARES = 4 / 4 + 3 / (4 * 0.64) + 3 / (4 * 0.25)  # at z = 2


def plan_of(mechanism, sampling=None, relation="add_or_remove_one", **unit):
    sampling = sampling or FullBatch(100, 10)
    return PrivacyPlan([Release("a", 5.0, mechanism)], sampling, relation, unit=Unit(**unit))


def staged(z=2.0, **changes):
    return Staged(Gaussian(z), **{**STAGES, **changes})


def take(ledger, parameters=None, size=4000, name="a"):
    draw = ledger.open("batch", parameters)
    zero = {"w": Private(torch.zeros(size), draw)}
    return ledger.release(draw, {name: make_bounded(zero, 1.5, 3.0, draw)})[name]["w"]


# ---- what it costs


def test_the_cost_is_that_of_every_draw_with_its_own_noise():
    assert plan_of(staged()).epsilon(DELTA).value == pytest.approx(gaussian_epsilon(SQUARES**0.5, DELTA))
    replaced = plan_of(staged(4.0), relation="replace_one").epsilon(DELTA).value
    assert replaced == pytest.approx(gaussian_epsilon(SQUARES**0.5, DELTA))
    users = plan_of(staged(6.0), name="user", records=3).epsilon(DELTA).value
    assert users == pytest.approx(gaussian_epsilon(SQUARES**0.5, DELTA))


def test_the_cost_of_sampled_draws_is_that_of_another_accountant():
    sampling = Poisson(600, 6000, 300)
    found = plan_of(Staged(Gaussian(2.0), (0, 100), (1.0, 0.6)), sampling).epsilon(DELTA)
    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
    for z, count in ((2.0, 100), (1.2, 200)):
        gaussian = dp_accounting.GaussianDpEvent(z)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(0.1, gaussian), count)
    assert found.value == pytest.approx(accountant.get_epsilon(DELTA), rel=2e-3)
    # between those of its smallest and its largest multiplier, and not that of their mean
    low, mean, high = (plan_of(Gaussian(z), sampling).epsilon(DELTA).value for z in (2.0, 4.4 / 3, 1.2))
    assert low < mean < found.value * 0.99 < found.value < high


def test_equal_stages_cost_what_one_does():
    for sampling in (Poisson(256, 60_000, 1000), FixedEpochs(10, 100, 1000)):
        found = plan_of(Staged(Gaussian(1.0), (0, 500), (1.0, 1.0)), sampling).event()
        assert found == plan_of(Gaussian(1.0), sampling).event()


def test_releases_of_one_draw_share_its_stages():
    releases = [Release("a", 1.0, staged()), Release("b", 1.0, Gaussian(3.0))]
    plan = PrivacyPlan(releases, FullBatch(100, 10))
    assert [(p.count, sorted(p.names)) for p in plan.patterns()] == [(n, ["a", "b"]) for n in (4, 3, 3)]
    square = SQUARES + 10 / 9
    assert plan.epsilon(DELTA).value == pytest.approx(gaussian_epsilon(square**0.5, DELTA))


@pytest.mark.parametrize("sampling", [FixedEpochs(10, 40, 24), CyclicPoisson(5, 40, 24, 4)])
def test_a_record_meets_one_stage_per_epoch(sampling):
    plan = plan_of(Staged(Gaussian(2.0), (0, 8), (1.0, 0.5)), sampling)
    parts = [plan_of(Gaussian(z), replace(sampling, steps=steps)) for z, steps in ((2, 8), (1, 16))]
    whole = dp_accounting.ComposedDpEvent([part.event() for part in parts])
    assert plan.event() == whole


# ---- what is booked


def test_every_draw_has_the_noise_of_its_stage():
    ledger = Ledger(plan_of(staged()), secrets=Secrets(reproducible_seed=1))
    found = [float(take(ledger, f"p{i}").std()) / 1.5 for i in range(10)]
    assert found == pytest.approx([2.0] * 4 + [1.6] * 3 + [1.0] * 3, rel=0.05)
    rows = [row for row in ledger.journal.read() if row["type"] == "release"]
    assert [row["multipliers"]["a"] for row in rows] == [2.0] * 4 + [1.6] * 3 + [1.0] * 3
    with pytest.raises(PlanUsedUpError):
        take(ledger, "p10")


def test_draws_that_were_not_released_leave_their_stage():
    """What was spent is that of the stages in which releases lie, not of so many first draws."""
    ledger = Ledger(plan_of(staged()))
    for step in range(10):
        if step in (0, 5, 8, 9):
            take(ledger, f"p{step}", size=3)
        else:
            ledger.open("batch", f"p{step}")
    square = 1 / 4 + 1 / (4 * 0.64) + 2 / (4 * 0.25)
    assert ledger.spent(DELTA).value == pytest.approx(gaussian_epsilon(square**0.5, DELTA))
    ledger.close(stop_fixed_beforehand=True)
    other = Ledger(plan_of(Gaussian(50.0)), journal=ledger.journal)
    assert other.spent(DELTA).value == pytest.approx(gaussian_epsilon(square**0.5, DELTA))


def test_gaps_in_epochs_are_paid_where_they_lie():
    """Two releases of one stage that lie in two epochs, and one of the other."""
    ledger = Ledger(plan_of(Staged(Gaussian(2.0), (0, 8), (1.0, 0.5)), FixedEpochs(10, 40, 16)))
    for step in range(16):
        if step in (0, 5, 8):
            take(ledger, f"p{step}", size=3)
        else:
            ledger.open("batch", f"p{step}")
    square = 2 / 4 + 1 / 1
    assert ledger.spent(DELTA).value == pytest.approx(gaussian_epsilon(square**0.5, DELTA))


def test_noise_on_a_grid_keeps_its_stages():
    plan = plan_of(staged()).hardened()
    assert plan["a"].mechanism == Staged(GridGaussian(2.0), **STAGES)
    assert plan.arithmetic == "grid"
    ledger = Ledger(plan, secrets=Secrets(reproducible_seed=2))
    found = [float(take(ledger, f"p{i}").std()) / 1.5 for i in range(8)]
    assert found == pytest.approx([2.0] * 4 + [1.6] * 3 + [1.0], rel=0.05)


# ---- what it is refused for


REFUSED = [
    (lambda: staged(starts=(0, 4)), ValueError, "as many as the 3 factors"),
    (lambda: staged(starts=(0, 7, 4)), ValueError, "rising"),
    (lambda: staged(starts=(1, 4, 7)), ValueError, "from 0 on"),
    (lambda: staged(starts=(0, 4.0, 7)), ValueError, "whole numbers"),
    (lambda: staged(factors=(1.0, 0.0, 0.5)), ValueError, "factors"),
    (lambda: Staged(2.0, (0,), (1.0,)), TypeError, "mechanism=2.0"),
    (
        lambda: Staged(BandedGaussian((1, 0.5), 1.0), **STAGES),
        PlanError,
        "banded_gaussian noise cannot change",
    ),
    (lambda: Staged(staged(), **STAGES), PlanError, "staged noise cannot change"),
    (lambda: plan_of(staged(), FullBatch(100, 7)), PlanError, "changes at draw 7, and 7 are planned"),
    (lambda: plan_of(staged(), FixedEpochs(20, 40, 10)), PlanError, r"draw 7, within an epoch of 2 draws"),
    (
        lambda: PrivacyPlan(
            [Release("a", 1.0, staged()), Release("b", 1.0, Gaussian(1.0), count=3)], FullBatch(100, 10)
        ),
        PlanError,
        r"counts \[3, 10\] and noise in stages",
    ),
    (lambda: mechanism_from(staged().describe() | {"noise_multiplier": 3.0}), PlanError, "first stage's"),
    (lambda: staged().noised({}, None), PlanError, "that of a stage"),
]


@pytest.mark.parametrize(("make", "kind", "message"), REFUSED)
def test_what_is_refused(make, kind, message):
    with pytest.raises(kind, match=message):
        make()
