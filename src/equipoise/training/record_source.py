"""Private records by number.

A batch is a tensor or a nest of dicts, tuples and lists of tensors whose first axis counts records.
`RecordSource` puts one face on what users have: `equipoise.data.Records`, a dict or tuple of tensors, a
`TensorDataset`, or any map-style `Dataset`, whose items are collated. It hands out records by number, since
draws are lists of numbers.

Tensors in memory are looked at as a whole before the start. Those of a file that is mapped into memory are
read where they are drawn, like the items of a dataset: `numpy.memmap`, and tensors of `torch.from_file` with
`shared=True`. A sampling that assigns records to draws by what they hold reads the file once from its
beginning to its end. Which it is follows from what the object says of itself, not from sizes.
"""

from __future__ import annotations

import ctypes
import mmap
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from equipoise import _validate
from equipoise._tree import leaves, map_leaves, named_leaves
from equipoise.data.records import Records
from equipoise.distributed.processes import MachineError
from equipoise.gradients.engine_inputs import is_array, take_records
from equipoise.privacy import Secrets, digest
from equipoise.privacy.noise.uniform import KEYS, keyed_hash, keyed_integers, occurrences
from equipoise.training.randomness import Randomness
from equipoise.training.read_items import ReadItems
from equipoise.training.reading import ItemReader, ReadingWorkers


class DataError(ValueError):
    """The data cannot be trained on; raised before anything private was computed from them."""


class BatchFormError(DataError):
    """A batch lacks what a loss of this library needs. The message holds nothing of the records."""


class NoAnswerError(MachineError):
    """A machine that holds records does not answer, or not as it must."""


class RecordPlaces:
    """Records that other machines hold, as data: an item is the record's place, and the loss asks there.

    The places of a whole draw are announced before its first forward, so that a loss can ask each machine
    once. How a draw is cut into micro-batches follows from who else is in it, and no machine should see that.

    They are the data only of the loss that has them as its attribute `records_elsewhere`. They give no items,
    so that nothing can be made of them that trains as if its records were here.

    Args:
        places: of each record, a LongTensor [n, ...]; public. Fillers of a forward hold 0 only.

    Attributes:
        announced: the places of the records of the draw under way.
        draw: a secret number of that draw, the same whenever it is passed over, also by a step that is
            repeated; None outside of draws.
        kept: what the loss keeps of that draw; emptied when it is over.
    """

    def __init__(self, places: Tensor) -> None:
        self._places, self.announced = places, places[:0]
        self.draw: int | None = None
        self.kept: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self._places)

    def announce(self, ids: Tensor, draw: int | None) -> None:
        """Say which records the draw under way has, LongTensor [b]."""
        if draw != self.draw:
            self.kept.clear()
        self.announced, self.draw = self._places[ids], draw


_NOBODY = torch.zeros(0, dtype=torch.long)  # the numbers of no records


class RecordSource:
    """Records that can be taken by number.

    Args:
        data: Records, a tensor or a `numpy.memmap`, a dict / tuple / list of these, a map-style dataset, or
            `RecordPlaces`.
        collate: joins a list of a dataset's items to a batch; `torch.utils.data.default_collate` by default.
        workers: how many processes read the items of a draw ahead; rows of tensors need none.

    Attributes:
        widths: to what each record is padded, int64 [n], where they are sorted by it; else None.
        ids: what names each record for the whole run, int64 [n], where the user names them; else None.
        weights: what each record counts after the clip, float [n] in [0, 1]; None where all count alike.
        of_records: the source of single records, where users are drawn; else the same.
        items: takes note of the items that are read, in a run that has to compare them later; else None.

    Raises:
        DataError: no records, unequal lengths, an `IterableDataset`, NaN or infinity in the tensors.

    Example:
        >>> source = RecordSource({"input": torch.eye(3), "label": torch.tensor([0, 1, 2])})
        >>> len(source), source.take(torch.tensor([2, 0]))["label"]
        (3, tensor([2, 0]))
    """

    ids: Tensor | None = None
    weights: Tensor | None = None
    widths: Tensor | None = None
    items: ReadItems | None = None

    def __init__(
        self, data: Any, collate: Callable[[list[Any]], Any] | None = None, workers: int = 0
    ) -> None:
        self.of_records, self._collate = self, collate or default_collate
        self._data = data
        self._nest: Any = None
        self._length: int | None = None  # of tensors; another data set is asked each time
        self._reader = ItemReader(data)
        self._workers: ReadingWorkers | None = None
        self._read_ahead: dict[int, bytes] = {}  # pickled items of a part, by number
        self._read_by: Randomness | None = None  # and what gave them their random numbers
        if isinstance(data, (IterableDataset, Iterator)):
            raise DataError(
                f"data is a {type(data).__name__}, which has no record numbers: a private draw needs every "
                "record to be drawn by its number. Give a map-style dataset, a dict of tensors, or "
                "equipoise.data.Records."
            )
        if isinstance(data, torch.utils.data.DataLoader):
            sampler = getattr(data.batch_sampler, "sampler", data.sampler)
            is_weighted = isinstance(sampler, torch.utils.data.WeightedRandomSampler)
            size = "batch_sampler.batch_size" if data.batch_size is None else "batch_size"
            raise DataError(
                "data is a DataLoader, whose batches are not drawn as the privacy guarantee needs it. Give "
                "data=Data(loader.dataset, collate=loader.collate_fn, workers=loader.num_workers) and "
                f"sampling=Poisson(expected_batch_size=loader.{size}, population=..., steps=...)."
                + " In place of its weighted sampler weight the loss, with 1 as the largest weight."
                * is_weighted
            )
        is_map = hasattr(data, "__len__") and hasattr(data, "__getitem__")
        if isinstance(data, type) or not (is_map or self.is_elsewhere):
            raise DataError(
                f"data is {_validate.what_is(data)}; give a map-style dataset (it has a length, and items by "
                "number), a dict of tensors, or equipoise.data.Records"
            )
        # Classes derived from these two may make their items in their own way.
        if type(data) is TensorDataset:
            self._nest = data.tensors
        elif type(data) is Records:
            self._nest = dict(data.fields)
        elif isinstance(data, RecordPlaces):
            self._nest = data._places
            data.announce(_NOBODY, None)  # another training may have left a draw
        elif isinstance(data, (Tensor, np.memmap, dict, tuple)) or (
            isinstance(data, list) and data and all(isinstance(part, Tensor | np.memmap) for part in data)
        ):
            self._nest = data
        #: Whether all records were looked at beforehand; taking them then runs nobody's code.
        self.is_scanned = False
        if self._nest is not None:
            self.is_scanned = not (self.is_elsewhere or any(map(_is_mapped, leaves(self._nest))))
            self._nest = map_leaves(_as_rows, self._nest)
            self._check_nest()
        elif workers:
            self._workers = ReadingWorkers(data, workers)
        if len(self) == 0:
            raise DataError(
                "data holds no records: there is nothing to train on. Check the path or the split."
            )

    def __len__(self) -> int:
        return len(self._data) if self._length is None else self._length

    @property
    def is_elsewhere(self) -> bool:
        """Whether other machines hold the records; what is taken here are their places."""
        return isinstance(self._data, RecordPlaces)

    @property
    def has_rows(self) -> bool:
        """Whether records are rows of tensors, in memory or in files."""
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
            with torch.no_grad():
                return take_records(self._nest, ids)
        numbers = ids.tolist()
        items: dict[int, Any] = {}  # by place: one number may be asked for twice
        if randomness is not None and randomness is self._read_by:
            # Made anew at every call: joining may change an item, and the same ones may be joined again.
            for place, number in enumerate(numbers):
                if number in self._read_ahead:
                    with suppress(Exception):  # an item that can be sent and not be received
                        items[place] = pickle.loads(self._read_ahead[number])
        missing = [place for place in range(len(numbers)) if place not in items]
        if missing:
            read = self._reader.read([numbers[place] for place in missing], randomness)
            items |= zip(missing, read, strict=True)
        found = [items[place] for place in range(len(numbers))]
        if self.items is not None:
            self.items.note(numbers, found)
        return found

    def ahead(self, parts: Sequence[Tensor], randomness: Randomness) -> Iterator[None]:
        """Goes through parts of a draw: while it stands at one, workers have read its items for `read`.

        Where other machines hold the records, the whole draw is announced.

        Args:
            parts: numbers of records, each a LongTensor [b].
            randomness: as for `read`, which must be asked with this very object.
        """
        if isinstance(self._data, RecordPlaces):
            number = torch.randint(2**62, (), generator=randomness("elsewhere"))
            self._data.announce(torch.cat([_NOBODY, *parts]), int(number))
        return repeat(None, len(parts)) if self._workers is None else self._ahead(parts, randomness)

    def _ahead(self, parts: Sequence[Tensor], randomness: Randomness) -> Iterator[None]:
        assert self._workers is not None
        self._read_by = randomness
        try:
            for items in self._workers.read(parts, randomness):
                self._read_ahead = items
                yield
        finally:
            if self._read_by is randomness:  # else another pass has begun
                self._read_ahead, self._read_by = {}, None

    def close(self) -> None:
        """End the workers, and let go of what is kept of a draw; others start when they are needed."""
        if isinstance(self._data, RecordPlaces):
            self._data.announce(_NOBODY, None)
        if self._workers is not None:
            self._workers.close()
        if self.items is not None:
            self.items.close()

    def join(self, read: Any) -> Any:
        """The batch of what `read` gave."""
        if self._nest is not None:
            return read
        # Records are constants, also where a tensor of them asks for a gradient.
        batch = self._collate(read)
        return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, batch)

    def fingerprint(self) -> str:
        """A digest of the records or of their places, which is private; empty for those read on demand."""
        if not (self.is_scanned or self.is_elsewhere):
            found = ""
        elif isinstance(self._data, Records):
            found = self._data.fingerprint()
        else:
            found = digest({"data": leaves(self._nest)})
        return found if self.weights is None else digest({"records": found, "weights": self.weights})

    def keys(self, secrets: Secrets) -> Tensor | None:
        """A number for each record, of its id or of what it holds, int64 [n]; None for items without ids.

        Equal records get numbers of their own, by how many stand before. Which of them is withdrawn does not
        matter: as equal ones they may take each other's place. Records that differ are taken for equal with
        probability below n / 2^61 per record; only then could one move another to other draws.
        """
        if self._nest is None or self.ids is not None:
            return self.ids
        fields = named_leaves(self._nest)
        mapped = [leaf for leaf in fields.values() if _is_mapped(leaf)]
        for leaf in mapped:
            _advise(leaf, "MADV_SEQUENTIAL")
        held = keyed_hash(
            [fields[name] for name in sorted(fields)], secrets.stream_key(0, "what records hold")
        )
        for leaf in mapped:
            _advise(leaf, "MADV_RANDOM")
        if self.weights is not None:  # records of two weights are not equal; 1, or 0x3F800000, changes no key
            held = held + (self.weights.view(torch.int32).long() - 0x3F800000 << 32)
        one_of_equals = torch.stack([held, occurrences(held)], dim=1)
        return keyed_integers(KEYS, one_of_equals, secrets.stream_key(0, "keys of records"))

    def batch(self) -> Any:
        """All records as one batch, where tensors in memory hold them; None for those read on demand."""
        return self._nest if self.is_scanned else None

    def probes(self, count: int) -> Tensor:
        """Numbers of a few records that show what the data can hold.

        The first ones, and for every integer tensor the records with its smallest and its largest value:
        labels and tokens out of range show there. Where records are made on demand, records from all over
        the data, which may be in the order of their labels.
        """
        if not self.is_scanned:
            return self.spread(count)
        whole = [one for one in leaves(self._nest) if not one.is_floating_point() and one.dtype != torch.bool]
        return torch.tensor(sorted({*range(min(count, len(self))), *_extremes(whole)}))

    def spread(self, count: int) -> Tensor:
        """Numbers of records at equal distances, the first and the last among them."""
        return torch.linspace(0, len(self) - 1, min(count, len(self)), dtype=torch.float64).long()

    def _check_nest(self) -> None:
        tensors = leaves(self._nest)
        wrong = sorted({type(leaf).__name__ for leaf in tensors if not isinstance(leaf, Tensor)})
        if wrong or not tensors:
            remedy = f": {ARRAY_REMEDY}" if any(map(is_array, tensors)) else ""
            if isinstance(self._data, dict) and "Dataset" in wrong:
                remedy = f": give one of its data sets, such as data[{next(iter(self._data))!r}]"
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
        for leaf in tensors if self.is_scanned else []:
            numbers = leaf.is_floating_point() or leaf.is_complex()
            if numbers and not bool(torch.isfinite(leaf.sum())):
                bad = ~torch.isfinite(leaf.reshape(len(leaf), -1)).all(1)
                if count := int(bad.sum()):
                    hold = "1 record holds" if count == 1 else f"{count} records hold"
                    raise DataError(
                        f"{hold} NaN or infinity (the first is number "
                        f"{int(bad.nonzero()[0])}). Repair or drop them before the training starts: the "
                        "statement says that no record holds any."
                    )


def data_sets(data: Any) -> list[Any]:
    """These data, and the torch data sets that they hold, as attributes or in lists, in any depth."""
    found = [data]
    for one in found:
        for held in getattr(one, "__dict__", {}).values():
            parts = held if isinstance(held, (list, tuple)) else [held]
            inner = [part for part in parts if isinstance(part, Dataset) and hasattr(part, "__len__")]
            found += [part for part in inner if not any(part is other for other in found)]
    return found


def _is_mapped(leaf: Any) -> bool:
    """Whether it stands in a file, and says so."""
    if isinstance(leaf, np.memmap):
        return (
            getattr(leaf, "_mmap", None) is not None
        )  # None of what was computed from one: that is in memory
    is_plain = isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.layout == torch.strided
    return is_plain and leaf.untyped_storage().filename is not None


def _as_rows(leaf: Any) -> Any:
    """What is mapped, as a tensor over the same file; anything else as it is."""
    if not _is_mapped(leaf):
        return leaf
    if isinstance(leaf, np.memmap):
        # It may be for reading only; rows are taken out, never written.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            try:
                leaf = torch.from_numpy(leaf)
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"data holds a memory-mapped array of type {leaf.dtype}, which cannot be a tensor "
                    f"({error!s:.200}); map the file in another way"
                ) from None
    # Records are drawn from anywhere: without this word a system reads megabytes around each of them.
    _advise(leaf, "MADV_RANDOM")
    return leaf


def _advise(leaf: Tensor, word: str) -> None:
    """Say how a mapped file will be read."""
    advice, address = getattr(mmap, word, None), leaf.data_ptr()
    if advice is not None and leaf.numel():
        before = address % mmap.PAGESIZE
        size = (leaf[-1:].data_ptr() - address) + leaf[-1:].numel() * leaf.element_size()
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(address - before), ctypes.c_size_t(before + size), ctypes.c_int(advice))


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
