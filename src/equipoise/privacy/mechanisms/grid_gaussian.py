"""Exact normal noise on a grid of integers, for deployments that must resist floating-point attacks.

Floating-point noise added to a floating-point sum has holes: some results can come from one data set and not
from its neighbour. An observer of exact bits can use them (Mironov 2012). Here the sum is rounded to an
integer number of grid units first. The noise is an exact sample of a normal number rounded down to integers.
Only their integer sum leaves; making a float of it is post-processing. Since floor(s + X) = s + floor(X) for
an integer s, a release is post-processing of the exact Gaussian mechanism on the rounded sums. So every
accountant of this library holds for it as it stands. (A discrete Gaussian, Canonne, Kamath and Steinke 2020,
has the same Renyi divergence in many dimensions, but no statement on its privacy loss distribution.)

Rounding may move every coordinate of a sum by half a unit, those of two neighbours apart by one. With the
unit g, the bound C, P coordinates, the multiplier z and a standard deviation of 2^24 units,

    2^24 = z (C / g + sqrt(P)),     so     g = C / (2^24 / z - sqrt(P)),

the noise is z times the sensitivity of the rounded sum, and wider than without a grid by the factor
1 / (1 - z sqrt(P) / 2^24): 0.006% for a million coordinates at z = 1.

Sampling (after Karney 2016): y = v + f with P[v] ~ exp(-v^2 / 2) and f uniform in [0, 1), taken with
probability exp(-(v f + f^2 / 2)), has the density of a half normal. A random bit gives the sign. Uniform
numbers are compared with such probabilities by their first bits in floating point. Where that is too close to
tell (once in 2^39) more bits are drawn, and decimals of any length are compared. So the sample is exact if
floating-point exponentials are right to 40 bits.
"""

from __future__ import annotations

import decimal
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from equipoise.privacy._torch_side import Bounded, ReleaseStreams, ciphers, keyed, private, torch
from equipoise.privacy.errors import LedgerError
from equipoise.privacy.mechanisms.base import Mechanism, Sums

BITS = 24
"""The noise's standard deviation is 2^BITS grid units.

With fewer, rounding is a larger part of the noise (0.006% for a million coordinates at z = 1). More leave
less room for sums within `_LARGEST`, and a stream takes at most 24.
"""


# Floating-point exponentials are right to far more bits; what lies closer is decided in decimals. A wider one
# costs time alone, one near 2^-52 would trust the last bits of an exponential.
_SLACK = 2.0**-40
_LARGEST = 2.0**42  # grid units: sums beyond are cut, so that a quotient is right to 2^-10 of a unit

# Rounding moves neighbours apart by a unit per coordinate; a quotient errs by 2^-10 of one on either side.
# Less would make the noise narrower than the accountant takes it to be.
_ROUNDING = 1 + 2.0**-9
# Candidates at once, in 1.5 MB of random bits. A choice, but one that the bits of the noise follow: with
# another, a run that goes on would not get the noise that it had.
_CHUNK = 1 << 16


def grid_unit(bound: float, coordinates: int, multiplier: float) -> float:
    """The grid's unit g for a sum of this add-or-remove bound.

    Raises:
        LedgerError: so many coordinates or so much noise that rounding would be as large as the noise.

    Example:
        >>> unit = grid_unit(1.0, 1_000_000, 1.0)
        >>> round(unit * 2**24, 6)  # the noise's standard deviation; 1 without a grid
        1.00006
    """
    room = 2.0**BITS / multiplier - math.sqrt(coordinates) * _ROUNDING
    if room < 2.0 ** (BITS - 1) / multiplier:
        raise LedgerError(
            f"hardened noise on {coordinates:,} coordinates at noise multiplier {multiplier:g} would be more "
            f"than half rounding: the grid has 2^{BITS} units a standard deviation. Train fewer parameters, "
            "or leave hardened out"
        )
    return bound / room


def to_grid(value: torch.Tensor, unit: float) -> NDArray[np.int64]:
    """The value in grid units, rounded to integers, [numel]."""
    scaled = value.detach().cpu().reshape(-1).to(torch.float64).div(unit).clamp_(-_LARGEST, _LARGEST)
    rounded: NDArray[np.int64] = scaled.round_().to(torch.int64).numpy()
    return rounded


class GridStream:
    """A stream of normal numbers of standard deviation 2^bits, rounded down to integers.

    Args:
        key: 32 bytes, used only for this stream.
        bits: at most 24.
        slack: comparisons closer than this are done exactly; more only for tests.

    Example:
        >>> a, b = GridStream(bytes(32)), GridStream(bytes(32))
        >>> bool((a.draw(5) == b.draw(5)).all())
        True
    """

    def __init__(self, key: bytes, bits: int = BITS, slack: float = _SLACK) -> None:
        if len(key) != 32:
            raise ValueError(f"key has {len(key)} bytes; a stream takes 32")
        counter = ciphers.modes.CTR(bytes(16))
        self._cipher = ciphers.Cipher(ciphers.algorithms.AES(key), counter).encryptor()
        self._bits, self._slack = bits, slack

    def draw(self, count: int) -> NDArray[np.int64]:
        """The next `count` independent numbers, int64."""
        out = np.empty(count, np.int64)
        done = 0
        while done < count:
            found = self._candidates(min(_CHUNK, int((count - done) * 1.5) + 16))[: count - done]
            out[done : done + len(found)] = found
            done += len(found)
        return out

    def _words(self, count: int) -> NDArray[np.uint64]:
        return np.frombuffer(self._cipher.update(bytes(8 * count)), np.uint64)

    def _candidates(self, count: int) -> NDArray[np.int64]:
        """`count` candidates; those that are accepted, about 71% of them."""
        first, fraction, last = self._words(3 * count).reshape(3, count)
        whole = np.searchsorted(_TABLE, first, side="right").astype(np.int64)
        for i in np.flatnonzero(np.isin(first, _UNDECIDED)):
            whole[i] = _whole_exactly(int(first[i]), self._more)
        f = (fraction >> np.uint64(11)).astype(np.float64) * 2.0**-53
        probability = np.exp(-f * (whole + 0.5 * f))
        uniform = (last >> np.uint64(11)).astype(np.float64) * 2.0**-53
        accepted = uniform < probability
        for i in np.flatnonzero(np.abs(uniform - probability) <= self._slack):
            numbers = (int(whole[i]), int(fraction[i]), int(last[i]) >> 1)
            accepted[i] = _accepted_exactly(*numbers, self._more)
        magnitude = (whole << self._bits) + (fraction >> np.uint64(64 - self._bits)).astype(np.int64)
        # floor(-y) = -floor(y) - 1 for a y that is no integer, and almost surely none is
        signed = np.where(last & np.uint64(1), ~magnitude, magnitude)
        result: NDArray[np.int64] = signed[accepted]
        return result

    def _more(self) -> int:
        return int(self._words(1)[0])


@functools.cache
def _thresholds(bits: int) -> tuple[int, ...]:
    """floor(2^bits P[v <= k]) for k = 0, 1, ..., as far as it is below 2^bits."""
    with decimal.localcontext() as context:
        context.prec = bits // 3 + 30
        most = int(math.sqrt(2 * bits)) + 4  # exp(-v^2 / 2) < 2^-bits beyond
        weights = [(-decimal.Decimal(v * v) / 2).exp() for v in range(most + 20)]
        total, found, below = sum(weights), [], decimal.Decimal(0)
        for weight in weights[:most]:
            below += weight
            found.append(int(below / total * 2**bits))
    return tuple(value for value in found if value < 2**bits - 1)


# A word w means v = how many thresholds t have w > t: above floor(2^64 P) a word is above the threshold, and
# equal to it the next bits decide.
_TABLE = np.array(_thresholds(64), np.uint64) + np.uint64(1)
# The words that equal a threshold (`_TABLE` has one more), and the last word: further bits decide there.
_UNDECIDED = np.append(_TABLE - np.uint64(1), np.uint64(2**64 - 1))


def _whole_exactly(word: int, more: Callable[[], int]) -> int:
    """v from a word and as many further bits as it takes."""
    bits = 64
    while True:
        table = _thresholds(bits)
        if word not in table and word < 2**bits - 1:
            return sum(word > threshold for threshold in table)
        word, bits = (word << 64) | more(), bits + 64


def _accepted_exactly(v: int, f: int, u: int, more: Callable[[], int]) -> bool:
    """Whether a uniform number of first bits u is below exp(-(v x + x^2 / 2)), x of first bits f."""
    bits_f, bits_u = 64, 63
    while True:
        with decimal.localcontext() as context:
            context.prec = bits_f // 3 + 30
            error = decimal.Decimal(10) ** (3 - context.prec)

            def chance(x: decimal.Decimal) -> decimal.Decimal:
                return (-(v * x + x * x / 2)).exp()

            low = chance(decimal.Decimal(f + 1) / 2**bits_f) - error
            high = chance(decimal.Decimal(f) / 2**bits_f) + error
            if decimal.Decimal(u + 1) / 2**bits_u <= low:
                return True
            if decimal.Decimal(u) / 2**bits_u >= high:
                return False
        f, bits_f = (f << 64) | more(), bits_f + 64
        u, bits_u = (u << 64) | more(), bits_u + 64


@final
@dataclass(frozen=True)
class GridGaussian(Mechanism):
    """Independent normal noise, exact and on a grid of integers.

    Args:
        noise_multiplier: z, the noise's standard deviation over the add-or-remove bound of the sum.
    """

    noise_multiplier: float
    kind: ClassVar[str] = "grid_gaussian"
    arithmetic: ClassVar[str] = "grid"

    def check_sums(self, sums: Mapping[str, Bounded]) -> None:
        super().check_sums(sums)
        for bounded in sums.values():
            self._unit(bounded)

    def _unit(self, bounded: Bounded) -> float:
        coordinates = sum(value.numel() for value in bounded.value.values())
        return grid_unit(bounded.add_remove, coordinates, self.noise_multiplier)

    def noised(
        self, sums: Mapping[str, Bounded], streams: ReleaseStreams, over_steps: Sums | None = None
    ) -> Sums:
        # One stream for all sums of the release: no two of them share a number.
        stream = streams.get("grid noise", GridStream)
        return {name: self._noised(bounded, stream) for name, bounded in sums.items()}

    def _noised(self, bounded: Bounded, stream: GridStream) -> dict[str, torch.Tensor]:
        unit, out = self._unit(bounded), {}
        for name in sorted(bounded.value):
            value = bounded.value[name]
            dtype, raw = keyed.released_type(value), private.exact(value)
            integers = to_grid(raw, unit) + stream.draw(raw.numel())
            # From here on it is post-processing: half a unit makes up for rounding down.
            values = torch.from_numpy(integers).to(torch.float64).add_(0.5).mul_(unit)
            out[name] = values.to(dtype).view(raw.shape).to(raw.device)
        return {name: out[name] for name in bounded.value}

    def on_grid(self) -> GridGaussian:
        return self
