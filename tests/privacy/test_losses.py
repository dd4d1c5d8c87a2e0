"""Distributions of the privacy loss: divergences of a pair, dp-accounting's own accountant, long plans."""

import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import stats

from equipoise._relations import RELATIONS
from equipoise.privacy import epsilon, gaussian_epsilon
from equipoise.privacy.accounting.loss_distribution import (
    SampledGaussians,
    _discretised,
    composed_epsilon,
    divergence,
)

ADD, REPLACE = RELATIONS
DIRECTIONS = {ADD: ("remove", "add"), REPLACE: ("replace",)}

# sigma, rate, interval of dp-accounting
# sigma, rate, interval of dp-accounting
CASES = [
    (1.0, 0.004, 1e-3),
    (6.3, 0.5, 1e-3),
    (0.02, 0.5, 0.1),  # losses of thousands: nothing overflows
    (1.0, 0.999, 1e-3),
    (2.0, 1e-7, 1e-5),
]


GROUPS = [(2, 1.0, 0.01), (7, 4.0, 0.3), (7, 0.7, 1e-4)]


def theirs(sigma, rate, interval, relation):
    return privacy_loss_distribution.from_gaussian_mechanism(
        sigma,
        value_discretization_interval=interval,
        sampling_prob=rate,
        neighboring_relation=dp.NeighboringRelation[relation.upper()],
    )


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(("sigma", "rate", "interval"), CASES)
def test_divergences_are_those_of_the_library(sigma, rate, interval, relation):
    grid = np.sort([0.0, 10 * interval, 0.5, 3.0, 30.0, 300.0])
    ours = np.max(
        [divergence(grid, SampledGaussians(sigma, rate, 1), direction) for direction in DIRECTIONS[relation]],
        axis=0,
    )
    assert ours == pytest.approx(
        theirs(sigma, rate, interval, relation).get_delta_for_epsilon(grid), rel=1e-5, abs=1e-13
    )


@pytest.mark.parametrize("direction", ["remove", "add", "replace"])
@pytest.mark.parametrize(("sigma", "rate", "interval"), CASES)
def test_a_discrete_law_dominates_and_touches(sigma, rate, interval, direction):
    dominates_and_touches(SampledGaussians(sigma, rate, 1), direction, interval)


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(("group", "sigma", "rate"), GROUPS)
def test_the_discrete_law_of_a_group_dominates_and_touches(sigma, rate, group, direction):
    dominates_and_touches(of_group(sigma, rate, group), direction, 1e-3)


def of_group(sigma, rate, group):
    """A user with so many records, each sampled by itself."""
    moved = -math.expm1(group * math.log1p(-rate))
    shares = stats.binom.pmf(range(1, group + 1), group, rate) / moved
    return SampledGaussians(
        sigma, moved, 1, tuple(map(float, range(1, group + 1))), tuple(map(float, shares))
    )


@pytest.mark.parametrize(("group", "sigma", "rate"), GROUPS)
def test_divergences_of_a_group_are_integrals(sigma, rate, group):
    """Of the densities themselves, at the accuracy of a sum over a fine grid."""
    x = np.linspace(-40 * sigma, group + 40 * sigma, 400_001)
    still = stats.norm.pdf(x, 0, sigma)
    weights = stats.binom.pmf(range(group + 1), group, rate)
    mixed = sum(w * stats.norm.pdf(x, k, sigma) for k, w in enumerate(weights))
    part = of_group(sigma, rate, group)
    for at in (0.0, 1e-3, 0.1, 1.0, 4.0):
        for direction, first, second in (("remove", mixed, still), ("add", still, mixed)):
            wanted = np.maximum(first - math.exp(at) * second, 0.0).sum() * (x[1] - x[0])
            found = float(divergence(np.array([at]), part, direction)[0])
            assert found == pytest.approx(wanted, rel=1e-6, abs=1e-12)


def dominates_and_touches(part, direction, interval):
    """Its delta is the true one at the grid's points and above it between them; its masses add up to one."""
    law = _discretised(part, direction, interval, 1e-12)
    losses, masses = law.places * interval, np.exp(law.log_masses)
    assert masses.sum() + law.infinite == pytest.approx(1.0, abs=1e-12)
    # The law of the other side, where nothing overflows.
    assert np.exp(law.log_masses - losses)[losses > -500].sum() <= 1 + 1e-9

    def delta(at):
        return law.infinite + (masses * np.maximum(-np.expm1(np.minimum(at - losses, 0.0)), 0.0)).sum()

    points = losses[(losses >= 0) & (losses < 20)]
    for low, high in zip(points[::7][:-1], points[::7][1:], strict=True):
        for at in (low, (low + high) / 2):
            true = float(divergence(np.array([at]), part, direction)[0])
            assert delta(at) >= true * (1 - 1e-7) - 1e-13
        assert delta(low) == pytest.approx(
            float(divergence(np.array([low]), part, direction)[0]), rel=1e-6, abs=1e-12
        )


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(("sigma", "rate", "count"), [(0.927, 0.02, 2), (6.0, 0.5, 100)])
def test_compositions_are_those_of_the_library(sigma, rate, count, relation):
    expected = theirs(sigma, rate, 1e-4, relation).self_compose(count)
    halves = [SampledGaussians(sigma, rate, count // 2)] * 2
    for delta in (1e-3, 1e-8):
        ours = max(composed_epsilon(halves, delta, one, 64)[0] for one in DIRECTIONS[relation])
        assert ours == pytest.approx(expected.get_epsilon_for_delta(delta), rel=5e-4, abs=1e-6)


@pytest.mark.parametrize("delta", [1e-3, 1e-10])
@pytest.mark.parametrize("mu", [1e-3, 1.0, 30.0])
def test_gaussians_in_parts_are_one_gaussian(mu, delta):
    """Composed numerically without sampling; never below the closed form."""
    true = gaussian_epsilon(mu, delta)
    for counts in ((1,), (100,), (3, 50, 1000)):
        share = mu / math.sqrt(len(counts))
        parts = [SampledGaussians(math.sqrt(n) / share, 1.0, n) for n in counts]
        found, _ = composed_epsilon(parts, delta, "remove", 64)
        assert true * (1 - 1e-9) <= found == pytest.approx(true, rel=1e-3, abs=1e-7)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sigma", [0.05, 0.3, 1.0])
def test_a_rate_that_rounds_to_one_is_almost_one(sigma):
    """NumPy had warned of an invalid value, and the rest of delta was no number."""
    for rate in (1 - 1e-15, 1 - 2**-53):
        for direction in ("add", "remove"):
            found, whole = (
                composed_epsilon([SampledGaussians(sigma, r, 10)], 1e-6, direction, 32)[0]
                for r in (rate, 1.0)
            )
            # Without the record nothing is above -10 log(1 - rate), however small the noise.
            least = min(whole, -10 * math.log1p(-rate)) if direction == "add" else whole
            assert found == pytest.approx(least, rel=0.02)
            assert found <= whole * (1 + 1e-9)


def poisson(rate, z, steps):
    return dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z)), steps)


@pytest.mark.parametrize(
    ("population", "steps", "z", "expected"),
    [
        # Converged values: dp-accounting's own accountant on finer and finer grids, where it has enough
        # memory, at delta = 0.1 / population.
        (1e8, 10**5, 1.0, 0.0862),
        pytest.param(1e9, 10**6, 1.0, 0.0280, marks=pytest.mark.wide),
        pytest.param(1e9, 10**6, 0.6, 0.4887, marks=pytest.mark.wide),
    ],
)
def test_long_plans_over_large_populations(population, steps, z, expected):
    found = epsilon(poisson(4096 / population, z, steps), 0.1 / population, cross_check=False).value
    assert found == pytest.approx(expected, rel=0.01)


def test_epsilon_falls_with_the_noise_and_never_jumps():
    """On the plan where a coarse grid jumped between 0.45 and 5.5."""
    before, after = (epsilon(poisson(4e-6, z, 10**6), 1e-5, cross_check=False).value for z in (0.6, 0.605))
    assert 0.9 * before < after < before < 0.6


def test_the_cross_check_equals_all_orders_and_is_silent(capfd):
    """Integer orders, then tenths beside the best, find what the whole list of orders finds."""
    for rate, z, steps in ((0.5, 6.3, 30), (0.02, 20.0, 30)):  # best at 10.2 and at an integer
        event = poisson(rate, z, steps)
        cross = epsilon(event, 1e-5).cross_check
        assert capfd.readouterr().err == ""
        full = dp.rdp.RdpAccountant()
        full.compose(event)
        assert cross == pytest.approx(full.get_epsilon(1e-5), rel=1e-12)
        capfd.readouterr()
