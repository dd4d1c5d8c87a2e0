"""DP-MF: DP-SGD with noise that is correlated over steps, so that much of it cancels in what the optimiser
adds up.

    estimate_t = (sum_i w_i g_i + z C_t n_t) / B,      n = (C / |c|)^-1 w,     w_t ~ N(0, I)

with a Toeplitz strategy C of coefficients c_0, c_1, ...: b of them (`BandedGaussian`), or 1, d, d^2, ...
(`OneStepGaussian`). A single estimate has more noise than DP-SGD's, and their sum over many steps less.

**Which draws.** Noise over b steps is proved where the draws of a record are b steps apart:

| given | planned | z as for |
|---|---|---|
| `Poisson` | `CyclicPoisson` with b groups | Poisson sampling at rate b q, every b-th step |
| `CyclicPoisson` | itself | the same |
| `BallsInBins` | itself, with b groups | epochs of as many draws as a group has |
| `FixedEpochs` | the same, where records keep their slots | one release per epoch: no sampling is assumed |
| `FullBatch` | itself; b = 1 unless given | the whole run's sensitivity, for b > 1 |
| others, and subclasses of these | themselves; b = `min_separation` unless given | DP-SGD, where that is 1 |

`OneStep` is for `FixedEpochs` and `FullBatch` alone: its noise hides all participations of a record together,
and d has the least noise for that.

**How many bands.** More bands cancel more noise and weaken the amplification. The number is the one among
powers of two, at most 64, with the least

    z(b) E(b),     E(b) = |c| (1/T sum_t |first t rows summed of C^-1|^2)^(1/2),

where z(b) meets the budget and E is the root mean squared noise of the prefix sums (`prefix_error`). Of
shuffled epochs (`BallsInBins`) it is the one nearest to this that leaves the number of epochs as it is, and
that of their draws within a tenth. Each band keeps the noise of one more step, of the size of the model;
`OneStep` keeps none.

DP-FTRL's binary tree (Kairouz et al. 2021) is no case of it. The tree's strategy has a row per node, 2 T - 1
for T steps, and which nodes a step is in depends on its number: it is neither square nor Toeplitz. It has
more error than the square root at every length (`python benchmarks/noise_over_steps.py`).

Sources: Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization", arXiv 2306.08153; Kalinin and
Lampert 2024, arXiv 2405.13763; DP-lambda-CGD, arXiv 2601.22334.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from equipoise.methods.base import Plan, Setting
from equipoise.methods.configuration import Count, Option, Share
from equipoise.methods.dp_sgd import DPSGD
from equipoise.methods.noise_stages import NoiseStages
from equipoise.privacy.errors import BudgetError, PlanError
from equipoise.privacy.mechanisms.correlated_gaussian import (
    BandedGaussian,
    CorrelatedGaussian,
    OneStepGaussian,
    relative_to_first,
)
from equipoise.privacy.mechanisms.toeplitz import (
    least_error_decay,
    optimal_coefficients,
    square_root_coefficients,
)
from equipoise.privacy.sampling import BallsInBins, CyclicPoisson, FixedEpochs, Poisson, Sampling

MOST_BANDS = 64
"""The largest number of bands that is chosen by itself: each keeps one more noise of the model's size.

A choice: more bands take memory, and may cancel more noise over steps; whoever wants more gives `bands`.
"""


MOST_ROUNDED = 0.1
"""Share by which groups may change how many draws an epoch has. A choice: the batch size changes with it."""


class NoiseStrategy(Option, ABC):
    """By what noise is correlated over steps."""

    @abstractmethod
    def noise(self, bands: int, sampling: Sampling) -> Callable[[float], CorrelatedGaussian]:
        """From a noise multiplier to the mechanism, of at most so many bands."""

    @property
    def bands(self) -> int | None:
        """How many it has; None where it is asked for any number."""
        return None


@dataclass(frozen=True)
class SquareRoot(NoiseStrategy):
    """The coefficients of the square root of the matrix of prefix sums: 1, 1/2, 3/8, ..."""

    kind: ClassVar[str] = "square_root"

    def noise(self, bands: int, sampling: Sampling) -> Callable[[float], CorrelatedGaussian]:
        return partial(BandedGaussian, square_root_coefficients(bands))


@dataclass(frozen=True)
class LeastError(NoiseStrategy):
    """The coefficients of least noise in the prefix sums of the run, found before it begins."""

    kind: ClassVar[str] = "least_error"

    def noise(self, bands: int, sampling: Sampling) -> Callable[[float], CorrelatedGaussian]:
        return partial(BandedGaussian, optimal_coefficients(bands, sampling.steps))


@dataclass(frozen=True)
class OneStep(NoiseStrategy):
    """Each step takes back a share of the noise of the step before, which is made again: no noise is kept.

    Args:
        decay: the share; the one of least noise in the prefix sums of the run when None.
    """

    kind: ClassVar[str] = "one_step"
    decay: Share | None = None

    def noise(self, bands: int, sampling: Sampling) -> Callable[[float], CorrelatedGaussian]:
        steps, apart = sampling.steps, sampling.min_separation
        found = self.decay or least_error_decay(sampling.participations(steps), apart, steps)
        return partial(OneStepGaussian, found)


@dataclass(frozen=True)
class GivenCoefficients(NoiseStrategy):
    """Numbers of your own.

    Args:
        values: c_0 > 0, c_1, ...; or the path of a JSON file that holds the list. Only ratios matter.
    """

    kind: ClassVar[str] = "given"
    values: tuple[float, ...] | str = (1.0,)

    def __post_init__(self) -> None:
        values: object = self.values
        if isinstance(values, str):
            try:
                values = json.loads(Path(values).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"values={self.values!r:.80} is no JSON file with a list of numbers ({error}); give one, "
                    "or the numbers themselves: (1.0, 0.5, 0.375), on the command line 1,0.5,0.375"
                ) from None
        if not isinstance(values, list | tuple) or not all(
            isinstance(v, int | float) and not isinstance(v, bool) for v in values
        ):
            raise ValueError(
                f"values={self.values!r:.80} is no list of numbers; give (1.0, 0.5, 0.375), on the command "
                "line 1,0.5,0.375"
            )
        # The numbers are kept and not the path: a configuration says what was used.
        object.__setattr__(self, "values", relative_to_first(values=values))

    def noise(self, bands: int, sampling: Sampling) -> Callable[[float], CorrelatedGaussian]:
        return partial(BandedGaussian, tuple(self.values))  # type: ignore[arg-type]

    @property
    def bands(self) -> int:
        return len(self.values)


@dataclass(frozen=True, kw_only=True)
class DPMF(DPSGD):
    """DP-SGD with noise correlated over steps by a banded matrix factorisation.

    Guarantee: a run is one release C x + z N(0, I) of all its sums x (`BandedGaussian`), which C^-1 maps to
    what leaves. A record moves x_t by at most C_t where it is drawn, and its draws are at least b steps
    apart, so that the columns of C that it moves are orthogonal: k draws cost k Gaussian releases of
    multiplier z. Cyclic Poisson sampling makes each one of a sample at rate b q.

    Args:
        clip_norm: as for DP-SGD.
        clip_rule: as for DP-SGD.
        per_layer: as for DP-SGD.
        noise_multiplier: z, of one participation of a record; calibrated to the budget when None.
        strategy: of the noise: `SquareRoot`, `LeastError`, `OneStep`, or `GivenCoefficients`.
        bands: b, over how many steps noise is correlated; chosen from the plan when None.

    Example:
        >>> from equipoise.privacy import Budget
        >>> setting = Setting(sampling=Poisson(512, 60_000, 2400), budget=Budget(8.0, 1e-5))
        >>> DPMF(clip_norm=1.0).plan(setting).releases.sampling_of("batch")
        CyclicPoisson(expected_batch_size=512, population=60000, steps=2400, bands=32)
    """

    strategy: NoiseStrategy = SquareRoot()
    bands: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.noise_multiplier, NoiseStages):
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier!r:.80} changes over the run, and noise over steps "
                "is proved at one scale; give a number or None, or take dp-sgd"
            )
        if isinstance(self.strategy, OneStep) and self.bands is not None:
            raise ValueError(f"bands={self.bands}: noise by OneStep() goes over all steps; leave bands out")
        own = self.strategy.bands
        if own is not None and self.bands not in (None, own):
            raise ValueError(
                f"bands={self.bands} differs from the {own} coefficients of the strategy; leave it out"
            )

    def plan(self, setting: Setting) -> Plan:
        found: list[tuple[float, Plan]] = []
        for sampling, bands in self._candidates(setting):
            noise = self.strategy.noise(bands, sampling)
            try:
                made = self.calibrated(setting, noise, sampling)
            except BudgetError:
                if found:  # more bands cost more
                    break
                raise
            z = made["gradient"].noise_multiplier
            found.append((z * noise(z).prefix_error(setting.sampling.steps), Plan(made)))
        return min(found, key=lambda pair: pair[0])[1]

    def _candidates(self, setting: Setting) -> Iterator[tuple[Sampling, int]]:
        """The draws and numbers of bands to choose from."""
        sampling, asked = setting.sampling, self.bands or self.strategy.bands
        if asked == 1:  # DP-SGD, bit for bit
            yield sampling, 1
        elif isinstance(self.strategy, OneStep):
            yield replace(sampling, same_slots=True) if type(sampling) is FixedEpochs else sampling, 1
        elif type(sampling) is Poisson:  # a subclass draws in its own way, which groups would replace
            size, population, steps = sampling.expected_batch_size, sampling.population, sampling.steps
            if asked is None and self.noise_multiplier is not None:
                raise ValueError(
                    f"noise_multiplier={self.noise_multiplier} leaves bands open, and the cost grows with "
                    "them: give bands too, or a budget in place of the multiplier"
                )
            most = min(math.floor(population / size), steps, MOST_BANDS)
            for bands in [asked] if asked else [2**k for k in range(most.bit_length())]:
                yield (CyclicPoisson(size, population, steps, bands) if bands > 1 else sampling), bands
        elif type(sampling) is BallsInBins and sampling.bands == 1:
            if asked is None:
                alike = Poisson(sampling.batch_size, sampling.population, sampling.steps)
                of_these = self.plan(replace(setting, sampling=alike, booked=None)).releases
                near = of_these.sampling_of("batch").min_separation
                asked = min(_groups_of(sampling), key=lambda bands: abs(math.log(bands / near)))
            yield replace(sampling, bands=asked), asked
        elif isinstance(sampling, CyclicPoisson | BallsInBins):
            yield sampling, asked or min(sampling.bands, sampling.steps)
        else:
            if type(sampling) is FixedEpochs:  # slots of a subclass are its own
                sampling = replace(sampling, same_slots=True)
            apart = sampling.min_separation
            if asked and asked > apart and sampling.turn_rate < 1:
                raise PlanError(
                    f"bands={asked} with {type(sampling).__name__}: noise over {asked} steps needs draws of "
                    f"a record that are {asked} apart, and these may be {apart} apart. Take Poisson or "
                    f"FixedEpochs, whose draws dp-mf sets apart, or bands={apart}"
                    + (", which is dp-sgd" if apart == 1 else "")
                )
            yield sampling, asked or min(apart, sampling.steps, MOST_BANDS)


def _groups_of(sampling: BallsInBins) -> list[int]:
    """Numbers of bands under which an epoch has about as many draws, and each group at least two.

    >>> _groups_of(BallsInBins(100, 2_000, 400))
    [1, 2, 3, 4, 5, 7, 10]
    """
    draws, epochs = sampling.draws_per_epoch, sampling.participations(sampling.steps)
    found = [1]
    for bands in range(2, min(draws // 2, sampling.steps, MOST_BANDS) + 1):
        made = replace(sampling, bands=bands)
        is_near = abs(made.draws_per_epoch - draws) <= MOST_ROUNDED * draws
        if is_near and made.participations(sampling.steps) <= epochs:
            found.append(bands)
    return found
