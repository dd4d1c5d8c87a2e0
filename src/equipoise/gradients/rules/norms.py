"""Rules for the scales and shifts of normalisation layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.gradients.factors.base import DenseFactor, Factor
from equipoise.gradients.numerics import accumulation_dtype
from equipoise.gradients.rules.operation import (
    Finish,
    Layout,
    Operation,
    channel_sum,
    product,
    record_first,
    sum_over,
)


def layer_norm(op: Operation) -> Finish | None:
    """Scale and shift of ``layer_norm``."""
    x, shape, weight, bias, eps = op.get("input", "normalized_shape", "weight", "bias", "eps")
    eps = 1e-5 if eps is None else eps
    layout, records = op.layout(x), op.records
    if layout is None or op.tracks(x) or layout.axis >= x.ndim - len(shape):
        return None

    def summed(b: Tensor) -> Tensor:
        rows = record_first(b, layout, records)
        return sum_over(rows, range(1, rows.ndim - len(shape)))

    return _scale_and_shift(op, x, weight, bias, lambda t: F.layer_norm(t, shape, eps=eps), summed)


def _scale_and_shift(
    op: Operation, x: Tensor, weight: Any, bias: Any, normalise: Callable, summed: Callable[[Tensor], Tensor]
) -> Finish:
    """``weight * normalise(x) + bias``; ``summed`` adds up what the two were broadcast over."""
    kept = x.detach() if op.tracks(weight) else None  # normalised again later: that costs time, not memory
    bias = bias if op.tracks(bias) else None

    def finish(b: Tensor) -> list[tuple[Tensor, Factor]]:
        found: list[tuple[Tensor, Factor]] = []
        if kept is not None:
            found.append((weight, DenseFactor(summed(product(b, normalise(kept))))))
        if bias is not None:
            found.append((bias, DenseFactor(summed(b))))
        return found

    return finish


def group_norm(op: Operation) -> Finish | None:
    """Scale and shift of ``group_norm``, from the statistics that the forward kept."""
    x, groups, weight, bias, eps = op.get("input", "num_groups", "weight", "bias", "eps")
    eps = 1e-5 if eps is None else eps
    layout, records = op.layout(x), op.records
    if layout is None or op.tracks(x) or layout.axis != 0:
        return None
    plain = layout == Layout(0) and x.is_contiguous() and accumulation_dtype(x.dtype) == x.dtype
    if not (plain and op.tracks(weight)):

        def summed(b: Tensor) -> Tensor:
            return channel_sum(b, layout, records)

        return _scale_and_shift(op, x, weight, bias, lambda t: F.group_norm(t, groups, eps=eps), summed)
    kept, (channels, size) = x.detach(), (x.shape[1], x.shape[2:].numel())
    node = op.out.grad_fn
    mean, rstd = (getattr(node, f"_saved_result{i}", None) for i in (1, 2))  # what the forward computed
    bias = bias if op.tracks(bias) else None

    def finish(b: Tensor) -> list[tuple[Tensor, Factor]]:
        m, r = mean, rstd
        if m is None or r is None:
            _, m, r = torch.native_group_norm(kept, None, None, records, channels, size, groups, eps)
        # The records become groups of one large record, so that the sum over records is left out.
        _, by_weight, by_bias = torch.ops.aten.native_group_norm_backward(
            b.contiguous(), kept, m.view(1, -1), r.view(1, -1), kept.new_ones(records * channels),
            1, records * channels, size, records * groups, [False, True, True],
        )  # fmt: skip
        found: list[tuple[Tensor, Factor]] = [(weight, DenseFactor(by_weight.view(records, channels)))]
        if bias is not None:
            found.append((bias, DenseFactor(by_bias.view(records, channels))))
        return found

    return finish
