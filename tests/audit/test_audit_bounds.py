"""Certificates: exact limits, known values, and that they are not wrong more often than they say."""

import math

import numpy as np
import pytest
from scipy import optimize, stats

from equipoise.audit.bounds import (
    certify_known_law,
    certify_plan,
    certify_thresholds,
    clopper_pearson,
    epsilon_of_rates,
)
from equipoise.audit.one_run import certify_guesses, guess_by_score, is_refuted, trade_offs
from equipoise.privacy import gaussian_epsilon


@pytest.mark.parametrize("successes", [0, 1, 7, 19, 20])
def test_clopper_pearson_inverts_the_binomial(successes):
    low, high = clopper_pearson(successes, 20, 0.05)
    if successes > 0:
        assert stats.binom.sf(successes - 1, 20, low) == pytest.approx(0.05)
    if successes < 20:
        assert stats.binom.cdf(successes, 20, high) == pytest.approx(0.05)
    assert low <= successes / 20 <= high


def test_epsilon_of_rates():
    assert epsilon_of_rates(0.1, 0.05, 1e-5) == 0
    assert epsilon_of_rates(0.0, 0.5, 1e-5) == math.inf
    assert epsilon_of_rates(0.1, 0.2 + 1e-5, 1e-5) == pytest.approx(math.log(2))


def test_a_threshold_certificate_is_right_as_often_as_it_says():
    """Randomised response at epsilon 1: at confidence 0.8 the bound exceeds 1 in a fifth of all cases."""
    rng = np.random.default_rng(0)
    p = 1 / (1 + math.e)
    found = [
        certify_thresholds(rng.random(400) < p, rng.random(400) < 1 - p, 0.0, 0.8).epsilon for _ in range(80)
    ]
    assert np.mean(np.array(found) > 1.0) < 0.2 + 3 * math.sqrt(0.2 * 0.8 / 80)
    assert np.median(found) > 0.5


def test_the_mirrored_test_is_used_where_it_is_stronger():
    """With the record the statistic is never below 0; without it often."""
    found = certify_thresholds(np.tile([-1.0, 1.0], 500), np.ones(1000), 1e-5)
    assert found.epsilon > 3
    assert certify_thresholds(-np.ones(1000), np.tile([-1.0, 1.0], 500), 1e-5).epsilon > 3


def of_gaussian(scale, delta):
    """Epsilon of one Gaussian of multiplier 1, with so many times its noise."""
    return gaussian_epsilon(1 / scale, delta)


@pytest.mark.parametrize("mu", [0.2, 1.0, 3.0])
def test_rates_against_a_whole_trade_off_certify_nearly_all(mu):
    rng = np.random.default_rng(1)
    samples = rng.normal(size=200_000), rng.normal(mu, 1, 200_000)
    found, plain = certify_plan(*samples, of_gaussian, 1e-5), certify_thresholds(*samples, 1e-5)
    truth = gaussian_epsilon(mu, 1e-5)
    assert max(0.85 * truth, plain.epsilon) < found.epsilon < truth
    assert plain.epsilon > 0.3 * truth or mu < 0.5
    # With the samples exchanged, the mirrored test is used.
    turned = certify_plan(-samples[1], -samples[0], of_gaussian, 1e-5)
    assert turned.epsilon == pytest.approx(found.epsilon)


def test_a_certificate_against_a_trade_off_is_right_as_often_as_it_says():
    """At confidence 0.8 the bound exceeds the truth in a fifth of all cases at most."""
    rng, truth = np.random.default_rng(0), gaussian_epsilon(1.0, 1e-5)
    found = [
        certify_plan(rng.normal(size=400), rng.normal(1.0, 1.0, 400), of_gaussian, 1e-5, 0.8).epsilon
        for _ in range(60)
    ]
    assert np.mean(np.array(found) > truth) < 0.2 + 3 * math.sqrt(0.2 * 0.8 / 60)
    assert np.median(found) > truth / 2


def test_equal_laws_certify_nothing_against_a_trade_off():
    rng = np.random.default_rng(0)
    assert certify_plan(rng.normal(size=2000), rng.normal(size=2000), of_gaussian, 1e-5).epsilon < 0.1


@pytest.mark.parametrize(("n", "bad"), [(4, 0.0), (100, math.nan)])
def test_samples_that_prove_nothing_are_refused(n, bad):
    values = np.full(n, bad)
    with pytest.raises(ValueError, match="at least 8"):
        certify_thresholds(values, values, 1e-5)
    with pytest.raises(ValueError, match="at least 8"):
        certify_known_law(values, 1e-5)


@pytest.mark.parametrize("mu", [2.0, 20.0])
def test_a_known_law_certifies_beyond_the_number_of_runs(mu):
    """L of a Gaussian of distance mu is normal with mean mu^2/2 and deviation mu under the alternative."""
    rng = np.random.default_rng(3)
    found = certify_known_law(rng.normal(mu**2 / 2, mu, 200), 1e-5)
    assert mu**2 / 2 - 3 * mu < found.epsilon < gaussian_epsilon(mu, 1e-5)


def test_guesses_all_right():
    """All of r = m guesses right and delta = 0: p^m = alpha, epsilon = logit(alpha^(1/m))."""
    q = 0.05**0.01
    assert certify_guesses(100, 100, 100, 0.0, 0.95).epsilon == pytest.approx(math.log(q / (1 - q)), rel=0.01)


def most_probable(deltas, growth, m, r, v):
    """The largest P(at least v of r right) under the inequalities of `one_run`, by linear programming."""
    rows, limits = [], []
    for c in range(1, r + 1):
        left = np.array([i / m if i >= c else 0.0 for i in range(r + 1)])
        right = np.array([(r - i) / m if i >= c - 1 else 0.0 for i in range(r + 1)])
        for delta, grown in zip(deltas, growth, strict=True):
            rows += [left - grown * right, left - right / grown]
            limits += [delta, 1 - (1 - delta) / grown]
    found = optimize.linprog(
        [-float(i >= v) for i in range(r + 1)], rows, limits, np.ones((1, r + 1)), [1.0], bounds=(0, 1)
    )
    return -found.fun


@pytest.mark.parametrize(("m", "r", "v"), [(6, 6, 6), (8, 8, 6), (12, 5, 4), (9, 9, 9)])
@pytest.mark.parametrize("pairs", [[(1.0, 0.0)], [(0.5, 0.01)], [(0.0, 0.2), (0.5, 0.08), (1.5, 0.01)]])
def test_guesses_are_refuted_where_their_probability_is_too_large(m, r, v, pairs):
    deltas, growth = np.array([d for _, d in pairs]), np.exp([e for e, _ in pairs])
    most = most_probable(deltas, growth, m, r, v)
    assert is_refuted(growth, deltas, m, r, v, most * 1.001)
    assert not is_refuted(growth, deltas, m, r, v, most * 0.999)


def test_a_mechanism_that_attains_the_bound_is_not_accused():
    """Randomised response of every coin at epsilon 1, and all coins told with probability delta m / m."""
    rng = np.random.default_rng(4)
    m, delta, epsilon, runs = 50, 0.01, 1.0, 4000
    correct = rng.binomial(m, 1 / (1 + math.exp(-epsilon)), runs)
    correct = np.where(rng.random(runs) < delta, m, correct)
    for v in (40, 45, 50):
        share = np.mean(correct >= v)
        assert not is_refuted(np.exp([epsilon]), np.array([delta]), m, m, v, 0.9 * share)


def test_one_run_of_gaussian_coins_is_right_as_often_as_it_says():
    """Each canary's score is normal, at distance mu: against the whole trade-off, at confidence 0.8."""
    rng, mu = np.random.default_rng(6), 0.8
    offs, found, plain = trade_offs(lambda z, d: gaussian_epsilon(mu / z, d)), [], []
    for _ in range(40):
        coins = rng.random(200) < 0.5
        scores = rng.normal(size=200) + mu * coins
        found.append(guess_by_score(scores, coins, 1e-5, 0.8, offs).epsilon)
        plain.append(guess_by_score(scores, coins, 1e-5, 0.8).epsilon)
    truth = gaussian_epsilon(mu, 1e-5)
    assert np.mean(np.array(found) > truth) < 0.2 + 3 * math.sqrt(0.2 * 0.8 / 40)
    assert np.median(found) > 1.3 * np.median(plain)


def test_few_guesses_at_a_small_error_certify_more_against_a_trade_off():
    """Their probability is below 1e-3, which pairs of a smaller delta bound."""
    offs = trade_offs(lambda z, d: gaussian_epsilon(1 / z, d))
    for guesses, correct in ((1000, 617), (160, 110)):
        alone = certify_guesses(1000, guesses, correct, 1e-5, 0.994).epsilon
        assert certify_guesses(1000, guesses, correct, 1e-5, 0.994, offs).epsilon > 1.3 * alone


def test_scores_are_guessed_from_both_ends():
    rng = np.random.default_rng(5)
    coins = rng.random(1000) < 0.5
    strong = guess_by_score(coins + 0.1 * rng.normal(size=1000), coins, 1e-5)
    assert strong.epsilon > 4
    assert guess_by_score(rng.normal(size=1000), coins, 1e-5).epsilon < 0.5
    assert guess_by_score(-(coins + 0.1 * rng.normal(size=1000)), coins, 1e-5).epsilon == 0
