"""From counts to a certified lower bound on epsilon.

An attacker who decides "present" where a statistic exceeds a threshold errs at rates that (epsilon, delta)
limits, whatever the statistic: with P the law without the record and Q the law with it,

    Q(S > t) <= e^epsilon P(S > t) + delta,      P(S <= t) <= e^epsilon Q(S <= t) + delta.

So rates that were measured refute small values of epsilon. Four ways, by what is known:

- *threshold*: nothing is known. Clopper and Pearson's exact limits of both rates, each with half of the
  error probability, give epsilon >= log((Q - delta) / P). Threshold and side are chosen on one half of the
  runs and certified on the other; n runs cannot certify more than about log n.
- *plan*: the same rates, held against all pairs (epsilon, delta) of a plan at once. With its delta(epsilon),
  Q(S > t) <= e^epsilon P(S > t) + delta(epsilon) and 1 - P(S > t) <= e^epsilon (1 - Q(S > t)) +
  delta(epsilon) for every epsilon >= 0. Rates half way up tell noise of another scale from that of the plan,
  where at delta = 1e-5 the far tail alone does. What is certified is epsilon of the plan with as much noise
  as the rates do not refute, which is the least epsilon if noise of some scale is all that is in doubt.
- *gaussian law*: S is normal under both, N(m_0, s^2) and N(m_1, s^2), with three unknown numbers, as the
  log-likelihood ratio of full-batch Gaussian releases is. Then the trade-off of S alone is a Gaussian's of
  mu = (m_1 - m_0) / s, and epsilon is at least that one's. A normal limit of m_1 - m_0 and a chi-squared one
  of s, each with half of the error probability, limit mu from below to within some 4 / sqrt(n), far sharper
  than rates do.
- *known law*: P is known, and L is a log-likelihood ratio with E_P[e^L] <= 1. Then P(L > t) <= e^-t by
  Markov's inequality, and only Q is measured: epsilon >= t + log(Q(L > t) - delta), whatever the number of
  runs.

Sources: Jagielski, Ullman and Oprea 2020 (Clopper and Pearson's limits); Nasr et al. 2023 (Gaussian fit, and
rates against the trade-off of a mechanism).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from equipoise.audit.roc import Numbers
from equipoise.privacy import PrivacyPlan, epsilon, gaussian_epsilon

__all__ = [
    "Certificate",
    "certify_gaussian",
    "certify_known_law",
    "certify_plan",
    "certify_thresholds",
    "clopper_pearson",
    "epsilon_of_rates",
    "spent_by",
]


@dataclass(frozen=True)
class Certificate:
    """What runs with and without a record prove.

    Attributes:
        epsilon: lower bound on epsilon at `delta`, at least 0, true at `confidence`.
        delta: as claimed.
        confidence: probability that the bound is true.
        law: "unknown" (threshold test), "plan" (its whole trade-off), "gaussian" (two normal laws) or "known"
            (likelihood ratio).
        runs: how many runs certified it: (without, with).
        false_positives, true_positives: counts at the chosen threshold; of normal laws, half way between
            the two means.
        threshold: the chosen one.
    """

    epsilon: float
    delta: float
    confidence: float
    law: str
    runs: tuple[int, int]
    false_positives: int
    true_positives: int
    threshold: float


DELTAS = np.geomspace(1e-3, 0.9, 20)
"""Each pair (epsilon, delta) of a plan is a line under its trade-off; so many lie close together."""


class TradeOffs:
    """The trade-offs of a claim with more or less noise.

    Args:
        spent: epsilon of the claim, if it had so many times its noise, at a delta. More noise tells less.
        deltas: of the pairs that are looked at.
    """

    def __init__(self, spent: Callable[[float, float], float], deltas: Numbers = DELTAS) -> None:
        self.spent, self.deltas = spent, deltas

    @cache  # noqa: B019 - as long as an audit
    def growth(self, scale: float) -> Numbers:
        """e^epsilon at each delta; above e^700 it is e^700, which allows everything."""
        return np.exp(np.minimum([self.spent(scale, delta) for delta in self.deltas], 700.0))

    def least_refuted(self, refutes: Callable[[Numbers], bool], tolerance: float = 0.003) -> float:
        """The least scale of noise, to a relative tolerance, whose trade-off is refuted; infinite if none is.

        Args:
            refutes: from `growth` to whether what was seen is not allowed by it.
            tolerance: of the scale.
        """
        refuted = 1.0
        if refutes(self.growth(1.0)):  # what is refuted at 1 is so a little below, too
            refuted = 1 - 1e-9
        while refuted < 64 and not refutes(self.growth(refuted)):
            refuted *= 2
        if refuted == 64:
            return math.inf
        allowed = refuted / 2
        while allowed > 1 / 64 and refutes(self.growth(allowed)):
            refuted, allowed = allowed, allowed / 2
        while refuted > (1 + tolerance) * allowed:
            middle = math.sqrt(refuted * allowed)
            if refutes(self.growth(middle)):
                refuted = middle
            else:
                allowed = middle
        return refuted


def spent_by(plan: PrivacyPlan) -> Callable[[float, float], float]:
    """Epsilon of the plan with so many times its noise, at a delta."""
    return lambda scale, delta: (
        epsilon(plan.scaled(scale).event(), delta, plan.relation, cross_check=False).value
    )


def clopper_pearson(successes: int, trials: int, alpha: float) -> tuple[float, float]:
    """One-sided lower and upper limits of a rate, each wrong with probability at most alpha.

    Args:
        successes: out of `trials`.
        trials: at least 1.
        alpha: of either limit.

    Example:
        >>> low, high = clopper_pearson(0, 100, 0.05)
        >>> low, round(high, 4)  # 1 - 0.05 ** (1 / 100)
        (0.0, 0.0295)
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"successes={successes!r} of trials={trials!r}: give 0 <= successes <= trials")
    low, high = _limits(np.array(successes), trials, alpha)
    return float(low), float(high)


def epsilon_of_rates(false_positive: float, true_positive: float, delta: float) -> float:
    """The least epsilon >= 0 that allows rates at least this far apart: log((Q - delta) / P).

    Example:
        >>> round(epsilon_of_rates(0.01, 0.5, 1e-5), 3)
        3.912
    """
    gain = true_positive - delta
    if gain <= 0:
        return 0.0
    return math.inf if false_positive <= 0 else max(0.0, math.log(gain / false_positive))


def certify_thresholds(
    without: ArrayLike, with_record: ArrayLike, delta: float, confidence: float = 0.99
) -> Certificate:
    """The threshold test: chosen on the first half of the runs, certified on the second.

    Args:
        without: a statistic of independent runs without the record; large values speak for presence.
        with_record: of independent runs with it.
        delta: as claimed.
        confidence: of the certificate.

    Raises:
        ValueError: fewer than 8 runs of a kind, or a statistic that is no number.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> found = certify_thresholds(rng.normal(size=20_000), rng.normal(2.0, 1.0, 20_000), 1e-5)
        >>> 3.0 < found.epsilon < gaussian_epsilon(2.0, 1e-5)
        True
    """
    p, q = _two_samples(without, with_record)
    alpha = (1 - confidence) / 2
    halves = (p[: len(p) // 2], q[: len(q) // 2]), (p[len(p) // 2 :], q[len(q) // 2 :])
    choice, side = _select(*halves[0], delta, alpha)
    fp, tp, runs = _counts(*halves[1], choice, side)
    found = epsilon_of_rates(
        clopper_pearson(fp, runs[0], alpha)[1], clopper_pearson(tp, runs[1], alpha)[0], delta
    )
    sizes = len(halves[1][0]), len(halves[1][1])
    return Certificate(found, delta, confidence, "unknown", sizes, fp, tp, choice)


def certify_plan(
    without: ArrayLike,
    with_record: ArrayLike,
    spent: Callable[[float, float], float],
    delta: float,
    confidence: float = 0.99,
) -> Certificate:
    """The threshold test against the trade-offs of a plan with more or less noise.

    Args:
        without, with_record: as for `certify_thresholds`.
        spent: as for `TradeOffs`.
        delta: as claimed.
        confidence: of the certificate.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> samples = rng.normal(size=20_000), rng.normal(1.0, 1.0, 20_000)
        >>> found = certify_plan(*samples, lambda z, delta: gaussian_epsilon(1 / z, delta), 1e-5)
        >>> 0.85 < found.epsilon / gaussian_epsilon(1.0, 1e-5) < 1
        True
    """
    p, q = _two_samples(without, with_record)
    alpha = (1 - confidence) / 2
    offs = TradeOffs(spent)

    def excess(growth: Numbers, high: Numbers, low: Numbers) -> Numbers:
        """By how much true positives exceed what is allowed at these false positives."""
        fp = high[..., None]
        return low - np.minimum(growth * fp + DELTAS, 1 - (1 - fp - DELTAS) / growth).min(axis=-1)

    def least_refuted(high: Numbers, low: Numbers, tolerance: float) -> float:
        return offs.least_refuted(lambda growth: bool((excess(growth, high, low) > 0).any()), tolerance)

    thresholds, high, low = _rate_limits(p[: len(p) // 2], q[: len(q) // 2], alpha)
    best = least_refuted(high, low, 0.05)
    table = excess(offs.growth(1.0 if best == math.inf else best), high, low)
    row, column = np.unravel_index(table.argmax(), table.shape)
    choice, side = float(thresholds[row]), (1, -1)[column]
    fp, tp, runs = _counts(p[len(p) // 2 :], q[len(q) // 2 :], choice, side)
    most, least = clopper_pearson(fp, runs[0], alpha)[1], clopper_pearson(tp, runs[1], alpha)[0]
    scale = least_refuted(np.array([most]), np.array([least]), 0.003)
    found = 0.0 if scale == math.inf else spent(scale, delta)
    return Certificate(found, delta, confidence, "plan", runs, fp, tp, choice)


def certify_gaussian(
    without: ArrayLike, with_record: ArrayLike, delta: float, confidence: float = 0.99
) -> Certificate:
    """The limits of two normal laws of one deviation.

    Args:
        without: a statistic of independent runs without the record, normal.
        with_record: of independent runs with it, normal, with the same deviation.
        delta: as claimed, above 0.
        confidence: of the certificate, if the laws are normal.

    Raises:
        ValueError: fewer than 8 runs of a kind, or a statistic that is no number.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> found = certify_gaussian(rng.normal(size=20_000), rng.normal(2.0, 1.0, 20_000), 1e-5)
        >>> 0.95 < found.epsilon / gaussian_epsilon(2.0, 1e-5) < 1
        True
    """
    p, q = _two_samples(without, with_record)
    freedom, alpha = len(p) + len(q) - 2, (1 - confidence) / 2
    gap = float(q.mean() - p.mean())
    squares = float(((p - p.mean()) ** 2).sum() + ((q - q.mean()) ** 2).sum())
    spread = math.sqrt(1 / len(p) + 1 / len(q))
    # s^2 is at most squares / quantile; gap - (m_1 - m_0) at most the normal quantile times s * spread, on
    # either side: scores may tell the record's presence by being lower.
    lowest = math.sqrt(float(stats.chi2.ppf(alpha, freedom)) / squares) if squares > 0 else math.inf
    mu = abs(gap) * lowest - float(stats.norm.isf(alpha / 2)) * spread if gap else 0.0
    middle = float(p.mean() + q.mean()) / 2
    fp, tp, runs = _counts(p, q, middle, 1 if gap >= 0 else -1)

    found = float(gaussian_epsilon(mu, delta)) if mu > 0 else 0.0
    return Certificate(found, delta, confidence, "gaussian", runs, fp, tp, middle)


def certify_known_law(log_ratios: ArrayLike, delta: float, confidence: float = 0.99) -> Certificate:
    """The test of a known law: log-likelihood ratios L of runs *with* the record only.

    L must satisfy E[e^L] <= 1 without the record, as the log of a ratio of densities does, and as a sum of
    such logs does whose laws were fixed by what was released before. The quantile of L is chosen beforehand
    (the one that leaves the largest bound on the first half), so that selection and certification are apart.

    Args:
        log_ratios: L of independent runs with the record.
        delta: as claimed.
        confidence: of the certificate.

    Example:
        >>> certify_known_law([60.0] * 40, 1e-5).epsilon > 59
        True
    """
    values = np.asarray(log_ratios, dtype=np.float64).ravel()
    if len(values) < 8 or np.isnan(values).any():
        raise ValueError(f"{len(values)} log-likelihood ratios: give at least 8 numbers")
    first, second = values[: len(values) // 2], values[len(values) // 2 :]
    alpha = 1 - confidence

    def bound(sample: Numbers, threshold: float) -> float:
        low = clopper_pearson(int((sample > threshold).sum()), len(sample), alpha)[0] - delta
        return threshold + math.log(low) if low > 0 else 0.0

    # a threshold that a fifth of the runs exceed: one at the very edge would hardly be exceeded again
    highest = np.quantile(first, 0.8, method="lower")
    candidates = np.nextafter(np.unique(first[first <= highest]), -np.inf)
    threshold = float(max(candidates, key=lambda t: bound(first, float(t))))
    seen = int((second > threshold).sum())
    found = max(0.0, bound(second, threshold))
    return Certificate(found, delta, confidence, "known", (0, len(second)), 0, seen, threshold)


def _two_samples(without: ArrayLike, with_record: ArrayLike) -> tuple[Numbers, Numbers]:
    p, q = (np.asarray(values, dtype=np.float64).ravel() for values in (without, with_record))
    if min(len(p), len(q)) < 8 or np.isnan(p).any() or np.isnan(q).any():
        raise ValueError(
            f"{len(p)} runs without and {len(q)} with the record, of which {int(np.isnan(p).sum())} and "
            f"{int(np.isnan(q).sum())} are no numbers: give at least 8 of each, all of them numbers"
        )
    return p, q


def _select(p: Numbers, q: Numbers, delta: float, alpha: float) -> tuple[float, int]:
    """Threshold and side of the largest bound on the selection half."""
    thresholds, high, low = _rate_limits(p, q, alpha)
    with np.errstate(invalid="ignore", divide="ignore"):
        table = np.where(low > delta, np.maximum(np.log((low - delta) / high), 0.0), 0.0)
    row, column = np.unravel_index(table.argmax(), table.shape)
    return float(thresholds[row]), (1, -1)[column]


def _rate_limits(p: Numbers, q: Numbers, alpha: float) -> tuple[Numbers, Numbers, Numbers]:
    """Thresholds [n], and upper limits of false positives and lower ones of true positives, [n, 2 sides].

    The limits hold for all thresholds at once. At alpha for each of them the best would be a lucky one far in
    the tail, whose few positives certify little on the other half.
    """
    shares = np.concatenate([np.geomspace(1e-5, 0.5, 60), 1 - np.geomspace(1e-5, 0.5, 60)])
    pooled = np.concatenate([p, q])
    pooled = pooled[np.isfinite(pooled)]
    thresholds = np.unique(np.quantile(pooled, shares)) if len(pooled) else np.zeros(1)
    # also just outside of either sample: no false positive, or no false negative
    thresholds = np.unique(np.concatenate([thresholds, np.nextafter(thresholds, -np.inf)]))
    alpha /= 2 * len(thresholds)
    # every threshold with either side, as `_counts` counts
    absent = np.searchsorted(np.sort(p), thresholds, side="right")
    missed = np.searchsorted(np.sort(q), thresholds, side="right")
    (n, m), high, low = (len(p), len(q)), [], []
    for fp, negatives, tp, positives in ((n - absent, n, m - missed, m), (missed, m, absent, n)):
        high.append(_limits(fp, negatives, alpha)[1])
        low.append(_limits(tp, positives, alpha)[0])
    return thresholds, np.stack(high, axis=1), np.stack(low, axis=1)


def _counts(p: Numbers, q: Numbers, threshold: float, side: int) -> tuple[int, int, tuple[int, int]]:
    """False and true positives of "present where S > t" (side 1), or of the mirrored test (side -1).

    The mirrored test decides "absent" where S <= t; without and with change places.
    """
    if side == 1:
        return int((p > threshold).sum()), int((q > threshold).sum()), (len(p), len(q))
    return int((q <= threshold).sum()), int((p <= threshold).sum()), (len(q), len(p))


def _limits(successes: NDArray[np.int64], trials: int, alpha: float) -> tuple[Numbers, Numbers]:
    """Clopper and Pearson's limits, both one-sided at alpha, of many counts."""
    low = np.where(successes == 0, 0.0, stats.beta.ppf(alpha, successes, trials - successes + 1))
    high = np.where(successes == trials, 1.0, stats.beta.isf(alpha, successes + 1, trials - successes))
    return low, high
