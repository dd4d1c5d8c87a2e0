"""Rules for elementwise operations in which a parameter is broadcast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equipoise.gradients.factors.base import DenseFactor, Factor
from equipoise.gradients.rules.operation import Finish, Layout, Operation, product, record_first


def broadcast(
    op: Operation, param: Tensor, local_gradient: Callable[[Tensor, Any], Tensor], kept: Any = None
) -> Finish | None:
    """Rows are the output gradient times a local factor, summed where the parameter was broadcast."""
    layout, records, shape, ndim = op.out_layout, op.records, param.shape, op.out.ndim
    kept = kept.detach() if isinstance(kept, Tensor) else kept

    def finish(b: Tensor) -> list[tuple[Tensor, Factor]]:
        rows = record_first(local_gradient(b, kept), layout, records)
        g = _sum_to_shape(rows, layout, ndim, shape)
        if g is None:
            raise NotImplementedError("the parameter does not broadcast along the records")
        return [(param, DenseFactor(g))]

    return finish


def _sum_to_shape(rows: Tensor, layout: Layout, ndim: int, shape: torch.Size) -> Tensor | None:
    """Add up what broadcasting a parameter spread out: record-first ``rows`` of a tensor of ``ndim``
    dimensions.

    Returns [B, *shape], or None if ``shape`` does not broadcast to the rows in this layout.
    """
    aligned = [1] * (ndim - len(shape)) + list(shape)
    if layout.fold == "none" and aligned.pop(layout.axis) != 1:
        return None
    dims = []
    for i, (wanted, size) in enumerate(zip(aligned, rows.shape[1:], strict=True), start=1):
        if wanted == 1 and size != 1:
            dims.append(i)
        elif wanted != size:
            return None
    if dims:
        rows = rows.sum(dims)
    return rows.reshape(rows.shape[0], *shape)


def _operands(op: Operation) -> tuple[Any, Any] | None:
    """The two operands of an elementwise operation if exactly one is tracked."""
    if len(op.args) + len(op.kwargs) < 2:
        return None
    left, right = (*op.args, *op.kwargs.values())[:2]
    return None if op.tracks(left) == op.tracks(right) else (left, right)


def add(op: Operation, sign: int = 1) -> Finish | None:
    """Addition with broadcasting, of ``sign`` times the second operand."""
    pair = _operands(op)
    if pair is None:
        return None
    alpha = op.kwargs.get("alpha", 1)
    if op.tracks(pair[0]):
        return broadcast(op, pair[0], lambda b, _: b)
    return broadcast(op, pair[1], lambda b, _: b if sign * alpha == 1 else b * (sign * alpha))


def sub(op: Operation) -> Finish | None:
    """Subtraction with broadcasting."""
    return add(op, sign=-1)


def mul(op: Operation) -> Finish | None:
    """Multiplication with broadcasting."""
    pair = _operands(op)
    if pair is None:
        return None
    param, x = pair if op.tracks(pair[0]) else pair[::-1]
    return broadcast(op, param, _times, x)


def _times(b: Tensor, kept: Any) -> Tensor:
    return product(b, kept) if isinstance(kept, Tensor) else b * kept


def expand(op: Operation) -> Finish | None:
    """``expand``, ``repeat``, ``tile``, ``broadcast_to``: the class token of a vision transformer."""
    return broadcast(op, op.args[0], lambda b, _: b) if op.args and op.tracks(op.args[0]) else None
