"""Differences of two factors of one bilinear kind, as one factor of twice the terms.

A product and a convolution are linear in the inputs x and in the output gradients b: with operands (x, b) and
(w, c)

    x b - w c = x (b - c) + (x - w) c

has no large terms that cancel. The right side is put together for each use and dropped after it: a model's
differences hold no more memory than their operands.
"""

from __future__ import annotations

from typing import Generic, Self, TypeVar, cast

import torch
from torch import Tensor
from typing_extensions import override

from equipoise.gradients.factors.base import Factor

__all__ = ["BilinearDifference"]


Operand = TypeVar("Operand", bound=Factor)


class BilinearDifference(Factor, Generic[Operand]):
    """What differences of a kind share; to be mixed in before the class of their operands.

    Args:
        left, right: operands of equal sizes, rows of ``right`` to be taken from rows of ``left``.
        kernel: as for the operands.
    """

    def __init__(self, left: Operand, right: Operand, kernel: str) -> None:
        self._left, self._right, self.kernel = left, right, kernel

    def _inputs(self, left: Tensor, right: Tensor) -> Tensor:
        """[x; x - w] along the terms that a row sums."""
        return torch.cat([left, left - right], dim=1).to(self.dtype)

    def _output_gradients(self, left: Tensor, right: Tensor) -> Tensor:
        """[b - c; c] along the terms that a row sums."""
        return torch.cat([left - right, right], dim=1).to(self.dtype)

    @override
    def rows(self, index: Tensor | slice) -> Self:
        left, right = (cast(Operand, operand.rows(index)) for operand in (self._left, self._right))
        return type(self)(left, right, self.kernel)

    @override
    def _with(self, kernel: str) -> Factor:
        if kernel.startswith("rows"):  # which no longer need the operands
            return super()._with(kernel)  # type: ignore[safe-super]
        return type(self)(self._left, self._right, kernel)
