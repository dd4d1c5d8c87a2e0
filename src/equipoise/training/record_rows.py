"""Private records by number, and the gradient rows made of them.

A batch is a tensor or a nest of dicts, tuples and lists of tensors whose first axis counts records.
`RecordSource` puts one face on what users have: `equipoise.data.Records`, a dict or tuple of tensors, a
`TensorDataset`, or any map-style `Dataset`, whose items are collated. It hands out records by number, since
draws are lists of numbers. `BatchPreparation` moves a batch to the device and augments it. `RowSource` makes
gradient rows of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from equipoise import _validate
from equipoise._tree import leaves, map_leaves
from equipoise.data.records import Records
from equipoise.gradients.capture.random_numbers import GlobalState, random_numbers_from
from equipoise.gradients.capture.recorder import PlanMismatch
from equipoise.gradients.engine_inputs import (
    Loss,
    WholeNumbers,
    is_array,
    made_up_records,
    map_records,
    num_records,
    record_leaves,
    signature,
    take_records,
)
from equipoise.methods.base import Parameters
from equipoise.privacy import digest
from equipoise.training.randomness import Randomness, public_randomness

__all__ = [
    "PUBLIC_ROWS",
    "BatchPreparation",
    "DataError",
    "RecordSource",
    "RowSource",
    "averaged_over_views",
    "filled",
    "moved",
    "out_of_memory",
    "repeat_views",
]

_log = logging.getLogger("equipoise.training")

PUBLIC_ROWS = 2
"""How many made-up records every forward holds at least: one of each kind that there is."""


class DataError(ValueError):
    """The data cannot be trained on; raised before anything private was computed from them."""


class RecordSource:
    """Records that can be taken by number.

    Args:
        data: Records, a tensor, a dict / tuple / list of tensors, or a map-style dataset.
        collate: joins a list of a dataset's items to a batch; `torch.utils.data.default_collate` by default.

    Raises:
        DataError: no records, unequal lengths, an `IterableDataset`, NaN or infinity in the tensors.

    Example:
        >>> source = RecordSource({"input": torch.eye(3), "label": torch.tensor([0, 1, 2])})
        >>> len(source), source.take(torch.tensor([2, 0]))["label"]
        (3, tensor([2, 0]))
    """

    def __init__(self, data: Any, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self._collate = collate or default_collate
        self._data = data
        self._nest: Any = None
        self._length: int | None = None  # of tensors; another data set is asked each time
        self._draws_numbers = False
        if isinstance(data, (IterableDataset, Iterator)):
            raise DataError(
                f"data is a {type(data).__name__}, which has no record numbers: a private draw needs every "
                "record to be drawn by its number. Give a map-style dataset, a dict of tensors, or "
                "equipoise.data.Records."
            )
        if isinstance(data, torch.utils.data.DataLoader):
            raise DataError(
                "data is a DataLoader, which has a sampling of its own: that sampling would not be the one "
                "the privacy guarantee is computed for. Give its dataset (loader.dataset)."
            )
        if isinstance(data, type) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise DataError(
                f"data is {_validate.what_is(data)}; give a map-style dataset (it has a length, and items by "
                "number), a dict of tensors, or equipoise.data.Records"
            )
        # Classes derived from these two may make their items in their own way.
        if type(data) is TensorDataset:
            self._nest = data.tensors
        elif type(data) is Records:
            self._nest = dict(data.fields)
        elif isinstance(data, (Tensor, dict, tuple)) or (
            isinstance(data, list) and data and all(isinstance(part, Tensor) for part in data)
        ):
            self._nest = data
        if self._nest is not None:
            self._check_nest()
        if len(self) == 0:
            raise DataError(
                "data holds no records: there is nothing to train on. Check the path or the split."
            )

    def __len__(self) -> int:
        return len(self._data) if self._length is None else self._length

    @property
    def is_scanned(self) -> bool:
        """Whether records are rows of tensors: all were looked at beforehand, and taking them runs nobody's
        code.
        """
        return self._nest is not None

    def take(self, ids: Tensor, randomness: Randomness | None = None) -> Any:
        """The batch of the records with these numbers, LongTensor [b], b >= 1; see `read`."""
        return self.join(self.read(ids, randomness))

    def read(self, ids: Tensor, randomness: Randomness | None = None) -> Any:
        """The items of a dataset that makes them on demand, else the batch.

        Args:
            ids: numbers of the records, LongTensor [b].
            randomness: gives each item, by the number of its record, the random numbers that it asks for, so
                that they do not follow which other items are made.
        """
        if self._nest is not None:
            return take_records(self._nest, ids)
        if randomness is None:
            return [self._data[i] for i in ids.tolist()]
        if not self._draws_numbers:  # most data sets draw none, and need no streams
            before = GlobalState()
            items = [self._data[i] for i in ids.tolist()]
            if not before.moved():
                return items
            before.restore()
            self._draws_numbers = True
        items = []
        for i in ids.tolist():
            with random_numbers_from(randomness(f"item {i}")):
                items.append(self._data[i])
        return items

    def draws_numbers(self, number: int) -> bool:
        """Whether making this item asks for random numbers, whose generators then are as before."""
        with random_numbers_from(0):
            before = GlobalState()
            self.read(torch.tensor([number]))
            return bool(before.moved())

    def join(self, read: Any) -> Any:
        """The batch of what `read` gave."""
        batch = self._collate(read) if self._nest is None else read
        # Records are constants, also where a tensor of them asks for a gradient.
        return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, batch)

    def fingerprint(self) -> str:
        """A digest of the records, which is private; empty for datasets that make their items on demand."""
        if isinstance(self._data, Records):
            return self._data.fingerprint()
        return "" if self._nest is None else digest({"data": self.leaves()})

    def batch(self) -> Any:
        """All records as one batch, where tensors hold them; None for datasets that make items on demand."""
        return self._nest

    def leaves(self) -> list[Tensor]:
        """The tensors that hold all records, or an empty list for datasets that make items on demand."""
        return [] if self._nest is None else leaves(self._nest)

    def probes(self, count: int) -> Tensor:
        """Numbers of a few records that show what the data can hold.

        The first ones, and for every integer tensor the records with its smallest and its largest value:
        labels and tokens out of range show there. Where records are made on demand, records from all over
        the data, which may be in the order of their labels.
        """
        tensors = self.leaves()
        if not tensors:
            return self.spread(count)
        integers = [leaf for leaf in tensors if not (leaf.is_floating_point() or leaf.dtype == torch.bool)]
        return torch.tensor(sorted({*range(min(count, len(self))), *_extremes(integers)}))

    def marked(self) -> list[int]:
        """Numbers of the records with the smallest and the largest number of each other tensor.

        There may stand what few records hold: a number in the place of a missing value, a truth value.
        """
        return _extremes(
            [leaf for leaf in self.leaves() if leaf.is_floating_point() or leaf.dtype == torch.bool]
        )

    def spread(self, count: int) -> Tensor:
        """Numbers of records at equal distances, but the last three, which a later check reads first."""
        last = max(0, len(self) - 4)
        return torch.linspace(0, last, min(count, last + 1)).long()

    def _check_nest(self) -> None:
        tensors = leaves(self._nest)
        wrong = [type(leaf).__name__ for leaf in tensors if not isinstance(leaf, Tensor)]
        if wrong or not tensors:
            remedy = f": {ARRAY_REMEDY}" if any(map(is_array, tensors)) else ""
            raise DataError(
                f"data holds {wrong or 'nothing'} where tensors with the record axis first are "
                f"expected{remedy}"
            )
        lengths = {len(leaf) if leaf.ndim else None for leaf in tensors}
        if len(lengths) != 1 or None in lengths:
            shapes = [tuple(leaf.shape) for leaf in tensors]
            raise DataError(
                f"the tensors of data have shapes {shapes}: their first axes must be the same record axis"
            )
        self._length = lengths.pop()
        for leaf in tensors:
            numbers = leaf.is_floating_point() or leaf.is_complex()
            if numbers and not bool(torch.isfinite(leaf.sum())):
                bad = ~torch.isfinite(leaf.reshape(len(leaf), -1)).all(1)
                if bool(bad.any()):
                    raise DataError(
                        f"{int(bad.sum())} records hold NaN or infinity (the first is number "
                        f"{int(bad.nonzero()[0])}). Repair or drop them before the training starts: the "
                        "statement says that no record holds any."
                    )


def _extremes(tensors: Sequence[Tensor]) -> list[int]:
    """Numbers of the records with the smallest and the largest entry of each."""
    found = []
    for leaf in tensors:
        if leaf.numel() and not leaf.is_complex():
            flat = leaf.reshape(len(leaf), -1)
            flat = flat.byte() if leaf.dtype == torch.bool else flat
            found += [int(flat.amin(1).argmin()), int(flat.amax(1).argmax())]
    return found


ARRAY_REMEDY = "give torch.from_numpy(array) for a NumPy array"


def moved(nest: Any, device: torch.device) -> Any:
    """The nest with all its tensors on the device."""
    # A copy to the host must be waited for, and `non_blocking` would not.
    to_gpu = device.type == "cuda"
    return map_leaves(
        lambda leaf: leaf.to(device, non_blocking=to_gpu) if isinstance(leaf, Tensor) else leaf, nest
    )


def filled(batch: Any, size: int, public: Any, places: Tensor | None = None) -> Any:
    """`size` records: those of the batch at their places, public ones in turn at all others.

    Args:
        batch: at most `size` records.
        size: number of rows of a forward.
        public: records of the same form, one at least.
        places: of the records, ascending, LongTensor [b]; the first ones when None.

    Example:
        >>> filled({"label": torch.tensor([7])}, 4, {"label": torch.tensor([1, 0])})["label"]
        tensor([7, 1, 0, 1])
    """
    count, others = num_records(batch), iter(record_leaves(public))

    def fill(leaf: Tensor) -> Tensor:
        rest = next(others)
        return torch.cat([leaf, rest[torch.arange(size - count) % len(rest)]])

    rows = map_records(fill, batch)
    if places is None or int(places[-1]) == count - 1:
        return rows
    is_free = torch.ones(size, dtype=torch.bool).index_fill_(0, places, False)
    return take_records(rows, torch.cat([places, is_free.nonzero().flatten()]).argsort())


def repeat_views(
    batch: Any, views: int, augmentation: Callable[[Any, torch.Generator], Any], rng: torch.Generator
) -> Any:
    """K augmented views of every record: tensors [b, ...] become [b, K, ...].

    Args:
        batch: b records.
        views: K >= 1.
        augmentation: (batch, generator) -> batch, record by record.
        rng: where the augmentation takes its randomness from.
    """
    augmented = [augmentation(batch, rng) for _ in range(views)]
    of_each = zip(*map(record_leaves, augmented), strict=True)
    return map_records(lambda _: torch.stack(next(of_each), 1), augmented[0])


def averaged_over_views(loss: Loss, views: int) -> Loss:
    """The loss of a batch [b, K, ...] of K > 1 views per record: the mean over a record's views, [b]."""
    if views == 1:
        return loss

    def averaged(model: nn.Module, batch: Any) -> Tensor:
        flat = map_records(lambda leaf: leaf.flatten(0, 1), batch)
        return loss(model, flat).reshape(-1, views).mean(1)

    return averaged


@dataclass(frozen=True)
class BatchPreparation:
    """Brings a batch of records into the form that the engine takes.

    Attributes:
        device: where batches are moved to.
        augmentation: (batch, generator) -> batch, or None.
        views: K; with more than one, K augmented views per record.
    """

    device: torch.device
    augmentation: Callable[[Any, torch.Generator], Any] | None = None
    views: int = 1

    def __call__(self, batch: Any, randomness: Randomness) -> Any:
        """The batch on the device, augmented."""
        batch = moved(batch, self.device)
        if self.augmentation is None:
            return batch
        rng = randomness("augmentation")
        if self.views == 1:
            return self.augmentation(batch, rng)
        return repeat_views(batch, self.views, self.augmentation, rng)


class RowSource:
    """Makes gradient rows of records.

    Args:
        engine: makes per-sample gradients.
        source: the records.
        prepare: brings batches into the engine's form.
        micro_batch_size: the most private records of a forward.
        example: a batch of a few records, from which the rows of an empty draw are cut.
        seed: public seed of the randomness of public records.
        filler: what the public records of a forward hold where whole numbers go; None for copies of its first
            record instead.
        probes: numbers of the records of `example`, which could be read at the start.
        dealt: records are dealt to random places of a draw, which a record more does not change; otherwise
            they take the first places in their order.
    """

    def __init__(
        self,
        engine: Any,
        source: RecordSource,
        prepare: BatchPreparation,
        micro_batch_size: int,
        example: Any,
        seed: int,
        filler: WholeNumbers | None = "mixed",
        probes: Tensor | None = None,
        dealt: bool = False,
    ) -> None:
        self.filler, self.dealt = filler, dealt
        self.engine, self.source, self.prepare = engine, source, prepare
        self.probes = torch.zeros(0, dtype=torch.long) if probes is None else probes
        self.micro_batch_size, self.example, self.seed = micro_batch_size, example, seed
        self._failure_was_logged = False
        self._made_up: dict[tuple, Any] = {}

    def of_records(
        self, records: Any, at: Sequence[Parameters | None], randomness: Randomness, places: Tensor
    ) -> list[Any]:
        """Gradient rows of at most `micro_batch_size` private records at every parameter point.

        **Fixed shape.** Kernels round a row by the number of rows in a batch, and a model may run other
        operations where all records, or none, are of some kind. So every forward has the same number of rows,
        and public records are always among them: a record that enters a draw changes no other row.

        Args:
            records: their batch.
            at: the parameter points.
            randomness: of the micro-batch.
            places: of the records among the rows of the forward, ascending, LongTensor [b].

        Raises:
            PlanMismatch: of several records one runs what was not planned.
        """
        count, size = num_records(records), self.micro_batch_size + PUBLIC_ROWS
        batch = self.prepare(filled(records, size, self._public(records), places), randomness)
        try:
            whole = self.of_batch(self.engine.by_plan, batch, at, randomness)
        except PlanMismatch:
            if count > 1:
                raise  # those of the records that run what was planned go on without the others
            return self._of_one(batch, at, randomness, int(places))
        except Exception as error:
            if count > 1 or self.filler is None or out_of_memory(error):
                raise
            # The public records may fail: copies of the record fail only where it does.
            batch = self.prepare(filled(records, size, records, places), randomness)
            return self._of_one(batch, at, randomness, int(places))
        rows = []
        # The first places as a slice: nothing is copied.
        first = int(places[-1]) == count - 1
        for gradients in whole:
            norms = gradients.row_norms()  # in the fixed shape too; the cut below keeps them
            rows.append(gradients.rows(slice(count) if first else places.to(norms.device)))
        return rows

    def _public(self, records: Any) -> Any:
        """Public records of the form of these."""
        if self.filler is None:
            return take_records(records, slice(1))
        form = signature(records)
        if form not in self._made_up:
            self._made_up[form] = made_up_records(records, PUBLIC_ROWS, self.filler)
        return self._made_up[form]

    def _of_one(
        self, batch: Any, at: Sequence[Parameters | None], randomness: Randomness, place: int
    ) -> list[Any]:
        """Rows of the record at a place, without a plan.

        It has random numbers of its own, or those that all share, as by the plan: who runs by it follows from
        who else is there.
        """
        if self.dealt:
            return self.of_batch(partial(self.engine.alone, place=place), batch, at, randomness)
        one = take_records(batch, slice(place, place + 1))
        return self.of_batch(self.engine.alone, one, at, lambda kind: randomness(f"{kind} of {place}"))

    def of_batch(
        self,
        rows_of: Callable[..., Any],
        batch: Any,
        at: Sequence[Parameters | None],
        randomness: Randomness,
    ) -> list[Any]:
        """Gradient rows of a prepared batch at every parameter point, under the same masks."""
        rows = []
        for params in at:
            with random_numbers_from(randomness("dropout"), self.prepare.device):
                rows.append(rows_of(batch, params=params))
        return rows

    def of_public(self, batch: Any, at: Parameters | None, step: int) -> Any:
        """Gradient rows of public records, under the public randomness of a step."""
        batch = moved(batch, self.prepare.device)
        return self.of_batch(self.engine, batch, [at], public_randomness(self.seed, step, "public"))[0]

    def of_nobody(self, at: Sequence[Parameters | None]) -> list[Any]:
        """Rows of no records; the engine makes them without running the model."""
        nobody = moved(take_records(self.example, slice(0)), self.prepare.device)
        return [self.engine(nobody, params=params) for params in at]

    def check_source(self) -> None:
        """See that some record of the example, all of which were read at the start, can still be read.

        Reading depends on no parameters. Model and loss are never tried again on chosen records: at
        parameters that a server sent, whether they fail would be an answer without noise.

        Raises:
            Whatever the last of them raises, where none can be read: the source is gone.
        """
        failed: Exception | None = None
        for number in self.probes:
            try:
                self.source.take(number[None])
                return
            except Exception as error:
                failed = error
        if failed is not None:
            raise failed

    def log_failed_draw(self, name: str) -> None:
        """Tell the data owner, once, that a draw came to nothing; it is no reason to stop."""
        if not self._failure_was_logged:
            _log.error(
                "every record of a draw %r failed: the step goes on with only noise. The kinds of the "
                "errors are in private/diagnostics.jsonl; this is said once",
                name,
            )
        self._failure_was_logged = True


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, which is no record's fault."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
