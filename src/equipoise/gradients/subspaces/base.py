"""Subspaces of the parameter space: coordinates of the rows of G, and the way back.

A subspace has columns V [P, K], seldom held as such:

    coordinates(G) = G V     [B, K]
    lift(y)        = V y     named tensors
    gram()         = V^T V   [K, K]

The columns need not be orthonormal; ``gram()`` says what they are. For a column vec(u w^T) of a matrix
parameter (Khatri-Rao structure) the coordinate of a factor's row is ``sum_s (b_s . u)(a_s . w)``, and the
Gram matrix is ``(U^T U) * (W^T W)``, so that no column is formed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from equipoise.gradients.factors.base import Factor
from equipoise.gradients.factors.lookup import IndexFactor
from equipoise.gradients.factors.outer import OuterFactor
from equipoise.gradients.factors.pair_products import gram
from equipoise.gradients.numerics import accumulation_dtype, chunks, widen
from equipoise.gradients.operator import PerSampleGradients
from equipoise.gradients.views import projection, residual

__all__ = ["Subspace"]


class Subspace(ABC):
    """Columns V [P, K] over named parameters."""

    @property
    @abstractmethod
    def dimension(self) -> int:
        """K, the number of columns."""

    @abstractmethod
    def coordinates(self, gradients: PerSampleGradients) -> Tensor:
        """``G V`` [B, K]: dot products of the rows with the columns."""

    @abstractmethod
    def lift(self, y: Tensor) -> dict[str, Tensor]:
        """``V y`` as named tensors, for coordinates y [K]."""

    @abstractmethod
    def gram(self) -> Tensor:
        """``V^T V`` [K, K]."""

    @property
    def holds_columns(self) -> bool:
        """Whether the columns are in memory, so that `gram` is true to rounding."""
        return False

    def residual(
        self, gradients: PerSampleGradients, coordinates: Tensor | None = None
    ) -> PerSampleGradients:
        """The rows minus their part in the subspace; see `equipoise.gradients.views.residual`."""
        return residual(gradients, self, coordinates)

    def projection(self, gradients: PerSampleGradients) -> PerSampleGradients:
        """The rows' parts in the subspace; see `equipoise.gradients.views.projection`."""
        return projection(gradients, self)

    def _check_coordinates(self, y: Tensor) -> Tensor:
        if y.shape != (self.dimension,):
            raise ValueError(f"y has shape {tuple(y.shape)}; it needs [{self.dimension}], the coordinates")
        return y.detach()


def _coordinates(factor: Factor, block: Factor) -> Tensor:
    """Dot products of a factor's rows with columns; with Khatri-Rao columns by two narrow products."""
    if not isinstance(block, OuterFactor):
        return gram(factor, block)
    u, w = block.b[:, 0], block.a[:, 0]
    dtype = torch.promote_types(widen(u[:0]).dtype, accumulation_dtype(factor.dtype))
    u, w = u.to(dtype), w.to(dtype)
    if isinstance(factor, OuterFactor) and factor.matrix_shape == block.matrix_shape:
        out = torch.empty(factor.num_records, u.shape[0], dtype=dtype, device=factor.device)
        for part in chunks(factor.num_records, 2 * factor.positions * u.shape[0]):
            products = torch.matmul(factor.b[part].to(dtype), u.t())
            out[part] = products.mul_(torch.matmul(factor.a[part].to(dtype), w.t())).sum(1)
        return out
    if isinstance(factor, IndexFactor):
        out = torch.empty(factor.num_records, u.shape[0], dtype=dtype, device=factor.device)
        for part in chunks(factor.num_records, 2 * factor.positions * u.shape[0]):
            products = torch.matmul(factor.wide_b()[part].to(dtype), w.t())
            out[part] = products.mul_(u.t()[factor.index[part]]).sum(1)
        return out
    out = torch.empty(factor.num_records, u.shape[0], dtype=dtype, device=factor.device)
    for part in chunks(factor.num_records, factor.shape.numel()):
        rows = factor.rows(part).materialise().to(dtype).reshape(-1, *block.matrix_shape)
        out[part] = torch.matmul(rows, w.t()).mul_(u.t()).sum(1)
    return out
