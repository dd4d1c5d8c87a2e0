"""Balls in bins: the law of an epoch against closed forms, brute force and simulation; never below them."""

import itertools
import math

import numpy as np
import pytest
from scipy import special, stats

from equipoise.privacy import BallsInBins, FixedEpochs, PlanError, Poisson
from equipoise.privacy.accounting import allocation
from equipoise.privacy.accounting.allocation import divergence, ratio_law
from equipoise.privacy.accounting.epsilon import epsilon
from equipoise.privacy.accounting.loss_distribution import SampledGaussians, composed_epsilon
from equipoise.privacy.mechanisms.correlated_gaussian import BandedGaussian

EPSILONS = np.array([0.0, 0.1, 0.5, 1.0, 2.0])


def gaussian(epsilons, mu):
    return stats.norm.cdf(mu / 2 - epsilons / mu) - np.exp(epsilons) * stats.norm.cdf(-mu / 2 - epsilons / mu)


@pytest.mark.parametrize("sigma", [0.5, 4.0])
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_one_bin_is_a_plain_gaussian(sigma, direction):
    found, wanted = divergence(EPSILONS, sigma, 1, direction), gaussian(EPSILONS, 1 / sigma)
    assert (found >= wanted * (1 - 1e-12)).all()
    assert found == pytest.approx(wanted, rel=2e-3, abs=1e-12)


@pytest.mark.parametrize(("sigma", "slots"), [(1.0, 10), (0.8, 100), (3.0, 7)])
def test_moments_of_whole_orders_are_those_of_the_series(sigma, slots):
    """E_Q R^a = a! [x^a] (sum_k e^(k (k-1) / (2 sigma^2)) x^k / k!)^t / t^a; ours lie above, and close."""
    values, masses = ratio_law(sigma, slots)
    for order in (2, 3, 5):
        one = [math.exp(k * (k - 1) / 2 / sigma**2) / math.factorial(k) for k in range(order + 1)]
        power = np.array([1.0])
        for _ in range(slots):
            power = np.convolve(power, one)[: order + 1]
        wanted = power[order] * math.factorial(order) / slots**order
        assert wanted * (1 - 1e-12) <= values**order @ masses <= wanted * 1.02


def test_delta_is_that_of_drawn_epochs():
    """Within four standard errors of a simulation of the released numbers themselves, and not far above."""
    sigma, slots, count = 0.7, 12, 200_000
    rng = np.random.default_rng(0)
    noise = rng.normal(0, sigma, (count, slots))
    with_record = noise.copy()
    with_record[np.arange(count), rng.integers(slots, size=count)] += 1
    loss = {
        name: special.logsumexp((2 * y - 1) / (2 * sigma**2), axis=1) - math.log(slots)
        for name, y in (("remove", with_record), ("add", noise))
    }
    for direction, sign in (("remove", 1), ("add", -1)):
        for eps in (0.1, 0.5, 1.0):
            gain = np.maximum(0.0, -np.expm1(eps - sign * loss[direction]))
            (found,) = divergence(np.array([eps]), sigma, slots, direction)
            assert abs(found - gain.mean()) < 4 * gain.std() / math.sqrt(count) + 2e-4 * found


def test_epochs_compose_and_cost_no_more_than_a_known_order():
    """Two epochs against their simulation; always below `FixedEpochs`, and here below Poisson sampling."""
    sampling = BallsInBins(100, 1_000, 20)
    found = epsilon(sampling.event(0.8, 20), 1e-2)
    assert found.accountant == "pld"
    rng = np.random.default_rng(1)
    noise = rng.normal(0, 0.8, (200_000, 2, 10))
    for epoch in range(2):
        noise[np.arange(len(noise)), epoch, rng.integers(10, size=len(noise))] += 1
    loss = (special.logsumexp((2 * noise - 1) / (2 * 0.8**2), axis=2) - math.log(10)).sum(1)
    gain = np.maximum(0.0, -np.expm1(found.value - loss))
    assert gain.mean() == pytest.approx(1e-2, abs=4 * gain.std() / math.sqrt(len(gain)) + 1e-4)
    assert found.value < epsilon(Poisson(100, 1_000, 20).event(0.8, 20), 1e-2).value
    assert found.value < epsilon(FixedEpochs(100, 1_000, 20).event(0.8, 20), 1e-2).value
    assert sampling.event(1.0, 11) == sampling.event(1.0, 20)  # an epoch that was begun counts whole
    assert sampling.event(1.0, 20).count == 2


@pytest.mark.parametrize(("slots", "delta"), [(2, 1e-3), (3, 1e-9), (100, 1e-3)])
def test_it_never_costs_more_than_poisson_sampling_or_a_known_order(slots, delta):
    """Low noise and few bins too, where the grid near zero decides; and epsilon falls with the noise."""
    before = math.inf
    for z in (0.04, 0.3, 0.6, 1.0, 8.0):
        steps = 10 * slots
        found = epsilon(BallsInBins(10, 10 * slots, steps).event(z, steps), delta, cross_check=False).value
        assert found < before
        for other in (Poisson, FixedEpochs):
            event = other(10, 10 * slots, steps).event(z, steps)
            assert found <= epsilon(event, delta, cross_check=False).value * (1 + 1e-3)
        before = found


def moved(matrix, group, bands, bins, epochs):
    """What a record of a group adds to the whitened rows of a run, for each choice of its bins."""
    columns = matrix.reshape(len(matrix), epochs, bins, bands)[..., group]
    return np.stack(
        [
            sum(columns[:, epoch, place] for epoch, place in enumerate(places))
            for places in itertools.product(range(bins), repeat=epochs)
        ]
    )


@pytest.mark.parametrize("coefficients", [(1.0, 0.5), (1.0, -0.6), (1.0, 1e-9)])
def test_noise_over_two_steps_is_amplified_in_groups_of_bins(coefficients):
    """Of who knows the group it is the simulated delta of a whole run, and of who does not a bound."""
    z, bands, bins, epochs = 0.9, 2, 3, 2
    count, steps = 400_000, bands * bins * epochs
    matrix = (np.eye(steps) + coefficients[1] * np.eye(steps, k=-1)) / math.hypot(*coefficients)
    sampling = BallsInBins(10, 60, steps, bands)
    BandedGaussian(coefficients, z).check_sampling(sampling)
    found = epsilon(sampling.event(z, steps), 1e-2, cross_check=False).value
    rng = np.random.default_rng(0)
    groups = [moved(matrix, group, bands, bins, epochs) for group in range(bands)]
    for means, is_known in ((groups[0], True), (np.concatenate(groups), False)):
        for sign in (1, -1):  # with the record, and without
            noise = rng.normal(0, z, (count, steps))
            y = noise + (means[rng.integers(len(means), size=count)] if sign == 1 else 0)
            ratios = (y @ means.T - np.square(means).sum(1) / 2) / z**2
            loss = sign * (special.logsumexp(ratios, axis=1) - math.log(len(means)))
            gain = np.maximum(0.0, -np.expm1(found - loss))
            error = 4 * gain.std() / math.sqrt(count) + 1e-4
            assert gain.mean() < 1e-2 + error
            if is_known and sign == 1:
                assert gain.mean() > 1e-2 - error


def test_what_has_no_accountant_is_refused():
    sampling = BallsInBins(10, 100, 40)
    with pytest.raises(PlanError, match="not amplified by BallsInBins"):
        BandedGaussian((1.0, 0.5), 1.0).check_sampling(sampling)
    with pytest.raises(PlanError, match="replace_one"):
        epsilon(sampling.event(1.0, 40), 1e-5, "replace_one")
    with pytest.raises(PlanError, match="records_per_user=3"):
        sampling.event(1.0, 40, group=3)


def test_the_tests_see_a_record_that_is_drawn_twice(monkeypatch):
    """With half the draws in the law, the simulation lies above it."""
    monkeypatch.setattr(allocation, "ratio_law", lambda sigma, slots: ratio_law(sigma, 2 * slots))
    with pytest.raises(AssertionError):
        test_delta_is_that_of_drawn_epochs()


def test_mass_at_infinite_loss_is_no_epsilon(monkeypatch):
    """Where more than delta is lost at once, one direction has no epsilon, whatever the other has."""
    coarse = SampledGaussians(0.5, 1.0, 10, slots=2)
    monkeypatch.setattr(allocation, "ratio_law", lambda *_: (np.array([0.0, 2.0]), np.array([0.5, 0.5])))
    assert composed_epsilon([coarse], 1e-5, "add", 16)[0] == math.inf
