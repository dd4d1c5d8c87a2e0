"""Rows of records: the matrix of per-sample gradients as methods see it, whose every result is `Private`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from equipoise._tree import leaves, map_leaves
from equipoise.privacy.private import Draw, Private, PrivateError, forbidden, refuse, unwrap


def wrap(value: Any, draw: Draw | None, by_record: bool = False) -> Any:
    """`value` with every tensor made `Private` and every operator of rows made `PrivateRows`.

    Raises:
        PrivateError: for a plain number, which could not be guarded.
    """

    def guarded(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return Private(leaf, draw, by_record)
        if hasattr(leaf, "row_norms"):
            return PrivateRows(leaf, draw)
        if leaf is not None:
            refuse(f"a result of type {type(leaf).__name__}")
        return None

    return map_leaves(guarded, value)


class PrivateRows:
    """Per-sample rows whose every result is `Private`: the matrix of gradients as methods see it.

    Wraps any object with the operations of a per-sample gradient matrix (`row_norms`, `weighted_sums`,
    `cross_gram`, `inner`, `-`, `rows`, `select`, `residual`, `materialise`). Sizes, names, dtype
    and device stay public.

    Args:
        rows: the wrapped matrix; B rows.
        draw: the draw that the rows belong to; bounded sums made from them carry it.
        weights: [B], what each record's clipped row is multiplied by (`bounds.clipping`); ones when None.
        _all_finite: takes of all norms, and from each sum, whether every record was finite, as a tensor. Then
            none is left out, and who gives the list throws the sums away where one was not.
    """

    def __init__(
        self,
        rows: Any,
        draw: Draw | None = None,
        weights: torch.Tensor | None = None,
        _places: tuple[tuple[int, ...], ...] = (),
        _all_finite: list[torch.Tensor] | None = None,
    ) -> None:
        if isinstance(rows, PrivateRows):
            draw, weights = draw or rows.draw, rows._weights if weights is None else weights
            _places, _all_finite, rows = rows._places, rows._all_finite, rows._rows
        if not hasattr(rows, "row_norms") or not hasattr(rows, "weighted_sums"):
            raise TypeError(
                f"rows must offer row_norms and weighted_sums, got {type(rows).__name__}; pass the result of "
                "a gradient engine or of eq.per_sample_gradients"
            )
        self._rows: Any = rows
        self.draw: Draw | None = draw
        self._weights: torch.Tensor | None = weights
        # What `rows` chose, so that rows of two choices never meet.
        self._places: tuple[tuple[int, ...], ...] = _places
        self._all_finite: list[torch.Tensor] | None = _all_finite

    names: tuple[str, ...] = property(lambda self: self._rows.names)  # type: ignore[assignment]
    shapes: dict[str, torch.Size] = property(lambda self: self._rows.shapes)  # type: ignore[assignment]
    num_parameters: int = property(lambda self: self._rows.num_parameters)  # type: ignore[assignment]
    dtype: torch.dtype = property(lambda self: self._rows.dtype)  # type: ignore[assignment]
    device: torch.device = property(lambda self: self._rows.device)  # type: ignore[assignment]

    @property
    def num_records(self) -> int:
        """Refused: how many records were drawn is private, and no divisor or scale."""
        refuse("the number of records drawn")

    @property
    def losses(self) -> Private | None:
        """Per-record losses, [B], or None."""
        losses = getattr(self._rows, "losses", None)
        return None if losses is None else Private(losses, self.draw)

    def row_norms(self, groups: Sequence[Sequence[str]] | None = None) -> Private:
        """Norms of the rows, [B], or [B, m] for m groups of parameter names."""
        norms = self._rows.row_norms() if groups is None else self._rows.row_norms(groups)
        if self._all_finite is not None:  # some may be NaN that are known only to who looks
            self._all_finite.append((norms < math.inf).all())
        return Private(norms, self.draw)

    def weighted_sums(self, weights: Any) -> dict[str, Private]:
        """Weighted sums of the rows: weights [B], [B, m] or a mapping from parameter name to weights."""
        if isinstance(weights, Mapping):
            raw: Any = {name: unwrap(value) for name, value in weights.items()}
        else:
            raw = unwrap(weights)
        return wrap(self._rows.weighted_sums(raw), self.draw)

    def inner(self, other: Any) -> Private:
        """Dot products of matching rows, [B]."""
        # Row i meets row i of the other matrix. A public matrix has a row per place, and places shift.
        return wrap(self._rows.inner(_raw(other)), self.draw, by_record=isinstance(other, PrivateRows))

    def cross_gram(self, other: Any, per_tensor: bool = False) -> Any:
        """Dot products of all pairs of rows, [B, B']."""
        # Against public rows, row i of the result is record i's. Against private ones it is not.
        found = self._rows.cross_gram(_raw(other), per_tensor=per_tensor)
        return wrap(found, self.draw, by_record=not isinstance(other, PrivateRows))

    def rows(self, index: torch.Tensor) -> PrivateRows:
        """The rows at a public index, each at most once.

        Raises:
            PrivateError: the index is `Private`: which rows are kept would depend on other records, and for a
                mask so would their number.
            ValueError: a row occurs more than once: its record would count as often in every sum.
        """
        if isinstance(index, Private):
            kept = (
                "number of rows that a Private mask keeps" if index.dtype == torch.bool else "choice of rows"
            )
            refuse(f"the {kept}, which may follow from other records,")
        places = torch.arange(self._rows.num_records)[index.cpu()].tolist()  # -1 is the last row
        if len(set(places)) < len(places):
            raise ValueError(
                "index holds a row more than once: its record would count as often in every sum, beyond "
                "the bound; give every row once and use weights"
            )
        weights = None if self._weights is None else self._weights[places]
        chosen = (*self._places, tuple(places))
        return PrivateRows(self._rows.rows(index), self.draw, weights, chosen, self._all_finite)

    def select(self, names: Sequence[str]) -> PrivateRows:
        """The same rows on some of the parameters."""
        return self._like(self._rows.select(names))

    def residual(self, subspace: Any) -> PrivateRows:
        """The rows minus their part in a subspace."""
        return self._like(subspace.residual(self._rows))

    def split(self, subspace: Any) -> tuple[Private, PrivateRows]:
        """The rows' coordinates in a subspace, [B, K], and the rows minus their part in it.

        Both come from one projection, so that the residual costs no second one.
        """
        found = subspace.coordinates(self._rows)
        rest = subspace.residual(self._rows, found)
        return Private(found, self.draw), self._like(rest)

    def projection(self, subspace: Any) -> PrivateRows:
        """The rows' parts in a subspace."""
        return self._like(subspace.projection(self._rows))

    def coordinates(self, subspace: Any) -> Private:
        """The rows' coordinates in a subspace, [B, K]."""
        return Private(subspace.coordinates(self._rows), self.draw)

    def matrix(self) -> Private:
        """The rows as one matrix, [B, P], every parameter flattened in the order of `names`."""
        return Private(self._rows.materialise().matrix(), self.draw)

    def materialise(self) -> PrivateRows:
        """The dense matrix, still private."""
        return self._like(self._rows.materialise())

    def scaled(self, diagonal: Any) -> PrivateRows:
        """The rows times a public diagonal: a number, or by parameter name what broadcasts to its shape.

        Raises:
            PrivateError: for a `Private` one, which would carry other records into every row.
        """
        _refuse_private(diagonal, "a diagonal that follows from private values")
        return self._like(self._rows.scaled(diagonal))

    def shifted(self, by: Mapping[str, torch.Tensor]) -> PrivateRows:
        """The rows, to each of which one public row is added; named tensors of the parameters' shapes.

        Raises:
            PrivateError: for a `Private` row.
        """
        _refuse_private(by, "a row that follows from private values, added to all others,")
        return self._like(self._rows.shifted(by))

    def multiplied(self, matrices: Mapping[str, torch.Tensor]) -> PrivateRows:
        """The rows times public matrices on the side of a layer's inputs, by parameter name.

        Raises:
            PrivateError: for a `Private` one, which would carry other records into every row.
        """
        _refuse_private(matrices, "a matrix that follows from private values, by which rows are multiplied,")
        return self._like(self._rows.multiplied(matrices))

    def __mul__(self, factor: float) -> PrivateRows:
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            raise TypeError(
                f"rows can be multiplied by a public number only, got {type(factor).__name__}; scaled takes "
                "one number per parameter, and clip rules give one per record"
            )
        return self._like(factor * self._rows)

    __rmul__ = __mul__

    def __add__(self, other: PrivateRows) -> PrivateRows:
        """Rows of the same records at two parameter points, added record by record."""
        return self._like(self._rows + self._matching(other))

    def __sub__(self, other: PrivateRows) -> PrivateRows:
        """Differences of rows of the same records at two parameter points."""
        return self._like(self._rows - self._matching(other))

    def _matching(self, other: Any) -> Any:
        """The raw rows of the same records in the same order.

        Raises:
            PrivateError: row i of the two is not of one record, so that a record would be in several rows.
        """
        if not isinstance(other, PrivateRows) or other.draw != self.draw or other._places != self._places:
            raise PrivateError(
                "rows are added and subtracted record by record, and these are not of the same records in "
                "the same order: query both points of one draw, draw.query(fn, at=(x, w)), and choose the "
                "same rows of both. One public row for all records is added by shifted(row)"
            )
        return other._rows

    def _like(self, rows: Any) -> PrivateRows:
        return PrivateRows(rows, self.draw, self._weights, self._places, self._all_finite)

    def __len__(self) -> int:
        return self.num_records

    def __repr__(self) -> str:
        return f"PrivateRows(parameters={self.num_parameters}, dtype={self.dtype})"

    __str__ = __repr__
    __reduce_ex__ = forbidden("pickling or torch.save")


def _refuse_private(given: Any, what: str) -> None:
    if any(isinstance(leaf, Private) for leaf in leaves(given)):
        refuse(what)


def _raw(leaf: Any) -> Any:
    if isinstance(leaf, PrivateRows):
        return leaf._rows
    return unwrap(leaf)
