"""Subspaces of the parameter space: coordinates of the rows of G, and the way back.

A subspace has columns V [P, K], seldom held as such:

    coordinates(G) = G V     [B, K]
    lift(y)        = V y     named tensors
    gram()         = V^T V   [K, K]

The columns need not be orthonormal; ``gram()`` says what they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor
from typing_extensions import override

from equipoise.gradients.operator import DenseGradients, PerSampleGradients
from equipoise.methods.subspaces.views import projection, residual

__all__ = ["HeldSubspace", "Subspace"]


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
        """The rows minus their part in the subspace; see `equipoise.methods.subspaces.views.residual`."""
        return residual(gradients, self, coordinates)

    def projection(self, gradients: PerSampleGradients) -> PerSampleGradients:
        """The rows' parts in the subspace; see `equipoise.methods.subspaces.views.projection`."""
        return projection(gradients, self)

    def _check_coordinates(self, y: Tensor) -> Tensor:
        if y.shape != (self.dimension,):
            raise ValueError(f"y has shape {tuple(y.shape)}; it needs [{self.dimension}], the coordinates")
        return y.detach()


class HeldSubspace(Subspace):
    """Columns held in memory, name by name.

    Args:
        columns: parameter name -> [K, *shape].

    >>> import torch
    >>> V = HeldSubspace({"w": torch.eye(2, 3)})
    >>> G = DenseGradients({"w": torch.tensor([[1.0, 2.0, 3.0]])})
    >>> V.coordinates(G), V.lift(torch.tensor([1.0, 0.5]))
    (tensor([[1., 2.]]), {'w': tensor([1.0000, 0.5000, 0.0000])})
    """

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        counts = {name: tensor.shape[0] for name, tensor in columns.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(
                f"columns has different numbers of columns by name: {counts}; all need the same K"
            )
        self.columns = DenseGradients(columns)

    @property
    @override
    def dimension(self) -> int:
        return self.columns.num_records

    @override
    def coordinates(self, gradients: PerSampleGradients) -> Tensor:
        out = gradients.cross_gram(self.columns)
        assert isinstance(out, Tensor)
        return out

    @override
    def lift(self, y: Tensor) -> dict[str, Tensor]:
        return self.columns.weighted_sums(self._check_coordinates(y))

    @override
    def gram(self) -> Tensor:
        out = self.columns.cross_gram(self.columns)
        assert isinstance(out, Tensor)
        return out

    @property
    @override
    def holds_columns(self) -> bool:
        return True
