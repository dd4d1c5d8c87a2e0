"""Rows seen from a subspace: what is left of them outside it, and what lies in it.

The rows stay unformed wherever their norms and weighted sums can be had from products.

Residual: for columns V and coordinates y_i = V^T g_i the row is ``r_i = g_i - V y_i``, with

    ||r_i||^2 = ||g_i||^2 - 2 ||y_i||^2 + y_i^T (V^T V) y_i
    sum_i c_i r_i = sum_i c_i g_i - V (sum_i c_i y_i)

which holds for any V; with orthonormal columns r is the orthogonal residual. The three terms cancel where
little of a row is left. What is left then is the rounding of y, a sum over all parameters: up to 25 eps
``||g_i||^2`` were measured for rows and columns of one sign, at 1e3 to 1e6 parameters. So the squared norm
carries ``64 eps ||g_i||^2`` and the norm ``4 eps ||g_i||``: there it comes out too large (by 3e-3 ||g_i|| at
most in float32) rather than too small. That covers columns that are held and orthonormal. For others y and
V^T V may be wrong by far more, and the rows are formed (see ``holds_orthonormal``).

Projection: the row is ``V y_i``, with squared norm ``y_i^T V^T V y_i`` and weighted sums
``V (sum_i c_i y_i)``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol, Self

import torch
from torch import Tensor
from typing_extensions import override

from equipoise.gradients.numerics import GUARD, full_precision
from equipoise.gradients.operator import DenseGradients, PerSampleGradients

__all__ = [
    "Columns",
    "ProjectedGradients",
    "ResidualGradients",
    "holds_orthonormal",
    "projection",
    "residual",
]


class Columns(Protocol):
    """What a view needs of a subspace with columns V [P, K]; see `equipoise.methods.subspaces.base`."""

    @property
    def holds_columns(self) -> bool: ...

    def coordinates(self, gradients: PerSampleGradients) -> Tensor: ...

    def lift(self, y: Tensor) -> dict[str, Tensor]: ...

    def gram(self) -> Tensor: ...


def holds_orthonormal(subspace: Columns) -> bool:
    """Whether the columns are in memory and orthonormal, V^T V within 0.01 of I in the Frobenius norm.

    Only then do products give the norms of residuals and projections to rounding. A Gram matrix taken from
    public rows, ``W^T (G_pub G_pub^T) W``, is off by eps times the ratio of the largest to the smallest
    eigenvalue, and reads I where the columns are not orthonormal; long columns magnify rounding as well.

    >>> from equipoise.methods.subspaces.base import HeldSubspace
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


def residual(
    gradients: PerSampleGradients, subspace: Columns, coordinates: Tensor | None = None
) -> PerSampleGradients:
    """Rows minus their part in a subspace, ``g - V V^T g`` for the subspace's columns V.

    Args:
        gradients: the rows.
        subspace: the columns.
        coordinates: the rows' coordinates [B, K], where they are known already.
    """
    rest = ResidualGradients(gradients, subspace, coordinates)
    # Elsewhere the norms could not be told from products.
    return rest if holds_orthonormal(subspace) else rest.materialise()


def projection(gradients: PerSampleGradients, subspace: Columns) -> PerSampleGradients:
    """The rows' parts in a subspace, ``V V^T g``; formed as for `residual`."""
    parts = ProjectedGradients(gradients, subspace)
    return parts if holds_orthonormal(subspace) else parts.materialise()


#: In units of eps: what the guard of a squared norm is of the row's own square.
SQUARE_GUARD = 64


class _SubspaceView(PerSampleGradients):
    """Rows that follow from other rows and their coordinates y [B, K] in a subspace.

    Attributes:
        gradients: the rows that they come from.
    """

    def __init__(
        self, gradients: PerSampleGradients, subspace: Columns, coordinates: Tensor | None = None
    ) -> None:
        self.gradients, self.subspace = gradients, subspace
        self.shapes, self.num_records, self.losses = gradients.shapes, gradients.num_records, gradients.losses
        self.dtype, self.device = gradients.dtype, gradients.device
        self.coordinates = subspace.coordinates(gradients) if coordinates is None else coordinates

    @override
    def row_norms(self, groups: Sequence[Sequence[str]] | None = None) -> Tensor:
        # Coordinates add up over all parameters: those of a group are not known.
        return self._norms() if groups is None else self.materialise().row_norms(groups)

    @abstractmethod
    def _norms(self) -> Tensor: ...

    @override
    def weighted_sums(self, weights: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not isinstance(weights, Tensor):
            return self.materialise().weighted_sums(weights)
        with full_precision(self.device):
            y = weights.detach().to(self.coordinates).t() @ self.coordinates
        if weights.ndim == 1:
            return self._sums(weights, self.subspace.lift(y))
        lifted = [self.subspace.lift(row) for row in y]
        return self._sums(
            weights, {name: torch.stack([part[name] for part in lifted]) for name in self.names}
        )

    @abstractmethod
    def _sums(self, weights: Tensor, inside: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weighted sums, from those of the parts in the subspace."""

    @override
    def rows(self, index: Tensor | slice) -> Self:
        return type(self)(self.gradients.rows(index), self.subspace, self.coordinates[index])

    @override
    def cross_gram(self, other: PerSampleGradients, per_tensor: bool = False) -> Tensor | dict[str, Tensor]:
        return self.materialise().cross_gram(other.materialise(), per_tensor)

    @override
    def inner(self, other: PerSampleGradients) -> Tensor:
        return self.materialise().inner(other.materialise())

    @override
    def __sub__(self, other: PerSampleGradients) -> PerSampleGradients:
        return self.materialise() - other.materialise()

    @override
    def select(self, names: Sequence[str]) -> PerSampleGradients:
        return self.materialise().select(names)


class ResidualGradients(_SubspaceView):
    """``G - (G V) V^T`` for the columns V of a subspace.

    Norms by groups, ``select`` and cross products with another residual form the rows.
    """

    @override
    def _norms(self) -> Tensor:
        eps = torch.finfo(self.dtype).eps
        whole, y = self.gradients.row_norms().double(), self.coordinates.double()
        with full_precision(self.device):
            inside = (y @ self.subspace.gram().to(y)).mul_(y).sum(1) - 2 * y.square().sum(1)
        # abs, not a clamp at zero: a difference that rounding made negative is as far from zero as it errs.
        squares = (whole.square() + inside).abs_().add_(whole.square(), alpha=SQUARE_GUARD * eps)
        return squares.sqrt_().add_(whole, alpha=GUARD * eps).to(self.dtype)

    @override
    def _sums(self, weights: Tensor, inside: dict[str, Tensor]) -> dict[str, Tensor]:
        sums = self.gradients.weighted_sums(weights)
        return {name: total.sub_(inside[name]) for name, total in sums.items()}

    @override
    def cross_gram(self, other: PerSampleGradients, per_tensor: bool = False) -> Tensor | dict[str, Tensor]:
        if per_tensor or isinstance(other, ResidualGradients):
            return super().cross_gram(other, per_tensor)
        whole = self.gradients.cross_gram(other)
        assert isinstance(whole, Tensor)
        with full_precision(self.device):
            return whole - self.coordinates @ self.subspace.coordinates(other).t()

    @override
    def inner(self, other: PerSampleGradients) -> Tensor:
        if isinstance(other, ResidualGradients):
            return super().inner(other)
        return self.gradients.inner(other) - (self.coordinates * self.subspace.coordinates(other)).sum(1)

    @override
    def __sub__(self, other: PerSampleGradients) -> PerSampleGradients:
        if isinstance(other, ResidualGradients) and other.subspace is self.subspace:
            return residual(self.gradients - other.gradients, self.subspace)
        return self.materialise() - other

    @override
    def materialise(self) -> DenseGradients:
        rows = {name: kept.clone() for name, kept in self.gradients.materialise().tensors.items()}
        for i, y in enumerate(self.coordinates):
            for name, part in self.subspace.lift(y).items():
                rows[name][i] -= part
        return DenseGradients(rows, self.losses, num_records=self.num_records, device=self.device)


class ProjectedGradients(_SubspaceView):
    """``G V V^T``: the rows' parts in a subspace (for orthonormal columns their projections).

    >>> from equipoise.methods.subspaces.base import HeldSubspace
    >>> G = DenseGradients({"w": torch.tensor([[3.0, 4.0, 12.0]])})
    >>> projection(G, HeldSubspace({"w": torch.eye(2, 3)})).row_norms()
    tensor([5.])
    """

    @override
    def _norms(self) -> Tensor:
        y = self.coordinates.double()
        with full_precision(self.device):
            squares = (y @ self.subspace.gram().to(y)).mul_(y).sum(1).abs_()
            return squares.sqrt_().to(self.dtype)

    @override
    def _sums(self, weights: Tensor, inside: dict[str, Tensor]) -> dict[str, Tensor]:
        return inside

    @override
    def materialise(self) -> DenseGradients:
        lifted = [self.subspace.lift(y) for y in self.coordinates]
        rows = {
            name: torch.stack([part[name] for part in lifted]).to(self.dtype)
            if lifted
            else torch.zeros(0, *shape, dtype=self.dtype, device=self.device)
            for name, shape in self.shapes.items()
        }
        return DenseGradients(rows, self.losses, num_records=self.num_records, device=self.device)
