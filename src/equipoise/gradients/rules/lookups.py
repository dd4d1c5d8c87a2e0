"""Rules for what reads rows of a table by index."""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise.gradients.factors.base import Factor
from equipoise.gradients.factors.lookup import IndexFactor
from equipoise.gradients.numerics import accumulation_dtype
from equipoise.gradients.rules.operation import Finish, Layout, Operation, record_first


def embedding(op: Operation) -> Finish | None:
    """``embedding`` without ``max_norm`` and scaling by frequency."""
    index, weight, padding, max_norm, _, by_frequency = op.get(
        "input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq"
    )
    if max_norm is not None or by_frequency:
        return None
    return _look_up(op, weight, index, padding)


def get_item(op: Operation) -> Finish | None:
    """``table[index]`` with one integer tensor that follows the records."""
    weight, index = op.args
    if isinstance(index, tuple) and len(index) == 1:
        (index,) = index
    if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32):
        return None
    # Negative indices count from the end; the remainder is a new tensor, whose layout is the index's.
    return _look_up(op, weight, index % weight.shape[0], None, layout_of=index)


def _look_up(
    op: Operation, weight: Tensor, index: Tensor, padding: int | None, layout_of: Tensor | None = None
) -> Finish | None:
    layout, records, num_rows = (
        op.layout(index if layout_of is None else layout_of),
        op.records,
        weight.shape[0],
    )
    if layout is None or not op.tracks(weight):
        return None
    tail = tuple(weight.shape[1:])
    flat = record_first(index.detach(), layout, records).reshape(records, -1)

    def finish(b: Tensor) -> list[tuple[Tensor, Factor]]:
        b = record_first(b, layout, records).reshape(*flat.shape, *tail)
        if padding is not None:  # PyTorch gives the padding row no gradient
            b = b * (flat != padding % num_rows).view(*flat.shape, *(1,) * len(tail))
        return [(weight, IndexFactor(flat, b, num_rows))]

    return finish


def embedding_bag(op: Operation) -> Finish | None:
    """``embedding_bag`` of a matrix of indices, by sum or mean."""
    names = "input weight offsets max_norm norm_type scale_grad_by_freq mode sparse per_sample_weights"
    index, weight, offsets, max_norm, _, by_frequency, mode, _, scales, _, padding = op.get(
        *names.split(), "include_last_offset", "padding_idx"
    )
    layout, records, mode = op.layout(index), op.records, mode or "mean"
    if (
        layout is None
        or index.ndim != 2
        or layout != Layout(0)
        or offsets is not None
        or max_norm is not None
        or by_frequency
        or mode == "max"
        or op.tracks(scales)
    ):
        return None
    index, num_rows = index.detach(), weight.shape[0]
    parts = torch.ones(index.shape, dtype=accumulation_dtype(weight.dtype), device=index.device)
    if padding is not None:
        parts = parts * (index != padding % num_rows)
    if mode == "mean":
        parts = parts / parts.sum(1, keepdim=True).clamp(min=1)
    if scales is not None:
        parts = parts * scales.detach()

    def finish(b: Tensor) -> list[tuple[Tensor, Factor]]:
        return [(weight, IndexFactor(index.view(records, -1), b.unsqueeze(1) * parts.unsqueeze(2), num_rows))]

    return finish
