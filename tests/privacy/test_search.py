"""The law of the number of runs, and the price of choosing among them against the published formula."""

from __future__ import annotations

import math
from itertools import accumulate

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from scipy import stats

from equipoise import privacy as ep
from equipoise.privacy import epsilon
from equipoise.privacy.errors import JournalError, PlanError
from equipoise.privacy.ledger.journal import SearchEntry
from equipoise.privacy.ledger.journal_records import JournalRecords, events_of
from equipoise.privacy.ledger.run_record import compose_events

POISSON = ep.PrivateSearch(6.0, math.inf)


def probabilities(search: ep.PrivateSearch, most: int = 4000) -> list[float]:
    """P[K = 0], P[K = 1], ... by the definitions."""
    if math.isinf(search.shape):
        return [float(p) for p in stats.poisson.pmf(range(most), search.mean)]
    gamma, eta = search.gamma, search.shape
    weights, product = [0.0], 1.0
    for k in range(1, most):
        product *= (1 - gamma) * ((k - 1 + eta) / k if k > 1 or eta != 0 else 1.0)
        weights.append(product)
    total = sum(weights)
    return [w / total for w in weights]


@pytest.mark.parametrize(
    "search", [ep.PrivateSearch(10), ep.PrivateSearch(5, 0), ep.PrivateSearch(8, 0.5), POISSON]
)
def test_the_law_has_its_mean_and_its_quantiles(search):
    law = probabilities(search)
    assert sum(k * p for k, p in enumerate(law)) == pytest.approx(search.mean, rel=1e-6)
    cumulated = list(accumulate(law))
    for uniform in (1e-3, 0.2, 0.5, 0.9, 0.999):
        assert search.quantile(uniform) == next(k for k, c in enumerate(cumulated) if c >= uniform)


@pytest.mark.parametrize("shape", [1.0, 0.0, 0.5, 2.0])
def test_the_price_is_that_of_the_theorem(shape):
    """Theorem 2 for a Gaussian, whose divergence at order a is a / (2 z^2), minimised over both orders."""
    z, delta, search = 20.0, 1e-6, ep.PrivateSearch(10, shape)

    def rdp(a: float) -> float:
        return a / (2 * z * z)

    orders = [1 + 0.1 * k for k in range(1, 4000)]
    price = min(
        (1 + shape) * (1 - 1 / b) * rdp(b) + (1 + shape) * math.log(1 / search.gamma) / b for b in orders
    )
    best = min(
        rdp(a)
        + price
        + math.log(search.mean) / (a - 1)
        + math.log1p(-1 / a)
        - math.log(delta * a) / (a - 1)  # from Renyi to (epsilon, delta)
        for a in orders
    )
    found = epsilon(search.event(dp_accounting.GaussianDpEvent(z)), delta)
    assert found.accountant == "rdp"
    assert best * (1 - 1e-3) <= found.value <= 1.05 * best  # fewer orders than here: looser


def test_many_runs_cost_less_searched_than_composed_and_a_few_more(monkeypatch):
    run = dp_accounting.GaussianDpEvent(2.0)
    alone = epsilon(run, 1e-5).value
    assert epsilon(POISSON.event(run), 1e-5).value > alone
    for runs, dearer in ((2, True), (300, False)):
        chosen = epsilon(ep.PrivateSearch(runs).event(run), 1e-5).value
        composed = epsilon(dp_accounting.SelfComposedDpEvent(run, runs), 1e-5).value
        assert alone < min(chosen, composed)
        assert (chosen > composed) is dearer
    with pytest.raises(PlanError, match="add_or_remove_one"):
        epsilon(ep.PrivateSearch(10).event(ep.Poisson(20, 1000, 100).event(1.0)), 1e-5, "replace_one")
    assert epsilon(ep.PrivateSearch(10).event(dp_accounting.NonPrivateDpEvent()), 1e-5).value == math.inf
    for mean, shape in ((1, 1), (10, -1)):
        with pytest.raises(ValueError):
            ep.PrivateSearch(mean, shape)
    for bits, uniform in ((0, 2.0**-54), (2**52, 0.5 + 2.0**-54), (2**53 - 1, 1 - 2.0**-54)):
        monkeypatch.setattr("secrets.randbits", lambda count, bits=bits: bits if count == 53 else None)
        assert ep.PrivateSearch(10).draw() == ep.PrivateSearch(10).quantile(uniform)


def test_a_shared_journal_counts_the_search_of_another_run():
    plan = ep.PrivacyPlan([ep.Release("g", 1.0, ep.Gaussian(5.0))], ep.FullBatch(100, 4))
    journal = ep.Journal()
    first = ep.Ledger(plan, journal=journal)
    others = events_of(JournalRecords.of(journal).runs, plan.relation)
    without = epsilon(compose_events(others.values()), 1e-5, plan.relation)
    charge = SearchEntry(run=first.run, search=ep.PrivateSearch(10))
    journal.append(charge)
    second = ep.Ledger(plan, journal=journal)
    charged = second.spent(1e-5)
    assert charged.accountant == "rdp"
    assert charged.value > without.value
    journal.append(charge)
    with pytest.raises(JournalError, match="second search"):
        ep.Ledger(plan, journal=journal)


def test_a_search_of_alternatives_costs_what_the_largest_divergence_at_each_order_does():
    """Two curves that cross: more than a search of either, and no more than one of both composed."""
    sampled = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(0.8)), 100
    )
    plain, law = dp_accounting.GaussianDpEvent(2.0), ep.PrivateSearch(5)
    either = [epsilon(law.event(one), 1e-5).value for one in (sampled, plain)]
    found = epsilon(law.event(ep.Alternatives([sampled, plain])), 1e-5).value
    both = epsilon(law.event(dp_accounting.ComposedDpEvent([sampled, plain])), 1e-5).value
    assert max(either) <= found < both
    orders = [*range(2, 64), 128, 256, 512, 1024, 1.25, 1.5, 1.75, 2.5, 3.5, 4.5]
    curves = [rdp.RdpAccountant(orders).compose(one)._rdp for one in (sampled, plain)]
    crossing = dict(zip(orders, np.maximum(*curves), strict=True))
    assert len({bool(a > b) for a, b in zip(*curves, strict=True)}) == 2
    price = min(2 * (1 - 1 / b) * crossing[b] + 2 * math.log(1 / law.gamma) / b for b in orders)
    best = min(
        crossing[a] + price + math.log(law.mean) / (a - 1) + math.log1p(-1 / a) - math.log(1e-5 * a) / (a - 1)
        for a in orders
    )
    assert found == pytest.approx(best, rel=1e-6)
    same = epsilon(law.event(ep.Alternatives([plain, plain])), 1e-5).value
    assert same == pytest.approx(either[1])
