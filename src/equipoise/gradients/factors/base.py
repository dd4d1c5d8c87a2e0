"""What every factor offers, rows held as they are, and what products of inputs and output gradients share.

A factor holds the gradient of one use of a parameter, record by record, as the tensors that make it up
(a layer's inputs and output gradients), so that norms and weighted sums come from the same stored numbers.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import ClassVar, Self, cast

import torch
from torch import Tensor

from equipoise.gradients.numerics import (
    PARTIAL_SUM,
    TERMS_PER_ADDITION,
    memory_order,
    squared_rows,
    take,
    widen,
)

#: Uses of one parameter become one factor from this number on. Copies of its operands cost as much as the
#: uses hold; without them the norms take a product for every pair of uses, which are more than the uses from
#: four on.
MERGED_USES = 4


class Factor(ABC):
    """Row gradients of one use of one parameter: B rows, each of the parameter's shape.

    Tensors are held detached. Results are float32 or wider, on the factor's device.

    Attributes:
        kind: the kind of factor, by which dot products and kernels are looked up.
        shape: the parameter's shape.
        num_records: B, the number of rows.
        dtype: of the stored tensors (results are float32 at least).
        device: where the stored tensors are.
        positions: how many terms a row adds.
        kernel: the way in which norms are taken; "auto" for the one predicted to be fastest.
    """

    kind: ClassVar[str]
    shape: torch.Size
    num_records: int
    dtype: torch.dtype
    device: torch.device
    positions: int = 1
    kernel: str = "auto"

    def _describe(self, held: Tensor, shape: Sequence[int], kernel: str = "auto") -> None:
        # Plain attributes: a step reads them hundreds of times, and properties would cost as many calls.
        self.shape, self.kernel = torch.Size(shape), kernel
        self.num_records, self.dtype, self.device = held.shape[0], held.dtype, held.device

    def norms_squared(self) -> Tensor:
        """Squared row norms, [B] in float64; a row that holds NaN or infinity gives NaN or infinity.

        A kind of factor defines this or, where sums of products lose digits, `squares_and_errors`.
        """
        return self.squares_and_errors()[0]

    def magnitudes(self) -> Tensor | None:
        """At least the norm of a row whose terms' signs never cancel, [B]: what the rounding of a sum is
        relative to. None where a row is one term, so that it is its own norm.
        """
        return None

    def squares_and_errors(self) -> tuple[Tensor, Tensor | None]:
        """``norms_squared``, and how much those that are sums of products may have lost, [B] each.

        What rows that are formed lose is in ``additions``.
        """
        return self.norms_squared(), None

    def additions(self) -> int:
        """How many additions, one after another, the sum of a row's terms takes at most."""
        return min(self.positions, PARTIAL_SUM + self.positions // TERMS_PER_ADDITION)

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """``weights`` [B, m] -> [m, *shape]: sum_i weights[i, k] row_i for each k."""

    def add_weighted_sum(self, total: Tensor, weights: Tensor) -> Tensor:
        """``total`` and the weighted sum, in the memory of ``total`` where their types agree."""
        more = self.weighted_sum(weights)
        return total.add_(more) if total.dtype == more.dtype else total + more

    @abstractmethod
    def materialise(self) -> Tensor:
        """All rows, [B, *shape]."""

    @abstractmethod
    def rows(self, index: Tensor | slice) -> Factor:
        """Chosen rows: a LongTensor, a boolean mask, or a slice (which copies nothing)."""

    def difference(self, other: Factor) -> Factor:
        """Rows of ``self`` minus rows of ``other`` without the subtraction of large products."""
        return DenseFactor(self.materialise() - other.materialise())

    def kernels(self) -> tuple[str, ...]:
        """Names of the ways in which norms can be taken; the first is the one predicted to be fastest.

        The order follows from the sizes of a record and the kind of device alone, never from a clock, so that
        a run that is repeated, and each of several processes, adds in the same order.
        """
        return ("rows",)

    def fastest(self) -> Factor:
        """The same rows by the way predicted to be fastest, unless one was chosen before."""
        return self._with(self.kernels()[0]) if self.kernel == "auto" else self

    def _with(self, kernel: str) -> Factor:
        """By one of `kernels()`; ``"rows"`` forms them now, so that the inputs can be freed."""
        if kernel == "rows":
            return DenseFactor(self.materialise())
        out = copy.copy(self)
        out.kernel = kernel
        return out

    def route(self) -> str:
        """The way in which norms are taken: the chosen one, or the fastest of those that form no rows."""
        if self.kernel != "auto":
            return self.kernel
        return next(name for name in self.kernels() if not name.startswith("rows"))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, positions={self.positions}, "
            f"records={self.num_records}, kernel={self.kernel!r})"
        )


class DenseFactor(Factor):
    """Rows held as they are: ``g`` [B, *shape].

    >>> DenseFactor(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).norms_squared()
    tensor([25.,  1.], dtype=torch.float64)
    """

    kind = "dense"

    def __init__(self, g: Tensor) -> None:
        if g.ndim < 1 or not g.is_floating_point():
            raise ValueError(f"g has shape {tuple(g.shape)} and type {g.dtype}; it needs floats [B, *shape]")
        self.g = g.detach()
        self._describe(g, g.shape[1:], "rows")

    def norms_squared(self) -> Tensor:
        return squared_rows(widen(self.g))

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

    def materialise(self) -> Tensor:
        return widen(self.g)

    def rows(self, index: Tensor | slice) -> DenseFactor:
        return DenseFactor(take(self.g, index))

    def _with(self, kernel: str) -> Factor:
        return self


class BilinearFactor(Factor):
    """Rows that add products of an input with an output gradient: matrix products and convolutions.

    A difference of two of them is one factor of twice the terms. With operands (a, b) and (c, d)

        a b - c d = a (b - d) + (a - c) d

    has no large terms that cancel. The right side is put together for each use and dropped after it: a
    model's differences hold no more memory than their operands.

    Attributes:
        uses: terms along dimension 1 of inputs and output gradients.
    """

    uses: int
    #: Whether the way that is best for a factor is best for twice its terms too.
    kernel_scales: ClassVar[bool]
    _operands: tuple[BilinearFactor, BilinearFactor] | None = None

    def _hold(self, a: Tensor, b: Tensor, dimensions: int) -> None:
        """Keep inputs and output gradients, [B, uses, ...].

        Raises:
            ValueError: their sizes do not fit each other.
        """
        a, b = a.detach(), b.detach()
        a = a.unsqueeze(1) if a.ndim == dimensions - 1 else a
        b = b.unsqueeze(1) if b.ndim == dimensions - 1 else b
        if a.dtype != b.dtype:
            wide = torch.promote_types(a.dtype, b.dtype)
            a, b = a.to(wide), b.to(wide)
        self._a, self._b = a, b
        if not (a.ndim == b.ndim == dimensions and a.shape[:2] == b.shape[:2]):
            raise ValueError(f"inputs {tuple(a.shape)} and gradients {tuple(b.shape)} do not fit")

    @property
    def a(self) -> Tensor:
        """The inputs, [B, uses, ...]; of a difference [a; a - c]."""
        if self._operands is None:
            return self._a
        left, right = (operand.a for operand in self._operands)
        return torch.cat([left, left - right], dim=1).to(self.dtype)

    @property
    def b(self) -> Tensor:
        """The output gradients, [B, uses, ...]; of a difference [b - d; d]."""
        if self._operands is None:
            return self._b
        left, right = (operand.b for operand in self._operands)
        return torch.cat([left - right, right], dim=1).to(self.dtype)

    def _sides(self) -> tuple[Tensor, Tensor]:
        """Inputs and output gradients in their accumulation types."""
        a, b = (self._a, self._b) if self._operands is None else (self.a, self.b)
        return (a, b) if self.dtype in (torch.float32, torch.float64) else (widen(a), widen(b))

    @abstractmethod
    def _form(self) -> Hashable:
        """What must agree between factors whose terms are added or whose rows are subtracted."""

    @abstractmethod
    def _like(self, a: Tensor, b: Tensor) -> Self:
        """A factor of this form and kernel."""

    def rows(self, index: Tensor | slice) -> Self:
        if self._operands is None:
            out = copy.copy(self)  # what was checked of all records holds for some
            out._a, out._b = take(self._a, index), take(self._b, index)
            out.num_records = out._a.shape[0]
            return out
        left, right = (operand.rows(index) for operand in self._operands)
        return cast(Self, left._minus(right, self.kernel))

    def difference(self, other: Factor) -> Factor:
        if not isinstance(other, BilinearFactor) or self._form() != other._form():
            return super().difference(other)
        if (self.num_records, self.uses) != (other.num_records, other.uses):
            return super().difference(other)
        return self._minus(other, self.kernel if self.kernel_scales else "auto")

    def _minus(self, other: BilinearFactor, kernel: str) -> Self:
        out = copy.copy(self)
        out._operands, out.kernel = (self, other), kernel
        out.uses, out.positions = 2 * self.uses, 2 * self.positions
        if self.dtype != other.dtype:
            out.dtype = torch.promote_types(self.dtype, other.dtype)
        return out


def merged(parts: Sequence[Factor]) -> list[Factor]:
    """Factors of many uses of one parameter, such as a recurrent weight's, as few.

    Args:
        parts: the factors of one parameter, for the same records.

    Returns:
        Where enough are of one form, one factor that adds their terms stands in the place of the first.
    """
    if len(parts) < MERGED_USES:
        return list(parts)
    groups: dict[Hashable, list[Factor]] = {}
    for number, part in enumerate(parts):
        form: Hashable = "dense" if isinstance(part, DenseFactor) else number
        if isinstance(part, BilinearFactor) and part._operands is None:
            form = part._form()
        groups.setdefault(form, []).append(part)
    found: list[Factor] = []
    for group in groups.values():
        first = group[0]
        if len(group) < MERGED_USES:
            found += group
        elif isinstance(first, BilinearFactor):
            uses = cast(list[BilinearFactor], group)
            out = first._like(torch.cat([use.a for use in uses], 1), torch.cat([use.b for use in uses], 1))
            out.kernel = "auto"
            found.append(out)
        else:
            rows = first.materialise().clone()
            for part in group[1:]:
                rows += part.materialise()
            found.append(DenseFactor(rows))
    return found
