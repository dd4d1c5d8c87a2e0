"""Records that may enter: copies of those of the data, which stand behind them, every other one scaled."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise._tree import leaves, map_leaves
from equipoise.gradients.engine_inputs import map_records, record_leaves
from equipoise.training.record_source import RecordSource

SCALES = (1.0, -10.0)
"""What the floating-point numbers of a record that enters are multiplied by, in turn over the positions."""


@dataclass(frozen=True)
class ScaledCopy:
    """A record that may enter: a copy of one of the data, its floating-point numbers scaled."""

    number: int
    scale: float


class DatasetWithCopies(torch.utils.data.Dataset):
    """The items of a dataset, and behind them those that may enter."""

    def __init__(self, data: Any, copies: Sequence[ScaledCopy]) -> None:
        self._data, self._copies = data, copies

    def __len__(self) -> int:
        return len(self._data) + len(self._copies)

    def __getitem__(self, number: int) -> Any:
        count = len(self._data)
        if number < count:
            return self._data[number]
        one = self._copies[number - count]

        def scaled(leaf: Any) -> Any:
            is_real = isinstance(leaf, float) or getattr(getattr(leaf, "dtype", None), "kind", "") == "f"
            real_tensor = isinstance(leaf, Tensor) and leaf.is_floating_point()
            return leaf * one.scale if is_real or real_tensor else leaf

        return map_leaves(scaled, self._data[one.number])


def with_copies(source: RecordSource, data: Any, copies: Sequence[ScaledCopy], collate: Any) -> RecordSource:
    """The records, and behind them those that may enter."""
    if not source.has_rows:
        return RecordSource(DatasetWithCopies(data, copies), collate)
    scales = torch.tensor([one.scale for one in copies])

    def scaled(leaf: Tensor) -> Tensor:
        if leaf.is_floating_point():
            factors = scales.to(leaf).reshape(-1, *[1] * (leaf.ndim - 1))
            leaf[len(source) :] *= factors
        return leaf

    numbers = [*range(len(source)), *(one.number for one in copies)]
    return RecordSource(map_records(scaled, source.take(torch.tensor(numbers))), collate)


def other_record(source: RecordSource, record: int) -> int:
    """The number of a record with other contents, from half-way round on; of any if all are alike."""

    def contents(number: int) -> list[Any] | None:
        try:
            return leaves(source.take(torch.tensor([number])))
        except Exception:  # it has weight zero in a training, and would show nothing
            return None

    def differ(one: Any, other: Any) -> bool:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return not torch.equal(one, other)
        return bool(one != other)

    own, count = contents(record), len(source)
    for step in range(count):
        number = (record + count // 2 + step) % count
        there = None if number == record else contents(number)
        if there is not None and (own is None or any(map(differ, own, there))):
            return number
    return (record + 1) % count


#: How many records, at equal distances, the smallest and the largest are looked for among.
MOST_SIZED = 1000


def smallest_and_largest(source: RecordSource) -> tuple[int, int] | None:
    """Numbers of the records that hold the fewest and the most numbers, by the batch of one.

    Of records that hold equally many, those whose floating-point numbers are the smallest and the largest in
    norm; None if they do not differ.
    """

    def size(number: int) -> tuple[int, float]:
        tensors = record_leaves(source.take(torch.tensor([number])))
        real = (leaf.detach().double() for leaf in tensors if leaf.is_floating_point())
        return sum(leaf.numel() for leaf in tensors), sum(float(leaf.square().sum()) for leaf in real)

    sizes: dict[int, tuple[int, float]] = {}
    for number in torch.linspace(0, len(source) - 1, min(MOST_SIZED, len(source))).long().tolist():
        with suppress(Exception):  # it has weight zero in a training, and would show nothing
            sizes[number] = size(number)
    if len({*sizes.values()}) < 2:
        return None
    return min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
