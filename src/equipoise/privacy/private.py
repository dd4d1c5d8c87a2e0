"""Private numbers: tensors that compute, and that only the ledger can read.

A `Private` tensor holds a value computed from private records. Every tensor operation works on it and gives
`Private` results; everything that would carry the value out of the private side (`float`, `bool`, `if`,
`item`, `numpy`, printing, pickling, writing into an ordinary tensor, shapes that depend on values) raises
`PrivateError` and says how to release it.

The class is a wrapper subclass: the ordinary tensor object has no storage, and the value sits behind
`__torch_dispatch__`, below every public entry of PyTorch. `torch.tensor(p)`, `p.data`,
`p.as_subclass(torch.Tensor)` and `p.untyped_storage()` therefore yield `Private` tensors or errors, never
the value.

This guards against accidents, not against an adversary who writes code in the same process: Python has no
such wall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .nests import leaves_of, mapped
from .provenance import Storage, keeps_records_apart

if TYPE_CHECKING:
    from .draws import Draw

_REMEDY = (
    "Private values leave through the ledger alone: bound the quantity (clip, indicator, capped, top_k) "
    "and pass it to "
    "ledger.release(draw, {name: bounded}), or keep computing with Private tensors (torch.where, clamp, "
    "comparisons "
    "and sorting all work)."
)


class PrivateError(RuntimeError):
    """A private value was about to leave the private side other than through the ledger."""


def _refuse(what: str) -> NoReturn:
    raise PrivateError(f"{what} would show a private value. {_REMEDY}")


def _forbidden(what: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(what)

    method.__doc__ = f"Raise `PrivateError`: {what} would show a private value."
    return method


class Private(torch.Tensor):
    """A tensor of private values: shape, dtype and device are public, the values are not.

    Args:
        value: the tensor to hold; it is detached, not copied.
        draw: the draw of records that it was computed from, if any; results of operations carry it on.
        by_record: whether entry i along the first axis was computed from record i alone. Results of
            operations know it by themselves (see `provenance`); who wraps raw values vouches for it.

    Example:
        >>> norms = Private(torch.tensor([3.0, 4.0]))
        >>> (norms * 2).shape
        torch.Size([2])
        >>> float(norms.sum())  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        equipoise.privacy.private.PrivateError: float() or item() would show a private value...
    """

    _held: torch.Tensor
    _apart: bool
    _storage: Storage
    draw: Draw | None

    @staticmethod
    def __new__(cls, value: torch.Tensor, draw: Draw | None = None, by_record: bool = True) -> Private:
        """Make the wrapper: a tensor without storage."""
        if isinstance(value, Private):
            value = value._held
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"value must be a tensor, got {type(value).__name__}; wrap numbers with torch.tensor first"
            )
        return torch.Tensor._make_wrapper_subclass(
            cls,
            value.shape,
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
            device=value.device,
        )

    def __init__(self, value: torch.Tensor, draw: Draw | None = None, by_record: bool = True) -> None:
        storage = None
        if isinstance(value, Private):
            draw = value.draw if draw is None else draw
            by_record, storage = by_record and value.by_record, value._storage
            value = value._held
        object.__setattr__(self, "_held", value.detach())
        object.__setattr__(self, "_apart", by_record)
        object.__setattr__(self, "_storage", storage or Storage())
        object.__setattr__(self, "draw", draw)

    @property
    def by_record(self) -> bool:
        """Whether entry i along the first axis was computed from record i alone."""
        return self._apart and self.ndim > 0 and not self._storage.mixed

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation on the held values and wrap what it gives; refuse what would show a value."""
        kwargs = dict(kwargs or {})
        leaves = list(leaves_of((args, kwargs)))
        private = [leaf for leaf in leaves if isinstance(leaf, Private)]
        written = _written_arguments(func, args, kwargs)
        if any(not isinstance(leaf, Private) for leaf in written):
            _refuse(f"writing a Private tensor into an ordinary one ({func})")
        if _shows_values(func, args):
            name = str(func)
            _refuse("float() or item()" if "_local_scalar_dense" in name else f"the result of {name}")
        out = func(*mapped(_value, args), **mapped(_value, kwargs))
        if written:
            if not keeps_records_apart(func, args, kwargs, out):
                for leaf in written:
                    leaf._storage.mixed = True
            changed = next(leaf for leaf in leaves if isinstance(leaf, Private) and leaf is written[0])
            if changed._held.shape != changed.shape:
                raise PrivateError(
                    f"{func} changes the shape of a Private tensor in place; use the form that returns a "
                    "new one"
                )
            return changed if len(written) == 1 else tuple(written)
        draws = {p.draw for p in private if p.draw is not None}
        draw = next(iter(draws)) if len(draws) == 1 else None

        by_record = keeps_records_apart(func, args, kwargs, out)
        shared = private[0]._storage if func._schema.returns[0].alias_info is not None else None

        def wrap(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                made = Private(leaf, draw, by_record)
                if shared is not None:
                    object.__setattr__(made, "_storage", shared)
                return made
            if leaf is None:
                return None
            _refuse(f"the number returned by {func}")

        return mapped(wrap, out)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Private(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict) -> Private:
        return Private(self._held.clone(), self.draw, self.by_record)

    def __iter__(self) -> Iterator[Private]:
        return iter(self.unbind(0))  # type: ignore[arg-type]

    __str__ = _forbidden("printing")
    __format__ = _forbidden("formatting")
    __bool__ = _forbidden("bool() or `if`")
    __float__ = _forbidden("float() or item()")
    __int__ = _forbidden("int()")
    __complex__ = _forbidden("complex()")
    __index__ = _forbidden("use as a Python index")
    __contains__ = _forbidden("`in`")
    __array__ = _forbidden("conversion to a NumPy array")
    __dlpack__ = _forbidden("DLPack export")
    __reduce_ex__ = _forbidden("pickling or torch.save")
    __reduce__ = _forbidden("pickling or torch.save")
    item = _forbidden("float() or item()")
    tolist = _forbidden("tolist()")
    numpy = _forbidden("numpy()")
    data_ptr = _forbidden("data_ptr()")
    storage = _forbidden("storage()")
    untyped_storage = _forbidden("untyped_storage()")
    share_memory_ = _forbidden("share_memory_()")
    is_nonzero = _forbidden("bool() or `if`")


def _value(leaf: Any) -> Any:
    return leaf._held if isinstance(leaf, Private) else leaf


def _written_arguments(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that an operation writes to, by its schema."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    written: list[Any] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written += list(value) if isinstance(value, (list, tuple)) else [value]
    return [leaf for leaf in written if leaf is not None]


def _shows_values(func: Any, args: tuple) -> bool:
    """Whether an operation gives a Python number or a shape that depends on private values."""
    tags = func.tags
    if torch.Tag.data_dependent_output in tags:
        return True
    if torch.Tag.dynamic_output_shape not in tags:
        return False
    if func.overloadpacket is torch.ops.aten.index:  # x[mask]: only a mask has a size that depends on values
        indices = args[1]
        return any(isinstance(i, Private) and i.dtype in (torch.bool, torch.uint8) for i in indices)
    return True


def unwrap(value: torch.Tensor) -> torch.Tensor:
    """The raw tensor behind a `Private` one. For the ledger and for the wrappers of this room alone."""
    return value._held if isinstance(value, Private) else value


def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The values of disjoint micro-batches of a draw, one after another; by record if every part is."""
    if not all(isinstance(part, Private) for part in parts):
        return torch.cat(list(parts))
    by_record = all(part.by_record for part in parts)  # type: ignore[attr-defined]
    return Private(torch.cat([unwrap(part) for part in parts]), parts[0].draw, by_record)  # type: ignore[attr-defined]


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
    if value is None:
        return None
    _refuse(f"a result of type {type(value).__name__}")


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
        _refuse("the number of records drawn")

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
            _refuse(f"the {kept}, which may follow from other records,")
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
        return self._call("residual", subspace, known)

    def projection(self, subspace: Any) -> PrivateRows:
        """The rows' parts in a subspace."""
        return self._call("projection", subspace)

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
    __reduce_ex__ = _forbidden("pickling or torch.save")


def _raw(leaf: Any) -> Any:
    if isinstance(leaf, PrivateRows):
        return leaf._rows
    return _value(leaf)
