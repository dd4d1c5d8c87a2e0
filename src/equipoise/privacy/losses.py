"""Privacy loss distributions of Poisson-sampled Gaussians, built with array operations.

The distribution is dp-accounting's: the pessimistic "connect the dots" discretisation (Doroshenko et al.
2022, arXiv:2207.04380) on multiples of an interval, between the same truncation points, from the
hockey-stick divergences

    delta(epsilon) = P(X <= x) - e^epsilon Q(X <= x),    loss(x) = epsilon

of the mixtures P and Q. dp-accounting inverts the loss in a Python loop, 14 microseconds a cell; here the
inverse is one array expression, and the rest is its public functions. Of sampling rate q, noise sigma and
sensitivity 1, the inverses are

    remove    x = -1/2 - sigma^2 log(1 + (e^epsilon - 1) / q)
    add       x =  1/2 + sigma^2 log(1 + (e^-epsilon - 1) / q)
    replace   x = sigma^2 (asinh(-a sinh(epsilon / 2)) - epsilon / 2),   a = e^(1 / (2 sigma^2)) (1 - q) / q
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution, privacy_loss_mechanism

__all__ = ["sampled_gaussian"]

_Adjacency = privacy_loss_mechanism.AdjacencyType


def sampled_gaussian(sigma: float, rate: float, relation: str, interval: float) -> Any:
    """The discretised loss distribution of one Gaussian on a Poisson sample.

    Args:
        sigma: noise standard deviation; a record has norm 1 (under replace-one both records have).
        rate: sampling rate in (0, 1].
        relation: "add_or_remove_one" or "replace_one".
        interval: width of a cell.

    Returns:
        A `dp_accounting.pld.privacy_loss_distribution.PrivacyLossDistribution`.

    Example:
        >>> round(sampled_gaussian(2.0, 1.0, "add_or_remove_one", 1e-3).get_epsilon_for_delta(1e-5), 2)
        1.99
    """
    if relation == "replace_one":
        return privacy_loss_distribution.PrivacyLossDistribution(
            _probabilities(sigma, rate, _Adjacency.REPLACE, interval)
        )
    remove = _probabilities(sigma, rate, _Adjacency.REMOVE, interval)
    if rate == 1.0:
        return privacy_loss_distribution.PrivacyLossDistribution(remove)
    add = _probabilities(sigma, rate, _Adjacency.ADD, interval)
    return privacy_loss_distribution.PrivacyLossDistribution(remove, add)


def _probabilities(sigma: float, rate: float, adjacency: Any, interval: float) -> Any:
    loss = privacy_loss_mechanism.GaussianPrivacyLoss(sigma, sampling_prob=rate, adjacency_type=adjacency)
    bounds = loss.connect_dots_bounds()
    low = math.floor(bounds.epsilon_lower / interval)
    high = math.ceil(bounds.epsilon_upper / interval)
    epsilons = np.arange(low, high + 1) * interval
    x = _inverse(epsilons, sigma, rate, adjacency)
    with np.errstate(over="ignore", invalid="ignore"):
        deltas = loss.mu_upper_cdf(x) - np.exp(epsilons + loss.mu_lower_log_cdf(x))
    # Where every loss is larger x is infinite, and 1 - e^epsilon has a form that keeps its digits.
    deltas = np.where(np.isposinf(x), -np.expm1(np.minimum(epsilons, 0.0)), deltas)
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        interval, low, high, np.clip(deltas, 0.0, 1.0)
    )


def _inverse(epsilons: np.ndarray, sigma: float, rate: float, adjacency: Any) -> np.ndarray:
    """The largest x whose loss is at least epsilon; +inf where all losses are larger, -inf where none is."""
    variance = sigma**2
    if adjacency is _Adjacency.REMOVE:
        return -0.5 - variance * _unsampled(epsilons, rate)
    if adjacency is _Adjacency.ADD:
        return 0.5 + variance * _unsampled(-epsilons, rate)
    if rate == 1.0:
        return -0.5 * variance * epsilons
    half = np.abs(epsilons) / 2
    with np.errstate(divide="ignore"):  # epsilon = 0 gives x = 0
        log_sinh = half + np.log(-np.expm1(-2 * half)) - math.log(2)
    log_argument = log_sinh + 0.5 / variance + math.log1p(-rate) - math.log(rate)
    # asinh(e^t) in the log domain: t + log(1 + sqrt(1 + e^-2t)) for t > 0.
    small = np.minimum(log_argument, 0.0)
    large = np.maximum(log_argument, 0.0)
    asinh = np.where(
        log_argument > 0, large + np.log1p(np.sqrt(1 + np.exp(-2 * large))), np.arcsinh(np.exp(small))
    )
    return -np.sign(epsilons) * variance * (asinh + half)


def _unsampled(epsilons: np.ndarray, rate: float) -> np.ndarray:
    """log(1 + (e^epsilon - 1) / q), the loss before sampling; -inf at or below log(1 - q)."""
    if rate == 1.0:
        return epsilons
    with np.errstate(divide="ignore", invalid="ignore"):
        near = np.log1p(np.maximum(np.expm1(np.minimum(epsilons, 1.0)) / rate, -1.0))
        far = epsilons + np.log1p(-(1 - rate) * np.exp(-np.maximum(epsilons, 0.0))) - math.log(rate)
    return np.where(epsilons > 1.0, far, near)
