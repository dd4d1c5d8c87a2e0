"""The per-sample gradient matrix G of a batch as an implicit operator.

Row i of G is the gradient of record i's loss, with B rows and P columns (all trainable parameters). Methods
of differentially private training need its row norms, weighted sums of its rows and some inner products;
they never need the B x P numbers themselves. ``FactoredGradients`` holds G as factors, one per use of a
parameter; ``DenseGradients`` with its rows formed.

A parameter used more than once has several factors whose rows add, so that its norm has cross terms:

    ||sum_k g_ik||^2 = sum_k ||g_ik||^2 + 2 sum_{k<l} <g_ik, g_il>

The difference of two gradients of the same records at near parameters is kept in a form without large terms
that cancel (each factor's ``difference``); what remains is the rounding of the two forward passes. The guard

    n_i = ||g_i(x) - g_i(w)|| + 4 eps (||g_i(x)|| + ||g_i(w)||)

keeps a clip bound valid where the difference drowns in it. Rows whose own terms cancel have another guard
(``numerics.guarded``).

Rows combine: ``G.scaled(D)`` multiplies columns, ``a * G + b * H`` adds matching rows, ``G.shifted(m)`` adds
one row to all. Each stays in factors (``factors/scaled.py``), so that the norms come as those of G do.
``G.multiplied(P)`` mixes columns, on the side of a layer's inputs (``factors/multiplied.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from equipoise.gradients.factors.base import DenseFactor, Factor
from equipoise.gradients.factors.multiplied import input_rows, multiplied
from equipoise.gradients.factors.pair_products import gram, inner
from equipoise.gradients.factors.scaled import SharedFactor, added, scaled
from equipoise.gradients.numerics import (
    CANCELLATION_SHARE,
    GUARD,
    MOST_EXCESS,
    chunks,
    contracted,
    full_precision,
    guarded,
    products_error,
    squared_rows,
    sum_error,
    without_lost,
)


class PerSampleGradients(ABC):
    """A B x P matrix of per-record gradients. Results are detached and float32 or wider.

    The law of every implementation: each operation equals the same one on ``materialise()``, to rounding.

    Attributes:
        shapes: parameter name -> the parameter's shape, in the order of the columns.
        num_records: B; may be zero.
        dtype: the type of results.
        device: where results are.
        losses: detached per-record losses [B] of the capture, if there was one.
    """

    shapes: dict[str, torch.Size]
    num_records: int
    dtype: torch.dtype
    device: torch.device
    losses: Tensor | None

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

    def scaled(self, diagonal: Diagonal) -> PerSampleGradients:
        """Rows whose entries are multiplied by a diagonal, ``G D``.

        Args:
            diagonal: a number; or parameter name -> a tensor that broadcasts to the parameter's shape, or
                several of which D is the product. Norms stay those of products where each varies along one
                side of a matrix or one kind of channel of a convolution alone, along the rows of a look-up,
                or where a layer has one position per record. Elsewhere rows are formed in chunks.

        Raises:
            ValueError: it does not fit the parameters, or is not finite or larger than 1e15.

        >>> G = DenseGradients({"w": torch.tensor([[3.0, 4.0]])})
        >>> G.scaled({"w": torch.tensor([1.0, 0.0])}).row_norms(), G.scaled(2.0).row_norms()
        (tensor([3.]), tensor([10.]))
        """
        return as_factored(self).scaled(diagonal)

    def shifted(self, by: Mapping[str, Tensor]) -> PerSampleGradients:
        """Rows to each of which one row is added, given as named tensors of the parameters' shapes."""
        return as_factored(self).shifted(by)

    def multiplied(self, matrices: Mapping[str, Tensor]) -> PerSampleGradients:
        """Rows whose matrices are multiplied on the side of a layer's inputs, ``G_i P``.

        Args:
            matrices: P [d_in, d_in] for some of the parameters [d_out, d_in]; the others stay as they are.

        Raises:
            ValueError: they do not fit, or are not finite or hold more than 1e15.

        >>> G = DenseGradients({"w": torch.tensor([[[3.0, 4.0]]])})
        >>> G.multiplied({"w": torch.tensor([[0.0, 2.0], [1.0, 0.0]])}).materialise().tensors["w"]
        tensor([[[4., 6.]]])
        """
        return as_factored(self).multiplied(matrices)

    def input_moments(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Second moments of rows on the side of a layer's inputs, ``sum_i (w_i G_i)^T (w_i G_i)``.

        Args:
            weights: w [B] for some of the parameters [d_out, d_in].

        Returns:
            ``{name: [d_in, d_in]}`` for these. Of layers with one input per record, and of look-ups, no row
            is formed; of others a few at a time.

        >>> G = DenseGradients({"w": torch.tensor([[[3.0, 4.0]]])})
        >>> G.input_moments({"w": torch.tensor([0.5])})["w"]
        tensor([[2.2500, 3.0000],
                [3.0000, 4.0000]])
        """
        return as_factored(self).input_moments(weights)

    def __mul__(self, factor: float) -> PerSampleGradients:
        if not isinstance(factor, int | float):
            return NotImplemented
        return self.scaled(factor)

    __rmul__ = __mul__

    def __add__(self, other: PerSampleGradients) -> PerSampleGradients:
        """Matching rows added up; in ``a * G + b * H`` the terms of both stand in one factor."""
        return as_factored(self) + as_factored(other)

    def __len__(self) -> int:
        return self.num_records

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_records} records x {self.num_parameters} parameters)"


def differing_uses(left: tuple[Factor, ...], right: tuple[Factor, ...]) -> tuple[Factor, ...]:
    """Uses paired in order where they match; rows where the two points use the parameter differently."""
    if [factor.kind for factor in left] == [factor.kind for factor in right]:
        return tuple(a.difference(b) for a, b in zip(left, right, strict=True))
    if not left:
        return (DenseFactor(-summed_rows(right)),)
    rows = summed_rows(left)
    return (DenseFactor(rows - summed_rows(right) if right else rows),)


def summed_uses(left: tuple[Factor, ...], right: tuple[Factor, ...]) -> tuple[Factor, ...]:
    """Uses paired in order where they match, each pair as one; all of them one after the other elsewhere."""
    if len(left) == len(right):
        pairs = [added(a, b) for a, b in zip(left, right, strict=True)]
        if None not in pairs:
            return tuple(pair for pair in pairs if pair is not None)
    return (*left, *right)


#: What multiplies the columns of G: a number, or by parameter name one tensor, or several and their product.
Diagonal = float | Mapping[str, Tensor | Sequence[Tensor]]


#: Entries of rows below 3e-23 have squares that vanish in float32. Scaled by this they are below 1e-7; a
#: larger scale would lift them to sizes that count, and norms would read too short.
LARGEST_SCALE = 1e15


def diagonal_parts(
    diagonal: Diagonal, shapes: Mapping[str, torch.Size], like: Tensor
) -> dict[str, list[Tensor]]:
    """By parameter name the tensors whose product is the diagonal, of the parameter's dimensions or none.

    Raises:
        ValueError: they do not fit, or are not finite and at most ``LARGEST_SCALE``.
    """
    if not isinstance(diagonal, Mapping):
        number = torch.tensor(float(diagonal), dtype=torch.float64, device=like.device)
        diagonal = dict.fromkeys(shapes, number)
    if set(diagonal) != set(shapes):
        raise ValueError(
            f"diagonal is over {sorted(diagonal)}, the gradients over {sorted(shapes)}; give each parameter "
            "a tensor that broadcasts to its shape"
        )
    out: dict[str, list[Tensor]] = {}
    for name, shape in shapes.items():
        given = diagonal[name]
        parts = [given] if isinstance(given, Tensor) else list(given)
        found = []
        for part in parts:
            sides = zip(part.shape[::-1], shape[::-1], strict=False)
            if part.ndim > len(shape) or any(size not in (1, whole) for size, whole in sides):
                raise ValueError(
                    f"diagonal[{name!r}] has shape {tuple(part.shape)}, which does not broadcast to the "
                    f"parameter's, {tuple(shape)}"
                )
            found.append(part if part.ndim == 0 else part.view(*(1,) * (len(shape) - part.ndim), *part.shape))
        largest = 1.0
        for part in found:
            largest *= float(part.abs().max()) if part.numel() else 0.0
        if not largest <= LARGEST_SCALE:
            raise ValueError(
                f"diagonal[{name!r}] is not finite, or holds more than {LARGEST_SCALE:g}; keep scales apart "
                "from zero before their inverse is taken"
            )
        out[name] = found
    return out


def require_matrix(argument: str, name: str, shapes: Mapping[str, torch.Size]) -> int:
    """d_in of a parameter [d_out, d_in].

    Raises:
        ValueError: there is no such parameter, or it is no matrix.
    """
    if len(shapes.get(name, ())) != 2:
        raise ValueError(
            f"{argument} names {name!r}, which is no matrix among {[*map(str, shapes)]}; name parameters of "
            "two dimensions, outputs by inputs"
        )
    return shapes[name][1]


def summed_rows(uses: Sequence[Factor], index: Tensor | slice | None = None) -> Tensor:
    """The rows of all uses of one parameter added up, [B, *shape]; those at ``index`` if it is given."""
    parts = (factor if index is None else factor.rows(index) for factor in uses)
    total = next(parts).materialise()
    for factor in parts:
        total = total + factor.materialise()
    return total


def checked_names(names: Sequence[str], shapes: Mapping[str, torch.Size]) -> tuple[str, ...]:
    """The names, if they are known and none is there twice."""
    if isinstance(names, str):
        raise TypeError(f"names={names!r} is a string; pass a sequence of parameter names, [{names!r}]")
    unknown = [name for name in names if name not in shapes]
    if unknown or len(set(names)) != len(names):
        raise ValueError(
            f"names holds {'unknown' if unknown else 'repeated'} parameters {unknown or list(names)}; there "
            f"are {', '.join(shapes)}"
        )
    return tuple(names)


class FactoredGradients(PerSampleGradients):
    """The per-sample gradient matrix from the factors of each parameter.

    Args:
        factors: parameter name -> its factors, one per use; an unused one has none and needs ``shapes``.
        losses: per-record losses [B].
        shapes: shapes of the parameters; those with factors may be left out.
        num_records, dtype, device: needed only if no parameter has a factor.

    Raises:
        ValueError: factors and losses of different numbers of records.

    >>> from equipoise.gradients.factors import OuterFactor
    >>> a, b = torch.tensor([[1.0, 2.0], [0.0, 3.0]]), torch.tensor([[1.0], [2.0]])
    >>> G = FactoredGradients({"weight": (OuterFactor(a, b),)})
    >>> G.shape, G.row_norms(), G.weighted_sums(torch.tensor([1.0, 0.5]))
    ((2, 2), tensor([2.2361, 6.0000]), {'weight': tensor([[1., 5.]])})
    """

    def __init__(
        self,
        factors: Mapping[str, Sequence[Factor]],
        losses: Tensor | None = None,
        *,
        shapes: Mapping[str, Sequence[int]] | None = None,
        num_records: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.factors = {name: tuple(kept) for name, kept in factors.items()}
        given = {name: torch.Size(shape) for name, shape in (shapes or {}).items()}
        self.shapes = {n: given[n] if n in given else kept[0].shape for n, kept in self.factors.items()}
        self.losses = None if losses is None else losses.detach()
        every = [factor for kept in self.factors.values() for factor in kept]
        counts = {factor.num_records for factor in every}
        counts |= set() if num_records is None else {num_records}
        counts |= set() if self.losses is None else {len(self.losses)}
        if len(counts) != 1:
            raise ValueError(f"factors and losses are of {sorted(counts)} records; they need one number")
        self.num_records = counts.pop()
        if every:
            wide = torch.float64 in {factor.dtype for factor in every}
            dtype = torch.float64 if wide else torch.float32
        self.dtype = dtype or torch.float32
        self.device = every[0].device if every else device or torch.device("cpu")
        # Of a difference: what it was taken from, whose norms its guard needs; of sums, those of all in it.
        self._operands: tuple[FactoredGradients, ...] | None = None
        # Squared norms by parameter, and by several together, once they are computed.
        self._squared: dict[str | tuple[str, ...], Tensor] = {}

    def row_norms(self, groups: Sequence[Sequence[str]] | None = None) -> Tensor:
        with full_precision(self.device):
            if groups is None:
                norms = self._norms(self.names)
            else:
                columns = [self._norms(checked_names(names, self.shapes)) for names in groups]
                norms = torch.stack(columns, dim=1) if columns else self._zeros(0)
            return norms if self._operands is None else norms.add_(self.norm_guard(groups))

    def norm_guard(self, groups: Sequence[Sequence[str]] | None = None) -> Tensor:
        """What ``row_norms`` adds, [B] or [B, m]: 4 eps (|g(x)| + |g(w)|) for a difference, otherwise 0."""
        if self._operands is None:
            return self._zeros() if groups is None else self._zeros(len(groups))
        sizes = torch.stack([operand.row_norms(groups).to(self.dtype) for operand in self._operands]).sum(0)
        return sizes.mul_(GUARD * torch.finfo(self.dtype).eps)

    def weighted_sums(self, weights: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
        out = {}
        alike = self._weights_for("", weights) if isinstance(weights, Tensor) else None
        with full_precision(self.device):
            for name, shape in self.shapes.items():
                C = self._weights_for(name, weights) if alike is None else alike
                columns = C.unsqueeze(1) if C.ndim == 1 else C
                kept = self.factors[name]
                if not kept:
                    total = torch.zeros(columns.shape[1], *shape, dtype=self.dtype, device=self.device)
                else:
                    if len(kept) == 2 and kept[0].kind == "index":
                        kept = kept[::-1]  # look-ups are added in place, and two terms in either order
                    total = kept[0].weighted_sum(columns)
                    for factor in kept[1:]:
                        total = factor.add_weighted_sum(total, columns)
                out[name] = total[0] if C.ndim == 1 else total
        return out

    def cross_gram(self, other: PerSampleGradients, per_tensor: bool = False) -> Tensor | dict[str, Tensor]:
        right = as_factored(other)
        self._check_columns(right)
        by_name: dict[str, Tensor] = {}
        with full_precision(self.device):
            total = self._zeros(right.num_records)
            for name, kept in self.factors.items():
                if per_tensor:
                    total = self._zeros(right.num_records)
                for factor in kept:
                    for opposite in right.factors[name]:
                        total = total + gram(factor, opposite)
                by_name[name] = total
        return by_name if per_tensor else total

    def inner(self, other: PerSampleGradients) -> Tensor:
        right = as_factored(other)
        self._check_columns(right)
        self._check_records(right)
        total = self._zeros()
        with full_precision(self.device):
            for name, kept in self.factors.items():
                for factor in kept:
                    for opposite in right.factors[name]:
                        total = total + inner(factor, opposite)
        return total

    def __sub__(self, other: PerSampleGradients) -> FactoredGradients:
        right = as_factored(other)
        self._check_columns(right)
        self._check_records(right)
        with full_precision(self.device):
            factors = {name: differing_uses(kept, right.factors[name]) for name, kept in self.factors.items()}
        out = self._new(factors)
        out._operands = (self, right)
        return out

    def scaled(self, diagonal: Diagonal) -> FactoredGradients:
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        return self._scaled(diagonal_parts(diagonal, self.shapes, like))

    def _scaled(self, parts: Mapping[str, Sequence[Tensor]]) -> FactoredGradients:
        factors: dict[str, list[Factor]] = {}
        with full_precision(self.device):
            for name, uses in self.factors.items():
                kept = list(uses)
                for part in parts[name]:
                    kept = [scaled(factor, part) for factor in kept]
                factors[name] = kept
        return self._carried(self._new(factors, self.losses), lambda operand: operand._scaled(parts))

    def multiplied(self, matrices: Mapping[str, Tensor]) -> FactoredGradients:
        for name, matrix in matrices.items():
            width = require_matrix("matrices", name, self.shapes)
            if matrix.shape != (width, width):
                raise ValueError(
                    f"matrices[{name!r}] has shape {tuple(matrix.shape)}; it needs {(width, width)}, the "
                    "layer's inputs by its inputs"
                )
            if matrix.numel() and not float(matrix.abs().max()) <= LARGEST_SCALE:
                raise ValueError(
                    f"matrices[{name!r}] is not finite, or holds more than {LARGEST_SCALE:g}; damp what it "
                    "is the inverse of"
                )
        factors: dict[str, Sequence[Factor]] = {}
        with full_precision(self.device):
            for name, uses in self.factors.items():
                factors[name] = (
                    [multiplied(factor, matrices[name]) for factor in uses] if name in matrices else uses
                )
        return self._carried(self._new(factors, self.losses), lambda operand: operand.multiplied(matrices))

    def input_moments(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with full_precision(self.device):
            return {name: self._input_moment(name, weights) for name in weights}

    def _input_moment(self, name: str, weights: Mapping[str, Tensor]) -> Tensor:
        width = require_matrix("weights", name, self.shapes)
        w, uses = self._weights_for(name, weights).to(self.dtype), self.factors[name]
        few = input_rows(uses[0], w) if len(uses) == 1 else None
        if few is not None:
            kept = few.flatten(0, 1)
            return contracted(kept.t(), kept).to(self.dtype)
        total = torch.zeros(width, width, dtype=self.dtype, device=self.device)
        for part in chunks(self.num_records if uses else 0, self.shapes[name].numel()):
            kept = (summed_rows(uses, part) * w[part, None, None]).flatten(0, 1)
            total += contracted(kept.t(), kept)
        return total

    def shifted(self, by: Mapping[str, Tensor]) -> FactoredGradients:
        if not isinstance(by, Mapping):
            raise TypeError(f"by is a {type(by).__name__}; give a dict of one tensor per parameter")
        found = {name: tuple(row.shape) for name, row in by.items()}
        wanted = {name: tuple(shape) for name, shape in self.shapes.items()}
        if found != wanted:
            raise ValueError(
                f"by has the shapes {found}, and the gradients {wanted}; give each parameter one tensor of "
                "its shape"
            )
        shared = {name: (SharedFactor(by[name], self.num_records),) for name in self.names}
        out = self._new({name: (*uses, *shared[name]) for name, uses in self.factors.items()}, self.losses)
        out._operands = self._operands
        return out

    def __add__(self, other: PerSampleGradients) -> FactoredGradients:
        right = as_factored(other)
        self._check_columns(right)
        self._check_records(right)
        with full_precision(self.device):
            factors = {name: summed_uses(kept, right.factors[name]) for name, kept in self.factors.items()}
        out = self._new(factors)
        operands = (*(self._operands or ()), *(right._operands or ()))
        out._operands = operands or None
        return out

    def rows(self, index: Tensor | slice) -> FactoredGradients:
        if isinstance(index, Tensor) and index.dtype == torch.bool:
            if index.shape != (self.num_records,):
                raise ValueError(
                    f"index is a mask of shape {tuple(index.shape)}; it needs [{self.num_records}], one "
                    "entry per record"
                )
            index = index.nonzero().squeeze(1)  # once, not in every factor: on a GPU each would wait for it
        factors = {name: [factor.rows(index) for factor in kept] for name, kept in self.factors.items()}
        losses = None if self.losses is None else self.losses[index]
        count = len(range(self.num_records)[index]) if isinstance(index, slice) else index.shape[0]
        out = self._carried(self._new(factors, losses, count), lambda operand: operand.rows(index))
        # A row's norm does not depend on which others are there.
        out._squared = {name: squares[index] for name, squares in self._squared.items()}
        return out

    def select(self, names: Sequence[str]) -> FactoredGradients:
        chosen = checked_names(names, self.shapes)
        out = self._new({name: self.factors[name] for name in chosen}, self.losses)
        self._carried(out, lambda operand: operand.select(chosen))
        out._squared = {name: squares for name, squares in self._squared.items() if name in out.shapes}
        return out

    def _carried(
        self, out: FactoredGradients, change: Callable[[FactoredGradients], FactoredGradients]
    ) -> FactoredGradients:
        """Rows that were changed; of a difference, what it was taken from was changed alike."""
        if self._operands is not None:
            out._operands = tuple(map(change, self._operands))
        return out

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Parameter name -> rows [B, *shape]."""
        with full_precision(self.device):
            return {
                name: summed_rows(kept) if kept else self._zeros(*self.shapes[name])
                for name, kept in self.factors.items()
            }

    def matrix(self) -> Tensor:
        """All rows as one [B, P] tensor, parameters in the order of ``names``."""
        rows = [
            tensor.reshape(self.num_records, self.shapes[name].numel())
            for name, tensor in self.tensors.items()
        ]
        return torch.cat(rows, dim=1) if rows else self._zeros(0)

    def materialise(self) -> DenseGradients:
        tensors = {name: rows.to(self.dtype) for name, rows in self.tensors.items()}
        out = DenseGradients(tensors, self.losses, num_records=self.num_records, device=self.device)
        out._operands = self._operands
        return out

    def _squares(self, name: str) -> Tensor:
        """Squared row norms of one parameter, kept: the factors never change."""
        if name not in self._squared:
            kept = self.factors[name]
            if not kept:
                squares = self._zeros().double()
            elif len(kept) == 1:
                (factor,) = kept
                squares, errors = factor.squares_and_errors()
                squares = guarded(squares, factor.magnitudes(), factor.additions(), errors)
            else:
                squares = self._squares_of_sum(name, kept)
            self._squared[name] = squares
        return self._squared[name]

    def magnitudes(self, name: str, squares: Sequence[Tensor] | None = None) -> Tensor | None:
        """What the rounding of one parameter's rows is relative to, [B]; None where they are single terms."""
        kept = self.factors[name]
        if len(kept) <= 1:
            return kept[0].magnitudes() if kept else None
        own = [factor.norms_squared() for factor in kept] if squares is None else squares
        sizes = [factor.magnitudes() for factor in kept]
        known = [n.sqrt() if m is None else m for m, n in zip(sizes, own, strict=True)]
        return torch.stack([size.to(self.dtype) for size in known]).sum(0)

    def additions(self, name: str) -> int:
        """How many additions a row of one parameter takes, one after another, all uses together."""
        return sum(factor.additions() for factor in self.factors[name])

    def _squares_of_sum(self, name: str, kept: tuple[Factor, ...]) -> Tensor:
        own = [factor.norms_squared() for factor in kept]
        terms, sizes = torch.stack(own).sum(0), self.magnitudes(name, own)
        assert sizes is not None
        squares = terms.clone()  # float64: the cross terms are as large as the squares, and may cancel them
        for i, factor in enumerate(kept):
            for opposite in kept[i + 1 :]:
                squares.add_(inner(factor, opposite), alpha=2)
        # Uses that cancel leave no digits in the sum: those rows are added before they are squared.
        largest, shape = sizes.double().square(), self.shapes[name]
        additions = self.additions(name)
        error = products_error(sizes.dtype, additions, *shape[:1], shape[1:].numel())
        error += sum_error(sizes.dtype, additions)  # of rows that were formed for a product
        limit = torch.maximum(
            CANCELLATION_SHARE * terms, max(CANCELLATION_SHARE**2, error / MOST_EXCESS) * largest
        )
        lost = squares < limit
        squares = guarded(squares.clamp_(min=0.0), sizes, additions, error * largest)

        def formed(places: Tensor) -> Tensor:
            parts = (places[part] for part in chunks(len(places), shape.numel()))
            return torch.cat(
                [guarded(squared_rows(summed_rows(kept, at)), sizes[at], additions) for at in parts]
            )

        return without_lost(squares, None, lost, formed, largest)

    def _norms(self, names: Sequence[str]) -> Tensor:
        if not names:
            return self._zeros()
        together = tuple(names)
        if together not in self._squared:
            self._squared[together] = torch.stack([self._squares(name) for name in names]).sum(0)
        return self._squared[together].sqrt().to(self.dtype)

    def _zeros(self, *columns: int) -> Tensor:
        return torch.zeros(self.num_records, *columns, dtype=self.dtype, device=self.device)

    def _weights_for(self, name: str, weights: Tensor | Mapping[str, Tensor]) -> Tensor:
        if not isinstance(weights, (Tensor, Mapping)):
            raise TypeError(
                f"weights is a {type(weights).__name__}; pass a tensor [{self.num_records}], or a mapping "
                "from parameter name to one"
            )
        if isinstance(weights, Tensor):
            C = weights
        elif name in weights:
            C = weights[name]
        else:
            raise ValueError(f"weights has no entry for {name!r}; pass one, or select(names) first")
        if C.ndim not in (1, 2) or C.shape[0] != self.num_records:
            raise ValueError(
                f"weights has shape {tuple(C.shape)}; it needs [{self.num_records}] or [{self.num_records}, "
                "m], one row per record"
            )
        return C.detach()

    def _check_columns(self, other: PerSampleGradients) -> None:
        if self.shapes != other.shapes:
            odd = {n for n in (*self.names, *other.names) if self.shapes.get(n) != other.shapes.get(n)}
            raise ValueError(
                f"other is over different parameters ({', '.join(sorted(odd))} differ); select the same "
                "names on both"
            )

    def _check_records(self, other: PerSampleGradients) -> None:
        if self.num_records != other.num_records:
            raise ValueError(
                f"other has {other.num_records} records, self {self.num_records}; the operation pairs "
                "records one to one (cross_gram does not)"
            )

    def _new(
        self, factors: Mapping[str, Sequence[Factor]], losses: Tensor | None = None, count: int | None = None
    ) -> FactoredGradients:
        shapes = {name: self.shapes[name] for name in factors}
        records = self.num_records if count is None else count
        return FactoredGradients(
            factors, losses, shapes=shapes, num_records=records, dtype=self.dtype, device=self.device
        )


class DenseGradients(FactoredGradients):
    """The per-sample gradient matrix with its rows formed: the oracle, and small layers.

    Args:
        tensors: parameter name -> rows [B, *shape].
        losses: per-record losses [B].
        num_records, device: needed only if ``tensors`` is empty.

    >>> DenseGradients({"w": torch.eye(2), "b": torch.ones(2)}).matrix()
    tensor([[1., 0., 1.],
            [0., 1., 1.]])
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        losses: Tensor | None = None,
        *,
        num_records: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        factors = {name: (DenseFactor(rows),) for name, rows in tensors.items()}
        super().__init__(factors, losses, num_records=num_records, device=device)


class LossesOnly(PerSampleGradients):
    """Rows of which only the losses are known; whatever takes their gradients is refused.

    Args:
        losses: [B].
        shapes: of the parameters whose gradients the rows would be.

    >>> rows = LossesOnly(torch.tensor([1.0, 2.0]), {"w": torch.Size([3])})
    >>> rows.rows(slice(1, None)).losses
    tensor([2.])
    >>> rows.row_norms()
    Traceback (most recent call last):
    ...
    TypeError: the rows of a method with forward_only = True have losses and no gradients
    """

    def __init__(self, losses: Tensor, shapes: Mapping[str, torch.Size]) -> None:
        self.losses, self.shapes = losses, dict(shapes)
        self.num_records, self.dtype, self.device = len(losses), losses.dtype, losses.device

    def select(self, names: Sequence[str]) -> LossesOnly:
        assert self.losses is not None
        return LossesOnly(self.losses, {name: self.shapes[name] for name in names})

    def rows(self, index: Tensor | slice) -> LossesOnly:
        assert self.losses is not None
        return LossesOnly(self.losses[index], self.shapes)

    def _refused(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("the rows of a method with forward_only = True have losses and no gradients")

    row_norms = weighted_sums = cross_gram = inner = materialise = _refused
    __sub__ = __add__ = scaled = shifted = _refused


def as_factored(gradients: PerSampleGradients) -> FactoredGradients:
    """Anything as factors; what is not factored is materialised."""
    return gradients if isinstance(gradients, FactoredGradients) else gradients.materialise()


def factored_over(gradients: PerSampleGradients, shapes: Mapping[str, torch.Size]) -> FactoredGradients:
    """The rows as factors, which must be over the parameters of a subspace.

    Raises:
        ValueError: they are over others.
    """
    G = as_factored(gradients)
    if G.shapes != shapes:
        raise ValueError(
            f"gradients is over {', '.join(G.names)}, the subspace over {', '.join(shapes)}; names and "
            "shapes must agree"
        )
    return G
