"""Noise that is correlated over steps: the Gaussian mechanism of a Toeplitz strategy.

With the strategy C (lower triangular, C[t, s] = c_{t-s}, columns of length at most 1) step t releases

    y_t = x_t + z C_t n_t,     n = C^-1 w,     w_0, w_1, ... independent and standard,

for sums x_t of bound C_t. Two forms of C have noise that is made from little (c_0 = 1 here, and n times the
norm of c at the end):

| class | c | n_t | kept between steps |
|---|---|---|---|
| `BandedGaussian` | b numbers, then zeros | w_t - sum_{0<k<b} c_k n_{t-k} | b - 1 noises |
| `OneStepGaussian` | 1, d, d^2, ... | w_t - d w_{t-1} | the 32 bytes from which w_{t-1} follows |

What is kept is private state, and tells as much as the raw sums.

**Why it is private.** Divided by z C_t and multiplied by C, which everybody can do and undo, the releases are

    y'_t = sum_k c_k x_{t-k} / (z C_{t-k}) + w_t.

So what one record adds to a run is C u / z, where u has an entry of length at most 1 in each step that the
record is in. The rows come one after another. What the record adds to a row is fixed before that row's noise
is drawn, and its squared lengths add up to at most a bound, whatever was released before. Adaptive
composition of Gaussian mechanisms then gives one Gaussian (Denisov et al. 2022, theorem 2.1).

1. *Participations at least b steps apart*, of b bands, have no row in common. Each is one Gaussian mechanism
   of multiplier z, since a column has length 1 at most. So the run costs what as many uses of fresh noise do:
   the event of the sampling (`Sampling.event`), with its amplification where records are drawn at random.
   Given the earlier rows, whether the record is in draw s concerns the rows s to s + b - 1 alone, and is
   decided independently of all that came before (Choquette-Choo et al. 2023, theorem 1, for records that are
   drawn in every b-th step only: `CyclicPoisson`; `allocation.py` for those of `BallsInBins`).
2. *Participations closer than that*, and all of `OneStepGaussian`, share rows. What k of them, at least m
   apart, add to a whole run has a squared length of at most `squared_sensitivity` / z^2. The run is one
   Gaussian mechanism; nothing is amplified. Draws that would be amplified by themselves are refused, by
   choice and not for want of a proof: parts that overlap would throw the amplification away.

A run that ends early lacks rows. One whose noise starts afresh on the way has a strategy with some entries
of C put to zero. Neither adds to the length of what absolute values bound.

With one band, or d = 0, this is the Gaussian mechanism, bit for bit for one band.

Sources: `toeplitz.py`; Denisov et al. 2022, "Improved Differential Privacy for SGD via Optimal Private Linear
Operators on Adaptive Streams", arXiv 2202.08312; for noise of the step before that is made again,
DP-lambda-CGD, arXiv 2601.22334.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from equipoise import _validate
from equipoise.privacy._torch_side import Bounded, ReleaseStreams, keyed, private, torch
from equipoise.privacy.errors import PlanError
from equipoise.privacy.mechanisms.base import (
    Mechanism,
    NoiseOverSteps,
    Past,
    Sums,
    history_key,
    require_carried,
)
from equipoise.privacy.mechanisms.grid_gaussian import GridGaussian
from equipoise.privacy.mechanisms.toeplitz import (
    geometric_coefficients,
    geometric_prefix_error,
    inverse_coefficients,
    prefix_error,
    squared_sensitivity,
)
from equipoise.privacy.sampling import Sampling

# Steps after which noise that stays bounded is taken to have the size that it keeps. A choice: fewer miss
# inverses that grow slowly, more take longer.
_LONG = 4096
# A choice: the inverses of the coefficients that `DPMF` chooses reach 2.2 at most (of two bands).
_EXPLODES = 1e3


def _decays(coefficients: tuple[float, ...]) -> bool:
    """Whether the inverse falls to nothing: its poles lie within the unit circle.

    By the recursion of Schur and Cohn: they do if and only if every last coefficient, of polynomials of one
    degree less each, is below 1.
    """
    left = np.array(coefficients)
    while len(left) > 1:
        last = left[-1]
        if not abs(last) < 1:
            return False
        left = (left - last * left[::-1])[:-1] / (1 - last**2)
    return True


@functools.lru_cache(maxsize=64)
def _growth(coefficients: tuple[float, ...]) -> float:
    """How much longer than fresh noise that of a late step is."""
    with np.errstate(over="ignore", invalid="ignore"):
        inverse = inverse_coefficients(coefficients, _LONG)
        return float(np.nan_to_num(np.linalg.norm(inverse), nan=math.inf))


def relative_to_first(**named: Sequence[float]) -> tuple[float, ...]:
    """Coefficients over the first of them, by the name of the argument that holds them.

    Raises:
        ValueError: noise by them would grow, or they are no such numbers.

    Example:
        >>> relative_to_first(coefficients=(2.0, 1.0))
        (1.0, 0.5)
    """
    ((name, values),) = named.items()
    given = tuple(map(float, values))
    remedy = "Give coefficients that fall from the first one on, such as (1.0, 0.5, 0.375)"
    if not given or not all(map(math.isfinite, given)) or given[0] <= 0:
        raise ValueError(
            f"{name}={given!r:.80} must be finite numbers, the first above 0: its noise is that of the "
            f"release itself. {remedy}"
        )
    kept = tuple(c / given[0] for c in given)
    if not (_decays(kept) and _growth(kept) < _EXPLODES):
        raise ValueError(
            f"{name}={given!r:.80} have an inverse that grows without end, or to more than {_EXPLODES:g} "
            f"times its size, and so would the noise from step to step. {remedy}"
        )
    return kept


class CorrelatedGaussian(Mechanism):
    """What the forms share: a strategy of coefficients, and noise that is `noise_over_steps` in its scale."""

    @abstractmethod
    def first_coefficients(self, count: int) -> Sequence[float]:
        """c_0 = 1, c_1, ...: as many as `count` draws reach."""

    @abstractmethod
    def prefix_error(self, count: int) -> float:
        """Root mean squared noise of `count` prefix sums, for a multiplier and a bound of 1."""

    @property
    @abstractmethod
    def _norm(self) -> float:
        """The length of c."""

    @property
    @abstractmethod
    def _growth(self) -> float:
        """How much longer than fresh noise that of a late step is."""

    @abstractmethod
    def _instead(self, apart: int) -> str:
        """What to give if draws are only so far apart."""

    def check_sampling(self, sampling: Sampling) -> None:
        if self.reach >= sampling.min_separation and sampling.turn_rate < 1:
            raise PlanError(
                f"{self.kind} noise is not amplified by {type(sampling).__name__} with "
                f"min_separation={sampling.min_separation}: what a record adds to two draws would overlap. "
                f"Give {self._instead(sampling.min_separation)}"
            )

    def whitened_square(self, participations: int = 1, separation: int = 1, count: int = 1) -> float:
        square = squared_sensitivity(self.first_coefficients(count), participations, separation, count)
        return square / (self._norm * self.noise_multiplier) ** 2

    def standard_deviation(self, name: str, bound: float) -> float:
        """Of a release that many others came before; the first ones have less."""
        return self.noise_multiplier * bound * self._norm * self._growth

    def check_sums(self, sums: Mapping[str, Bounded]) -> None:
        super().check_sums(sums)
        for name, bounded in sums.items():
            afresh = self.noise_multiplier * bounded.add_remove * self._norm
            require_carried(f"sums[{name!r}]", bounded.value, [afresh])

    def noised(
        self, sums: Mapping[str, Bounded], streams: ReleaseStreams, over_steps: Sums | None = None
    ) -> Sums:
        out: Sums = {}
        for name, bounded in sums.items():
            scale = self.noise_multiplier * bounded.add_remove * self._norm
            if not self.memory:
                out[name] = keyed.add_normals(streams, bounded.value, scale)
                continue
            assert over_steps is not None
            noise = over_steps[name]
            out[name] = private.add_exact({key: noise[key] * scale for key in bounded.value}, bounded.value)
        return out

    def whitened(self, values: Sums, bounds: Mapping[str, float], past: Sequence[Past] = ()) -> Sums:
        out: Sums = {}
        runs = [(values, bounds), *past]
        coefficients = self.first_coefficients(len(runs))
        for name, tensors in values.items():
            out[name] = {
                key: sum(
                    (
                        earlier[name][key].double() * (c / (self.noise_multiplier * of[name] * self._norm))
                        for c, (earlier, of) in zip(coefficients, runs, strict=False)
                    ),
                    start=torch.zeros((), dtype=torch.float64, device=tensors[key].device),
                )
                for key in tensors
            }
        return out

    def on_grid(self) -> GridGaussian:
        if self.memory:
            raise PlanError(
                "hardened noise is fresh in every step, and this is correlated over steps: take one "
                "coefficient (bands=1 of dp-mf, which is dp-sgd), or leave hardened out"
            )
        return GridGaussian(self.noise_multiplier)


def _fresh(sums: Mapping[str, Bounded], streams: ReleaseStreams, name: str) -> dict[str, torch.Tensor]:
    """w of the sum of this name."""
    value = sums[name].value
    # Sorted: which numbers a tensor gets must not follow from the order in which a method names them.
    return keyed.normals(streams, {key: value[key] for key in sorted(value)}, 1.0)


@final
@dataclass(frozen=True)
class BandedGaussian(CorrelatedGaussian):
    """Noise of which a part cancels over steps, so that sums of releases have less of it.

    Args:
        coefficients: c_0, c_1, ... of the strategy, one per band; only their ratios matter, and they are kept
            with c_0 = 1. `square_root_coefficients` and `optimal_coefficients` give good ones.
        noise_multiplier: z, of one participation of a record.

    Example:
        >>> noise = BandedGaussian((2.0, 1.0), noise_multiplier=4.0)
        >>> noise.coefficients, noise.memory
        ((1.0, 0.5), 1)
        >>> round(noise.whitened_square(participations=3, separation=2, count=10), 6)  # 3 / z^2
        0.1875
    """

    coefficients: tuple[float, ...]
    noise_multiplier: float
    kind: ClassVar[str] = "banded_gaussian"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "coefficients", relative_to_first(coefficients=self.coefficients))

    def first_coefficients(self, count: int) -> Sequence[float]:
        return self.coefficients

    def prefix_error(self, count: int) -> float:
        return prefix_error(self.coefficients, count)

    @property
    def memory(self) -> int:
        return len(self.coefficients) - 1

    @property
    def _norm(self) -> float:
        return math.hypot(*self.coefficients)

    @property
    def _growth(self) -> float:
        return _growth(self.coefficients)

    def _instead(self, apart: int) -> str:
        bands = len(self.coefficients)
        return (
            f"at most {apart} coefficient{'s'[: apart > 1]}, or draws that are {bands} apart: "
            f"CyclicPoisson or BallsInBins(..., bands={bands}), or FixedEpochs(..., same_slots=True) with as "
            "many draws per epoch"
        )

    def noise_over_steps(
        self, sums: Mapping[str, Bounded], streams: ReleaseStreams, past: Sequence[NoiseOverSteps] = ()
    ) -> Sums:
        out: Sums = {}
        for name in sums if self.memory else ():
            out[name] = _fresh(sums, streams, name)
            for c, earlier in zip(self.coefficients[1:], past, strict=False):
                for key, noise in out[name].items():
                    noise.sub_(private.unwrap(earlier.noise[name][key]).to(noise.device), alpha=c)
        return out

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"coefficients": list(self.coefficients)}


@final
@dataclass(frozen=True)
class OneStepGaussian(CorrelatedGaussian):
    """Noise that takes back a share of the noise of the step before, which is made again and never kept.

    Args:
        decay: d in (0, 1), the share; `least_error_decay` gives a good one.
        noise_multiplier: z, of one participation of a record.

    Example:
        >>> noise = OneStepGaussian(0.5, noise_multiplier=2.0)
        >>> round(noise.whitened_square(participations=1, count=50), 6)  # 1 / z^2
        0.25
    """

    decay: float
    noise_multiplier: float
    kind: ClassVar[str] = "one_step_gaussian"
    memory: ClassVar[int] = 1
    reach: ClassVar[float] = math.inf
    keeps_noise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.share(decay=self.decay)

    def first_coefficients(self, count: int) -> Sequence[float]:
        return geometric_coefficients(self.decay, count).tolist()

    def prefix_error(self, count: int) -> float:
        return geometric_prefix_error(self.decay, count)

    @property
    def _norm(self) -> float:
        return (1 - self.decay**2) ** -0.5

    @property
    def _growth(self) -> float:
        return math.hypot(1.0, self.decay)

    def _instead(self, apart: int) -> str:
        return (
            "FixedEpochs(..., same_slots=True) or FullBatch, or take noise over a few steps: "
            "BandedGaussian, which is dp-mf without strategy=one_step"
        )

    def noise_over_steps(
        self, sums: Mapping[str, Bounded], streams: ReleaseStreams, past: Sequence[NoiseOverSteps] = ()
    ) -> Sums:
        out: Sums = {}
        for name in sums:
            # From the key that the ledger keeps: no other part of these streams can be made of it.
            own, *before = [history_key(streams, name), *(left.key for left in past)]
            out[name] = _fresh(sums, keyed.ReleaseStreams.under(own), name)
            for key in before:
                again = _fresh(sums, keyed.ReleaseStreams.under(key), name)
                for tensor, noise in out[name].items():
                    noise.sub_(again[tensor], alpha=self.decay)
        return out
