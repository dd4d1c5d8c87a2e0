"""Auditing in one run: many canaries, each in the training or not at random, guessed all at once.

Let each of m canaries be in with probability 1/2, independently of the others. An attacker guesses r of them,
and v guesses are right. What (epsilon, delta)-DP allows:

*Pure.* Given the guesses T and the assignment of the other canaries, the odds that a guess is right are at
most e^epsilon (both assignments of its canary give neighbouring data sets, and were equally likely before).
So whatever the order in which the guesses are uncovered, each is right with probability at most
p = e^epsilon / (1 + e^epsilon) given those before, and v is stochastically below Binomial(r, p).

*Approximate.* Outside of an event of probability at most delta for each canary and assignment of it,
the same odds hold. Let Y be the number of canaries that such an event has spoilt: E[Y] <= 2 m delta, and
v <= Binomial(r, p) + Y. The spoiling may be arranged as the adversary likes, so that all that is known of Y
is its mean. With f(v) = P(Binomial(r, p) >= v), the worst is to spoil i canaries at once with probability
at most 2 m delta / i:

    P(at least v right) <= f(v) + 2 m delta max_{1 <= i <= v} (f(v - i) - f(v)) / i.

The largest epsilon at which the right side is at most 1 - confidence is refuted, and all below it.

Source: Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run", Theorem 5.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from equipoise._roots import NoCrossing, crossing

__all__ = ["OneRun", "certify_guesses", "guess_by_score", "p_value"]

_LARGEST = 64.0  # no more is certified: a number of canaries that would refute it does not exist


@dataclass(frozen=True)
class OneRun:
    """What one run with canaries proves.

    Attributes:
        epsilon: certified lower bound at `delta`.
        delta: as claimed.
        confidence: probability that the bound is true.
        canaries, guesses, correct: m, r and v.
    """

    epsilon: float
    delta: float
    confidence: float
    canaries: int
    guesses: int
    correct: int


def p_value(epsilon: float, delta: float, canaries: int, guesses: int, correct: int) -> float:
    """An upper limit of P(at least v of r guesses right) under (epsilon, delta)-DP.

    Args:
        epsilon, delta: of the hypothesis.
        canaries: m.
        guesses: r <= m.
        correct: v <= r.

    Example:
        >>> round(p_value(0.0, 0.0, 10, 10, 10), 6)  # ten right guesses at random: 2^-10
        0.000977
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            f"correct={correct}, guesses={guesses}, canaries={canaries}: none may exceed the next"
        )
    p = 1 / (1 + math.exp(-epsilon))
    tail = float(stats.binom.sf(correct - 1, guesses, p))
    if delta == 0 or correct == 0:
        return min(1.0, tail)
    spoilt = np.arange(1, correct + 1)
    below = stats.binom.sf(correct - spoilt - 1, guesses, p)
    return float(min(1.0, tail + 2 * canaries * delta * ((below - tail) / spoilt).max()))


def certify_guesses(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95
) -> OneRun:
    """The largest epsilon that the guesses refute; 0 if they refute none.

    Example:
        >>> round(certify_guesses(100, 100, 100, 0.0, 0.95).epsilon, 2)
        3.49
    """
    alpha = 1 - confidence

    def excess(epsilon: float) -> float:
        return alpha - p_value(epsilon, delta, canaries, guesses, correct)

    low = 0.0
    if guesses and excess(0.0) > 0:
        try:
            low, _ = crossing(excess, 0.0, 1.0, most=_LARGEST, tolerance=1e-12)
        except NoCrossing:
            low = _LARGEST
    return OneRun(low, delta, confidence, canaries, guesses, correct)


def guess_by_score(scores: ArrayLike, present: ArrayLike, delta: float, confidence: float = 0.95) -> OneRun:
    """Guess the canaries of the highest scores present and those of the lowest absent.

    How many are guessed may not be chosen by how many come out right. So several numbers are tried, each at
    its share of the error: 10, 20, 40, ... guesses, half of them on either side.

    Args:
        scores: [m]; high speaks for presence.
        present: [m], who was in.
        delta: as claimed.
        confidence: of the best bound.
    """
    order = np.argsort(np.asarray(scores, dtype=np.float64), kind="stable")
    inside = np.asarray(present, dtype=bool)[order]
    m = len(inside)
    sizes = sorted({min(m, 2 * k) for k in (5 * 2**i for i in range(40)) if k < m} | {m})
    share = 1 - (1 - confidence) / len(sizes)
    best = OneRun(0.0, delta, confidence, m, 0, 0)
    for size in sizes:
        lowest, highest = size // 2, size - size // 2
        correct = int((~inside[:lowest]).sum() + inside[m - highest :].sum())
        found = certify_guesses(m, size, correct, delta, share)
        if found.epsilon > best.epsilon or best.guesses == 0:
            best = OneRun(found.epsilon, delta, confidence, m, size, correct)
    return best
