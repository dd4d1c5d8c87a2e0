"""Noise that is correlated over steps: the Gaussian mechanism of a banded Toeplitz strategy.

With the strategy C (lower triangular, C[t, s] = c_{t-s}, b bands, columns of length at most 1) the release of
step t is

    y_t = x_t + z C_t n_t,     n = C^-1 w,     w_0, w_1, ... independent and standard,

for sums x_t of bound C_t. The recursion n_t = w_t - sum_{0<k<b} c_k n_{t-k} (for c_0 = 1, and times the
norm of c at the end) needs the b - 1 noises before. They are private state, and tell as much as the raw sums.

**Why it is private.** Divided by z C_t and multiplied by C, which everybody can do and undo, the releases are

    y'_t = sum_k c_k x_{t-k} / (z C_{t-k}) + w_t.

So one record of a participation in step s adds to the rows s to s + b - 1 alone, a vector of length at most
1 / z in all (x_s / C_s has length 1 at most, the column of C has length 1). The rows come one after another.
What the record adds to a row is fixed before that row's noise is drawn, and its squared lengths add up to
the bound, whatever was released before. Adaptive composition of Gaussian mechanisms then gives one Gaussian
(Denisov et al. 2022, theorem 2.1).

1. *Participations at least b steps apart* have no row in common. Each is one Gaussian mechanism of
   multiplier z. So the run costs what as many uses of fresh noise do: the event of the sampling
   (`Sampling.event`), with its amplification where records are drawn at random. Given the earlier rows,
   whether the record is in draw s concerns the rows s to s + b - 1 alone, and is decided independently of
   all that came before (Choquette-Choo et al. 2023, theorem 1, for records that are drawn in every b-th step
   only: `CyclicPoisson`).
2. *Participations closer than that* share rows. What k of them, at least m apart, add to a whole run has a
   squared length of at most `squared_sensitivity` / z^2. The run is one Gaussian mechanism; nothing is
   amplified. Draws that would be amplified by themselves are refused, by choice and not for want of a proof:
   more bands than they are apart would throw the amplification away.

A run that ends early lacks rows. One whose noise starts afresh on the way has a strategy with some entries
of C put to zero. Neither adds to the length of what absolute values bound.

With one band this is the Gaussian mechanism, bit for bit.

Sources: `toeplitz.py`; Denisov et al. 2022, "Improved Differential Privacy for SGD via Optimal Private Linear
Operators on Adaptive Streams", arXiv 2202.08312.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np

from equipoise._lazy import later
from equipoise.privacy.errors import PlanError
from equipoise.privacy.mechanisms.base import Mechanism, Past, Sums, require_carried
from equipoise.privacy.mechanisms.grid_gaussian import GridGaussian
from equipoise.privacy.mechanisms.toeplitz import inverse_coefficients, squared_sensitivity
from equipoise.privacy.sampling import Sampling

if TYPE_CHECKING:
    import torch

    from equipoise.privacy import private
    from equipoise.privacy.bounds.bounded import Bounded
    from equipoise.privacy.noise import streams as keyed
    from equipoise.privacy.noise.streams import ReleaseStreams
else:
    torch, private = later("torch"), later("equipoise.privacy.private")
    keyed = later("equipoise.privacy.noise.streams")

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


@final
@dataclass(frozen=True)
class BandedGaussian(Mechanism):
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

    @property
    def memory(self) -> int:
        return len(self.coefficients) - 1

    @property
    def _norm(self) -> float:
        return math.hypot(*self.coefficients)

    def check_sampling(self, sampling: Sampling) -> None:
        bands, apart = len(self.coefficients), sampling.min_separation
        if bands > apart and sampling.turn_rate < 1:
            raise PlanError(
                f"{self.kind} noise over {bands} steps is not amplified by {type(sampling).__name__} with "
                f"min_separation={apart}: what a record adds to two draws would overlap. Give at most "
                f"{apart} coefficient{'s'[: apart > 1]}, or draws that are {bands} apart: CyclicPoisson(..., "
                f"bands={bands}), or FixedEpochs(..., same_slots=True) with as many draws per epoch"
            )

    def whitened_square(self, participations: int = 1, separation: int = 1, count: int = 1) -> float:
        square = squared_sensitivity(self.coefficients, participations, separation, count)
        return square / (self._norm * self.noise_multiplier) ** 2

    def standard_deviation(self, name: str, bound: float) -> float:
        """Of a release that many others came before; the first ones have less."""
        return self.noise_multiplier * bound * self._norm * _growth(self.coefficients)

    def check_sums(self, sums: Mapping[str, Bounded]) -> None:
        super().check_sums(sums)
        for name, bounded in sums.items():
            afresh = self.noise_multiplier * bounded.add_remove * self._norm
            require_carried(f"sums[{name!r}]", bounded.value, [afresh])

    def noise_over_steps(
        self, sums: Mapping[str, Bounded], streams: ReleaseStreams, past: Sequence[Sums] = ()
    ) -> Sums:
        if not self.memory:
            return {}
        out: Sums = {}
        for name, bounded in sums.items():
            # Sorted: which numbers a tensor gets must not follow from the order in which a method names them.
            like = {key: bounded.value[key] for key in sorted(bounded.value)}
            out[name] = keyed.normals(streams, like, 1.0)
            for c, earlier in zip(self.coefficients[1:], past, strict=False):
                for key, noise in out[name].items():
                    noise.sub_(private.unwrap(earlier[name][key]).to(noise.device), alpha=c)
        return out

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
        for name, tensors in values.items():
            runs = [(values, bounds), *past]
            out[name] = {
                key: sum(
                    (
                        earlier[name][key].double() * (c / (self.noise_multiplier * of[name] * self._norm))
                        for c, (earlier, of) in zip(self.coefficients, runs, strict=False)
                    ),
                    start=torch.zeros((), dtype=torch.float64, device=tensors[key].device),
                )
                for key in tensors
            }
        return out

    def on_grid(self) -> GridGaussian:
        if self.memory:
            raise PlanError(
                "hardened noise is fresh in every step, and this is correlated over "
                f"{len(self.coefficients)}: take one coefficient (bands=1 of dp-mf, which is dp-sgd), or "
                "leave hardened out"
            )
        return GridGaussian(self.noise_multiplier)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"coefficients": list(self.coefficients)}
