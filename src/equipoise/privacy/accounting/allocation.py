"""Balls in bins: a record is in one of t draws, secret and uniformly random, and each draw gets fresh noise.

With noise sigma and a record of norm 1 the pair of output laws of an epoch is, on t coordinates,

    remove    P = mean over i of N(e_i, sigma^2 I)     Q = N(0, sigma^2 I)         add    the same, exchanged

and their ratio depends on the mean of t independent log-normal variables alone:

    P/Q = R = (X_1 + ... + X_t) / t,   X_i = exp(z_i / sigma - 1 / (2 sigma^2)),  z_i standard normal under Q,

    remove    delta(epsilon) = E_Q (R - e^epsilon)+            add    delta(epsilon) = E_Q (1 - e^epsilon R)+.

**These laws dominate** what a training releases, whatever it does with what was released before. *Proof.*
Fix the bins of all other records, which do not depend on that of x. Draw j releases N(f_j + a_j v_j,
sigma^2 I), where a_j says whether x is in it, and f_j and v_j, |v_j| <= 1, follow from earlier releases. From
y_j, which is N(a_j, sigma^2), it is made as f_j + y_j v_j plus noise of covariance sigma^2 (I - v_j v_j^T),
without knowing a_j. So all releases are post-processing of y_1 ... y_t, whose laws are P with x and Q
without. Epochs have independent bins and compose. QED

With noise over b steps the record's group is given, and a draw stands for the b whitened rows that it
reaches, which no other draw of the group does. What a record adds to them has the direction of c times v_j
and a length of at most 1. y_j is their part in that direction. The rest of their noise depends on neither
y_j nor x, and each row of f_j follows the rows before.

**Discretisation.** Both functions of R are convex. A discrete law that comes from that of X by splitting
each value between the two grid points beside it, so that the mean stays, is larger in convex order, and so
is the sum of independent such variables. So every delta computed from it is an upper bound, with an error of
second order in the grid; rounding adds up to 1e-9 of itself. The law of the sum is made by doubling, and
after each sum split onto a new grid of logarithms: as fine as its deviation in the middle, coarse far out on
either side, where "add" looks at values near zero and "remove" at large ones. (The pair is that of Chua et
al. 2024, arXiv:2412.16802, who simulate it, and of Feldman and Shenfeld 2025, arXiv:2502.08202, who bound
it.)
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import dp_accounting
import numpy as np
from scipy import special

Array = np.ndarray

_BEYOND = 1e-18
"""Probability of a value above the grid, under the law with the record; delta is raised by it.

Far below what `loss_distribution` cuts off. A smaller one needs a longer grid."""

_LEAST = 1e-25
"""Probability of a value below the grid. A choice: a larger one makes "add" looser at small delta."""

_POINTS = 600
"""Of a grid. A choice by time, which grows with the square: with 2,400 points epsilon is smaller by 0.04 to
0.2% (at 20 to 1,000 draws and multipliers 0.6 to 3), and takes twenty times as long as 0.1 s."""


@dataclass(frozen=True)
class BallsInBinsDpEvent(dp_accounting.DpEvent):
    """An epoch of so many draws, each with noise of this multiplier; a record is in one of them at random."""

    slots: int
    noise_multiplier: float


Law = tuple[Array, Array]
"""Rising values, and their probabilities."""


@functools.lru_cache(maxsize=64)
def ratio_law(sigma: float, slots: int, points: int = _POINTS) -> Law:
    """A law of R that is larger than the true one in convex order, but for values of probability `_BEYOND`.

    >>> values, masses = ratio_law(1.0, 100)
    >>> round(float(masses.sum()), 9), round(float(values @ masses), 9)
    (1.0, 1.0)
    """
    power, total, left = _log_normal(sigma, points), None, slots
    while True:
        if left % 2:
            total = power if total is None else _sum(total, power, points)
        left //= 2
        if not left:
            break
        power = _sum(power, power, points)
    assert total is not None
    return total[0] / slots, total[1]


def _log_normal(sigma: float, points: int) -> Law:
    """The law of X on a geometric grid and zero."""
    mu = 1 / sigma
    z = np.linspace(special.ndtri(_BEYOND), mu - special.ndtri(_BEYOND), points - 1)
    values = np.concatenate([[0.0], np.exp(z * mu - mu * mu / 2)])
    below, shifted = np.concatenate([[-np.inf], z]), np.concatenate([[-np.inf], z]) - mu
    # Of each cell its probability, and its share of the mean: that of a normal law moved by mu.
    mass, mean = _between(below), _between(shifted)
    upper = np.clip((mean - mass * values[:-1]) / np.diff(values), 0.0, mass)
    masses = np.append(mass - upper, special.ndtr(-z[-1])) + np.insert(upper, 0, 0.0)
    return values, masses


def _between(ends: Array) -> Array:
    """The probability of a standard normal number between neighbouring ends, exact in both tails."""
    left, right = special.ndtr(ends), special.ndtr(-ends)
    return np.where(ends[:-1] > 0, right[:-1] - right[1:], left[1:] - left[:-1])


def _sum(one: Law, two: Law, points: int) -> Law:
    """The law of the sum of independent variables, each value split between the two grid points beside it."""
    values = np.add.outer(one[0], two[0]).ravel()
    masses = np.multiply.outer(one[1], two[1]).ravel()
    mean, top = float(values @ masses), float(values.max())
    # Without the far tail, which would widen the grid where most of the mass lies.
    spread = math.sqrt(float(masses @ (np.minimum(values, 3 * mean) - mean) ** 2)) / mean
    # What lies below the grid is split between its end and zero.
    positive = values > 0
    counts, edges = np.histogram(np.log(values[positive]), 4096, weights=masses[positive])
    low = min(math.exp(edges[np.searchsorted(np.cumsum(counts), _LEAST)]), mean / 2)
    ends = np.arcsinh(np.log(np.array([low, top]) / mean) / spread)
    grid = np.append(0.0, mean * np.exp(spread * np.sinh(np.linspace(ends[0], ends[1], points - 1))))
    grid[-1] = top
    place = np.clip(np.searchsorted(grid, values, side="right") - 1, 0, points - 2)
    share = np.clip((values - grid[place]) / (grid[place + 1] - grid[place]), 0.0, 1.0)
    upper = np.bincount(place + 1, weights=masses * share, minlength=points)
    return grid, upper + np.bincount(place, weights=masses * (1 - share), minlength=points)


def divergence(epsilons: Array, sigma: float, slots: int, direction: str) -> Array:
    """delta(epsilon) of an epoch, for epsilon >= 0, an upper bound; "remove" or "add".

    Both are linear between the values of R, where sums of terms of one sign give them.

    Example:
        >>> divergence(np.array([0.0, 1.0]), 1.0, 100, "remove").round(7).tolist()
        [0.0514303, 3e-07]
    """
    values, masses = ratio_law(sigma, slots)
    if direction == "remove":
        at = np.exp(np.minimum(epsilons, 700.0))
        above = np.append(np.cumsum(masses[::-1])[::-1], 0.0)  # of this value and all larger ones
        means = np.append(np.cumsum((np.diff(values) * above[1:-1])[::-1])[::-1], 0.0)
        place = np.searchsorted(values, at, side="right")  # the first value above
        first = np.minimum(place, len(values) - 1)
        found = np.where(place < len(values), means[first] + (values[first] - at) * above[place], 0.0)
        return found + _BEYOND
    at = np.exp(-np.minimum(epsilons, 700.0))
    below = np.cumsum(masses)
    means = np.insert(np.cumsum(np.diff(values) * below[:-1]), 0, 0.0)
    place = np.searchsorted(values, at, side="right") - 1
    with np.errstate(over="ignore"):
        return (means[place] + (at - values[place]) * below[place]) / at
