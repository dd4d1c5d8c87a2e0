"""Epsilon of many Gaussian releases on random samples, from the distribution of their privacy loss.

A record in the sample moves a release by one (noise sigma = z), or, where it is replaced, from -1 to +1
(noise sigma = 2z; see the convention of `epsilon.py`). With sampling rate q the pairs of output laws are

    remove    P = (1 - q) N(0) + q N(1)     Q = N(0)
    add       the same, exchanged
    replace   P = (1 - q) N(0) + q N(1)     Q = (1 - q) N(0) + q N(-1)

and with L = log P/Q and delta_G(., mu) that of a Gaussian without sampling, mu = 1/sigma, for epsilon >= 0

    remove    delta(epsilon) = q delta_G(log(1 + (e^epsilon - 1) / q), mu)
    add       delta(epsilon) = (1 - (1 - q) e^epsilon) delta_G(-log(1 + (e^-epsilon - 1) / q), mu)

A user of several sampled records moves it by one of several lengths c, with shares w. Then N(1) is
M = sum_c w_c N(c) above, q the probability that anything moves, and delta_G that of M and N(0), in either
order. Their loss grows with the release, so that the sets where it is above epsilon are half-lines, whose
end a Newton iteration finds (log M/N(0) is convex and grows).

In draws with a cap a record may push another one out, and then moves a release twice as far (`sampling.py`).
Whether it would is known to whoever sees the pair of laws, so that delta is the mean of both.

An epoch in which a record is in one draw of several, at random, is one release here (`allocation.py`).

For epsilon < 0, delta(epsilon) = 1 - e^epsilon + e^epsilon delta'(-epsilon) with delta' of P and Q exchanged.

**Discretisation.** "Connect the dots": the pair of discrete laws whose delta agrees with the true one at the
grid's points and is linear in e^epsilon between them. It dominates the true pair, so that every epsilon from
it is an upper bound. Source: Doroshenko et al. 2022, arXiv:2207.04380. The points are multiples of one
interval; beyond 256 of them their gaps grow with the loss. So a grid has a few thousand points, however fine
it is where a step's losses lie and however far its tail reaches.

**Composition.** Losses add up. With K the logarithm of the moment generating function of the sum, the law
tilted by e^(lambda L - K(lambda)) is composed by one Fourier transform, and tilted back where the answer
lies. Lambda is that of Chernoff's bound for delta, so that the answer lies in the middle of the tilted law:
rounding is relative to delta itself. What lies outside the transform's window is bounded by Chernoff too, and
counted in full.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import fft, special

from equipoise._roots import NoCrossing, crossing
from equipoise.privacy.accounting import allocation

Array = np.ndarray

#: Points of a grid at single intervals on either side of zero; beyond, a gap is one of so many parts of the
#: loss. A choice: any gives an upper bound, more of them a tighter one that takes longer.
_DENSE = 256

#: Losses above which delta, of all releases together, is below this share of what is asked for are taken as
#: infinite: that costs at most as much of delta. A choice: a smaller share makes grids longer.
_CUT = 1e-5

#: What of the tilted law may lie outside the window of a transform, on either side. It counts in full, so
#: that a larger share makes epsilon larger and never too small; a smaller one takes more cells.
_OUTSIDE = 1e-9

#: The largest number of cells of a transform; above, cells are wider, and epsilon looser. A choice: each
#: array of so many takes 34 MB.
_MOST_CELLS = 2**22


@dataclass(frozen=True)
class SampledGaussians:
    """Equal Gaussian releases on Poisson samples.

    Attributes:
        sigma: noise standard deviation; a record has norm 1.
        rate: sampling rate in (0, 1]: the probability that anything moves.
        count: how many there are.
        lengths, shares: by how much it moves then, and how likely each is.
        pushed: probability of a draw in which all moves are twice as long.
        slots: of an epoch with balls in bins, which counts as one release: how many draws it has.
    """

    sigma: float
    rate: float
    count: int
    lengths: tuple[float, ...] = (1.0,)
    shares: tuple[float, ...] = (1.0,)
    pushed: float = 0.0
    slots: int = 1

    @property
    def mu(self) -> float:
        """The largest move in units of the noise."""
        return max(self.lengths) / self.sigma * (2 if self.pushed else 1)

    @property
    def kinds(self) -> list[tuple[float, SampledGaussians]]:
        """Draws without and with moves of twice the length, with their probabilities."""
        plain = replace(self, pushed=0.0)
        return [(1 - self.pushed, plain), (self.pushed, replace(plain, sigma=self.sigma / 2))]

    def deviation(self, direction: str) -> float:
        """About the standard deviation of one loss: that of the ratio of the laws, or without sampling."""
        if self.pushed:
            return math.sqrt(sum(share * kind.deviation(direction) ** 2 for share, kind in self.kinds))
        square = min(1 / self.sigma**2, 700.0)
        if self.slots > 1:
            return min(self.mu, math.sqrt(math.expm1(square) / self.slots))
        if direction == "replace":
            return min(2 / self.sigma, self.rate * 2 * math.sqrt(math.sinh(square)))
        pairs = itertools.product(zip(self.lengths, self.shares, strict=True), repeat=2)
        ratio = sum(v * w * math.expm1(min(c * d * square, 700.0)) for (c, v), (d, w) in pairs)
        return min(self.mu, self.rate * math.sqrt(ratio))


def composed_epsilon(
    parts: Sequence[SampledGaussians], delta: float, direction: str, fineness: float
) -> tuple[float, float]:
    """An upper bound of epsilon at delta of all parts together, in one direction.

    Args:
        parts: at least one.
        delta: in (0, 1).
        direction: "add", "remove" or "replace".
        fineness: cells per standard deviation of a step's loss; fewer where the transform grows too large.

    Returns:
        (epsilon, width of a cell).

    Example:
        >>> steps = [SampledGaussians(sigma=1.0, rate=256 / 60_000, count=4700)]
        >>> round(composed_epsilon(steps, 1e-5, "remove", 32)[0], 3)
        1.571
    """
    total = sum(part.count for part in parts)
    spread = math.sqrt(sum(part.count * part.deviation(direction) ** 2 for part in parts))
    interval = spread / math.sqrt(total) / fineness
    while True:
        cut = _CUT * delta / total
        losses = [_discretised(part, direction, interval, cut) for part in parts]
        law = _Composition(losses, interval, delta)
        if law.cells <= _MOST_CELLS:
            return law.epsilon(), interval
        interval *= 2


# ---- one release
def divergence(epsilons: Array, part: SampledGaussians, direction: str) -> Array:
    """delta(epsilon) of one release, for epsilon >= 0."""
    if part.pushed:
        return sum(
            (share * divergence(epsilons, kind, direction) for share, kind in part.kinds),
            start=np.zeros(len(epsilons)),
        )
    if part.slots > 1:
        return allocation.divergence(epsilons, part.sigma, part.slots, direction)
    mu, sigma, rate = 1 / part.sigma, part.sigma, part.rate

    def moved(epsilons: Array) -> Array:
        """delta of a release that moves for sure."""
        if part.lengths == (1.0,):
            return _gaussian_delta(epsilons, 2 * mu if direction == "replace" else mu)
        return _mixture_delta(epsilons, part, direction)

    if rate == 1:
        return moved(epsilons)
    if direction == "remove":
        return rate * moved(_before_sampling(epsilons, rate))
    if direction == "add":
        # Above 36 the 53 bits of 1 + x in its logarithm are used up, and it may be infinite; less gives more.
        inner = np.minimum(-_before_sampling(-epsilons, rate), 36.0)
        share = np.maximum(rate - (1 - rate) * np.expm1(np.minimum(epsilons, 700.0)), 0.0)
        return share * moved(inner)
    # The set where the loss is above epsilon is all beyond x; three terms that vanish with the rate.
    x = _replaced_from(epsilons, sigma, rate)
    with np.errstate(divide="ignore"):  # log 0 at epsilon 0
        there, opposite, nobody = (special.log_ndtr((shift - x) / sigma) for shift in (1.0, -1.0, 0.0))
        rest = np.log(-np.expm1(-epsilons)) + epsilons + nobody + math.log1p(-rate)
    found = rate * (np.exp(there) - np.exp(epsilons + opposite)) - np.exp(rest)
    return np.maximum(found, 0.0)


def _gaussian_delta(epsilons: Array, mu: float) -> Array:
    """delta(epsilon) of a Gaussian of multiplier 1/mu, for epsilon >= 0."""
    a = special.log_ndtr(mu / 2 - epsilons / mu)
    b = epsilons + special.log_ndtr(-mu / 2 - epsilons / mu)
    return np.exp(a) * -np.expm1(np.minimum(b - a, 0.0))


def _mixture_delta(epsilons: Array, part: SampledGaussians, direction: str) -> Array:
    """delta(epsilon) of the mixture of moves against none ("remove"), or of none against it, epsilon >= 0."""
    lengths, shares, sigma = np.array(part.lengths)[:, None], np.array(part.shares)[:, None], part.sigma
    x = _where_loss_is(epsilons if direction == "remove" else -epsilons, lengths, shares, sigma)
    # The set beyond x, or before it where nothing moves in the first law; both tails in the log domain.
    side = 1.0 if direction == "remove" else -1.0
    with np.errstate(under="ignore"):
        # Shares as logarithms too: those of 200 records and more span the range of float64.
        mixed = special.logsumexp(np.log(shares) + special.log_ndtr(side * (lengths - x) / sigma), axis=0)
    still = special.log_ndtr(-side * x / sigma)
    first, second = (mixed, still) if direction == "remove" else (still, mixed)
    return np.exp(first) * -np.expm1(np.minimum(epsilons + second - first, 0.0))


def _where_loss_is(losses: Array, lengths: Array, shares: Array, sigma: float) -> Array:
    """Where the logarithm of the mixture over a release that does not move reaches these losses."""
    # One term alone reaches the loss further right: from there Newton's steps come down to the crossing.
    alone = (losses - np.log(shares)) * sigma**2 / lengths + lengths / 2
    x = alone.min(axis=0)
    for _ in range(100):
        terms = np.log(shares) + (lengths * x - lengths**2 / 2) / sigma**2
        value = special.logsumexp(terms, axis=0)
        slope = (np.exp(terms - value) * lengths).sum(axis=0) / sigma**2
        step = (value - losses) / slope
        x = x - step
        if np.all(np.abs(step) <= 1e-13 * (np.abs(x) + sigma)):
            break
    return x


def _before_sampling(epsilons: Array, rate: float) -> Array:
    """log(1 + (e^epsilon - 1) / q), the loss before sampling; -inf at or below log(1 - q)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        # Two forms of one expression: the first keeps the digits of a small epsilon, the second does not
        # overflow for a large one.
        near = np.log1p(np.maximum(np.expm1(np.minimum(epsilons, 1.0)) / rate, -1.0))
        far = epsilons + np.log1p(-(1 - rate) * np.exp(-np.maximum(epsilons, 0.0))) - math.log(rate)
    return np.where(epsilons > 1.0, far, near)


def _replaced_from(epsilons: Array, sigma: float, rate: float) -> Array:
    """Where the loss of a replaced record reaches epsilon >= 0.

    sigma^2 (asinh(a sinh(epsilon / 2)) + epsilon / 2) with a = e^(1 / (2 sigma^2)) (1 - q) / q.
    """
    half = epsilons / 2
    with np.errstate(divide="ignore"):  # epsilon = 0 gives x = 0
        log_sinh = half + np.log(-np.expm1(-2 * half)) - math.log(2)
    t = log_sinh + 0.5 / sigma**2 + math.log1p(-rate) - math.log(rate)
    # asinh(e^t) in the log domain: t + log(1 + sqrt(1 + e^-2t)) for t > 0.
    small, large = np.minimum(t, 0.0), np.maximum(t, 0.0)
    above = large + np.log1p(np.sqrt(1 + np.exp(-2 * large)))
    return sigma**2 * (np.where(t > 0, above, np.arcsinh(np.exp(small))) + half)


@dataclass(frozen=True)
class _Losses:
    """The discrete law of a loss.

    Attributes:
        places: in intervals, rising, int64.
        log_masses: logarithms of their probabilities.
        infinite: probability of an infinite loss.
        count: of independent losses with this law.
    """

    places: Array
    log_masses: Array
    infinite: float
    count: int


def _discretised(part: SampledGaussians, direction: str, interval: float, cut: float) -> _Losses:
    opposite = {"remove": "add", "add": "remove", "replace": "replace"}[direction]
    above, deltas_above = _side(part, direction, interval, cut)
    below, deltas_below = _side(part, opposite, interval, cut)
    places = np.concatenate([-below[:0:-1], above])
    # Above zero delta(epsilon), below it delta(epsilon) - (1 - e^epsilon), which is small too.
    gamma = np.concatenate([(np.exp(-below * interval) * deltas_below)[:0:-1], deltas_above])
    gaps, steps = np.diff(places) * interval, np.diff(gamma)
    # The mass of a point is how much the slope of delta in e^epsilon grows there, times e^epsilon.
    right = np.append(steps / np.expm1(gaps), 0.0)
    left = np.insert(steps / -np.expm1(-gaps), 0, gamma[0])
    masses = right - left
    masses[places == 0] += 1.0
    kept = masses > 0  # rounding may leave less; left out below zero, it is added to nothing else
    with np.errstate(divide="ignore"):
        return _Losses(places[kept], np.log(masses[kept]), float(gamma[-1]), part.count)


def _side(part: SampledGaussians, direction: str, interval: float, cut: float) -> tuple[Array, Array]:
    """Points from zero up to where delta is cut off, in intervals, and delta there."""
    mu = (2 if direction == "replace" else 1) * part.mu
    farthest = (mu * mu / 2 + 40 * mu) / interval + 2
    widest = max(1.0, mu / 16 / interval)  # compared with the deviation of the loss before sampling
    turn = min(farthest, max(_DENSE, _DENSE * widest))
    number = math.ceil(math.log(max(turn, _DENSE) / _DENSE) * _DENSE) + 1
    grown = _DENSE * np.exp(np.arange(number + 1) / _DENSE)
    further = grown[-1] + widest * np.arange(1, max(0.0, farthest - grown[-1]) / widest + 2)
    places = np.unique(np.concatenate([np.arange(_DENSE), grown, further]).round().astype(np.int64))
    deltas = divergence(places * interval, part, direction)
    end = int(np.argmax(deltas <= cut)) if (deltas <= cut).any() else len(places) - 1
    return places[: max(end, 1) + 1], deltas[: max(end, 1) + 1]


# ---- composition
class _Composition:
    """The sum of independent losses, tilted to where delta is what is asked for.

    Args:
        losses: their laws, on one grid.
        interval: of the grid.
        delta: in (0, 1).

    Attributes:
        cells: of the window that holds the tilted law.
    """

    def __init__(self, losses: Sequence[_Losses], interval: float, delta: float) -> None:
        self._losses, self._interval, self._delta = losses, interval, delta
        # The bound of delta that Chernoff's argument gives is least where t K'(t) - K(t) + log(1 + t) is
        # log(1 / delta): for t > 0, (1 - e^-x)+ <= e^(t x) t^t / (1 + t)^(1 + t).
        self._tilt = self._tilt_where(lambda t, value, slope: t * slope - value + math.log1p(t), delta)
        start, _ = self.cumulants(self._tilt)

        def tail(step: float, value: float, slope: float) -> float:
            return step * slope - value + start

        # Beyond the ends the tilted law has a share of _OUTSIDE at most, by Chernoff's bound.
        self._bottom, self._top = (
            self.cumulants(self._tilt_where(tail, _OUTSIDE, self._tilt, sign))[1] for sign in (-1, 1)
        )
        self._first = math.floor(self._bottom / interval)
        self.cells = math.ceil(self._top / interval) - self._first + 2

    def cumulants(self, tilt: float) -> tuple[float, float]:
        """K and its derivative, which is the mean of the tilted law."""
        value = slope = 0.0
        for part in self._losses:
            exponents = part.log_masses + (tilt * self._interval) * part.places
            most = exponents.max()
            weights = np.exp(exponents - most)
            total = float(weights.sum())
            value += part.count * (float(most) + math.log(total))
            slope += part.count * self._interval * float(weights @ part.places) / total
        return value, slope

    def _tilt_where(
        self, bound: Callable[[float, float, float], float], share: float, base: float = 0.0, sign: int = 1
    ) -> float:
        """The tilt where bound(tilt - base, K, K') is log(1 / share); it grows away from base."""

        def missing(log_step: float) -> float:
            step = sign * math.exp(log_step)
            return -math.log(share) - bound(step, *self.cumulants(base + step))

        most = math.log(50 / self._interval)  # neighbouring points then differ by e^50
        try:
            _, log_step = crossing(missing, 0.0, 1.0, least=-60.0, most=most, tolerance=1e-3)
        except NoCrossing:  # the law's last point has more than that
            log_step = most
        return base + sign * math.exp(log_step)

    def epsilon(self) -> float:
        """The smallest epsilon at which delta is not larger than asked for."""
        size = fft.next_fast_len(self.cells, real=True)
        spectrum: Array | float = 0.0
        for part in self._losses:
            exponents = part.log_masses + (self._tilt * self._interval) * part.places
            masses = np.exp(exponents - special.logsumexp(exponents))
            folded = np.bincount(part.places % size, weights=masses, minlength=size)
            with np.errstate(divide="ignore"):
                spectrum = spectrum + part.count * np.log(fft.rfft(folded))
        tilted = np.roll(fft.irfft(np.exp(spectrum), size), -(self._first % size))
        epsilons = self._interval * (self._first + np.arange(size))
        value, _ = self.cumulants(self._tilt)
        with np.errstate(divide="ignore"):  # rounding may leave less than nothing
            log_masses = np.log(np.maximum(tilted, 0.0)) + (value - self._tilt * epsilons)
        infinite = -math.expm1(sum(part.count * math.log1p(-part.infinite) for part in self._losses))
        beyond = _OUTSIDE * math.exp(value - self._tilt * self._top)
        return _solved(epsilons, log_masses, infinite + beyond, self._delta)


def _solved(epsilons: Array, log_masses: Array, rest: float, delta: float) -> float:
    """The smallest epsilon >= 0 with rest + sum of masses (1 - e^(epsilon - loss)) above it <= delta."""
    if rest > delta:
        return math.inf
    # Sums over all cells from one on.
    sums = np.logaddexp.accumulate(log_masses[::-1])[::-1]
    weighted = np.logaddexp.accumulate((log_masses - epsilons)[::-1])[::-1]
    with np.errstate(over="ignore", invalid="ignore"):
        deltas = rest + np.exp(sums) - np.exp(epsilons + weighted)  # at each cell's own loss
    # From the right, where nothing is blown up: the first cell at which delta is too large.
    place = len(deltas) - int(np.argmax(~(deltas[::-1] <= delta)))
    if deltas.max() <= delta:
        return max(0.0, float(epsilons[0]))
    if place == len(deltas) or weighted[place] == -math.inf:
        return max(0.0, float(epsilons[min(place, len(deltas) - 1)]))
    # Between the cell before and this one all cells from this one on count.
    more = math.exp(sums[place]) + rest - delta
    found = math.log(more) - weighted[place] if more > 0 else -math.inf
    low = epsilons[place - 1] if place else -math.inf
    return max(0.0, float(min(max(found, low), epsilons[place])))
