"""Rows times a diagonal, and a row that all records share.

A diagonal D multiplies the columns of G: row i becomes ``D * row_i``, entry by entry. Where D follows the
form of a factor the factor takes it in and stays what it was, with the same kernels:

| factor | takes in |
|---|---|
| outer product ``b (outer) a`` | what varies along one side alone, so products ``u v^T`` too |
| convolution | what varies along output or input channels alone |
| look-up, held rows, a shared row | every D: a look-up meets the rows of D that it reads |

Any other D stays apart from the factor (`ScaledFactor`), whose rows are never held. One outer product has

    ||D * (b (outer) a)||^2 = sum_oi D_oi^2 b_o^2 a_i^2

taken in float64, where no square vanishes; several positions are formed in chunks. The weighted sum is D
times the factor's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise.gradients.factors.base import BilinearFactor, DenseFactor, Factor
from equipoise.gradients.factors.convolution import ConvFactor
from equipoise.gradients.factors.lookup import IndexFactor
from equipoise.gradients.factors.outer import OuterFactor
from equipoise.gradients.numerics import chunks, squared_rows, widen


def scaled(factor: Factor, diagonal: Tensor) -> Factor:
    """The rows times a diagonal.

    Args:
        factor: of one use of a parameter.
        diagonal: with as many dimensions as the parameter, each of its size or 1; or with none.

    >>> f = OuterFactor(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]]))
    >>> scaled(f, torch.tensor([[2.0, 1.0]])).materialise(), scaled(f, torch.tensor(2.0)).kind
    (tensor([[[6., 6.]]]), 'outer')
    """
    diagonal = diagonal.detach().to(widen(torch.empty(0, dtype=factor.dtype)).dtype)
    if isinstance(factor, BilinearFactor):
        found = _taken_in(factor, diagonal)
        return ScaledFactor(factor, diagonal.expand(factor.shape)) if found is None else found
    if isinstance(factor, ScaledFactor):
        return ScaledFactor(factor.inner, factor.diagonal * diagonal)
    if isinstance(factor, SharedFactor):
        return SharedFactor(widen(factor.row) * diagonal, factor.num_records)
    if isinstance(factor, IndexFactor):
        # A position is e_r (outer) b: it meets row r of the diagonal and no other.
        by_position = diagonal if diagonal.ndim == 0 else diagonal.expand(factor.shape)[factor.index]
        return IndexFactor(factor.index, widen(factor.b) * by_position, factor.num_rows, factor.kernel)
    return DenseFactor(factor.materialise() * diagonal)


def _taken_in(factor: BilinearFactor, diagonal: Tensor) -> BilinearFactor | None:
    """The same factor with a diagonal on its inputs or its output gradients; None where neither holds it."""
    if factor._operands is not None:
        left, right = (_taken_in(operand, diagonal) for operand in factor._operands)
        return None if left is None or right is None else left._minus(right, factor.kernel)
    a, b = widen(factor._a), widen(factor._b)
    if diagonal.numel() == 1:
        return factor._like(a, b * diagonal.reshape(()))
    tail = a.ndim - 3  # spatial dimensions of a convolution
    if isinstance(factor, OuterFactor):
        sizes = factor.matrix_shape if factor.shape == factor.matrix_shape else None
        groups = 1
    elif isinstance(factor, ConvFactor):
        sizes, groups = factor.shape, factor.geometry.groups
    else:
        return None
    if sizes is None:
        return None
    if diagonal.shape[0] == sizes[0] and diagonal[0].numel() == 1:
        return factor._like(a, b * diagonal.reshape(-1, *(1,) * tail))
    if diagonal.shape[1] == sizes[1] and diagonal.numel() == sizes[1]:
        return factor._like(a * diagonal.reshape(-1).repeat(groups).view(-1, *(1,) * tail), b)
    return None


def added(left: Factor, right: Factor) -> Factor | None:
    """Rows of two uses of a parameter added up, as one factor where that has their form; else None."""
    if isinstance(left, DenseFactor) and isinstance(right, DenseFactor):
        return DenseFactor(widen(left.g) + widen(right.g))
    if isinstance(left, SharedFactor) and isinstance(right, SharedFactor):
        return SharedFactor(left.row + right.row, left.num_records)
    if isinstance(left, ScaledFactor) and isinstance(right, ScaledFactor):
        inner = added(left.inner, right.inner) if left.diagonal is right.diagonal else None
        return None if inner is None else ScaledFactor(inner, left.diagonal)
    if isinstance(left, IndexFactor) and isinstance(right, IndexFactor) and left.shape == right.shape:
        if left.index.shape == right.index.shape and bool((left.index == right.index).all()):
            return IndexFactor(left.index, widen(left.b) + widen(right.b), left.num_rows, left.kernel)
        index = torch.cat([left.index, right.index], dim=1)
        return IndexFactor(index, torch.cat([left.b, right.b], dim=1), left.num_rows, "sort")
    if (
        isinstance(left, BilinearFactor)
        and isinstance(right, BilinearFactor)
        and left._form() == right._form()
    ):
        # The terms one after the other: what cancels among them is seen by the kernels' own guards.
        out = left._like(torch.cat([left.a, right.a], dim=1), torch.cat([left.b, right.b], dim=1))
        out.kernel = left.kernel if left.kernel_scales else "auto"
        return out
    return None


def term_squares(factor: OuterFactor, diagonal: Tensor, part: slice) -> Tensor:
    """Squared norms of every position's scaled outer product, [B, S] in float64."""
    a, b = factor.a[part].double().square(), factor.b[part].double().square()
    return (torch.matmul(b, diagonal.double().square().reshape(factor.matrix_shape)) * a).sum(2)


class ScaledFactor(Factor):
    """``D * row_i`` for a diagonal that the factor itself does not take in.

    Args:
        inner: the rows.
        diagonal: D, of the parameter's shape.

    >>> f = OuterFactor(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]]))
    >>> ScaledFactor(f, torch.tensor([[1.0, 0.5]])).norms_squared()
    tensor([18.], dtype=torch.float64)
    """

    kind = "scaled"

    def __init__(self, inner: Factor, diagonal: Tensor) -> None:
        self.inner, self.diagonal, self.positions = inner, diagonal.detach(), inner.positions
        self.shape, self.num_records, self.device = inner.shape, inner.num_records, inner.device
        self.dtype = torch.promote_types(inner.dtype, diagonal.dtype)

    @property
    def _single(self) -> bool:
        """Whether a row is one outer product."""
        return isinstance(self.inner, OuterFactor) and self.positions == 1

    def _terms(self) -> Tensor:
        assert isinstance(self.inner, OuterFactor)
        sizes = self.positions * sum(self.inner.matrix_shape)
        found = [term_squares(self.inner, self.diagonal, part) for part in chunks(self.num_records, sizes)]
        empty = torch.zeros(0, self.positions, dtype=torch.float64, device=self.device)
        return torch.cat(found) if found else empty

    def norms_squared(self) -> Tensor:
        if self._single:
            return self._terms().squeeze(1)
        out = torch.zeros(self.num_records, dtype=torch.float64, device=self.device)
        for part in chunks(self.num_records, self.shape.numel()):
            out[part] = squared_rows(self.inner.rows(part).materialise() * self.diagonal)
        return out

    def magnitudes(self) -> Tensor | None:
        if self._single:
            return None
        result = widen(torch.empty(0, dtype=self.dtype)).dtype
        if isinstance(self.inner, OuterFactor):
            return self._terms().sqrt_().sum(1).to(result)
        inner = self.inner.magnitudes()
        return None if inner is None else inner * self.diagonal.abs().max()

    def additions(self) -> int:
        return self.inner.additions()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.inner.weighted_sum(weights) * self.diagonal

    def materialise(self) -> Tensor:
        return self.inner.materialise() * self.diagonal

    def rows(self, index: Tensor | slice) -> ScaledFactor:
        return ScaledFactor(self.inner.rows(index), self.diagonal)

    def difference(self, other: Factor) -> Factor:
        if isinstance(other, ScaledFactor) and other.diagonal is self.diagonal:
            return ScaledFactor(self.inner.difference(other.inner), self.diagonal)
        return super().difference(other)


class SharedFactor(Factor):
    """One row for every record: what is added to all rows alike.

    Args:
        row: of the parameter's shape.
        num_records: B.

    >>> SharedFactor(torch.tensor([3.0, 4.0]), 2).norms_squared()
    tensor([25., 25.], dtype=torch.float64)
    """

    kind = "shared"

    def __init__(self, row: Tensor, num_records: int) -> None:
        self.row = row.detach()
        self._describe(self.row.expand(num_records, *row.shape), row.shape, "rows")

    def norms_squared(self) -> Tensor:
        return squared_rows(widen(self.row).unsqueeze(0)).expand(self.num_records)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        row = widen(self.row)
        return torch.tensordot(weights.to(row.dtype).sum(0), row, 0)

    def materialise(self) -> Tensor:
        return widen(self.row).expand(self.num_records, *self.shape).clone()

    def rows(self, index: Tensor | slice) -> SharedFactor:
        return SharedFactor(self.row, len(torch.empty(self.num_records, device=self.device)[index]))
