"""What rows made from other rows share: the sizes of these, and rows formed for what has no shorter way.

Rows minus their part in a subspace, never formed.

For columns V and coordinates y_i = V^T g_i the residual is ``r_i = g_i - V y_i`` and

    ||r_i||^2 = ||g_i||^2 - 2 ||y_i||^2 + y_i^T (V^T V) y_i
    sum_i c_i r_i = sum_i c_i g_i - V (sum_i c_i y_i)

which holds for any V; with orthonormal columns r is the orthogonal residual. The three terms cancel where
little of a row is left. What is left then is the rounding of y, a sum over all parameters: up to 25 eps
``||g_i||^2`` were measured for rows and columns of one sign, at 1e3 to 1e6 parameters. So the squared norm
carries ``64 eps ||g_i||^2`` and the norm ``4 eps ||g_i||``: there it comes out too large (by 3e-3 ||g_i|| at
most in float32) rather than too small. That covers columns that are held and orthonormal. For others y and
V^T V may be wrong by far more: `PerSampleGradients.residual` then forms the rows.

Rows projected on a subspace, and rows with masked entries; neither is formed where it need not be.

For columns V and coordinates y_i = V^T g_i the projected row is ``V y_i``, with squared norm
``y_i^T V^T V y_i`` and weighted sums ``V (sum_i c_i y_i)``. A masked row is ``m * g_i`` for a vector m of
zeros and ones; its norm needs the row, formed parameter by parameter in chunks, its weighted sums do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from equipoise.gradients.numerics import GUARD, chunks, full_precision, guarded, squared_rows
from equipoise.gradients.operator import DenseGradients, FactoredGradients, PerSampleGradients
from equipoise.gradients.subspaces.base import Subspace

__all__ = ["Derived", "MaskedGradients", "ProjectedGradients", "ResidualGradients"]


class Derived(PerSampleGradients):
    """Rows that come from other rows, record by record and tensor by tensor.

    Attributes:
        gradients: the rows that they come from.
    """

    gradients: PerSampleGradients

    @property
    @override
    def shapes(self) -> dict[str, torch.Size]:
        return self.gradients.shapes

    @property
    @override
    def num_records(self) -> int:
        return self.gradients.num_records

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.gradients.dtype

    @property
    @override
    def device(self) -> torch.device:
        return self.gradients.device

    @property
    @override
    def losses(self) -> Tensor | None:
        return self.gradients.losses

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


class ProjectedGradients(Derived):
    """``G V V^T``: the rows' parts in a subspace (for orthonormal columns their projections).

    >>> from equipoise.gradients.subspaces.held import HeldSubspace
    >>> G = DenseGradients({"w": torch.tensor([[3.0, 4.0, 12.0]])})
    >>> G.projection(HeldSubspace({"w": torch.eye(2, 3)})).row_norms()
    tensor([5.])
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
        y = self.coordinates
        with full_precision(self.device):
            y = y.double()
            squares = (y @ self.subspace.gram().to(y)).mul_(y).sum(1).abs_()
            return squares.sqrt_().to(self.dtype)

    @override
    def weighted_sums(self, weights: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not isinstance(weights, Tensor):
            return self.materialise().weighted_sums(weights)
        with full_precision(self.device):
            y = weights.detach().to(self.coordinates).t() @ self.coordinates
        if weights.ndim == 1:
            return self.subspace.lift(y)
        lifted = [self.subspace.lift(row) for row in y]
        return {name: torch.stack([part[name] for part in lifted]) for name in self.names}

    @override
    def rows(self, index: Tensor | slice) -> ProjectedGradients:
        return ProjectedGradients(self.gradients.rows(index), self.subspace, self.coordinates[index])

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


class MaskedGradients(Derived):
    """Rows with some of their entries set to zero.

    Args:
        gradients: the rows.
        masks: parameter name -> bool tensor of the parameter's shape; True entries stay.

    >>> G = DenseGradients({"w": torch.tensor([[3.0, 4.0, 12.0]])})
    >>> G.masked({"w": torch.tensor([True, True, False])}).row_norms()
    tensor([5.])
    """

    def __init__(self, gradients: PerSampleGradients, masks: Mapping[str, Tensor]) -> None:
        found = {name: mask.shape for name, mask in masks.items()}
        if found != gradients.shapes:
            raise ValueError(
                f"masks is over {sorted(found)}, the gradients over {sorted(gradients.shapes)}; give "
                "one mask of "
                "its shape a parameter"
            )
        self.gradients, self.masks = gradients, dict(masks)

    @override
    def row_norms(self, groups: Sequence[Sequence[str]] | None = None) -> Tensor:
        squares = {name: self._squares(name) for name in self.names}
        wanted = [self.names] if groups is None else groups
        columns = [
            torch.stack([squares[name] for name in names]).sum(0).sqrt_().to(self.dtype)
            if names
            else torch.zeros(self.num_records, dtype=self.dtype, device=self.device)
            for names in wanted
        ]
        return columns[0] if groups is None else torch.stack(columns, dim=1)

    def _squares(self, name: str) -> Tensor:
        mask, part = self.masks[name], self.gradients.select([name])
        out = torch.zeros(self.num_records, dtype=torch.float64, device=self.device)
        for piece in chunks(self.num_records, mask.numel()):
            out[piece] = squared_rows(part.rows(piece).materialise().tensors[name] * mask)
        # the sums come from the terms of the whole rows
        if not isinstance(part, FactoredGradients):
            return out
        return guarded(out, part.magnitudes(name), part.terms(name))

    @override
    def weighted_sums(self, weights: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: total * self.masks[name] for name, total in self.gradients.weighted_sums(weights).items()
        }

    @override
    def rows(self, index: Tensor | slice) -> MaskedGradients:
        return MaskedGradients(self.gradients.rows(index), self.masks)

    @override
    def materialise(self) -> DenseGradients:
        rows = {name: kept * self.masks[name] for name, kept in self.gradients.materialise().tensors.items()}
        return DenseGradients(rows, self.losses, num_records=self.num_records, device=self.device)
