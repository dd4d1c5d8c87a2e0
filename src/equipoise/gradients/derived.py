"""What rows made from other rows share: the sizes of these, and rows formed for what has no shorter way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from equipoise.gradients.operator import PerSampleGradients

__all__ = ["Derived"]


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
