"""Trials of reading, collating and augmenting, on a few records: each record must come out by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, get_args

import torch
from torch import Tensor

from equipoise.gradients.capture.isolation import undisturbed
from equipoise.gradients.capture.random_numbers import (
    RandomUse,
    random_numbers_from,
    ranges_asked,
    use_of_random_numbers,
)
from equipoise.gradients.capture.recorder import CallTrace
from equipoise.gradients.compare import OWN_GENERATOR, losses_moved
from equipoise.gradients.engine import GradientEngine
from equipoise.gradients.engine_inputs import signature
from equipoise.training.forwards import BatchPreparation
from equipoise.training.randomness import public_randomness
from equipoise.training.record_source import DataError, RecordSource, data_sets

MOST_READS = 256
"""Of how many records from all over the data the shapes are seen.

A choice: each is read and collated at the start; with fewer, a statement more often misses that shapes
differ.
"""

ATTEMPTS = 8
"""How often records are made, with other random numbers each time.

A choice: a branch that one of three takes is missed with 4%, and each attempt makes and runs three batches.
"""

ROWS_ROUND, HALF_ROWS_ROUND = {torch.float64: 1e-9, torch.float32: 1e-3}, 3e-2
"""What gradients round by in a batch of another shape, relative to their norm: on GPUs they may use TF32.

Choices: tighter ones refuse pipelines for rounding, wider ones overlook what records share if it moves less.
"""


@dataclass(frozen=True)
class Tried:
    """Losses of a batch, and the gradient of a weighted sum of all of them but the last."""

    losses: Tensor
    gradient: Sequence[Tensor]
    trace: CallTrace

    def losses_moved(
        self, other: Tried, own: Tensor | slice = slice(None), its: slice = slice(None), slack: float = 1.0
    ) -> bool:
        """Whether its losses, or some of them, are others than these, or these in an order.

        Half precision rounds anew in other shapes, such as those of trimmed batches.
        """
        low_precision = self.trace.low_precision or other.trace.low_precision
        is_reshaped = self.trace.shapes() != other.trace.shapes()
        return losses_moved(self.losses[own], other.losses[its], slack, low_precision and is_reshaped)

    def moved(self, other: Tried | None) -> bool:
        """Whether another last record moves any of this by more than the rounding of padded batches."""
        if other is None:
            return False
        if self.losses_moved(other, slice(-1), slice(-1), slack=100):
            return True
        pairs = zip(self.gradient, other.gradient, strict=True)
        apart = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
        size = sum(float(part.double().square().sum()) for part in self.gradient)
        low_precision = self.trace.low_precision or other.trace.low_precision
        rounding = {} if low_precision else ROWS_ROUND
        largest = max((rounding.get(part.dtype, HALF_ROWS_ROUND) for part in self.gradient), default=0.0)
        return apart > largest**2 * size  # false where either is not finite: weight zero


def runs_code(source: RecordSource, prepare: BatchPreparation) -> bool:
    """Whether the owner's code makes batches here."""
    return not (source.is_scanned or source.is_elsewhere) or prepare.augmentation is not None


@dataclass(frozen=True)
class Pipeline:
    """From the numbers of records to their losses, under numbered randomness.

    Attributes:
        engine: runs model and loss.
        params: at which they run, nowhere zero.
        source: reads each item under random numbers of its own, and collates.
        prepare: brings batches to the device and augments them.
        seed: public, of all random numbers.
    """

    engine: GradientEngine
    params: Mapping[str, Tensor]
    source: RecordSource
    prepare: BatchPreparation
    seed: int

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

    def tried(self, ids: Tensor, items: int = 0, rest: int = 0) -> Tried | None:
        """What comes of them; None if one cannot be made or run: it has weight zero in the training too."""
        try:
            batch = self.batch(ids, items, rest)
            with CallTrace() as trace:
                weights = 0.5 + torch.rand(len(ids) - 1, generator=torch.Generator().manual_seed(0))
                with undisturbed(self.engine.model):
                    losses, gradient = self.engine.gradient(batch, slice(len(weights)), self.params, weights)
        except Exception:
            return None
        return Tried(losses, [*gradient.values()], trace)

    def random_use(self, ids: Tensor) -> RandomUse:
        """Whose random numbers collate, augmentation, model and loss take, as seen on a few records."""
        widths = torch.zeros_like(ids) if self.source.widths is None else self.source.widths[ids]
        uses = [self._random_use(ids[widths == width]) for width in torch.unique(widths)]
        return max(uses, key=get_args(RandomUse).index)

    def _random_use(self, ids: Tensor) -> RandomUse:
        few, many = 3, 8
        randomness = public_randomness(self.seed, "example")
        # Beforehand: each item has random numbers of its own.
        read = {n: self.source.read(ids[torch.arange(n) % len(ids)], randomness) for n in (few, many)}

        def run(count: int, weights: Tensor) -> tuple[Tensor, list[Tensor]]:
            batch = self.prepare(self.source.join(read[count]), randomness)
            losses, found = self.engine.gradient(batch, params=self.params, weights=weights)
            return losses, [*found.values()]

        try:
            return use_of_random_numbers(run, few, many, self.prepare.device)
        except Exception:  # not understood; places that stay the same are right for all models
            return "shared"

    @cached_property
    def shapes(self) -> dict[int, tuple]:
        """Shapes of the batches of one, by the number of the record, for records from all over the data."""
        found = {}
        for number in self.source.spread(MOST_READS).tolist():
            with suppress(Exception):  # such a record has weight zero in the training too
                found[number] = signature(self.batch(torch.tensor([number])))
        return found

    @property
    def shapes_follow(self) -> bool:
        """Whether the shape of a batch follows the records in it."""
        return len({*self.shapes.values()}) > 1

    def chosen(self, most: int = 8) -> list[int]:
        """Numbers of some records that have losses; if sizes differ, small ones first, a large one last."""

        def is_readable(number: int) -> bool:
            return self.tried(torch.tensor([number])) is not None

        order = sorted(self.shapes, key=lambda n: sum(shape.numel() for _, shape in self.shapes[n]))
        few = [*islice(filter(is_readable, order), most - 1)]
        largest = [*islice(filter(is_readable, reversed(order)), 1)]
        return [*(number for number in few if number not in largest), *largest]


def check_pipeline(pipeline: Pipeline, size: int) -> bool:
    """Compare the losses and gradients of a few records next to a small one and next to the largest one.

    Where a short text is padded without a mask, its gradient moves where its loss hardly does.

    Args:
        pipeline: from numbers to losses.
        size: of a micro-batch.

    Returns:
        Whether all of it could be tried, if code of the owner runs there: not with fewer than three records,
        nor where collating or augmenting draws random numbers.

    Raises:
        DataError: two equal attempts differ, or the loss or the gradient of a record depends on which others
            came with it, on their number, or on its place.
    """
    if not runs_code(pipeline.source, pipeline.prepare):
        return True
    numbers = pipeline.chosen()
    if len(numbers) < 3:
        return False
    # Whoever joins or augments with random numbers may draw more of them for one record than for another in
    # its place, which gives those behind it other ones. The last one has none behind it.
    usual, mixed = torch.tensor([*numbers[:-1], numbers[0]]), torch.tensor(numbers)
    for attempt in range(ATTEMPTS):
        before, again, after = (pipeline.tried(ids, attempt, attempt) for ids in (usual, usual, mixed))
        if before is None or again is None:
            return False
        if before.losses_moved(again):
            raise DataError(
                f"data, collate or augmentation give other records each time, {OWN_GENERATOR} An "
                "augmentation may take those of its generator. Nothing was spent."
            )
        if before.moved(after):
            raise DataError(MIXED)
    first, other = pipeline.tried(usual), pipeline.tried(usual, 0, 1)
    if first is None or other is None or first.losses_moved(other):
        return False  # random numbers follow number and place
    count = len(usual)
    for order in (torch.arange(count - 1), torch.arange(count).flip(0), torch.arange(size) % count):
        found = pipeline.tried(usual[order])
        if found is not None and first.losses_moved(found, order, slack=100):
            raise DataError(MIXED)
    return True


MIXED = (
    "augmentation, collate or the data set mixes records: with another record next to it, in another order "
    "or among fewer, a record's loss or gradient changed. Augment every record by itself (no mixup or "
    "cutmix), pad to one fixed width, or mask the padding in the model and in the loss. Nothing was spent."
)


#: A whole number below so few is drawn to augment a record: RandAugment has 31 levels, a crop fewer places. A
#: smaller one refuses these for data of as many records; below it, MixUp of so few records is not seen.
FEW = 32


def check_items(source: RecordSource, data: Any) -> None:
    """See among how many values a few items draw whole numbers.

    Args:
        source: of records that are made on demand.
        data: of the user.

    Raises:
        DataError: an item draws a whole number below the number of records: it chooses another one. All but
            its own are one less.
    """
    lengths = {length for inner in data_sets(data) for length in (len(inner), len(inner) - 1)}
    with ranges_asked() as asked:
        for number in source.spread(3).tolist():
            for seed in range(ATTEMPTS):  # both sides of a branch
                with suppress(Exception), random_numbers_from(seed):  # such a record has weight zero
                    source.read(torch.tensor([number]))
    if any(count >= FEW for count in asked & lengths):
        raise DataError(
            "data has items that draw a whole number below the number of records while they are read: they "
            "choose another record, as MixUp does. Make each item of one record and of public constants or "
            "records. If the number chooses something else, draw it as int(count * torch.rand(()))"
        )
