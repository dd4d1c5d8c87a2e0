"""Rows projected on a subspace, and rows with masked entries; neither is formed where it need not be.

For columns V and coordinates y_i = V^T g_i the projected row is ``V y_i``, with squared norm
``y_i^T V^T V y_i`` and weighted sums ``V (sum_i c_i y_i)``. A masked row is ``m * g_i`` for a vector m of
zeros and ones; its norm needs the row, formed parameter by parameter in chunks, its weighted sums do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from equipoise.gradients.base import chunks, squared_rows
from equipoise.gradients.derived import Derived
from equipoise.gradients.factored import DenseGradients, FactoredGradients
from equipoise.gradients.operator import PerSampleGradients
from equipoise.gradients.precision import full_precision
from equipoise.gradients.rounding import guarded
from equipoise.gradients.subspace import Subspace

__all__ = ["MaskedGradients", "ProjectedGradients"]


class ProjectedGradients(Derived):
    """``G V V^T``: the rows' parts in a subspace (for orthonormal columns their projections).

    >>> from equipoise.gradients.subspace import HeldSubspace
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
