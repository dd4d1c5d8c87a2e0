"""Rows times a matrix on the side of a layer's inputs, and what they are made of there.

The rows of a parameter W [d_out, d_in] are matrices G_i of its shape. For a matrix P [d_in, d_in]

    G_i P               is the gradient of a layer that sees P^T x in the place of its input x
    sum_i w_i^2 G_i^T G_i     is the rows' second moment on that side, [d_in, d_in]

| factor | G_i P | rows h with w_i^2 G_i^T G_i = sum_h h h^T |
|---|---|---|
| one outer product ``b (outer) a`` | ``b (outer) P^T a`` | ``w |b| a`` |
| several | the same, position by position | formed |
| look-up | ``b P`` | ``w b``, of equal indices added up |
| all others | formed | formed |
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from equipoise.gradients.factors.base import DenseFactor, Factor
from equipoise.gradients.factors.lookup import IndexFactor
from equipoise.gradients.factors.outer import OuterFactor
from equipoise.gradients.factors.scaled import SharedFactor
from equipoise.gradients.numerics import contracted, widen


def multiplied(factor: Factor, matrix: Tensor) -> Factor:
    """The rows times a matrix, ``G_i P``.

    Args:
        factor: of one use of a matrix parameter.
        matrix: P, [d_in, d_in].

    >>> f = OuterFactor(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]]))
    >>> multiplied(f, torch.tensor([[0.0, 1.0], [1.0, 0.0]])).materialise()
    tensor([[[6., 3.]]])
    """
    matrix = matrix.detach().to(widen(torch.empty(0, dtype=factor.dtype)).dtype)
    if isinstance(factor, OuterFactor) and factor.shape == factor.matrix_shape:
        return _outer(factor, matrix)
    if isinstance(factor, IndexFactor):
        return IndexFactor(factor.index, contracted(factor.wide_b(), matrix), factor.num_rows, factor.kernel)
    if isinstance(factor, SharedFactor):
        return SharedFactor(contracted(widen(factor.row), matrix), factor.num_records)
    return DenseFactor(contracted(factor.materialise(), matrix))


def _outer(factor: OuterFactor, matrix: Tensor) -> OuterFactor:
    if factor._operands is None:
        return factor._like(contracted(widen(factor._a), matrix), factor._b)
    left, right = (_outer(cast(OuterFactor, operand), matrix) for operand in factor._operands)
    return left._minus(right, factor.kernel)


def input_rows(factor: Factor, weights: Tensor) -> Tensor | None:
    """Few rows h of each record with ``w_i^2 G_i^T G_i = sum_h h h^T``, [B, n, d_in]; None for want of them.

    Args:
        factor: the only use of a matrix parameter.
        weights: w [B].

    >>> f = OuterFactor(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
    >>> input_rows(f, torch.tensor([0.5]))
    tensor([[[2.5000, 5.0000]]])
    """
    if isinstance(factor, OuterFactor) and factor.positions == 1 and factor.shape == factor.matrix_shape:
        a = widen(factor.a)
        # In float64, where no square vanishes or overflows.
        sizes = torch.linalg.vector_norm(factor.b, dim=2, keepdim=True, dtype=torch.float64)
        sizes = (sizes * weights[:, None, None]).clamp_(max=torch.finfo(a.dtype).max)
        return a * sizes.to(a.dtype)
    if isinstance(factor, IndexFactor):
        b = factor.wide_b()
        return factor._segment_sums(b).view_as(b) * weights[:, None, None].to(b.dtype)
    return None
