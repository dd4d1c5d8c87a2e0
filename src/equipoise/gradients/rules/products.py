"""Rules for products with a matrix parameter: linear layers, `addmm`, `matmul`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from equipoise.gradients.factors.base import DenseFactor, Factor
from equipoise.gradients.factors.outer import OuterFactor
from equipoise.gradients.rules.operation import Finish, Operation, flat, sum_over

__all__ = ["addmm", "linear", "matmul"]


def _matrix_product(
    op: Operation, x: Tensor, weight: Any, bias: Any, transposed: bool, scale: float = 1.0
) -> Finish | None:
    """``x W^T + bias`` (``transposed``) or ``x W + bias`` with a matrix W and x [..., d_in]."""
    layout, records = op.layout(x), op.records
    # Records along the features: what is summed over would be the records.
    if layout is None or layout.axis == x.ndim - 1 or op.tracks(x) or op.out.ndim != x.ndim:
        return None
    kept = x.detach() if op.tracks(weight) else None
    bias = bias if op.tracks(bias) else None
    if bias is not None and bias.shape != op.out.shape[-1:]:
        return None

    def finish(b: Tensor) -> list[tuple[Tensor, Factor]]:
        b = flat(b, layout, records)
        found: list[tuple[Tensor, Factor]] = []
        if kept is not None:
            a, scaled = flat(kept, layout, records), b if scale == 1.0 else b * scale
            found.append((weight, OuterFactor(a, scaled) if transposed else OuterFactor(scaled, a)))
        if bias is not None:
            found.append((bias, DenseFactor(b.squeeze(1) if b.shape[1] == 1 else sum_over(b, (1,)))))
        return found

    return finish


def linear(op: Operation) -> Finish | None:
    """``linear(input, weight, bias)``."""
    x, weight, bias = op.get("input", "weight", "bias")
    return _matrix_product(op, x, weight, bias, transposed=True) if weight.ndim == 2 else None


def addmm(op: Operation) -> Finish | None:
    """``addmm(bias, input, weight)`` with a matrix whose rows are inputs."""
    bias, x, weight = op.get("input", "mat1", "mat2")
    if op.kwargs.get("beta", 1) != 1 and op.tracks(bias):
        return None
    return _matrix_product(op, x, weight, bias, transposed=False, scale=op.kwargs.get("alpha", 1))


def matmul(op: Operation) -> Finish | None:
    """``input @ weight`` with a matrix that the records share."""
    x, weight = op.args if len(op.args) == 2 else op.get("input", "other" if "other" in op.kwargs else "mat2")
    if not op.tracks(weight) or op.tracks(x):
        return None
    return _matrix_product(op, x, weight, None, transposed=False) if weight.ndim == 2 else None
