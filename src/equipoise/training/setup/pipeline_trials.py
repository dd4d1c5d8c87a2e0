"""Trials of reading, collating and augmenting, on a few records: each record must come out by itself."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from equipoise.gradients.capture.random_numbers import (
    RandomUse,
    random_numbers_from,
    ranges_asked,
    use_of_random_numbers,
)
from equipoise.gradients.capture.recorder import CallTrace
from equipoise.gradients.compare import OWN_GENERATOR, AwayFromZero, TracedLosses
from equipoise.gradients.engine_inputs import record_leaves, signature
from equipoise.training.forwards import BatchPreparation
from equipoise.training.randomness import public_randomness
from equipoise.training.record_source import DataError, RecordSource, data_sets
from equipoise.training.setup.loss_trials import SEARCHED

__all__ = ["Pipeline", "check_history", "check_items", "check_pipeline"]


@dataclass(frozen=True)
class Pipeline:
    """From the numbers of records to their losses, under numbered randomness.

    Attributes:
        trials: their losses.
        source: reads each item under random numbers of its own, and collates.
        prepare: brings batches to the device and augments them.
        seed: public, of all random numbers.
        agree: what processes that share a model take for true, where this one found something.
    """

    trials: AwayFromZero
    source: RecordSource
    prepare: BatchPreparation
    seed: int
    agree: Callable[[bool], bool] = bool

    def batch(self, ids: Tensor, items: int = 0, rest: int = 0) -> Any:
        """The batch of these records: the `items`-th random numbers for each, the `rest`-th for the batch.

        Args:
            ids: the records' numbers.
            items, rest: which random numbers.
        """
        randomness = public_randomness(self.seed, "example", rest)
        with random_numbers_from(randomness("records"), self.prepare.device):
            batch = self.source.take(ids, public_randomness(self.seed, "example", items))
            return self.prepare(batch, randomness)

    def losses(self, ids: Tensor, items: int = 0, rest: int = 0) -> TracedLosses | None:
        """Their losses; None where one cannot be made or run: it has weight zero in the training too."""
        try:
            return TracedLosses.of(self.trials.losses, self.batch(ids, items, rest))
        except Exception:
            return None

    def random_use(self, ids: Tensor) -> RandomUse:
        """Whose random numbers collate, augmentation, model and loss take, as seen on a few records."""
        few, many = 3, 8
        randomness = public_randomness(self.seed, "example")
        # Beforehand: each item has random numbers of its own.
        read = {n: self.source.read(ids[torch.arange(n) % len(ids)], randomness) for n in (few, many)}

        def run(count: int, weights: Tensor) -> tuple[Tensor, list[Tensor]]:
            return self.trials.gradient(self.prepare(self.source.join(read[count]), randomness), weights)

        try:
            found = use_of_random_numbers(run, few, many, self.prepare.device)
            # Numbers that nobody saw may be those of a whole forward.
            batch = self.prepare(self.source.join(read[few]), randomness)
            usual, other = (self.trials.losses(batch, seed, dropout=True) for seed in (0, 1))
            unseen = found == "none" and not torch.equal(usual, other)
        except Exception:  # not understood; places that stay the same are right for all models
            return "shared"
        return "shared" if unseen else found

    @cached_property
    def shapes(self) -> dict[int, tuple]:
        """Shapes of the batches of one, by the number of the record; of tensors none, which have one shape.

        They are records from all over the data, as many as can be made in a moment.
        """
        return {} if self.source.is_scanned else dict(self._shapes())

    def _shapes(self) -> Iterator[tuple[int, tuple]]:
        numbers, is_over = self.source.spread(MOST_READS).tolist(), self.time_limit()
        random.Random(0).shuffle(numbers)
        for number in numbers:
            try:
                yield number, signature(self.batch(torch.tensor([number])))
            except Exception:  # such a record has weight zero in the training too
                continue
            if is_over():
                return

    @property
    def shapes_follow(self) -> bool:
        """Whether the shape of a batch follows the records in it."""
        return len({*self.shapes.values()}) > 1

    def readable(self, most: int = 9) -> list[int]:
        """Numbers of some records that have losses, from all over the data.

        Where shapes follow the records, the smallest is the first of them, and the largest the last but one.
        """
        # Between the probes, which the pipeline has met: a later check needs one that it has not.
        spread = self.source.spread(most + 2).tolist()[1:-1]
        numbers = dict.fromkeys([*spread, *range(min(SEARCHED, len(self.source)))])
        found = list(itertools.islice(filter(self._is_readable, numbers), most))
        if len(found) < 3 or not self.shapes_follow:
            return found
        by_size = sorted(self.shapes, key=lambda number: _size(self.shapes[number]))
        first = next(filter(self._is_readable, by_size[:SEARCHED]), found[0])
        last = next(filter(self._is_readable, by_size[: -SEARCHED - 1 : -1]), found[-1])
        *between, spare = [n for n in found if n not in (first, last)][: most - 2]
        return [first, *between, last, spare]

    def smallest(self, most: int = 21) -> list[int]:
        """Numbers of the smallest records that have losses; none where all have one size."""
        if not self.shapes_follow:
            return []
        by_size = sorted(self.shapes, key=lambda number: _size(self.shapes[number]))
        return [*itertools.islice(filter(self._is_readable, by_size[:SEARCHED]), most)]

    def _is_readable(self, number: int) -> bool:
        return self.losses(torch.tensor([number])) is not None

    def time_limit(self) -> Callable[[], bool]:
        """Whether the time is over: of the processor, so that a busy machine tries as much as an idle one."""
        worked, waited = time.thread_time() + WORK, time.monotonic() + WAIT
        return lambda: self.agree(time.thread_time() > worked or time.monotonic() > waited)

    def row(self, ids: Tensor, count: int = 1) -> TracedRow | None:
        """The sum of the first records' gradient rows next to the others; None where it cannot be made."""
        try:
            batch = self.batch(ids)
            with CallTrace(sees_through=False) as trace:
                row = self.trials.row(batch, count)
        except Exception:
            return None
        return TracedRow(row, trace.low_precision)


def _size(shapes: tuple) -> int:
    """How many numbers a batch of one in these shapes holds."""
    return sum(shape.numel() for _, shape in shapes)


#: What a row rounds by in a batch of another shape, relative to its norm; on GPUs, which may multiply in
#: TF32; and in half precision.
RESHAPED_ROWS_ROUND = {torch.float64: 1e-9, torch.float32: 1e-4}
TF32_ROWS_ROUND, HALF_ROWS_ROUND = 1e-3, 3e-2


@dataclass(frozen=True)
class TracedRow:
    """The gradient row of a record, by parameter, and whether it came of half precision."""

    parts: Sequence[Tensor]
    low_precision: bool

    def rounding(self) -> float:
        """What it rounds by, relative to its norm."""
        if self.low_precision:
            return HALF_ROWS_ROUND
        by_type = (RESHAPED_ROWS_ROUND.get(part.dtype, HALF_ROWS_ROUND) for part in self.parts)
        on_gpu = any(part.is_cuda and part.dtype == torch.float32 for part in self.parts)
        return max(by_type, default=0.0) if not on_gpu else TF32_ROWS_ROUND


@dataclass(frozen=True)
class RowMove:
    """How far a record's row is from the one that it has in other company.

    Attributes:
        distance: of the two rows.
        norm: of the first one.
        rounding: relative to the norm.
    """

    distance: float
    norm: float
    rounding: float

    @classmethod
    def of(cls, one: TracedRow | None, other: TracedRow | None) -> RowMove:
        """No move where a row could not be made, or is not finite: such a record has weight zero."""
        if one is None or other is None:
            return cls(0.0, 0.0, 0.0)
        pairs = zip(one.parts, other.parts, strict=True)
        apart = math.sqrt(sum(float((a.double() - b.double()).square().sum()) for a, b in pairs))
        norm = math.sqrt(sum(float(part.double().square().sum()) for part in one.parts))
        if not math.isfinite(apart):
            return cls(0.0, 0.0, 0.0)
        return cls(apart, norm, max(one.rounding(), other.rounding()))

    def is_large(self, least: float) -> bool:
        """Whether it is more than rounding, relative to the norm or to this number if that is larger."""
        return self.distance > self.rounding * max(self.norm, least)


#: How often records are made, with other random numbers each time.
ATTEMPTS = 8


def check_pipeline(pipeline: Pipeline, readable: list[int], size: int) -> bool:
    """Make a batch of some records twice, and again with one of them replaced; see whose loss moves.

    Args:
        pipeline: from numbers to losses.
        readable: numbers of records that have losses.
        size: of a micro-batch.

    Returns:
        Whether all of it could be tried: not with fewer than three records, nor where collating or augmenting
        draws random numbers.

    Raises:
        DataError: two equal attempts differ, or the loss of a record depends on which others came with it,
            on their number, or on its place.
    """
    of = pipeline.losses
    if len(readable) < 3:
        return False
    *kept, spare = readable
    ids, count = torch.tensor(kept), len(kept)
    first, second = of(ids), of(ids, 0, 1)
    if first is None or second is None:
        return False
    # Whoever joins or augments with random numbers may draw more of them for one record than for another in
    # its place, which deals those behind it other ones. The last one has none behind it.
    random_rest = first.moved(second, record=-1)
    for attempt in range(ATTEMPTS):
        before, again = (of(ids, attempt, attempt) for _ in range(2))
        if before is None or again is None:
            return False
        if before.moved(again, record=-1):
            raise DataError(
                f"data, collate or augmentation give other records each time, {OWN_GENERATOR} In an "
                "augmentation, the generator that it is given serves too. Nothing was spent."
            )
        for place in {count - 1} if random_rest else {attempt % count, count - 1 - attempt % count}:
            others = ids.clone()
            others[place] = spare
            after = of(others, attempt, attempt)
            # Padding to another length may round differently: a mixture moves losses by far more.
            if after is not None and before.moved(after, place, slack=100):
                raise DataError(
                    "augmentation, collate or the data set mixes records: with another record next to it, a "
                    "record's loss changed. One record would then move the gradients of several, and the "
                    "privacy guarantee would not hold. Augment every record by itself (no mixup or cutmix "
                    "between records), and mask padding in the model and in the loss. Nothing was spent."
                )
    # Random numbers of the rest would be dealt otherwise next to another record.
    _check_rows(pipeline, ids, [] if random_rest else pipeline.smallest())
    if random_rest:
        return False  # its random numbers are dealt otherwise where records are fewer or stand elsewhere
    for order in (torch.arange(count - 1), torch.arange(count).flip(0), torch.arange(size) % count):
        found = of(ids[order])
        if found is not None and first[order].moved(found, record=-1, slack=100):
            raise DataError(
                "with other records in the batch, or in another order, the losses of records change: data, "
                "collate, augmentation or loss use how many records there are or where one stands. Both "
                "follow from which records are drawn, and that is private. Treat every record by itself; the "
                "sum over records is divided by the expected batch size. Nothing was spent."
            )
    return True


def _check_rows(pipeline: Pipeline, ids: Tensor, small: Sequence[int]) -> None:
    """Hold rows of some records next to their own copies against those next to the others.

    Where a short text is padded without a mask, next to a long one, its row moves where its loss hardly does.
    Several short ones are held together: a largest value over a text moves with the padding of few of them.

    Args:
        pipeline: from numbers to rows.
        ids: of the records, the smallest first and the largest last.
        small: records that are held next to a copy of the first of them, and next to the largest.
    """
    moves: list[RowMove] = []
    for place in {0, len(ids) // 2, len(ids) - 1}:
        # In the first place: whoever draws random numbers deals it the same ones in all company.
        copies = ids[place].expand(len(ids))
        moves.append(RowMove.of(pipeline.row(copies), pipeline.row(ids.roll(-place))))
    for group in (small[start : start + 7] for start in range(0, len(small), 7)):
        among = (torch.tensor([*group, other]) for other in (group[0], int(ids[-1])))
        moves.append(RowMove.of(*(pipeline.row(numbers, len(group)) for numbers in among)))
    # A tiny row rounds by what cancels in it: parts of the size of other rows.
    least = 0.1 * max((move.norm for move in moves), default=0.0)
    if any(move.is_large(least) for move in moves):
        raise DataError(
            "augmentation, collate or the data set mixes records: next to others, and perhaps longer ones, a "
            "record's gradient is another one, by more than rounding. One record would then move the "
            "gradients of several, and the privacy guarantee would not hold. Pad every record to one fixed "
            "width, or mask the padding in the model and in the loss; augment every record by itself. "
            "Nothing was spent."
        )


def check_history(pipeline: Pipeline, untouched: Pipeline | None, readable: list[int]) -> bool:
    """See whether records come out alike whatever was read, collated and augmented before them.

    Args:
        pipeline: it met records.
        untouched: the same with copies that met none, where there are such.
        readable: numbers of records that have losses.

    Returns:
        Whether copies met other records first, and gave the same losses.

    Raises:
        ValueError: they gave others, or a record came out otherwise after many others.
    """
    if len(readable) < 2:
        return False
    tried = pipeline if untouched is None else untouched
    ids, first = torch.tensor(readable[:-1]), torch.tensor(readable[-1:])
    if untouched is not None:
        untouched.losses(first)
        before, after = pipeline.losses(ids), untouched.losses(ids)
        if before is not None and after is not None and before.moved(after, record=-1):
            raise ValueError(
                "data, collate or augmentation keep something of the first records that they meet: copies "
                "that met others first give other records. It would follow who is drawn first, and move "
                "every record's gradient. Take what all records need from public ones before the training. "
                "Nothing was spent."
            )
    _check_many(tried, readable)
    return untouched is not None


#: A whole number below so few is drawn to augment a record: RandAugment has 31 levels, a crop fewer places.
FEW = 32


def check_items(source: RecordSource, data: Any) -> None:
    """See which random numbers a few items ask for, when they are first read, again, and at rare numbers.

    Args:
        source: of records that are made on demand; nobody has read them yet.
        data: of the user.

    Raises:
        DataError: an item draws a whole number below the number of records: it chooses another one. All but
            its own are one less.
        ValueError: an item draws random numbers when it is first read, and none later.
    """
    lengths = {length for inner in data_sets(data) for length in (len(inner), len(inner) - 1)}
    for number in source.spread(3).tolist():
        first = second = False
        with ranges_asked() as asked, suppress(Exception):  # such a record has weight zero in the training
            first, second = source.draws_numbers(number), source.draws_numbers(number)
            for seed in range(1, ATTEMPTS):  # both sides of a branch
                source.draws_numbers(number, seed)
        if any(count >= FEW for count in asked & lengths):
            raise DataError(
                "data has items that draw a whole number below the number of records while they are read: "
                "they choose another record, as MixUp does and whoever looks for a negative example. One "
                "person would then be in several items, and the guarantee would not hold. Make each item of "
                "one record and of public constants; the other one may be a public record. If the number "
                "chooses something else, draw it as int(count * torch.rand(())). Nothing was spent."
            )
        if first and not second:
            raise ValueError(
                "data keeps items that draw random numbers: one drew some when it was first read, and none "
                "when it was read again. A cache that holds fewer items than there are would draw them anew "
                "when others pushed them out: a record's item would follow who else is drawn. Cache what is "
                "read, and draw random numbers after that, at each call. Nothing was spent."
            )


MOST_READS, WORK, WAIT = 1000, 0.5, 5.0
"""How often, for how many seconds of a processor and of a clock, records are made to see what they are."""


def _check_many(pipeline: Pipeline, readable: list[int]) -> None:
    """Make records one by one, in a random order."""
    chosen, is_over = random.Random(0), pipeline.time_limit()
    known: dict[tuple[int, int], Any] = {}
    for _ in range(MOST_READS):
        number, attempt = chosen.choice(readable), chosen.randrange(8)
        try:
            now = pipeline.batch(torch.tensor([number]), attempt, attempt)
            is_alike = _is_alike(known.setdefault((number, attempt), now), now, pipeline.trials)
        except Exception:  # such a record has weight zero in the training too
            return
        if not is_alike:
            raise ValueError(
                "data, collate or augmentation give other records after many reads, though all random "
                "numbers start alike: they keep something of what they read, such as running statistics or a "
                "count. It would follow who is drawn, and the guarantee would not hold. Make each record "
                "from itself and from public numbers. Nothing was spent."
            )
        if is_over():
            return


def _is_alike(before: Any, after: Any, trials: AwayFromZero) -> bool:
    """Whether two batches of one record are the same, or have the same loss."""
    leaves = record_leaves(before), record_leaves(after)
    if len(leaves[0]) == len(leaves[1]) and all(
        one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
        for one, other in zip(*leaves, strict=True)
    ):
        return True
    one, other = (TracedLosses.of(trials.losses, batch) for batch in (before, after))
    return not one.moved(other, record=-1, slack=100)
