"""The unit of privacy: what it costs that a user owns several records."""

from __future__ import annotations

import functools
import json

import dp_accounting
import pytest
import torch
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from scipy import stats

from equipoise import privacy as ep
from equipoise.privacy import calibrate, calibrate_noise_multiplier, epsilon, gaussian_epsilon
from equipoise.published import PublishedLedger, PublishedPlan, Unproven

SAMPLED = ep.Poisson(expected_batch_size=100, population=10_000, steps=1000)


def plan_of(sampling, z, records, relation="add_or_remove_one", rows=None, **release):
    unit = ep.Unit("user", records, rows)
    return ep.PrivacyPlan(
        [ep.Release("gradient", 1.0, ep.Gaussian(z), **release)], sampling, relation, unit=unit
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("records", "wanted"), [(1, 2.1245), (2, 4.5541), (8, 23.0825)])
def test_the_cost_is_that_of_mixtures_of_gaussians(records, wanted):
    """The figures are dp-accounting's at its default interval of 1e-4, which takes 10 to 50 s."""
    found = plan_of(SAMPLED, 1.0, records).epsilon(1e-6)
    assert found.value == pytest.approx(wanted, rel=2e-4)
    assert found.accountant == "pld"
    assert (found.cross_check is None) == (records > 1)
    if records == 1:
        alone = ep.PrivacyPlan([ep.Release("gradient", 1.0, ep.Gaussian(1.0))], SAMPLED)
        assert plan_of(SAMPLED, 1.0, 1).event() == alone.event()
        assert plan_of(SAMPLED, 1.0, 8, rows="mean").event() == alone.event()  # users are drawn, not records
        # The shares of hundreds of records, binomial probabilities, span the range of float64.
        many = plan_of(ep.Poisson(10, 10_000, 100), 20.0, 200).epsilon(1e-6).value
        assert many == pytest.approx(0.4013455, rel=1e-6)


def test_users_without_sampling_have_a_closed_form():
    wanted = gaussian_epsilon(20**0.5 * 3 / 10, 1e-6)
    assert plan_of(ep.FullBatch(1000, 20), 10.0, 3).epsilon(1e-6).value == wanted
    assert wanted == pytest.approx(6.852, abs=1e-3)
    # as does the same law written as a mixture, and one of five epochs, whose slots share the records out
    certain = MixtureOfGaussiansDpEvent(10.0, (0.0, 3.0), (0.0, 1.0))
    event = dp_accounting.SelfComposedDpEvent(certain, 20)
    assert epsilon(event, 1e-6).value == pytest.approx(wanted, rel=1e-9)
    of_epochs = plan_of(ep.FixedEpochs(10, 40, 20), 10.0, 3).epsilon(1e-6).value
    assert of_epochs == pytest.approx(gaussian_epsilon(5**0.5 * 3 / 10, 1e-6))


def test_the_event_is_binomial():
    (event,) = {plan_of(SAMPLED, 1.5, 3).event().event}
    assert event.standard_deviation == 1.5
    assert event.sensitivities == (0.0, 1.0, 2.0, 3.0)
    assert event.sampling_probs == pytest.approx(stats.binom.pmf(range(4), 3, 0.01))


def test_noise_is_calibrated_for_users():
    budget, records = ep.Budget(3.0, 1e-6), 8
    plan = calibrate(lambda scale: plan_of(SAMPLED, scale, records), budget)
    z = calibrate_noise_multiplier(SAMPLED, budget, unit=ep.Unit("user", records))
    assert z == pytest.approx(plan["gradient"].noise_multiplier)
    assert 0.99 * 3 <= plan.epsilon(1e-6).value <= 3
    # fewer records cost less, and more noise than for one record is needed
    assert plan_of(SAMPLED, plan["gradient"].noise_multiplier, records - 1).epsilon(1e-6).value < 0.9 * 3


def test_what_no_accountant_covers_is_refused():
    for sampling, relation in (
        (ep.CyclicPoisson(10, 1000, 10, 4), "add_or_remove_one"),
        (ep.WithoutReplacement(10, 1000, 10), "replace_one"),
        (SAMPLED, "replace_one"),
    ):
        with pytest.raises(ep.PlanError, match=r"records_per_user=2.*rows='mean'"):
            plan_of(sampling, 1.0, 2, relation)
        plan_of(sampling, 1.0, 1, relation)
        plan_of(sampling, 1.0, 2, relation, rows="sum")
    over_steps, slots = (
        ep.Release("gradient", 1.0, ep.BandedGaussian((1.0, 0.5), 1.0)),
        ep.FixedEpochs(10, 40, 20, True),
    )
    with pytest.raises(ep.PlanError, match="noise over steps"):
        ep.PrivacyPlan([over_steps], slots, unit=ep.Unit("user", 2))
    with pytest.raises(ep.PlanError, match="replace_one"):
        epsilon(plan_of(SAMPLED, 1.0, 2).event(), 1e-6, "replace_one")
    with pytest.raises(ValueError, match=r"records_per_user=4 .* belong to users"):
        ep.Unit("record", 4)
    with pytest.raises(ValueError, match="rows='max' is unknown"):
        ep.Unit("user", 4, "max")
    journal = ep.Journal()
    for records in (2, 3):  # of users all
        ep.Ledger(plan_of(SAMPLED, 1.0, records), journal=journal)
    with pytest.raises(ep.JournalError, match="accounted for one user, this one for one record"):
        ep.Ledger(ep.PrivacyPlan([ep.Release("gradient", 1.0, ep.Gaussian(1.0))], SAMPLED), journal=journal)


def test_a_replaced_user_moves_what_it_leaves_and_what_it_enters():
    """Sums of values in [0, U] are moved by U once by a replaced record; two users' records may lie apart."""
    small = plan_of(ep.FullBatch(100, 1), 2.0, 3, "replace_one", replace_ratio=1.0)
    assert small.epsilon(1e-5).value == pytest.approx(gaussian_epsilon(2 * 3 / 2, 1e-5))
    alone = plan_of(ep.FullBatch(100, 1), 2.0, 1, "replace_one", replace_ratio=1.0)
    assert alone.epsilon(1e-5).value == pytest.approx(gaussian_epsilon(1 / 2, 1e-5))


def test_plans_name_their_unit():
    plan = plan_of(SAMPLED, 1.0, 4)
    described = json.loads(json.dumps(plan.describe()))
    assert described["users"] == {"records": 4, "rows": None}
    again = ep.PrivacyPlan.from_description(described)
    assert again.unit == plan.unit
    assert again.fingerprint() == plan.fingerprint()
    others = [plan_of(SAMPLED, 1.0, 3), plan_of(SAMPLED, 1.0, 4, rows="mean"), plan.protecting(ep.Unit())]
    assert len({plan.fingerprint(), *(other.fingerprint() for other in others)}) == 4
    # plans of records are described as they were before there were users
    assert "users" not in others[-1].describe()


def test_the_worst_case_of_a_step_without_proof_is_a_users():
    """A method names what one record may do at worst; a user with G records does it G times."""
    plan = functools.partial(PublishedPlan, [], ep.FullBatch(100, 1), unproven=[Unproven("update")])
    costs = []
    for unit in (ep.Unit(), ep.Unit("user", 3)):
        ledger = PublishedLedger(plan(unit=unit))
        draw = ledger.open("batch")
        value = {"w": ep.Private(torch.zeros(2), draw)}
        ledger.release_unproven(draw, "update", value, 1.0, hole="not proved", worst_case_multiplier=6.0)
        costs.append(ledger.spent(1e-5).value)
    assert costs == pytest.approx([gaussian_epsilon(1 / 6, 1e-5), gaussian_epsilon(3 / 6, 1e-5)])
