"""Poisson samples with a cap: their cost against exact laws and another accountant, and their law."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from dp_accounting import NeighboringRelation, TruncatedSubsampledGaussianDpEvent, pld
from scipy import stats

import equipoise as eq
from equipoise.privacy import (
    BandedGaussian,
    Budget,
    Gaussian,
    PlanError,
    Poisson,
    PrivacyPlan,
    PrivateSearch,
    Release,
    Secrets,
    TruncatedPoisson,
    Unit,
    epsilon,
)
from equipoise.privacy.accounting.epsilon import pushed_out
from equipoise.privacy.accounting.loss_distribution import SampledGaussians, divergence
from equipoise.published import PublishedPlan, Unproven

DELTA = 1e-6


def plan_of(sampling, z=1.0, relation="add_or_remove_one", **options):
    return PrivacyPlan([Release("gradient", 1.0, Gaussian(z))], sampling, relation, **options)


# ---- the cost


@pytest.mark.parametrize(("cap", "theirs"), [(1200, 2.125), (1100, 4.490), (1000, 13.009)])
def test_the_cost_beside_another_accountant(cap, theirs):
    """The figures are dp-accounting's, which takes the pair of a replaced record wherever a draw is cut."""
    found = plan_of(TruncatedPoisson(1000, 100_000, 1000, cap)).epsilon(DELTA)
    assert 0.9 * theirs < found.value < theirs * 1.001
    assert (found.accountant, found.cross_check) == ("pld", None)


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_another_accountant_is_near(relation):
    """It knows how often a record is in a batch that was cut, and takes a looser pair of laws there."""
    for size, cap in ((30, 34), (30, 30), (12, 25)):
        event = plan_of(TruncatedPoisson(size, 100, 5, cap), 3.0, relation).event()
        sampled = event.event
        if relation == "replace_one":  # its events name the noise over one record's part
            sampled = type(sampled)(100, size / 100, cap, 3.0)
        accountant = pld.PLDAccountant(NeighboringRelation[relation.upper()], 1e-3)
        theirs = accountant.compose(sampled, 5).get_epsilon(1e-5)
        ours = epsilon(event, 1e-5, relation).value
        assert 0.7 * theirs < ours < 1.15 * theirs


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
    grid, step = np.linspace(-30, 30, 60_001, retstep=True)
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


@pytest.mark.parametrize("sigma", [0.3, 1.0, 3.0])
@pytest.mark.parametrize(("rate", "cap"), [(0.5, 3), (0.3, 2), (0.95, 5)])
def test_no_number_of_records_has_a_larger_delta_than_the_bound(sigma, rate, cap):
    pushed = pushed_out(TruncatedSubsampledGaussianDpEvent(6, rate, cap, sigma))
    assert exceeded(sigma, rate, cap, 6, pushed) < 1e-6


def test_the_exact_law_rejects_the_cost_of_samples_without_a_cap():
    assert exceeded(3.0, 0.5, 3, 6, pushed=0.0) > 0.5
    half = pushed_out(TruncatedSubsampledGaussianDpEvent(6, 0.95, 5, 3.0)) / 2
    assert exceeded(3.0, 0.95, 5, 6, pushed=half) > 0.1


def test_a_cap_that_is_never_reached_is_poisson_sampling():
    capped, plain = TruncatedPoisson(20, 100, 10, 100), Poisson(20, 100, 10)
    assert plan_of(capped).epsilon(DELTA) == plan_of(plain).epsilon(DELTA)
    secrets = Secrets(reproducible_seed=1)
    for index in range(10):
        assert torch.equal(capped.sample(secrets, index, 100), plain.sample(secrets, index, 100))
    whole = TruncatedPoisson(100, 100, 10)
    assert plan_of(whole, 5.0).epsilon(DELTA).accountant == "gdp"


def test_it_composes_with_other_samples():
    releases = [
        Release("gradient", 1.0, Gaussian(2.0)),
        Release("other", 1.0, Gaussian(2.0), draw="other", sampling=Poisson(50, 1000, 20)),
    ]
    both = PrivacyPlan(releases, TruncatedPoisson(50, 1000, 20, 60)).epsilon(DELTA).value
    alone = plan_of(TruncatedPoisson(50, 1000, 20, 60), 2.0).epsilon(DELTA).value
    assert alone < both < 2 * alone


# ---- the draws


def test_draws_are_cut_to_uniform_subsets():
    sampling, secrets, draws = TruncatedPoisson(8, 40, 6000, 9), Secrets(reproducible_seed=11), 6000
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


# ---- what it is refused for


CAPPED = TruncatedPoisson(20, 100, 10, 30)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: plan_of(CAPPED, unit=Unit("user", 3)), "records_per_user=3"),
        (lambda: PrivacyPlan([Release("a", 1.0, BandedGaussian((1, 0.5), 1.0))], CAPPED), "min_separation=1"),
        (lambda: PublishedPlan([], CAPPED, unproven=[Unproven("raw")]), "push another one out"),
        (lambda: epsilon(PrivateSearch(10.0, 1.0).event(plan_of(CAPPED).event()), DELTA), "search"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(PlanError, match=message):
        make()


def test_users_drawn_whole_are_capped_like_records():
    unit = Unit("user", 8, rows="mean")
    sampling = TruncatedPoisson(20, 100, 10, 30)
    assert plan_of(sampling, unit=unit).event() == plan_of(sampling).event()


# ---- trainings


def test_a_training_never_draws_more_and_says_what_it_assumed(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    sampling = TruncatedPoisson(20, 60, 12, 22)
    training = eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch["x"]).square().sum(1),
        data={"x": torch.randn(60, 4)},
        sampling=sampling,
        method=eq.DPSGD(clip_norm=0.5),
        budget=Budget(8.0, 1e-3),
        run=tmp_path / "run",
    )
    list(training)
    statement = training.finish().statement
    assert statement.guarantee == "proven"
    assert 7.9 < statement.epsilon <= 8
    assert "population 60 and sampling TruncatedPoisson of draw 'batch'" in statement.assumptions
    assert statement.releases[0]["sampling"]["max_batch_size"] == 22
    assert eq.verify_run(tmp_path / "run").consistent
