"""Sampling schemes: the sampler and the accounting event come from one object.

| scheme | one draw | its event with noise multiplier z |
|---|---|---|
| `Poisson` | each record, independently, with probability q | Poisson-sampled Gaussian |
| `TruncatedPoisson` | the same; of more records than a cap a uniform subset of that size | below |
| `CyclicPoisson` | as `Poisson`, at rate b q from one of b groups in turn | one of these per b draws |
| `WithoutReplacement` | a uniform subset of batch_size | Gaussian sampled without replacement |
| `FullBatch` | all records | Gaussian |
| `FixedEpochs` | each record once per epoch | one Gaussian per epoch |
| `BallsInBins` | the same, in a draw that nobody knows | one mixture of Gaussians per epoch |

`population` is a public constant that the user states. It sets q, and nothing here is computed from the
number of records that are really there.

`FixedEpochs` and `BallsInBins` assign every record independently to one of the `round(population /
batch_size)` draws of an epoch. The draw of one record does not depend on the presence of another. So a
record meets one Gaussian per epoch, under both relations, however the others are assigned. Consecutive
slices of one permutation would not have this under add-or-remove.

**Keys of records.** A scheme that assigns records to draws (`takes_turns`) assigns each one by a number that
names it for the whole run: a secret hash of what it holds, or of an id. Dealt by their positions, the
records behind one that is withdrawn while a run is interrupted would change their draws, and meet a second
Gaussian in the epoch under way. Two records that have one key share their draws: each is still in one draw
per epoch, and where amplification rests on a secret draw (`BallsInBins`) no two have one (`owners.py`). The
other schemes draw afresh every time, independently of all draws before. Each draw is accounted for by
itself, whoever is in it, so a position may belong to another record in every draw.

`CyclicPoisson` assigns every record once, independently, to one of b groups, and draws in turn from each. A
record is in at most one draw of b, there with probability b q, and whether it is decides itself
independently every time. So each round of b draws is a Poisson-sampled Gaussian for it, whatever its group.
The marginal rate of a draw is q.

`TruncatedPoisson` draws each of at most N records with probability q, and keeps a uniform subset of K where
more than K were drawn. Let s be how many of the others were drawn. Where s < K, one record more is Poisson
sampling: it adds its part with probability q. Where s >= K, couple the draws with it and without. With
probability r = q K / (s + 1) it is in the batch and a uniform one of the others is out; else the batches are
the same. So it moves the sum by its own part and another's, 2 bounds at most, with probability r < q. Whoever
knows which of the two it was sees the more, and a divergence of mixtures is convex and grows with r:

    delta <= (1 - p) delta(rate q, length 1) + p delta(rate q, length 2),    p = P[Binomial(N - 1, q) >= K]

in each direction; a replaced record's parts lie 2 bounds from nothing at most, in the place of 1. Fewer
records than N are pushed out more seldom, so the bound holds for any number up to N, which is refused above.
It is tighter under add-or-remove than the same bound with the pair of a replaced record, which dp-accounting
takes (A. Ganesh 2025, "Tighter Privacy Analysis for Truncated Poisson Sampling", arXiv:2508.15089).

**Separation.** Noise over steps asks how far apart the draws of one record are (`min_separation`). An epoch
that is assigned anew may follow a record's last slot with its first one: separation 1. With `same_slots=True`
the assignment of the first epoch holds for all, and a record's draws are one epoch apart. Either way it
meets one Gaussian per epoch, so the cost of fresh noise is the same. `BallsInBins` with b bands assigns each
record once to one of b groups, group j to the draws j, j + b, j + 2 b, ..., and in each epoch anew to one of
those of its group: a record's draws are a multiple of b apart. Whoever knows its group sees balls in bins of
t / b draws, of b steps each (`allocation.py`), and a divergence of mixtures is convex.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import dp_accounting
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from scipy import stats

from equipoise import _validate
from equipoise.privacy._torch_side import Secrets, by_author, torch, uniform
from equipoise.privacy.accounting.allocation import BallsInBinsDpEvent
from equipoise.privacy.draw import Draw
from equipoise.privacy.errors import PlanError

#: To meet epsilon 8 at rate 0.001 over 1,000 steps, users of so many need noise 21; to find it takes 30 s. A
#: choice: with a larger number the accountant takes longer, for noise that leaves nothing to learn.
MOST_SAMPLED = 1000


class Sampling(ABC):
    """What all schemes share: the public population and the number of draws (steps)."""

    population: int
    steps: int
    takes_turns: ClassVar[bool] = False
    """Whether a record is in at most one draw of each epoch of `draws_per_epoch`, from ordinal 0 on.

    Such a scheme assigns records by their keys."""
    pushes_out: ClassVar[bool] = False
    """Whether a record that is drawn may keep another one out of the draw."""
    draws_by_itself: ClassVar[bool] = True
    """Whether each record is drawn by itself: a replaced record need not be in the draw of the other."""

    def __post_init__(self) -> None:
        _validate.count("the public number of records, which the user states", population=self.population)
        _validate.count("the number of draws", steps=self.steps)

    def _check_size(self, name: str) -> None:
        """The size of a draw is at most the population: beyond, a rate would be above 1."""
        if getattr(self, name) > self.population:
            raise ValueError(
                f"{name}={getattr(self, name)} exceeds population={self.population}: the sampling rate would "
                f"be above 1; lower {name} or use FullBatch"
            )

    @property
    @abstractmethod
    def expected_size(self) -> float:
        """Expected number of records in a draw: the public divisor of noised sums."""

    @property
    def sampling_rate(self) -> float:
        """Probability that a given record enters a given draw."""
        return self.expected_size / self.population

    @property
    def size_deviation(self) -> float:
        """Standard deviation of the number of records in a draw, which is binomial."""
        return math.sqrt(self.expected_size * max(0.0, 1 - self.sampling_rate))

    @property
    def largest_size(self) -> int:
        """A number of records that a draw of the population exceeds with a probability below 1e-15.

        By the Chernoff bound: n independent trials of rate q succeed a times or more with probability at
        most exp(-n KL(a/n | q)).
        """
        if self.size_deviation == 0:
            return math.ceil(self.expected_size)
        rate, low, high = self.sampling_rate, math.floor(self.expected_size), self.population
        while low + 1 < high:
            middle = (low + high) // 2
            share = middle / self.population
            divergence = share * math.log(share / rate) + (1 - share) * math.log((1 - share) / (1 - rate))
            if self.population * divergence < -math.log(1e-15):
                low = middle
            else:
                high = middle
        return high

    @cached_property
    def capacity(self) -> int:
        """Records that a draw may hold, and its sums have room for (`whole_sums`).

        Four times the largest draw: a population that is stated too small is a warning, not an error.
        """
        return max(1 << 16, 4 * self.largest_size)

    @property
    def min_separation(self) -> int:
        """How many draws lie at least from one draw with a record to the next with the same; 1 for any."""
        return 1

    @property
    def draws_per_epoch(self) -> int:
        """Of how many draws a record is in one at most; 1 where it may be in any."""
        return 1

    @property
    def turn_rate(self) -> float:
        """Probability that a record enters a draw of its turn."""
        return self.sampling_rate

    def participations(self, count: int) -> int:
        """In how many of the draws of ordinal 0 to `count` - 1 one record is at most."""
        return math.ceil(count / self.draws_per_epoch)

    def event(self, noise_multiplier: float, count: int = 1, group: int = 1) -> dp_accounting.DpEvent:
        """The event of the draws of ordinal 0 to `count` - 1 whose sums get noise of this multiplier.

        Args:
            noise_multiplier: relative to what one record moves.
            count: how many draws.
            group: how many records a unit of privacy owns, each drawn by itself (`Unit.group`).

        Raises:
            PlanError: no event covers a group of several records under this scheme.
        """
        gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
        # At rate 1 nothing is left to chance, and a plain Gaussian has a closed form.
        if self.turn_rate < 1:
            one = self._sampled(gaussian) if group == 1 else self._of_group(noise_multiplier, group)
        else:
            # Of an epoch that assigns records to slots: the squares of the parts add up to the group's at
            # most.
            one = dp_accounting.GaussianDpEvent(noise_multiplier / group)
        return dp_accounting.SelfComposedDpEvent(one, self.participations(count))

    def _sampled(self, gaussian: dp_accounting.GaussianDpEvent) -> dp_accounting.DpEvent:
        """The event of one draw at a rate below 1; as it stands, of a draw that amplifies nothing."""
        return gaussian

    def _of_group(self, noise_multiplier: float, group: int) -> dp_accounting.DpEvent:
        """The event of one draw at a rate below 1 for so many records together."""
        raise PlanError(
            f"records_per_user={group}: no accountant covers users of several records under "
            f"{type(self).__name__}, which does not draw each record by itself afresh. Draw users "
            "(rows='mean'; population and batch size then count users), or take Poisson, FullBatch or "
            "FixedEpochs"
        )

    @abstractmethod
    def sample(self, secrets: Secrets, draw: Draw | int, records: int | torch.Tensor) -> torch.Tensor:
        """Sorted positions of the records of the draw, int64, shape [size of the draw].

        Args:
            secrets: the run's.
            draw: the ledger's, or an index, which then is its ordinal, too.
            records: how many there are. If the scheme assigns them (`takes_turns`), one int64 for each, [n],
                that names it for the whole run; of a number alone, the names are the positions.
        """

    @classmethod
    def of_size(cls, batch_size: float, population: int, steps: int) -> Sampling:
        """The scheme with this expected number of records per draw; a scheme without one leaves it out."""
        given = {"expected_batch_size": batch_size, "batch_size": batch_size}
        if float(batch_size).is_integer():
            given["batch_size"] = int(batch_size)
        # Each scheme takes what it knows: an expected size, a whole size, or none.
        names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        sizes = {name: size for name, size in given.items() if name in names}
        return cls(population=population, steps=steps, **sizes)  # type: ignore[call-arg]

    def describe(self) -> dict[str, Any]:
        """Name and arguments, for fingerprints and statements."""
        arguments = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {"scheme": type(self).__name__, **arguments}


def as_draw(draw: Draw | int) -> Draw:
    """`draw` itself, or the draw named "batch" with this index and ordinal."""
    return draw if isinstance(draw, Draw) else Draw("batch", draw, draw)


def _check_records(records: int | torch.Tensor) -> int:
    """How many there are."""
    if isinstance(records, torch.Tensor):
        return len(records)
    if not isinstance(records, int) or records < 0:
        raise ValueError(f"records must be a non-negative integer, or one for each, got {records!r}")
    return records


def _drawn_by_themselves(rate: float, generator: torch.Generator, count: int) -> torch.Tensor:
    """Which of `count` records are drawn if each is by itself with probability `rate`, sorted.

    From one record that is drawn to the next the records left out are counted: floor(log(U) / log(1 - q))
    with U uniform in (0, 1], of 53 bits, which has the law of independent trials. Further records behind
    those that are there change nothing for them.
    """
    if rate == 1:
        return torch.arange(count)
    parts, last = list[torch.Tensor](), -1
    while last < count - 1:
        # Always as many at a time: not even that follows how many records there are.
        numbers = 1 - torch.rand(_AT_ONCE, generator=generator, dtype=torch.float64)
        left_out = (numbers.log() / math.log1p(-rate)).clamp(max=2.0**52).to(torch.int64)
        parts.append(last + (left_out + 1).cumsum(0))
        last = int(parts[-1][-1])
    drawn = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
    return drawn[drawn < count]


def _one_of(**given: float | None) -> float:
    """The one that was given.

    Raises:
        TypeError: none or several were.
    """
    found = [value for value in given.values() if value is not None]
    if len(found) != 1:
        said = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise TypeError(f"give one of {' and '.join(given)}, got {said}")
    return found[0]


# Gaps between records that are drawn. A choice by time: the numbers are the same in pieces of any size.
_AT_ONCE = 1024

#: Below, the 53 bits that a gap follows would change a record's chance by more than 1e-5 of itself.
_LEAST_RATE = 1e-11


class _ByRate(Sampling):
    """Schemes that draw each record by itself, with the probability that an expected size gives."""

    expected_batch_size: float

    def __post_init__(self) -> None:
        _validate.positive(expected_batch_size=self.expected_batch_size)
        super().__post_init__()
        self._check_size("expected_batch_size")
        if self.sampling_rate < _LEAST_RATE:
            raise ValueError(
                f"expected_batch_size={self.expected_batch_size} of population={self.population} is a "
                f"sampling rate of {self.sampling_rate:.1e}, and records are drawn exactly from "
                f"{_LEAST_RATE:.0e} on only; raise expected_batch_size, or state the true population"
            )

    @property
    def expected_size(self) -> float:
        return float(self.expected_batch_size)

    def _drawn(self, secrets: Secrets, draw: Draw, rate: float, count: int) -> torch.Tensor:
        return _drawn_by_themselves(rate, secrets.sampling_generator(draw.index, draw.parameters), count)


@dataclass(frozen=True, init=False)
class Poisson(_ByRate):
    """Poisson sampling: every record enters a draw independently with probability q.

    Args:
        expected_batch_size: expected records per draw, in (0, population]; `batch_size` is the same.
        population: public number of records; q = expected_batch_size / population.
        steps: number of draws.
        epochs: in place of steps, how often a record is drawn on average: the fewest steps that reach it.

    Example:
        >>> Poisson(expected_batch_size=256, population=60_000, steps=4700).sampling_rate
        0.004266666666666667
        >>> Poisson(batch_size=256, population=60_000, epochs=20)
        Poisson(expected_batch_size=256, population=60000, steps=4688)
    """

    expected_batch_size: float
    population: int
    steps: int

    def __init__(
        self,
        expected_batch_size: float | None = None,
        population: int | None = None,
        steps: int | None = None,
        *,
        batch_size: float | None = None,
        epochs: float | None = None,
    ) -> None:
        size = _one_of(expected_batch_size=expected_batch_size, batch_size=batch_size)
        _validate.positive(**{"expected_batch_size" if batch_size is None else "batch_size": size})
        _validate.count("the public number of records, which the user states", population=population)
        assert population is not None
        _one_of(steps=steps, epochs=epochs)
        if epochs is not None:
            _validate.positive(epochs=epochs)
            # What rounding adds to a whole number of steps must not make one step more.
            steps = max(1, math.ceil(min(epochs * population / size, 2.0**62) - 1e-9))
        for name, value in (("expected_batch_size", size), ("population", population), ("steps", steps)):
            object.__setattr__(self, name, value)
        self.__post_init__()

    def _sampled(self, gaussian: dp_accounting.GaussianDpEvent) -> dp_accounting.DpEvent:
        return dp_accounting.PoissonSampledDpEvent(self.sampling_rate, gaussian)

    def _of_group(self, noise_multiplier: float, group: int) -> dp_accounting.DpEvent:
        if group > MOST_SAMPLED:
            raise PlanError(
                f"records_per_user={group} with sampled records: users of at most {MOST_SAMPLED:,} are "
                "accounted for. Beyond, the noise that they need leaves nothing to learn. State a smaller "
                "cap, or draw users (rows='mean'; population and batch size then count users)"
            )
        drawn = stats.binom.pmf(range(group + 1), group, self.sampling_rate)
        lengths = tuple(map(float, range(group + 1)))
        return MixtureOfGaussiansDpEvent(noise_multiplier, lengths, tuple(map(float, drawn)))

    def sample(self, secrets: Secrets, draw: Draw | int, records: int | torch.Tensor) -> torch.Tensor:
        """Sorted positions, in time and memory that follow the draw and not the population."""
        return self._drawn(secrets, as_draw(draw), self.sampling_rate, _check_records(records))


@dataclass(frozen=True)
class TruncatedPoisson(_ByRate):
    """Poisson sampling with a cap: of more records than that a uniform subset is taken.

    No draw is larger than `max_batch_size`, which bounds memory and time of a step. Where the cap is seldom
    reached it costs next to nothing. Near the expected size it costs much: a record then pushes others out.

    Args:
        expected_batch_size: expected records per draw before the cap, in (0, max_batch_size]; the divisor.
        population: public number of records, which the data must not exceed.
        steps: number of draws.
        max_batch_size: the cap, at most the population; six standard deviations above the expected size when
            None.

    Example:
        >>> sampling = TruncatedPoisson(256, population=60_000, steps=4700)
        >>> sampling.max_batch_size, TruncatedPoisson(256, 60_000, 4700, 300).largest_size
        (352, 300)
    """

    expected_batch_size: float
    population: int
    steps: int
    max_batch_size: int | None = None
    pushes_out: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_batch_size is None:
            far = math.ceil(self.expected_batch_size + 6 * self.size_deviation)
            object.__setattr__(self, "max_batch_size", min(self.population, far))
        _validate.count("the most records of a draw", max_batch_size=self.max_batch_size)
        self._check_size("max_batch_size")
        if self.largest_size < self.expected_batch_size:
            raise ValueError(
                f"max_batch_size={self.max_batch_size} is below expected_batch_size="
                f"{self.expected_batch_size}, so that most draws would be cut; raise it, or lower "
                "expected_batch_size"
            )

    @property
    def largest_size(self) -> int:
        """The cap."""
        assert self.max_batch_size is not None
        return self.max_batch_size

    def _sampled(self, gaussian: dp_accounting.GaussianDpEvent) -> dp_accounting.DpEvent:
        return dp_accounting.TruncatedSubsampledGaussianDpEvent(
            self.population, self.sampling_rate, self.largest_size, gaussian.noise_multiplier
        )

    def sample(self, secrets: Secrets, draw: Draw | int, records: int | torch.Tensor) -> torch.Tensor:
        """Sorted positions, in time and memory that follow the draw and not the population.

        Raises:
            ValueError: there are more records than the population.
        """
        count = _check_records(records)
        if count > self.population:
            raise ValueError(
                f"records={count} exceeds population={self.population}: how often a record pushes "
                "another one out is accounted for at most that many; state a population that covers the "
                "records, or use Poisson"
            )
        draw = as_draw(draw)
        generator = secrets.sampling_generator(draw.index, draw.parameters)
        found = _drawn_by_themselves(self.sampling_rate, generator, count)
        if len(found) <= self.largest_size:
            return found
        return found[uniform.uniform_subset(len(found), self.largest_size, generator)]


@dataclass(frozen=True)
class CyclicPoisson(_ByRate):
    """Poisson sampling from one group of records after the other, assigned once and for all by secret
    randomness.

    Two draws of a record are at least `bands` apart, so that noise over as many steps is amplified by
    sampling. It costs more than Poisson sampling with fresh noise: a record that has its turn is drawn
    `bands` times as often.

    Args:
        expected_batch_size: expected records per draw, in (0, population / bands].
        population: public number of records; q = expected_batch_size / population.
        steps: number of draws.
        bands: number of groups; 1 is Poisson sampling.

    Example:
        >>> sampling = CyclicPoisson(256, population=60_000, steps=4700, bands=10)
        >>> sampling.min_separation, sampling.turn_rate, sampling.event(1.0, 4700).count
        (10, 0.042666666666666665, 470)
    """

    expected_batch_size: float
    population: int
    steps: int
    bands: int
    takes_turns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _validate.count("the number of groups", bands=self.bands)
        super().__post_init__()
        if self.turn_rate > 1:
            raise ValueError(
                f"expected_batch_size={self.expected_batch_size} is more than a group of "
                f"population={self.population} in bands={self.bands} holds; lower bands to at most "
                f"{int(self.population / self.expected_batch_size)}"
            )

    @property
    def min_separation(self) -> int:
        return self.bands

    @property
    def draws_per_epoch(self) -> int:
        return self.bands

    @property
    def turn_rate(self) -> float:
        rate = self.bands * self.expected_batch_size / self.population
        return 1.0 if abs(rate - 1) < 1e-12 else rate  # a group that the draw takes whole

    def _sampled(self, gaussian: dp_accounting.GaussianDpEvent) -> dp_accounting.DpEvent:
        return dp_accounting.PoissonSampledDpEvent(self.turn_rate, gaussian)

    def sample(self, secrets: Secrets, draw: Draw | int, records: int | torch.Tensor) -> torch.Tensor:
        """Sorted positions, in time and memory that follow `bands` times the draw, and not the population."""
        draw = as_draw(draw)
        found = self._drawn(secrets, draw, self.turn_rate, _check_records(records))
        # Of those drawn from all groups, that of the turn. One assignment for all draws: keyed by the draw,
        # two that are close could hold the same record.
        keys = records[found] if isinstance(records, torch.Tensor) else found
        assigned = uniform.keyed_integers(self.bands, keys, secrets.stream_key(0, f"groups {draw.name}"))
        return found[assigned == draw.ordinal % self.bands]


@dataclass(frozen=True)
class WithoutReplacement(Sampling):
    """A uniform subset of a fixed size, drawn afresh every time. Only valid under replace-one.

    Args:
        batch_size: records per draw, in [1, population].
        population: the number of records; under replace-one it is public and equals the number present.
        steps: number of draws.
    """

    batch_size: int
    population: int
    steps: int
    draws_by_itself: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _validate.count("the number of records per draw", batch_size=self.batch_size)
        super().__post_init__()
        self._check_size("batch_size")

    @property
    def expected_size(self) -> float:
        return float(self.batch_size)

    @property
    def size_deviation(self) -> float:
        return 0.0

    def _sampled(self, gaussian: dp_accounting.GaussianDpEvent) -> dp_accounting.DpEvent:
        return dp_accounting.SampledWithoutReplacementDpEvent(self.population, self.batch_size, gaussian)

    def sample(self, secrets: Secrets, draw: Draw | int, records: int | torch.Tensor) -> torch.Tensor:
        """Sorted positions of a uniform subset, in time and memory that follow the draw.

        Raises:
            ValueError: if the number of records is not the public population.
        """
        # The amplification rests on the true number of records, so a rounded population would not do here.
        count = _check_records(records)
        if count != self.population:
            raise ValueError(
                f"records={count} differs from population={self.population}: sampling without "
                "replacement is accounted under replace-one, where the number of records is public; state "
                "the true population, or use Poisson"
            )
        draw = as_draw(draw)
        generator = secrets.sampling_generator(draw.index, draw.parameters)
        return uniform.uniform_subset(count, self.batch_size, generator)


@dataclass(frozen=True)
class FullBatch(Sampling):
    """All records in every draw.

    Args:
        population: public number of records, the divisor of the sums.
        steps: number of draws.
    """

    population: int
    steps: int

    @property
    def expected_size(self) -> float:
        return float(self.population)

    def sample(self, secrets: Secrets, draw: Draw | int, records: int | torch.Tensor) -> torch.Tensor:
        return torch.arange(_check_records(records))


_DEALT_AT_ONCE = 2**20
"""Records that `FixedEpochs` assigns together: a choice that bounds its memory, and changes no draw."""


@dataclass(frozen=True)
class _Epochs(Sampling):
    """Epochs in which every record is used once, in a slot that a secret hash of its name gives it."""

    batch_size: int
    population: int
    steps: int
    same_slots = False
    bands = 1
    takes_turns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _validate.count("the expected number of records per draw", batch_size=self.batch_size)
        super().__post_init__()
        self._check_size("batch_size")

    @property
    def draws_per_epoch(self) -> int:
        """Number of draws that together use every record once, and of which a record is in one."""
        return self.bands * max(1, round(self.population / self.batch_size / self.bands))

    @property
    def min_separation(self) -> int:
        """The draws of an epoch where records keep their slots; else `bands`."""
        return self.draws_per_epoch if self.same_slots else self.bands

    @property
    def sampling_rate(self) -> float:
        """Share of the records in a draw."""
        return 1 / self.draws_per_epoch

    @property
    def turn_rate(self) -> float:
        return 1.0

    @property
    def expected_size(self) -> float:
        return self.population / self.draws_per_epoch

    def sample(self, secrets: Secrets, draw: Draw | int, records: int | torch.Tensor) -> torch.Tensor:
        """Sorted positions of the records assigned to slot `ordinal % draws_per_epoch` of the draw's epoch.

        Every record is assigned for every draw: the time follows the population, the memory does not.
        """
        draw, count = as_draw(draw), _check_records(records)
        epoch, slot = divmod(draw.ordinal, self.draws_per_epoch)
        # One assignment for all slots of an epoch: keyed by the draw, two of them could hold the same record.
        key = secrets.stream_key(0 if self.same_slots else epoch, f"epoch {draw.name}")
        found = [torch.empty(0, dtype=torch.int64)]
        for first in range(0, count, _DEALT_AT_ONCE):
            last = min(first + _DEALT_AT_ONCE, count)
            keys = records[first:last] if isinstance(records, torch.Tensor) else torch.arange(first, last)
            assigned = uniform.keyed_integers(self.draws_per_epoch // self.bands, keys, key)
            if self.bands > 1:
                groups = secrets.stream_key(0, f"groups {draw.name}")
                assigned = assigned * self.bands + uniform.keyed_integers(self.bands, keys, groups)
            found.append((assigned == slot).nonzero().flatten() + first)
        return torch.cat(found)


@dataclass(frozen=True)
class FixedEpochs(_Epochs):
    """Epochs in which every record is used once, without privacy amplification: their order may be known.

    For data that come in an order that is no fresh random sample. It costs more than `BallsInBins`.

    Args:
        batch_size: expected records per draw, in (0, population].
        population: public number of records.
        steps: number of draws.
        same_slots: assign the records once, so that every epoch has the same slots. The cost is the same; two
            draws of a record are then `draws_per_epoch` apart, which noise over steps may need.
    """

    same_slots: bool = False


@dataclass(frozen=True)
class BallsInBins(_Epochs):
    """Epochs in which every record is used once, in a draw that is secret and drawn anew in each epoch.

    What shuffled epochs are to other libraries, with batches of random size and a proof (`allocation.py`). An
    epoch costs somewhat less than as many steps of Poisson sampling, and leaves no record out. Only under
    "add_or_remove_one"; users of several records are refused.

    Args:
        batch_size: expected records per draw, in (0, population].
        population: public number of records.
        steps: number of draws.
        bands: over how many steps noise may go (`DPMF` sets it): records are in as many groups, which take
            turns, and are drawn anew within theirs. An epoch has a multiple of it as its number of draws.

    Example:
        >>> sampling = BallsInBins(batch_size=600, population=60_000, steps=1_000)
        >>> sampling.draws_per_epoch, sampling.event(0.8, 1_000).count
        (100, 10)
    """

    bands: int = 1

    def __post_init__(self) -> None:
        _validate.count("the number of groups", bands=self.bands)
        super().__post_init__()
        if self.bands * self.batch_size > self.population:
            raise ValueError(
                f"batch_size={self.batch_size} is more than a group of population={self.population} in "
                f"bands={self.bands} holds; lower bands to at most {self.population // self.batch_size}"
            )

    @property
    def turn_rate(self) -> float:
        return self.bands / self.draws_per_epoch

    def event(self, noise_multiplier: float, count: int = 1, group: int = 1) -> dp_accounting.DpEvent:
        if group > 1 or self.turn_rate == 1:
            return super().event(noise_multiplier, count, group)
        one = BallsInBinsDpEvent(self.draws_per_epoch // self.bands, noise_multiplier)
        return dp_accounting.SelfComposedDpEvent(one, self.participations(count))


SAMPLINGS: dict[str, type[Sampling]] = {
    c.__name__: c
    for c in (
        Poisson, TruncatedPoisson, CyclicPoisson, BallsInBins, WithoutReplacement, FullBatch, FixedEpochs,
    )
}  # fmt: skip
"""Every scheme by its name. A new one is its class and a word here; options and readers follow."""


SAMPLING_WORDS: dict[str, type[Sampling]] = {
    re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower(): kind
    for name, kind in SAMPLINGS.items()
    if kind is not CyclicPoisson  # it needs a number of groups, which the methods that take it find
}
"""Every scheme that a size describes, by its word on the command line: `FullBatch` is full-batch."""


def sampling_from(description: Mapping[str, Any]) -> Sampling:
    """The scheme that `Sampling.describe` wrote."""
    arguments = dict(description)
    scheme = arguments.pop("scheme")
    if scheme == "own":
        return by_author.OwnSampling.described(arguments)
    if scheme not in SAMPLINGS:
        raise ValueError(f"scheme={scheme!r} is no sampling; give one of {', '.join(SAMPLINGS)}")
    return SAMPLINGS[scheme](**arguments)
