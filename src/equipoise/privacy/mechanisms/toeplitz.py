"""Toeplitz strategies of noise over steps: their coefficients, error and sensitivity.

A strategy is a lower triangular matrix C with C[t, s] = c_{t-s}. Noise C^-1 w on the sums x (w independent
and standard) is the same as noise w on C x: a record that is in the steps S adds columns of C, and what an
optimiser adds up, the prefix sums A x with A[t, s] = 1 for s <= t, gets the noise A C^-1 w.

| asked | answer |
|---|---|
| c with C C = A, cut at b bands | `square_root_coefficients`: prod (2k - 1) / 2k |
| C^-1 | `inverse_coefficients`: the power series 1 / c(x) |
| what one record adds | `squared_sensitivity` |
| noise of prefix sums | `prefix_error` |
| c of least prefix error | `optimal_coefficients` |
| c = 1, d, d^2, ..., and its best d | `geometric_coefficients`, `least_error_decay` |

**Sensitivity.** A record is in at most k steps S, two of them at least m apart, and adds C d with |d_s| <=
1. So

    |C d|^2 = sum_{s, t in S} <C_s, C_t> <d_s, d_t> <= sum_{s, t in S} <|C|_s, |C|_t>,

which is the squared norm of the sum of the columns S of |C|. It grows with every entry, so coefficients that
do not fall are replaced by the least ones above them that do. For coefficients that fall it is largest at S =
{0, m, 2m, ...} (Kalinin and Lampert 2024, theorem 2). So the answer is exact for coefficients that are not
negative and do not rise, and an upper bound for all. Columns without a row in common are orthogonal, whatever
the coefficients: where one participation ends before the next begins the squared lengths add up, exactly.

Sources: Kalinin and Lampert 2024, "Banded Square Root Matrix Factorization for Differentially Private Model
Training", arXiv 2405.13763; Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization", arXiv
2306.08153; Fichtenberger, Henzinger and Upadhyay 2023 for the square root of A, arXiv 2202.11205.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize, minimize_scalar
from scipy.signal import lfilter

from equipoise import _validate

_Array = NDArray[np.float64]


def square_root_coefficients(bands: int) -> tuple[float, ...]:
    """The first coefficients of the square root of the matrix of prefix sums.

    Example:
        >>> square_root_coefficients(4)
        (1.0, 0.5, 0.375, 0.3125)
    """
    _validate.count("the number of coefficients", bands=bands)
    k = np.arange(1, bands)
    return (1.0, *np.cumprod((2 * k - 1) / (2 * k)).tolist())


def inverse_coefficients(coefficients: Sequence[float] | _Array, count: int) -> _Array:
    """The first `count` coefficients of the inverse, which is Toeplitz too, [count].

    Example:
        >>> inverse_coefficients(square_root_coefficients(5), 5).tolist()
        [1.0, -0.5, -0.125, -0.0625, -0.0390625]
    """
    impulse = np.zeros(count)
    impulse[:1] = 1.0
    return np.asarray(lfilter([1.0], coefficients, impulse), dtype=np.float64)


def non_increasing_majorant(coefficients: Sequence[float] | _Array) -> _Array:
    """The least coefficients that do not rise and are nowhere below the absolute ones.

    Example:
        >>> non_increasing_majorant([1.0, -0.5, 0.8]).tolist()
        [1.0, 0.8, 0.8]
    """
    return np.maximum.accumulate(np.abs(coefficients)[::-1])[::-1].astype(np.float64)


def squared_sensitivity(
    coefficients: Sequence[float] | _Array, participations: int, separation: int, count: int
) -> float:
    """The largest squared length of what one record adds to C x, for contributions of length 1.

    Args:
        coefficients: c_0 and on; whatever follows is zero.
        participations: in how many steps the record may be.
        separation: how many steps lie at least from one of them to the next, 1 for consecutive steps.
        count: steps in all.

    Example:
        >>> squared_sensitivity([1.0], participations=7, separation=1, count=5)
        5.0
    """
    starts = range(0, count, separation)[:participations]
    apart = len(starts) == 1 or separation >= len(coefficients)
    column = (np.abs(coefficients) if apart else non_increasing_majorant(coefficients))[:count]
    total = np.zeros(count)
    for start in starts:
        total[start : start + len(column)] += column[: count - start]
    return float(total @ total)


def prefix_error(coefficients: Sequence[float] | _Array, count: int) -> float:
    """Root mean squared noise of `count` prefix sums, where one participation has sensitivity 1.

    A multiplier and a bound scale it. It counts every prefix alike, as a constant learning rate does.

    Example:
        >>> round(prefix_error([1.0], 2400) ** 2, 6)  # (2400 + 1) / 2
        1200.5
    """
    sums = inverse_coefficients(coefficients, count).cumsum()
    mean = float(np.arange(count, 0, -1) @ sums**2) / count
    return math.sqrt(mean) * math.hypot(*coefficients)


@functools.lru_cache(maxsize=128)
def optimal_coefficients(bands: int, count: int) -> tuple[float, ...]:
    """The coefficients of least `prefix_error` among those that do not rise and are not negative.

    Found by quasi-Newton steps from the square root, and never worse than it; what comes out is proved by
    nobody, and need not be: its sensitivity is computed like that of any others.

    Args:
        bands: how many coefficients.
        count: steps of the run.

    Example:
        >>> best = optimal_coefficients(8, 1000)
        >>> prefix_error(best, 1000) < prefix_error(square_root_coefficients(8), 1000)
        True
    """
    _validate.count("the number of steps", count=count)
    start = np.array(square_root_coefficients(min(bands, count)))
    weights = np.arange(count, 0, -1) / count

    def coefficients(drops: _Array) -> _Array:
        """c_k = (1 - drop_1) ... (1 - drop_k)."""
        return np.concatenate([[1.0], np.cumprod(1 - drops)])

    def objective(drops: _Array) -> tuple[float, _Array]:
        """log of the squared error, and its gradient."""
        # of 1 / ((1 - x) c(x)) in c_k: -x^k / ((1 - x) c(x)^2)
        c = coefficients(drops)
        sums = inverse_coefficients(c, count).cumsum()
        weighted, again = weights * sums, np.asarray(lfilter([1.0], c, sums))
        error, norm = float(weighted @ sums), float(c @ c)
        slopes = np.array([weighted[k:] @ again[: count - k] for k in range(1, len(c))])
        gradient = -2 * slopes / error + 2 * c[1:] / norm
        # of c_j in drop_k: -c_j / (1 - drop_k) for j >= k
        return math.log(error) + math.log(norm), -np.cumsum((gradient * c[1:])[::-1])[::-1] / (1 - drops)

    if len(start) == 1:
        return (1.0,)
    # By what share each falls below the one before: the roots of such a polynomial lie outside of the unit
    # circle (Enestrom and Kakeya), so that no step of the search meets an inverse that grows without end.
    found = minimize(
        objective,
        1 - start[1:] / start[:-1],
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.0, 1 - 1e-9)] * (len(start) - 1),
        options={"maxiter": 300},
    )
    best = coefficients(found.x)
    return tuple((best if prefix_error(best, count) < prefix_error(start, count) else start).tolist())


def geometric_coefficients(decay: float, count: int) -> _Array:
    """1, d, d^2, ..., [count]; the inverse is 1, -d and zeros.

    Example:
        >>> inverse_coefficients(geometric_coefficients(0.5, 4), 4).tolist()
        [1.0, -0.5, 0.0, 0.0]
    """
    return np.asarray(decay ** np.arange(count), dtype=np.float64)


def geometric_prefix_error(decay: float, count: int) -> float:
    """`prefix_error` of all coefficients 1, d, d^2, ... without end.

    The sum of n_0 to n_t is w_t + (1 - d) (w_0 + ... + w_{t-1}).

    Example:
        >>> round(geometric_prefix_error(0.0, 2400) ** 2, 6)
        1200.5
    """
    return math.sqrt((1 + (1 - decay) ** 2 * (count - 1) / 2) / (1 - decay**2))


def least_error_decay(participations: int, separation: int, count: int) -> float:
    """The d of least noise in the prefix sums of a run whose noise hides all participations of a record.

    Args:
        participations, separation, count: as for `squared_sensitivity`.

    Example:
        >>> round(least_error_decay(participations=8, separation=54, count=400), 3)
        0.925
    """

    def log_error(log_gap: float) -> float:
        decay = -math.expm1(log_gap)
        square = squared_sensitivity(geometric_coefficients(decay, count), participations, separation, count)
        # the length of all coefficients cancels
        return math.log(1 + (1 - decay) ** 2 * (count - 1) / 2) + math.log(square)

    found = minimize_scalar(log_error, bounds=(math.log(1e-6), math.log(1 - 1e-6)), method="bounded")
    return float(-math.expm1(found.x))
