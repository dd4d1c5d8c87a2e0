"""Rows of records: the matrix of per-sample gradients as methods see it, whose every result is `Private`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from equipoise.privacy.nests import mapped
from equipoise.privacy.private import Private, PrivateError, forbidden, raw_value, refuse

if TYPE_CHECKING:
    from equipoise.privacy.draw import Draw


def wrap(value: Any, draw: Draw | None, by_record: bool = False) -> Any:
    """`value` with every tensor made `Private` and every operator of rows made `PrivateRows`.

    Raises:
        PrivateError: for a plain number, which could not be guarded.
    """
    if isinstance(value, torch.Tensor):
        return Private(value, draw, by_record)
    if isinstance(value, Mapping):
        return {key: wrap(item, draw, by_record) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(wrap(item, draw, by_record) for item in value)
    if hasattr(value, "row_norms"):
        return PrivateRows(value, draw)
    if value is not None:
        refuse(f"a result of type {type(value).__name__}")
    return None


class PrivateRows:
    """Per-sample rows whose every result is `Private`: the matrix of gradients as methods see it.

    Wraps any object with the operations of a per-sample gradient matrix (`row_norms`, `weighted_sums`,
    `cross_gram`, `inner`, `-`, `rows`, `select`, `residual`, `materialise`). Sizes, names, dtype
    and device stay public.

    Args:
        rows: the wrapped matrix; B rows.
        draw: the draw that the rows belong to; bounded sums made from them carry it.
    """

    def __init__(self, rows: Any, draw: Draw | None = None) -> None:
        if isinstance(rows, PrivateRows):
            draw = draw or rows.draw
            rows = rows._rows
        if not hasattr(rows, "row_norms") or not hasattr(rows, "weighted_sums"):
            raise TypeError(
                f"rows must offer row_norms and weighted_sums, got {type(rows).__name__}; "
                "pass the result of a gradient engine or of eq.per_sample_gradients"
            )
        self._rows: Any = rows
        self._known: tuple[Any, Private, torch.Tensor] | None = None
        self.draw: Draw | None = draw

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

    def _call(self, name: str, *args: Any, by_record: bool = False, **kwargs: Any) -> Any:
        arguments = mapped(_raw, args)
        keywords = mapped(_raw, kwargs)
        return wrap(getattr(self._rows, name)(*arguments, **keywords), self.draw, by_record)

    def row_norms(self, groups: Sequence[Sequence[str]] | None = None) -> Private:
        """Norms of the rows, [B], or [B, m] for m groups of parameter names."""
        arguments = () if groups is None else (groups,)
        return self._call("row_norms", *arguments, by_record=True)

    def weighted_sums(self, weights: Any) -> dict[str, Private]:
        """Weighted sums of the rows: weights [B], [B, m] or a mapping from parameter name to weights."""
        return self._call("weighted_sums", weights)

    def inner(self, other: Any) -> Private:
        """Dot products of matching rows, [B]."""
        return self._call("inner", other, by_record=isinstance(other, PrivateRows))

    def cross_gram(self, other: Any, per_tensor: bool = False) -> Any:
        """Dot products of all pairs of rows, [B, B']."""
        return self._call(
            "cross_gram", other, per_tensor=per_tensor, by_record=not isinstance(other, PrivateRows)
        )

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
        if isinstance(index, torch.Tensor) and index.dtype != torch.bool:
            places = index.remainder(max(1, self._rows.num_records))  # -1 is the last row
            if len(set(places.tolist())) < places.numel():
                raise ValueError(
                    "index holds a row more than once: its record would count as often in every sum, beyond "
                    "the bound; give every row once and use weights"
                )
        return self._call("rows", index)

    def select(self, names: Sequence[str]) -> PrivateRows:
        """The same rows on some of the parameters."""
        return self._call("select", names)

    def residual(self, subspace: Any, coordinates: Any = None) -> PrivateRows:
        """The rows minus their part in a subspace.

        Args:
            subspace: the columns.
            coordinates: the last answer of `self.coordinates(subspace)`, where there is one: it is not
                computed again. Norms are those of the residual for these coordinates alone.

        Raises:
            ValueError: `coordinates` is anything else.
        """
        known = None
        if coordinates is not None:
            if self._known is None or self._known[0] is not subspace or self._known[1] is not coordinates:
                raise ValueError(
                    "coordinates must be what rows.coordinates(subspace) answered last, for these rows and "
                    "this subspace: others need not come from each record alone, and the norms would be "
                    "wrong; leave them out"
                )
            known = self._known[2]
        return PrivateRows(subspace.residual(self._rows, known), self.draw)

    def projection(self, subspace: Any) -> PrivateRows:
        """The rows' parts in a subspace."""
        return PrivateRows(subspace.projection(self._rows), self.draw)

    def masked(self, masks: Mapping[str, torch.Tensor]) -> PrivateRows:
        """The rows with the entries set to zero where a public mask is False."""
        return self._call("masked", masks)

    def coordinates(self, subspace: Any) -> Private:
        """The rows' coordinates in a subspace, [B, K]."""
        found = subspace.coordinates(self._rows)
        answer: Private = wrap(found, self.draw, by_record=True)
        # A copy of our own: the caller may write to the answer.
        self._known = (subspace, answer, found.clone())
        return answer

    def matrix(self) -> Private:
        """The rows as one matrix, [B, P], every parameter flattened in the order of `names`."""
        return wrap(self._rows.materialise().matrix(), self.draw, by_record=True)

    def materialise(self) -> PrivateRows:
        """The dense matrix, still private."""
        return self._call("materialise")

    def concat(self, parts: Sequence[PrivateRows]) -> PrivateRows:
        """Refused: a record that is in two parts would count twice in every sum, beyond its bound.

        Raises:
            PrivateError: always; that no record is in two parts cannot be seen from the rows.
        """
        raise PrivateError(
            "rows cannot be joined: a record that is in two parts would count twice in every sum, beyond its "
            "bound. Bound the sums of each part alone; draw.query unites those of the micro-batches"
        )

    def __sub__(self, other: Any) -> PrivateRows:
        return PrivateRows(self._rows - _raw(other), self.draw)

    def __len__(self) -> int:
        return self.num_records

    def __repr__(self) -> str:
        return f"PrivateRows(parameters={self.num_parameters}, dtype={self.dtype})"

    __str__ = __repr__
    __reduce_ex__ = forbidden("pickling or torch.save")


def _raw(leaf: Any) -> Any:
    if isinstance(leaf, PrivateRows):
        return leaf._rows
    return raw_value(leaf)
