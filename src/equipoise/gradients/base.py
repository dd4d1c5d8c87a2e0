"""What every factor offers, and the simplest factor: rows held as they are.

A factor holds the gradient of one use of a parameter, record by record, as the tensors that make it up
(a layer's inputs and output gradients), so that norms and weighted sums come from the same stored numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

__all__ = ["DenseFactor", "Factor"]

#: How many numbers a temporary of a chunked computation may hold (8 MiB of float32).
CHUNK_ELEMENTS = 1 << 21

#: Squares and products are added up in float32 over this many numbers at most, and in float64 from there on.
PARTIAL_SUM = 512

#: Matrix products at least this wide are added up in pieces by the libraries themselves; the pieces' sum is
#: float32 and short enough up to this many numbers.
WIDE_PRODUCT, LONG_PRODUCT = 16, 1 << 15

#: Rows are kept instead of their inputs only if they are at most this many times larger (memory of a step).
ROWS_GROWTH = 2


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which a sum over numbers of ``dtype`` is taken: float32 at least.

    >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(tensor: Tensor) -> Tensor:
    """``tensor`` in its accumulation type (itself where it is there already)."""
    return tensor.to(accumulation_dtype(tensor.dtype))


def chunks(count: int, size: int, budget: int | None = None) -> Iterator[slice]:
    """Slices of ``range(count)`` with at most ``budget`` numbers each, one item holding ``size`` numbers."""
    step = max(1, (CHUNK_ELEMENTS if budget is None else budget) // max(1, size))
    for start in range(0, count, step):
        yield slice(start, min(count, start + step))


def take(tensor: Tensor, index: Tensor | slice) -> Tensor:
    """Rows of ``tensor``; what is broadcast over the records stays broadcast."""
    if isinstance(index, Tensor) and tensor.shape[0] > 1 and tensor.stride(0) == 0:
        count = int(index.sum()) if index.dtype == torch.bool else index.shape[0]
        return tensor[:1].expand(count, *tensor.shape[1:])
    return tensor[index]


def pad_positions(tensor: Tensor, positions: int) -> Tensor:
    """``tensor`` [B, S, ...] with zeros appended to reach ``positions`` along dimension 1."""
    missing = positions - tensor.shape[1]
    if missing == 0:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:])], dim=1)


def memory_order(tensor: Tensor) -> list[int]:
    """Dimensions 1, 2, ... as they lie in memory, the outermost first (not ascending in channels last)."""
    strides = tensor.stride()
    return sorted(range(1, tensor.ndim), key=lambda dimension: -strides[dimension])


def squared_rows(tensor: Tensor) -> Tensor:
    """Sum of squares of each record, [B, ...] -> [B] in float64, without a copy of dense rows.

    Float32 alone would read rows of a million numbers too short by up to 1e-3: each square is rounded as it
    is added to a sum that is far larger, all of them down where they are alike. So it takes pieces of
    ``PARTIAL_SUM`` numbers, at 2e-6 each at most. Squares below 1e-45 vanish: what is lost of a norm is less
    than 1e-17 for 1e10 numbers.

    >>> squared_rows(torch.full((1, 10**6), 0.1)).sub(10**4).abs() < 1e-2
    tensor([True])
    """
    if tensor.ndim == 1:
        return tensor.double().square()
    if tensor.ndim > 2:
        tensor = tensor if tensor.is_contiguous() else tensor.permute(0, *memory_order(tensor))
        tensor = tensor.reshape(tensor.shape[0], tensor.shape[1:].numel())
    pieces = tensor.shape[1] // PARTIAL_SUM
    if pieces == 0:
        return torch.linalg.vector_norm(tensor, dim=1).double().square_()
    whole = pieces * PARTIAL_SUM
    parts = torch.linalg.vector_norm(tensor[:, :whole].view(tensor.shape[0], pieces, PARTIAL_SUM), dim=2)
    out = torch.linalg.vector_norm(parts, dim=1, dtype=torch.float64).square_()
    if whole < tensor.shape[1]:
        out += torch.linalg.vector_norm(tensor[:, whole:], dim=1).double().square_()
    return out


def contracted(left: Tensor, right: Tensor) -> Tensor:
    """``left`` [..., m, K] times ``right`` [..., K, n], true to 1e-5 of its terms however long K is.

    Libraries add wide products up in pieces of some hundred terms, narrow ones from end to end.
    """
    pieces = left.shape[-1] // PARTIAL_SUM
    if pieces <= 1 or min(left.shape[-2], right.shape[-1]) >= WIDE_PRODUCT:
        return torch.matmul(left, right)
    whole = pieces * PARTIAL_SUM
    first = left[..., :whole].reshape(*left.shape[:-1], pieces, PARTIAL_SUM).movedim(-2, -3)
    second = right[..., :whole, :].reshape(*right.shape[:-2], pieces, PARTIAL_SUM, right.shape[-1])
    out = torch.matmul(first, second).sum(-3, dtype=torch.float64)
    return out.add_(torch.matmul(left[..., whole:], right[..., whole:, :])).to(left.dtype)


def dots(left: Tensor, right: Tensor) -> Tensor:
    """Dot products [n, m] of rows [n, P] with rows [m, P], true to 1e-5 of their lengths for every P."""
    if left.shape[1] <= LONG_PRODUCT:
        return contracted(left, right.t())
    out = left.new_zeros(left.shape[0], right.shape[0], dtype=torch.float64)
    for start in range(0, left.shape[1], LONG_PRODUCT):
        piece = slice(start, start + LONG_PRODUCT)
        out += contracted(left[:, piece], right[:, piece].t())
    return out.to(left.dtype)


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

    def inner(self, other: Factor) -> Tensor:
        """Dot products of matching rows, [B]; ``other`` may be of any kind."""
        from equipoise.gradients.crossterms import inner

        return inner(self, other)

    def gram(self, other: Factor) -> Tensor:
        """Dot products of all rows with all rows, [B, B']; ``other`` may be of any kind."""
        from equipoise.gradients.crossterms import gram

        return gram(self, other)

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
