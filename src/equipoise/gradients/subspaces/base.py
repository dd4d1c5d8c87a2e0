"""Subspaces of the parameter space: coordinates of the rows of G, and the way back.

A subspace has columns V [P, K], seldom held as such:

    coordinates(G) = G V     [B, K]
    lift(y)        = V y     named tensors
    gram()         = V^T V   [K, K]

The columns need not be orthonormal; ``gram()`` says what they are. For a column vec(u w^T) of a matrix
parameter (Khatri-Rao structure) the coordinate of a factor's row is ``sum_s (b_s . u)(a_s . w)``, and the
Gram matrix is ``(U^T U) * (W^T W)``, so that no column is formed. Columns that are combinations of public
rows, ``V = G_pub^T W``, need only the cross-Gram matrix of public and private rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from equipoise.gradients.factors.base import Factor
from equipoise.gradients.factors.lookup import IndexFactor
from equipoise.gradients.factors.outer import OuterFactor
from equipoise.gradients.numerics import accumulation_dtype, chunks, full_precision, widen
from equipoise.gradients.operator import PerSampleGradients

__all__ = ["SpanSubspace", "Subspace", "holds_orthonormal"]


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

    def _check_coordinates(self, y: Tensor) -> Tensor:
        if y.shape != (self.dimension,):
            raise ValueError(f"y has shape {tuple(y.shape)}; it needs [{self.dimension}], the coordinates")
        return y.detach()


def holds_orthonormal(subspace: Subspace) -> bool:
    """Whether the columns are in memory and orthonormal, V^T V within 0.01 of I in the Frobenius norm.

    Only then do products give the norms of residuals and projections to rounding. A Gram matrix taken from
    public rows, ``W^T (G_pub G_pub^T) W``, is off by eps times the ratio of the largest to the smallest
    eigenvalue, and reads I where the columns are not orthonormal; long columns magnify rounding as well.

    >>> from equipoise.gradients.subspaces.held import HeldSubspace
    >>> holds_orthonormal(HeldSubspace({"w": torch.eye(2, 3)}))
    True
    >>> holds_orthonormal(HeldSubspace({"w": 2 * torch.eye(2, 3)}))
    False
    """
    if not subspace.holds_columns:
        return False
    gram = subspace.gram()
    off = gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return float(torch.linalg.matrix_norm(off)) <= 0.01


class SpanSubspace(Subspace):
    """Combinations of public rows: ``V = G_pub^T W``, the weights W by parameter or common.

    Args:
        public: m public rows, at their own parameter point.
        weights: name -> W [m, K_l], when each parameter has coordinates of its own (K = sum of K_l, in the
            order of ``public.names``); or one W [m, K] for all.

    >>> from equipoise.gradients.operator import DenseGradients
    >>> V = SpanSubspace(DenseGradients({"w": torch.eye(2, 3)}), torch.tensor([[1.0], [1.0]]))
    >>> V.coordinates(DenseGradients({"w": torch.tensor([[1.0, 2.0, 3.0]])})), V.gram()
    (tensor([[3.]]), tensor([[2.]]))
    """

    def __init__(self, public: PerSampleGradients, weights: Tensor | Mapping[str, Tensor]) -> None:
        self.public = public
        self.per_tensor = not isinstance(weights, Tensor)
        self.weights: dict[str, Tensor]
        if isinstance(weights, Tensor):
            self.weights = {"": weights.detach()}
        else:
            if set(weights) != set(public.names):
                raise ValueError(
                    f"weights has entries for {', '.join(sorted(weights))}; the public rows are over "
                    f"{', '.join(public.names)}, and each needs one"
                )
            self.weights = {name: weights[name].detach() for name in public.names}
        for name, W in self.weights.items():
            if W.ndim != 2 or W.shape[0] != public.num_records:
                raise ValueError(
                    f"weights {name} has shape {tuple(W.shape)}; it needs [{public.num_records}, K], a row a "
                    "public record"
                )

    @property
    @override
    def dimension(self) -> int:
        return sum(W.shape[1] for W in self.weights.values())

    @override
    def coordinates(self, gradients: PerSampleGradients) -> Tensor:
        products = gradients.cross_gram(self.public, per_tensor=self.per_tensor)
        if isinstance(products, Tensor):
            products = {"": products}
        with full_precision(gradients.device):
            return torch.cat(
                [products[name] @ W.to(products[name]) for name, W in self.weights.items()], dim=1
            )

    @override
    def lift(self, y: Tensor) -> dict[str, Tensor]:
        y = self._check_coordinates(y)
        rows, start = {}, 0
        with full_precision(self.public.device):
            for name, W in self.weights.items():
                rows[name] = W @ y[start : start + W.shape[1]].to(W)
                start += W.shape[1]
        return self.public.weighted_sums(rows if self.per_tensor else rows[""])

    @override
    def gram(self) -> Tensor:
        products = self.public.cross_gram(self.public, per_tensor=self.per_tensor)
        if isinstance(products, Tensor):
            products = {"": products}
        with full_precision(self.public.device):
            blocks = [
                W.to(products[n]).t() @ products[n] @ W.to(products[n]) for n, W in self.weights.items()
            ]
            out = blocks[0].new_zeros(self.dimension, self.dimension)
            start = 0
            for block in blocks:
                stop = start + block.shape[0]
                out[start:stop, start:stop] = block
                start = stop
            return out


def _coordinates(factor: Factor, block: Factor) -> Tensor:
    """Dot products of a factor's rows with columns; with Khatri-Rao columns by two narrow products."""
    if not isinstance(block, OuterFactor):
        return factor.gram(block)
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
