"""Batches whose length is one of a few that are public."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class PadTo:
    """A collate function that pads batches up to one of a few lengths.

    A trace serves batches of one shape, so each further length costs a trace of its own, and beyond a few
    lengths batches run eagerly. The model still has to mask the padding.

    Args:
        collate: joins items to a batch, a dict of tensors; those in `values` have one length along `axis`.
        lengths: public, in rising order; no batch may be longer than the last.
        values: name of a field -> what it is padded with.
        axis: the axis of the length.

    Raises:
        ValueError: no values, or lengths that do not rise; when called, a batch longer than the last of them.

    Example:
        >>> import torch
        >>> collate = PadTo(lambda items: {"ids": torch.stack(items)}, (4, 8), {"ids": 0})
        >>> collate([torch.ones(5, dtype=torch.long)])
        {'ids': tensor([[1, 1, 1, 1, 1, 0, 0, 0]])}
    """

    collate: Callable[[list[Any]], dict[str, Tensor]]
    lengths: Sequence[int]
    values: Mapping[str, float]
    axis: int = 1

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("values={} names no field to pad: give each one's value, such as {'ids': 0}")
        if not self.lengths or any(b <= a for a, b in zip((0, *self.lengths), self.lengths, strict=False)):
            raise ValueError(f"lengths={self.lengths} must be positive and rise, such as (64, 128, 256)")

    def width(self, length: int) -> int:
        """The length to which a record of this length is padded.

        Raises:
            ValueError: it is longer than the last one.
        """
        place = bisect_left(self.lengths, length)
        if place == len(self.lengths):
            raise ValueError(
                f"a record or batch is longer than the last of lengths={tuple(self.lengths)}: cut records "
                "to that length before they are joined, or add a longer one"
            )
        return self.lengths[place]

    def __call__(self, items: list[Any]) -> dict[str, Tensor]:
        batch = self.collate(items)
        return self.resized(batch, self.width(max(batch[name].shape[self.axis] for name in self.values)))

    def resized(self, batch: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
        """A batch that is padded, or cut, to a length."""

        def resized(tensor: Tensor, value: float) -> Tensor:
            missing = width - tensor.shape[self.axis]  # a negative one cuts
            behind = tensor.ndim - 1 - self.axis % tensor.ndim  # axes after this one
            return pad(tensor, (0, 0) * behind + (0, missing), value=value)

        return {**batch, **{name: resized(batch[name], value) for name, value in self.values.items()}}
