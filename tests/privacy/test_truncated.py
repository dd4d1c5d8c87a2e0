"""Poisson samples with a cap: their cost against exact laws and another accountant, and their law."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from dp_accounting import TruncatedSubsampledGaussianDpEvent
from scipy import stats

from equipoise import privacy as ep
from equipoise.privacy import epsilon
from equipoise.privacy.accounting.epsilon import pushed_out
from equipoise.privacy.accounting.loss_distribution import SampledGaussians, divergence
from equipoise.published import PublishedPlan, Unproven

DELTA = 1e-6


def plan_of(sampling, z=1.0, relation="add_or_remove_one", **options):
    return ep.PrivacyPlan([ep.Release("gradient", 1.0, ep.Gaussian(z))], sampling, relation, **options)


@pytest.mark.parametrize(("cap", "theirs"), [(1200, 2.125), (1000, 13.009)])
def test_the_cost_beside_another_accountant(cap, theirs):
    """The figures are dp-accounting's, which takes the pair of a replaced record wherever a draw is cut."""
    found = plan_of(ep.TruncatedPoisson(1000, 100_000, 1000, cap)).epsilon(DELTA)
    assert 0.9 * theirs < found.value < theirs * 1.001
    assert (found.accountant, found.cross_check) == ("pld", None)


def laws(count, rate, cap, sigma, parts, grid):
    """Densities of a release without and with a record; each of `count` others adds the second part."""
    new, old = parts
    others, without, with_one = np.arange(count + 1), 0.0, 0.0
    for s, chance in zip(others, stats.binom.pmf(others, count, rate), strict=True):
        kept = min(s, cap)
        plain = stats.norm.pdf(grid, kept * old, sigma)
        inside = rate * min(1.0, cap / (s + 1))
        joined = stats.norm.pdf(grid, min(s, cap - 1) * old + new, sigma)
        without = without + chance * plain
        with_one = with_one + chance * ((1 - inside) * plain + inside * joined)
    return without, with_one


def deltas(first, second, epsilons, step):
    return [float(np.maximum(first - math.exp(e) * second, 0).sum() * step) for e in epsilons]


EPSILONS = np.array([0.0, 0.1, 0.3, 1.0, 2.0, 4.0])


def exceeded(sigma, rate, cap, population, pushed):
    """By how much the exact delta of some number of records is above the bound, relatively."""
    grid, step = np.linspace(-30, 30, 20_001, retstep=True)
    row = SampledGaussians(sigma, rate, 1, pushed=pushed)
    bounds = {side: divergence(EPSILONS, row, side) for side in ("add", "remove")}
    replaced = divergence(EPSILONS, row, "replace")
    worst = 0.0
    for count in range(population):
        for parts in ((1.0, -1.0), (1.0, 1.0), (1.0, 0.0)):
            without, with_one = laws(count, rate, cap, sigma, parts, grid)
            for side, pair in (("remove", (with_one, without)), ("add", (without, with_one))):
                found = deltas(*pair, EPSILONS, step)
                worst = max(worst, float(np.max((found - bounds[side]) / np.maximum(found, 1e-9))))
            _, other = laws(count, rate, cap, sigma, (-parts[0], parts[1]), grid)
            found = deltas(with_one, other, EPSILONS, step)
            worst = max(worst, float(np.max((found - replaced) / np.maximum(found, 1e-9))))
    return worst


@pytest.mark.parametrize(
    ("sigma", "rate", "cap"), [(0.3, 0.5, 3), (1.0, 0.3, 2), (3.0, 0.95, 5), (1.0, 0.5, 3)]
)
def test_no_number_of_records_has_a_larger_delta_than_the_bound(sigma, rate, cap):
    pushed = pushed_out(TruncatedSubsampledGaussianDpEvent(6, rate, cap, sigma))
    assert exceeded(sigma, rate, cap, 6, pushed) < 1e-6


def test_the_exact_law_rejects_the_cost_of_samples_without_a_cap():
    assert exceeded(3.0, 0.5, 3, 6, pushed=0.0) > 0.5
    half = pushed_out(TruncatedSubsampledGaussianDpEvent(6, 0.95, 5, 3.0)) / 2
    assert exceeded(3.0, 0.95, 5, 6, pushed=half) > 0.1


def test_a_cap_that_is_never_reached_is_poisson_sampling():
    capped, plain = ep.TruncatedPoisson(20, 100, 10, 100), ep.Poisson(20, 100, 10)
    assert plan_of(capped).epsilon(DELTA) == plan_of(plain).epsilon(DELTA)
    secrets = ep.Secrets(reproducible_seed=1)
    for index in range(10):
        assert torch.equal(capped.sample(secrets, index, 100), plain.sample(secrets, index, 100))
    whole = ep.TruncatedPoisson(100, 100, 10)
    assert plan_of(whole, 5.0).epsilon(DELTA).accountant == "gdp"
    unit = ep.Unit("user", 8, rows="mean")  # users are drawn whole
    assert plan_of(CAPPED, unit=unit).event() == plan_of(CAPPED).event()


def test_draws_are_cut_to_uniform_subsets():
    sampling, secrets, draws = ep.TruncatedPoisson(8, 40, 2500, 9), ep.Secrets(reproducible_seed=11), 2500
    found = [sampling.sample(secrets, index, 40) for index in range(draws)]
    sizes = np.array([len(ids) for ids in found])
    assert sizes.max() == 9 == sampling.largest_size
    law = stats.binom.pmf(np.arange(9), 40, 0.2)
    expected = np.append(law, 1 - law.sum()) * draws
    observed = np.bincount(sizes, minlength=10)
    kept = expected > 5
    assert ((observed - expected) ** 2 / expected)[kept].sum() < stats.chi2.ppf(0.999, kept.sum())
    # every record as often as every other, in the draws that were cut too
    for some in (found, [ids for ids in found if len(ids) == 9]):
        counts = np.bincount(torch.cat(some).numpy(), minlength=40)
        assert stats.chisquare(counts).pvalue > 1e-3
    assert all(torch.equal(ids, ids.unique()) for ids in found[:100])


CAPPED = ep.TruncatedPoisson(20, 100, 10, 30)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: plan_of(CAPPED, unit=ep.Unit("user", 3)), "records_per_user=3"),
        (
            lambda: ep.PrivacyPlan([ep.Release("a", 1.0, ep.BandedGaussian((1, 0.5), 1.0))], CAPPED),
            "min_separation=1",
        ),
        (lambda: PublishedPlan([], CAPPED, unproven=[Unproven("raw")]), "push another one out"),
        (lambda: epsilon(ep.PrivateSearch(10.0, 1.0).event(plan_of(CAPPED).event()), DELTA), "search"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ep.PlanError, match=message):
        make()
