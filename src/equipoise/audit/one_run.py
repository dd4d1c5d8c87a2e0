"""Auditing in one run: many canaries, each in the training or not at random, guessed all at once.

Let each of m canaries be in with probability 1/2, independently of the others. An attacker guesses r of them,
and v guesses are right. What (epsilon, delta)-DP allows:

Let the training be f-DP: with F(x) = 1 - f(x), an event of probability x on one of two neighbouring data sets
has one of at most F(x) on the other. For a pair (epsilon, delta), F(x) is at most e^epsilon x + delta and at
most 1 - (1 - x - delta) e^-epsilon; for a plan it is at most the least of these over all its pairs.

**What that allows.** Let p_i be the probability that i guesses are right. For every c >= 1

    sum_{i >= c} (i / m) p_i  <=  F( sum_{i >= c - 1} ((r - i) / m) p_i ).

*Proof.* Take a canary j at random, and fix the assignment of the others. Let A be the event that j is guessed
to be g, and that at least c - 1 of the other guesses are right. Neighbouring data sets assign g to j, or not
g; so P(A | g) <= F(P(A | not g)). With the mean over j, g and the others, and since F is concave, the left
side becomes the probability that j's guess is right and at least c are in all, which is sum_{i >= c} (i / m)
p_i; the right one that of a wrong guess of j where at least c - 1 are right. QED

**When v right guesses refute it.** Suppose that P(at least v right) >= alpha. Then p_v, p_{v-1}, ..., p_0 can
be bounded from below one after another by the inequality for c = v, v - 1, ..., 1. The least total comes of
all of alpha in v and the least p_{c-1} that each allows: mass that is moved down from c to c - 1 makes the
left side of all later inequalities smaller and what is under F larger. If that total is above 1, f is refuted
at confidence 1 - alpha.

Source: Mahloujifar, Melis and Chaudhuri 2024, "Auditing f-differential privacy in one run", arXiv 2410.22235.
With one pair (epsilon, 0) the bound is within 3% of Binomial(r, e^epsilon / (1 + e^epsilon)), that of
Steinke, Nasr and Jagielski 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from equipoise.audit.bounds import TradeOffs
from equipoise.audit.roc import Numbers

__all__ = ["OneRun", "certify_guesses", "guess_by_score", "is_refuted", "trade_offs"]


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


def is_refuted(
    growth: Numbers, deltas: Numbers, canaries: int, guesses: int, correct: int, alpha: float
) -> bool:
    """Whether so many right guesses, or more, have a probability below alpha under these pairs.

    Args:
        growth, deltas: e^epsilon and delta of each pair.
        canaries, guesses, correct: m, r and v.
        alpha: of the error.

    Example:
        >>> is_refuted(np.array([1.0]), np.array([0.0]), 10, 10, 10, 0.002)  # of random guesses: 2^-10
        True
    """
    right, wrong = alpha * correct / canaries, alpha * (guesses - correct) / canaries
    for below in range(correct - 1, -1, -1):
        # the least x with F(x) >= `right`
        needed = max(0.0, ((right - deltas) / growth).max(), (1 - deltas - growth * (1 - right)).max())
        mass = max(0.0, needed - wrong) / (guesses - below)
        right, wrong = right + below * mass, wrong + (guesses - below) * mass
        if (right + wrong) * canaries > guesses:
            return True
    return False


def certify_guesses(
    canaries: int,
    guesses: int,
    correct: int,
    delta: float,
    confidence: float = 0.95,
    offs: TradeOffs | None = None,
) -> OneRun:
    """Epsilon of the claim with as much noise as the guesses do not refute; 0 if they refute none.

    Args:
        canaries, guesses, correct: m, r and v.
        delta: as claimed.
        confidence: of the bound.
        offs: of a plan (`trade_offs`). Without it nothing but (epsilon, delta) is claimed.

    Example:
        >>> round(certify_guesses(100, 100, 100, 0.0, 0.95).epsilon, 1)
        3.5
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            f"correct={correct}, guesses={guesses}, canaries={canaries}: none may exceed the next"
        )
    claim = offs or TradeOffs(lambda scale, at: 1 / scale, np.array([delta]))
    scale = claim.least_refuted(
        lambda growth: is_refuted(growth, claim.deltas, canaries, guesses, correct, 1 - confidence)
    )
    found = 0.0 if scale == math.inf else claim.spent(scale, delta)
    return OneRun(found, delta, confidence, canaries, guesses, correct)


def trade_offs(spent: Callable[[float, float], float]) -> TradeOffs:
    """Those of a plan. That many guesses are right is rare, and bounded by the pairs of the least deltas."""
    return TradeOffs(spent, np.geomspace(1e-5, 0.9, 30))


def guess_by_score(
    scores: ArrayLike,
    present: ArrayLike,
    delta: float,
    confidence: float = 0.95,
    offs: TradeOffs | None = None,
) -> OneRun:
    """Guess the canaries of the highest scores present and those of the lowest absent.

    How many are guessed may not be chosen by how many come out right. So several numbers are tried, each at
    its share of the error: 10, 20, 40, ... guesses, half of them on either side.

    Args:
        scores: [m]; high speaks for presence.
        present: [m], who was in.
        delta: as claimed.
        confidence: of the best bound.
        offs: as for `certify_guesses`.
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
        found = certify_guesses(m, size, correct, delta, share, offs)
        if found.epsilon > best.epsilon or best.guesses == 0:
            best = OneRun(found.epsilon, delta, confidence, m, size, correct)
    return best
