"""What every factor offers, and the simplest factor: rows held as they are.

A factor holds the gradient of one use of a parameter, record by record, as the tensors that make it up
(a layer's inputs and output gradients), so that norms and weighted sums come from the same stored numbers.

TODO.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from equipoise.gradients.numerics import (
    memory_order,
    squared_rows,
    take,
    widen,
)

__all__ = ["DenseFactor", "Factor"]


class Factor(ABC):
    """Row gradients of one use of one parameter: B rows, each of the parameter's shape.

    Tensors are held detached. Results are float32 or wider, on the factor's device.
    """

    kind: ClassVar[str]
    shape: torch.Size
    kernel: str

    @property
    @abstractmethod
    def num_records(self) -> int:
        """B, the number of rows."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The type of the stored tensors (results are float32 at least)."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the stored tensors are."""

    @abstractmethod
    def norms_squared(self) -> Tensor:
        """Squared row norms, [B] in float64; a row that holds NaN or infinity gives NaN or infinity."""

    def magnitudes(self) -> Tensor | None:
        """At least the norm of a row whose terms' signs never cancel, [B]: what the rounding of a sum is
        relative to. None where a row is one term, so that it is its own norm.
        """
        return None

    def terms(self) -> int:
        """How many terms a row adds."""
        return 1

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """``weights`` [B, m] -> [m, *shape]: sum_i weights[i, k] row_i for each k."""

    @abstractmethod
    def materialise(self) -> Tensor:
        """All rows, [B, *shape]."""

    @abstractmethod
    def rows(self, index: Tensor | slice) -> Factor:
        """Chosen rows: a LongTensor, a boolean mask, or a slice (which copies nothing)."""

    @abstractmethod
    def difference(self, other: Factor) -> Factor:
        """Rows of ``self`` minus rows of ``other`` without the subtraction of large products."""

    @abstractmethod
    def join(self, others: Sequence[Factor]) -> Factor | None:
        """This factor's records followed by those of ``others``, or None where only rows can be joined."""

    @abstractmethod
    def input_elements(self) -> int:
        """How many numbers a record keeps."""

    @abstractmethod
    def kernels(self) -> tuple[str, ...]:
        """Names of the ways in which norms can be taken; the first is the one predicted to be fastest."""

    @abstractmethod
    def signature(self) -> str:
        """Kind and sizes without B: factors with one signature share a kernel choice."""

    @abstractmethod
    def _with(self, kernel: str) -> Factor:
        """A copy that uses ``kernel``, a member of ``kernels()``."""

    def with_kernel(self, name: str) -> Factor:
        """The same rows by another route. ``"rows"`` forms them now, so that the inputs can be freed.

        Raises:
            ValueError: ``name`` is not in ``kernels()``.
        """
        if name not in self.kernels():
            raise ValueError(
                f"kernel={name!r} is not a way to compute {self.signature()}; "
                f"choose one of {', '.join(self.kernels())}"
            )
        return self._with(name)

    def route(self) -> str:
        """The way in which norms are taken: the chosen one, or the one predicted to be fastest."""
        return self.kernels()[0] if self.kernel == "auto" else self.kernel

    @staticmethod
    def concat(parts: Sequence[Factor]) -> Factor:
        """The records of all parts, in order."""
        if not parts:
            raise ValueError("parts=[] holds no factor to concatenate; pass at least one")
        if len(parts) == 1:
            return parts[0]
        joined = parts[0].join(parts[1:])
        return DenseFactor(torch.cat([part.materialise() for part in parts])) if joined is None else joined

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.signature()}, records={self.num_records}, kernel={self.kernel!r})"
        )

    def _materialised_difference(self, other: Factor) -> DenseFactor:
        return DenseFactor(self.materialise() - other.materialise())


class DenseFactor(Factor):
    """Rows held as they are: ``g`` [B, *shape].

    Products with ``rough`` rows may be added up in float32 from end to end (true to 3e-5 of the lengths at a
    million numbers, others to 3e-6): enough for coordinates that are clipped by their own norm, not for norms
    made by subtraction.

    >>> DenseFactor(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).norms_squared()
    tensor([25.,  1.], dtype=torch.float64)
    """

    kind = "dense"
    kernel = "rows"

    def __init__(self, g: Tensor, rough: bool = False) -> None:
        if g.ndim < 1 or not g.is_floating_point():
            raise ValueError(f"g has shape {tuple(g.shape)} and type {g.dtype}; it needs floats [B, *shape]")
        self.g = g.detach()
        self.shape = g.shape[1:]
        self.rough = rough

    @property
    @override
    def num_records(self) -> int:
        return self.g.shape[0]

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.g.dtype

    @property
    @override
    def device(self) -> torch.device:
        return self.g.device

    @override
    def norms_squared(self) -> Tensor:
        return squared_rows(widen(self.g))

    @override
    def weighted_sum(self, weights: Tensor) -> Tensor:
        g = widen(self.g)
        weights = weights.to(g.dtype)
        if g.is_contiguous():
            out = torch.mm(weights.t(), g.view(g.shape[0], self.shape.numel()))
            return out.view(weights.shape[1], *self.shape)
        # Rows that lie in memory in another order (channels last) are multiplied in that order, not copied.
        order = memory_order(g)
        permuted = g.permute(0, *order)
        out = torch.mm(weights.t(), permuted.reshape(g.shape[0], self.shape.numel()))
        inverse = [order.index(d) + 1 for d in range(1, g.ndim)]
        return out.view(weights.shape[1], *permuted.shape[1:]).permute(0, *inverse)

    @override
    def materialise(self) -> Tensor:
        return widen(self.g)

    @override
    def rows(self, index: Tensor | slice) -> DenseFactor:
        return DenseFactor(take(self.g, index))

    @override
    def difference(self, other: Factor) -> Factor:
        return self._materialised_difference(other)

    @override
    def join(self, others: Sequence[Factor]) -> Factor | None:
        if not all(isinstance(part, DenseFactor) for part in others):
            return None
        return DenseFactor(torch.cat([self.g, *(part.g for part in others if isinstance(part, DenseFactor))]))

    @override
    def input_elements(self) -> int:
        return self.shape.numel()

    @override
    def kernels(self) -> tuple[str, ...]:
        return ("rows",)

    @override
    def signature(self) -> str:
        return f"dense {tuple(self.shape)}"

    @override
    def _with(self, kernel: str) -> Factor:
        return self
