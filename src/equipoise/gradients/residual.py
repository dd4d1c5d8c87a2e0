"""Rows minus their part in a subspace, never formed.

For columns V and coordinates y_i = V^T g_i the residual is ``r_i = g_i - V y_i`` and

    ||r_i||^2 = ||g_i||^2 - 2 ||y_i||^2 + y_i^T (V^T V) y_i
    sum_i c_i r_i = sum_i c_i g_i - V (sum_i c_i y_i)

which holds for any V; with orthonormal columns r is the orthogonal residual. The three terms cancel where
little of a row is left. What is left then is the rounding of y, a sum over all parameters: up to 25 eps
``||g_i||^2`` were measured for rows and columns of one sign, at 1e3 to 1e6 parameters. So the squared norm
carries ``64 eps ||g_i||^2`` and the norm ``4 eps ||g_i||``: there it comes out too large (by 3e-3 ||g_i|| at
most in float32) rather than too small. That covers columns that are held and orthonormal. For others y and
V^T V may be wrong by far more: `PerSampleGradients.residual` then forms the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from equipoise.gradients.derived import Derived
from equipoise.gradients.factored import DenseGradients
from equipoise.gradients.operator import PerSampleGradients
from equipoise.gradients.precision import full_precision
from equipoise.gradients.rounding import GUARD
from equipoise.gradients.subspace import Subspace

__all__ = ["ResidualGradients"]

#: In units of eps: what the guard of a squared norm is of the row's own square.
SQUARE_GUARD = 64


class ResidualGradients(Derived):
    """``G - (G V) V^T`` for the columns V of a subspace.

    Norms by groups, ``select`` and cross products with another residual form the rows.
    """

    def __init__(
        self, gradients: PerSampleGradients, subspace: Subspace, coordinates: Tensor | None = None
    ) -> None:
        self.gradients, self.subspace = gradients, subspace
        self.coordinates = subspace.coordinates(gradients) if coordinates is None else coordinates

    @override
    def row_norms(self, groups: Sequence[Sequence[str]] | None = None) -> Tensor:
        if groups is not None:
            return self.materialise().row_norms(groups)
        eps = torch.finfo(self.dtype).eps
        whole, y = self.gradients.row_norms().double(), self.coordinates.double()
        with full_precision(self.device):
            inside = (y @ self.subspace.gram().to(y)).mul_(y).sum(1) - 2 * y.square().sum(1)
        squares = (whole.square() + inside).abs_().add_(whole.square(), alpha=SQUARE_GUARD * eps)
        return squares.sqrt_().add_(whole, alpha=GUARD * eps).to(self.dtype)

    @override
    def weighted_sums(self, weights: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not isinstance(weights, Tensor):
            return self.materialise().weighted_sums(weights)
        sums = self.gradients.weighted_sums(weights)
        with full_precision(self.device):
            columns = weights.detach().to(self.coordinates)
            columns = columns.unsqueeze(1) if weights.ndim == 1 else columns
            y = columns.t() @ self.coordinates
        lifted = [self.subspace.lift(column) for column in y]
        if weights.ndim == 1:
            return {name: total - lifted[0][name] for name, total in sums.items()}
        for name, total in sums.items():
            for k, column in enumerate(lifted):
                total[k] -= column[name]
        return sums

    @override
    def cross_gram(self, other: PerSampleGradients, per_tensor: bool = False) -> Tensor | dict[str, Tensor]:
        if per_tensor or isinstance(other, ResidualGradients):
            return self.materialise().cross_gram(other.materialise(), per_tensor)
        whole = self.gradients.cross_gram(other)
        assert isinstance(whole, Tensor)
        with full_precision(self.device):
            return whole - self.coordinates @ self.subspace.coordinates(other).t()

    @override
    def inner(self, other: PerSampleGradients) -> Tensor:
        if isinstance(other, ResidualGradients):
            return self.materialise().inner(other.materialise())
        return self.gradients.inner(other) - (self.coordinates * self.subspace.coordinates(other)).sum(1)

    @override
    def __sub__(self, other: PerSampleGradients) -> PerSampleGradients:
        if isinstance(other, ResidualGradients) and other.subspace is self.subspace:
            return (self.gradients - other.gradients).residual(self.subspace)
        return self.materialise() - other

    @override
    def rows(self, index: Tensor | slice) -> ResidualGradients:
        return ResidualGradients(self.gradients.rows(index), self.subspace, self.coordinates[index])

    @override
    def materialise(self) -> DenseGradients:
        rows = {name: kept.clone() for name, kept in self.gradients.materialise().tensors.items()}
        for i, y in enumerate(self.coordinates):
            for name, part in self.subspace.lift(y).items():
                rows[name][i] -= part
        return DenseGradients(rows, self.losses, num_records=self.num_records, device=self.device)
