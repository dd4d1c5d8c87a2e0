"""Rules for products with a matrix parameter: linear layers, `addmm`, `matmul`, `einsum`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equipoise.gradients.factors.base import DenseFactor, Factor
from equipoise.gradients.factors.outer import OuterFactor
from equipoise.gradients.rules.operation import Finish, Operation, flat, sum_over


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


def einsum(op: Operation) -> Finish | None:
    """``x[record, S, in], W[in, out] -> [record, S, out]`` in any order of letters, no batched weights."""
    equation, *operands = op.args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation or "->" not in equation:
        return None
    left, result = equation.replace(" ", "").split("->")
    letters = left.split(",")
    if op.tracks(operands[0]):
        letters, operands = letters[::-1], operands[::-1]
    (x_letters, w_letters), (x, weight) = letters, operands
    layout, records = op.layout(x), op.records
    if layout is None or layout.fold != "none" or not op.tracks(weight) or op.tracks(x):
        return None
    inner = [c for c in w_letters if c in x_letters]
    outer = [c for c in w_letters if c in result]
    record = x_letters[layout.axis]
    shared = [c for c in x_letters if c != record and c not in inner]
    if (
        set(inner) & set(outer)
        or len(inner) + len(outer) != len(w_letters)
        or set(result) != {record, *shared, *outer}
        or any(len(set(word)) != len(word) for word in (x_letters, w_letters, result))
    ):
        return None
    in_first = list(w_letters) == inner + outer
    if not in_first and list(w_letters) != outer + inner:
        return None
    kept, shape = x.detach(), weight.shape

    def arrange(tensor: Tensor, word: str, last: list[str]) -> Tensor:
        order = [record, *shared, *last]
        sizes = dict(zip(word, tensor.shape, strict=True))
        width = torch.Size(sizes[c] for c in last).numel()
        return tensor.permute([word.index(c) for c in order]).reshape(records, -1, width)

    def finish(b: Tensor) -> list[tuple[Tensor, Factor]]:
        a, b = arrange(kept, x_letters, inner), arrange(b, result, outer)
        return [(weight, OuterFactor(b, a, shape) if in_first else OuterFactor(a, b, shape))]

    return finish
