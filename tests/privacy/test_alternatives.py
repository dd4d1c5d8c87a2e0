"""Releases over records that are held apart: what they cost, by brute force and by dp-accounting."""

import itertools
import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting import pld
from scipy import stats

from equipoise import privacy as ep
from equipoise.privacy import epsilon, gaussian_epsilon
from equipoise.statements import statement_of
from equipoise.statements.checks import check_published

ADD, REPLACE = "add_or_remove_one", "replace_one"
SAMPLED = ep.Poisson(50, 1000, 40)


def plan_of(z=2.0, of_score=3.0, relation=ADD, sampling=SAMPLED, apart=True):
    noise, whole = ep.Gaussian(of_score), ep.FullBatch(100, 5)
    score = ep.Release("score", 1.0, noise, 5, "score", whole, math.sqrt(2), apart=apart)
    return ep.PrivacyPlan([ep.Release("gradient", 1.0, ep.Gaussian(z)), score], sampling, relation)


def training(z=2.0, factor=1.0):
    return dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(z / factor)), 40)


def score(z=3.0, factor=1.0):
    return dp.SelfComposedDpEvent(dp.GaussianDpEvent(z / factor), 5)


def by_pld(events, delta):
    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
    return accountant.compose(dp.ComposedDpEvent(events)).get_epsilon(delta)


@pytest.mark.parametrize(("z", "of_score"), [(0.8, 30.0), (2.0, 3.0), (2.0, 1.0)])
def test_a_record_costs_the_larger_side_or_where_it_is_replaced_both(z, of_score):
    found = plan_of(z, of_score).epsilon(1e-5)
    each = [by_pld([training(z)], 1e-5), by_pld([score(of_score)], 1e-5)]
    assert found.value == pytest.approx(max(each), rel=5e-3)
    assert found.cross_check is None or found.cross_check >= max(each)
    both = plan_of(z, of_score, REPLACE).epsilon(1e-5).value
    moved = dp.ComposedDpEvent([training(z, 2), score(of_score, math.sqrt(2))])
    assert both == pytest.approx(epsilon(moved, 1e-5, REPLACE).value, rel=1e-9)
    alike = plan_of(z, of_score, apart=False).epsilon(1e-5).value
    assert alike == pytest.approx(by_pld([training(z), score(of_score)], 1e-5), rel=5e-3)


@pytest.mark.parametrize(("share", "adaptive"), [(0.1, 2.0), (0.5, 0.0), (0.97, 2.0)])
def test_brute_force_over_the_secret_side(share, adaptive):
    """A record moves one of two sums, by chance; the noise of the second release may follow the first."""
    first, second = 1.5, 2.5
    x = np.linspace(-12, 14, 651)
    a, b = np.meshgrid(x, x, indexing="ij")

    def density(move_a, move_b):
        # What the second query adds follows what the first one gave, in both data sets alike.
        drift = adaptive * np.tanh(a)
        return stats.norm.pdf(a - move_a, scale=first) * stats.norm.pdf(b - drift - move_b, scale=second)

    without, held = density(0, 0), share * density(0, 1) + (1 - share) * density(1, 0)
    area = (x[1] - x[0]) ** 2
    event = ep.Alternatives([dp.GaussianDpEvent(first), dp.GaussianDpEvent(second)])
    for delta in (0.01, 0.1):
        claimed = epsilon(event, delta).value
        for p, q in ((held, without), (without, held)):
            assert np.maximum(p - math.exp(claimed) * q, 0).sum() * area <= delta * (1 + 1e-3)
        smaller = gaussian_epsilon(1 / second, delta)  # it would not do to charge the smaller side
        shown = np.maximum(held - math.exp(smaller) * without, 0).sum() * area
        assert share > 0.5 or shown > delta


def test_other_runs_compose_into_each_side():
    """Their sides are drawn anew, so that a record may be on either one in each."""
    runs = [plan_of(2.0, 3.0).event(), plan_of(1.0, 5.0).event(), dp.GaussianDpEvent(4.0)]
    of_sides = [
        epsilon(dp.ComposedDpEvent([one, other, runs[2]]), 1e-5).value
        for one in (training(2.0), score(3.0))
        for other in (training(1.0), score(5.0))
    ]
    assert epsilon(dp.ComposedDpEvent(runs), 1e-5).value == max(of_sides)
    # Of many equal ones the number on each side is all that counts.
    event = ep.Alternatives([dp.GaussianDpEvent(9.0), dp.GaussianDpEvent(8.0)])
    for many in (dp.ComposedDpEvent([event] * 52), dp.SelfComposedDpEvent(event, 52)):
        assert epsilon(many, 1e-5).value == pytest.approx(gaussian_epsilon(math.sqrt(52) / 8, 1e-5), rel=1e-9)
    assert epsilon(dp.ComposedDpEvent([event, dp.NonPrivateDpEvent()]), 1e-5).value == math.inf


@pytest.mark.parametrize("drift", [1.002, 1.3])
def test_of_many_runs_the_bound_lies_between_the_largest_side_and_all_of_them(drift):
    pairs = [(9 * drift**week, 8 * drift**week) for week in range(6)]
    sides = [dp.ComposedDpEvent([*map(dp.GaussianDpEvent, zs)]) for zs in itertools.product(*pairs)]
    largest = max(epsilon(one, 1e-5).value for one in sides)
    both = epsilon(dp.ComposedDpEvent([dp.GaussianDpEvent(z) for pair in pairs for z in pair]), 1e-5).value
    events = [ep.Alternatives([*map(dp.GaussianDpEvent, pair)]) for pair in pairs]
    found = epsilon(dp.ComposedDpEvent(events), 1e-5).value
    assert largest <= found <= min(both, 1.01 * largest if drift < 1.01 else both)


def test_users_of_several_records_and_descriptions():
    of_users = plan_of(sampling=ep.FullBatch(1000, 40)).protecting(ep.Unit("user", 3))
    assert of_users.epsilon(1e-5).value == gaussian_epsilon(math.sqrt(40) * 3 / 2, 1e-5)
    again = ep.PrivacyPlan.from_description(plan_of().describe())
    assert (again.fingerprint(), again.event()) == (plan_of().fingerprint(), plan_of().event())
    assert plan_of(apart=False).fingerprint() != plan_of().fingerprint()
    assert "apart" not in str(plan_of(apart=False).describe())  # plans of before keep their names
    with pytest.raises(ep.PlanError, match="apart"):
        ep.PrivacyPlan(
            [ep.Release("a", 1.0, ep.Gaussian(1.0), apart=True), ep.Release("b", 1.0, ep.Gaussian(1.0))],
            SAMPLED,
        )


def test_a_statement_is_computed_again_from_what_is_published():
    statement = statement_of(ep.Ledger(plan_of()), delta=1e-5)
    assert statement.epsilon == plan_of().epsilon(1e-5).value
    assert all(finding.ok is not False for finding in check_published(vars(statement)))
    forged = {**vars(statement), "releases": [dict(row) for row in statement.releases]}
    del forged["releases"][1]["apart"]
    assert any(finding.ok is False for finding in check_published(forged))
