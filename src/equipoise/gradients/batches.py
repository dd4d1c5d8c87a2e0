"""Batches: a tensor or a nest of mappings, tuples and lists of tensors, with the record axis first in every
tensor.

Leaves that are no tensors, and tensors without dimensions, belong to all records and pass through unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["map_leaves", "num_records", "record_leaves", "signature", "take_records"]


def map_leaves(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """``batch`` with ``function`` applied to every tensor that has a record axis; containers keep their type.

    >>> map_leaves(lambda t: t[:1], {"x": torch.ones(3, 2), "name": "digits"})
    {'x': tensor([[1., 1.]]), 'name': 'digits'}
    """
    if isinstance(batch, Tensor):
        return function(batch) if batch.ndim else batch
    if isinstance(batch, Mapping):
        if type(batch) is dict:
            return {key: map_leaves(function, value) for key, value in batch.items()}
        new: Any = copy.copy(
            batch
        )  # an ordered or a tokenizer's dict keeps its type and its extra attributes
        for key, value in batch.items():
            new[key] = map_leaves(function, value)
        return new
    if isinstance(batch, tuple):
        parts = [map_leaves(function, value) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if isinstance(batch, list):
        return [map_leaves(function, value) for value in batch]
    if hasattr(batch, "__array__") and getattr(batch, "ndim", 0) > 0:
        raise TypeError(
            f"batch holds a {type(batch).__name__}, which would pass for something that all records share; "
            "give a tensor, for instance torch.from_numpy(array)"
        )
    return batch


def record_leaves(batch: Any) -> list[Tensor]:
    """The tensors of ``batch`` that have a record axis, in a fixed order."""
    leaves: list[Tensor] = []
    waiting = [batch]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            if value.ndim:
                leaves.append(value)
        elif isinstance(value, Mapping):
            waiting.extend(reversed(list(value.values())))
        elif isinstance(value, (tuple, list)):
            waiting.extend(reversed(value))
        else:
            map_leaves(_unchanged, value)  # refuses arrays that are no tensors
    return leaves


def _unchanged(leaf: Tensor) -> Tensor:
    return leaf


def replace_leaves(batch: Any, leaves: list[Tensor]) -> Any:
    """``batch`` with other record leaves, in the order of ``record_leaves``."""
    source = iter(leaves)
    return map_leaves(lambda _: next(source), batch)


def num_records(batch: Any) -> int:
    """B, the common first size of the batch's tensors.

    Raises:
        ValueError: no tensor has a record axis, or the first sizes differ.
    """
    leaves = record_leaves(batch)
    if not leaves:
        raise ValueError(
            f"batch={type(batch).__name__} holds no tensor with a record axis; pass a tensor or a dict, "
            "tuple or "
            "list of tensors whose first dimension counts the records"
        )
    sizes = [leaf.shape[0] for leaf in leaves]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"batch holds tensors of first sizes {sizes}, so that records cannot be told apart; give "
            "every tensor the "
            "record axis first (move what is shared by all records into the model or the loss)"
        )
    return sizes[0]


def take_records(batch: Any, index: Tensor | slice) -> Any:
    """The chosen records of ``batch``.

    >>> take_records((torch.arange(4), [torch.eye(4)]), slice(1, 2))
    (tensor([1]), [tensor([[0., 1., 0., 0.]])])
    """
    if isinstance(index, slice):
        return map_leaves(lambda leaf: leaf[index], batch)
    return map_leaves(lambda leaf: leaf.index_select(0, index.to(leaf.device)), batch)


def repeat_to(batch: Any, count: int) -> Any:
    """The first ``count`` records; where the batch has fewer, they are repeated in turn."""
    size = num_records(batch)
    return take_records(batch, torch.arange(count) % size)


def perturb_record(batch: Any, record: int) -> Any:
    """``batch`` with other contents in one record: floats get noise, the rest another record's values."""
    generator = torch.Generator().manual_seed(20)

    def change(leaf: Tensor) -> Tensor:
        new = leaf.clone()
        if leaf.is_floating_point():
            noise = torch.randn(leaf.shape[1:], generator=generator, dtype=torch.float32)
            new[record] = leaf[record] + noise.to(leaf.device, leaf.dtype)
        else:
            new[record] = leaf[(record + 1) % leaf.shape[0]]
        return new

    return map_leaves(change, batch)


def signature(batch: Any) -> tuple:
    """Types and shapes of the record leaves without their record axis: batches that one plan serves."""
    return tuple((leaf.dtype, leaf.shape[1:]) for leaf in record_leaves(batch))
