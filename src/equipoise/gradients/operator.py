"""The per-sample gradient matrix G of a batch as an implicit operator.

Row i of G is the gradient of record i's loss, with B rows and P columns (all trainable parameters). Methods
of differentially private training need its row norms, weighted sums of its rows and some inner products;
they never need the B x P numbers themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from equipoise.gradients.factored import DenseGradients
    from equipoise.gradients.subspace import Subspace

__all__ = ["PerSampleGradients"]


class PerSampleGradients(ABC):
    """A B x P matrix of per-record gradients. Results are detached and float32 or wider.

    The law of every implementation: each operation equals the same one on ``materialise()``, to rounding.
    """

    @property
    @abstractmethod
    def shapes(self) -> dict[str, torch.Size]:
        """Parameter name -> the parameter's shape, in the order of the columns."""

    @property
    @abstractmethod
    def num_records(self) -> int:
        """B; may be zero."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The type of results."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where results are."""

    @property
    @abstractmethod
    def losses(self) -> Tensor | None:
        """Detached per-record losses [B] of the capture, if there was one."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, in the order of the columns."""
        return tuple(self.shapes)

    @property
    def num_parameters(self) -> int:
        """P, the number of columns."""
        return sum(shape.numel() for shape in self.shapes.values())

    @property
    def shape(self) -> tuple[int, int]:
        """(B, P)."""
        return self.num_records, self.num_parameters

    @abstractmethod
    def row_norms(self, groups: Sequence[Sequence[str]] | None = None) -> Tensor:
        """Euclidean norms of the rows.

        Args:
            groups: parameter names by group; a name may be in no group.

        Returns:
            [B], or [B, m] for m groups. A row with NaN or infinity has a norm that is NaN or infinite and
            does not touch the others. The norm of a difference carries the guard against cancellation.
        """

    @abstractmethod
    def weighted_sums(self, weights: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``C^T G`` as named tensors.

        Args:
            weights: C [B] or [B, m], or a mapping from every parameter name to such weights.

        Returns:
            ``{name: [*shape]}`` for weights [B], ``{name: [m, *shape]}`` for weights [B, m]. A bad row (NaN)
            stays bad under weight zero: leave it out with ``rows(mask)``.
        """

    @abstractmethod
    def cross_gram(self, other: PerSampleGradients, per_tensor: bool = False) -> Tensor | dict[str, Tensor]:
        """``G H^T`` [B, B']: dot products with all rows of ``other``, in sum or by parameter name."""

    @abstractmethod
    def inner(self, other: PerSampleGradients) -> Tensor:
        """Dot products of matching rows, [B]."""

    @abstractmethod
    def __sub__(self, other: PerSampleGradients) -> PerSampleGradients:
        """Row differences, in the form that survives cancellation where both are near."""

    @abstractmethod
    def rows(self, index: Tensor | slice) -> PerSampleGradients:
        """Some records: a LongTensor of positions, a boolean mask [B] or a slice."""

    @abstractmethod
    def select(self, names: Sequence[str]) -> PerSampleGradients:
        """Some parameters."""

    @abstractmethod
    def materialise(self) -> DenseGradients:
        """The same matrix with its rows formed."""

    def residual(self, subspace: Subspace, coordinates: Tensor | None = None) -> PerSampleGradients:
        """Rows minus their part in a subspace, ``g - V V^T g`` for the subspace's columns V.

        Args:
            subspace: the columns.
            coordinates: the rows' coordinates [B, K], where they are known already.

        The rows stay unformed where the subspace holds orthonormal columns; elsewhere their norms could not
        be told from products, and they are formed (see `holds_orthonormal`).
        """
        from equipoise.gradients.residual import ResidualGradients
        from equipoise.gradients.subspace import holds_orthonormal

        rest = ResidualGradients(self, subspace, coordinates)
        return rest if holds_orthonormal(subspace) else rest.materialise()

    def projection(self, subspace: Subspace) -> PerSampleGradients:
        """The rows' parts in a subspace, ``V V^T g``; formed as for `residual`."""
        from equipoise.gradients.projection import ProjectedGradients
        from equipoise.gradients.subspace import holds_orthonormal

        parts = ProjectedGradients(self, subspace)
        return parts if holds_orthonormal(subspace) else parts.materialise()

    def masked(self, masks: Mapping[str, Tensor]) -> PerSampleGradients:
        """Rows with the entries set to zero where the bool mask of a parameter's shape is False."""
        from equipoise.gradients.projection import MaskedGradients

        return MaskedGradients(self, masks)

    @staticmethod
    def concat(parts: Sequence[PerSampleGradients]) -> PerSampleGradients:
        """The records of all parts, in order."""
        from equipoise.gradients.factored import concat

        return concat(parts)

    def __len__(self) -> int:
        return self.num_records

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_records} records x {self.num_parameters} parameters)"
