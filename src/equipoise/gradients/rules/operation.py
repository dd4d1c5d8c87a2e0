"""One operation on parameters, as rules see it: its tensors, where the records are in them, and shared sums.

An axis whose size is proportional to the number of records follows the batch. Its size may be a multiple,
n * k, when positions were folded into it: record-major (n, k) as in ``x.view(-1, d)`` of [B, T, d], or
record-minor (k, n) as in a flattened sequence-first tensor. Shapes cannot tell these two apart; gradients can
(see ``capture.planner``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from equipoise.gradients.factors.base import Factor
from equipoise.gradients.numerics import accumulation_dtype

Finish = Callable[[Tensor], list[tuple[Tensor, Factor]]]
Rule = Callable[["Operation"], "Finish | None"]


Fold = Literal["none", "major", "minor", "unknown"]


@dataclass(frozen=True)
class Layout:
    """The record axis of a tensor and how positions are folded into it."""

    axis: int
    fold: Fold = "none"


def record_first(tensor: Tensor, layout: Layout, records: int) -> Tensor:
    """A view of ``tensor`` with the records in dimension 0; folded positions stay where the axis was.

    >>> record_first(torch.arange(6).view(6, 1), Layout(0, "minor"), 3).squeeze(-1)
    tensor([[0, 3],
            [1, 4],
            [2, 5]])
    """
    axis = layout.axis
    if layout.fold == "none":
        return tensor if axis == 0 else tensor.movedim(axis, 0)
    before, after = tensor.shape[:axis], tensor.shape[axis + 1 :]
    folded = tensor.shape[axis] // max(1, records)
    if layout.fold == "major":
        return tensor.reshape(*before, records, folded, *after).movedim(axis, 0)
    if layout.fold == "minor":
        return tensor.reshape(*before, folded, records, *after).movedim(axis + 1, 0)
    raise ValueError(f"layout={layout} is not resolved; learn the fold from gradients first")


class Operation:
    """One call of a torch function that saw a tracked tensor, with the layouts of its tensors."""

    __slots__ = ("args", "func", "kwargs", "layouts", "out", "out_layout", "records", "tensors", "tracked")

    def __init__(
        self,
        func: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        out: Tensor,
        tracked: dict[int, Any],
        tensors: Sequence[Tensor],  # all tensor arguments in order
        layouts: Sequence[Layout | None],  # theirs
        out_layout: Layout,
        records: int,
    ) -> None:
        self.func, self.args, self.kwargs, self.out = func, args, kwargs, out
        self.tracked, self.tensors, self.layouts = tracked, tensors, layouts
        self.out_layout, self.records = out_layout, records

    def get(self, *names: str) -> list[Any]:
        """Arguments by position or keyword; None for those not given."""
        args, count = self.args, len(self.args)
        return [args[i] if i < count else self.kwargs.get(name) for i, name in enumerate(names)]

    def tracks(self, value: Any) -> bool:
        """Whether ``value`` is a trainable parameter or an expression of some."""
        return id(value) in self.tracked

    def layout(self, value: Any) -> Layout | None:
        """The layout of an argument; None for one that does not follow the records."""
        for tensor, layout in zip(self.tensors, self.layouts, strict=True):
            if tensor is value:
                return layout
        return None


def flat(tensor: Tensor, layout: Layout, records: int) -> Tensor:
    """[B, S, d]: records first, the last dimension kept, everything between them flattened."""
    return record_first(tensor, layout, records).reshape(records, -1, tensor.shape[-1])


def sum_over(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    """Sum in the accumulation type."""
    return tensor.sum(tuple(dims), dtype=accumulation_dtype(tensor.dtype)) if dims else tensor


def product(left: Tensor, right: Tensor) -> Tensor:
    """Elementwise product in the accumulation type."""
    wide = accumulation_dtype(torch.promote_types(left.dtype, right.dtype))
    return left.to(wide) * right.to(wide)


def channel_sum(product: Tensor, layout: Layout, records: int) -> Tensor:
    """[N, C, ...] -> [B, C]; the folded part of the record axis is summed too."""
    by_channel = sum_over(product, tuple(range(2, product.ndim)))
    rows = record_first(by_channel, layout, records).reshape(records, -1, product.shape[1])
    return rows.squeeze(1) if rows.shape[1] == 1 else sum_over(rows, (1,))
