"""TODO."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from typing_extensions import override

from equipoise.gradients.operator import DenseGradients, PerSampleGradients
from equipoise.gradients.subspaces.base import Subspace

__all__ = ["HeldSubspace"]


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
