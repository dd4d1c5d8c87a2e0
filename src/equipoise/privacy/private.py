"""Which private tensors speak of each record on its own.

A sum ``S = sum_i f(x_i)`` has the sensitivity of f alone, but only if f looks at one record. A mask such as
``norms > norms.median()`` looks at all of them: a record that enters moves the median, and with it everybody
else's entry, so that no bound holds however the entries are capped.

Therefore every `Private` tensor knows whether it is *by record*: entry i along the first axis was computed
from record i and from public values alone. The statistics of `PrivateRows` (norms, losses, coordinates)
start out so, and each operation decides by its own nature whether its result still is:

======================================  =============================================================
stays by record                         loses it
======================================  =============================================================
elementwise operations of by-record     reductions, sorts, cumulative sums, indexing, flips along the
tensors of one length with numbers and  first axis; a mixture with a private value that is not by
with public tensors that are constant   record; a public tensor that differs from row to row (a row's
along the first axis                    position depends on who else is there); randomness
reductions, slices and new axes behind
the first; products ``[B, K] @ public``
======================================  =============================================================

Whatever is not in the left column loses the mark: it is then refused where a bound would need it. The mark
cannot tell two micro-batches of equal length of one draw apart; a query that carries a tensor from one
micro-batch into the next must not mix them.

Private numbers: tensors that compute, and that only the ledger can read.

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

from equipoise.privacy.nests import leaves_of, mapped

if TYPE_CHECKING:
    from equipoise.privacy.draw import Draw


_aten = torch.ops.aten


# Same value at the same place: casts, copies and constants of the same shape.
_COPIES = (
    _aten._to_copy,
    _aten.detach,
    _aten.alias,
    _aten.zeros_like,
    _aten.ones_like,
    _aten.full_like,
    _aten.copy_,
    _aten.masked_fill_,
)


_REDUCTIONS = (
    _aten.sum,
    _aten.mean,
    _aten.amax,
    _aten.amin,
    _aten.any,
    _aten.all,
    _aten.linalg_vector_norm,
)


_VIEWS = (_aten.select, _aten.unsqueeze, _aten.squeeze)


class Storage:
    """What tensors that share memory share: whether a write has mixed records in it."""

    __slots__ = ("mixed",)

    def __init__(self) -> None:
        self.mixed = False


def keeps_records_apart(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> bool:
    """Whether the result of an operation on `Private` tensors is by record.

    Args:
        func: the overload that ran.
        args, kwargs: its arguments, private tensors still wrapped (they have `by_record`).
        out: its raw result.
    """
    if not isinstance(out, torch.Tensor) or out.ndim == 0:
        return False
    packet = func.overloadpacket
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if torch.Tag.pointwise in func.tags or packet in _COPIES:
        leaves = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        return all(_fits(leaf, out) for leaf in leaves)
    first = args[0]
    if not getattr(first, "by_record", False):
        return False
    if packet is _aten.mm:
        return not hasattr(args[1], "by_record")
    if packet in _REDUCTIONS:
        return _avoids_records(_argument(func, args, kwargs, "dim"), first.ndim)
    if packet in _VIEWS:
        return _avoids_records(
            _argument(func, args, kwargs, "dim"), out.ndim if packet is _aten.unsqueeze else first.ndim
        )
    if packet is _aten.slice:
        # x[:, 0] takes a slice of everything along the first axis first.
        return out.shape[0] == first.shape[0] and _argument(func, args, kwargs, "step") in (None, 1)
    return False


def _fits(leaf: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether an argument of an elementwise operation brings entry i nothing but record i."""
    along = leaf.ndim == out.ndim and leaf.shape[0] == out.shape[0]
    if hasattr(leaf, "by_record"):
        return along and bool(leaf.by_record)
    return leaf.ndim < out.ndim or leaf.shape[0] == 1


def _avoids_records(dim: Any, ndim: int) -> bool:
    axes = [dim] if isinstance(dim, int) else list(dim or ())
    return bool(axes) and all(axis % ndim != 0 for axis in axes)


def _argument(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name)
    return None


_REMEDY = (
    "Private values leave through the ledger alone: bound the quantity (clip, indicator, capped) "
    "and pass it to "
    "ledger.release(draw, {name: bounded}), or keep computing with Private tensors (torch.where, clamp, "
    "comparisons "
    "and sorting all work)."
)


class PrivateError(RuntimeError):
    """A private value was about to leave the private side other than through the ledger."""


def refuse(what: str) -> NoReturn:
    """Raise a `PrivateError` that says what would be shown, and how it may leave."""
    raise PrivateError(f"{what} would show a private value. {_REMEDY}")


def forbidden(what: str) -> Callable[..., Any]:
    """A method that refuses."""

    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(what)

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
            refuse(f"writing a Private tensor into an ordinary one ({func})")
        if _shows_values(func, args):
            name = str(func)
            refuse("float() or item()" if "_local_scalar_dense" in name else f"the result of {name}")
        out = func(*mapped(raw_value, args), **mapped(raw_value, kwargs))
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
            refuse(f"the number returned by {func}")

        return mapped(wrap, out)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Private(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict) -> Private:
        return Private(self._held.clone(), self.draw, self.by_record)

    def __iter__(self) -> Iterator[Private]:
        return iter(self.unbind(0))  # type: ignore[arg-type]

    __str__ = forbidden("printing")
    __format__ = forbidden("formatting")
    __bool__ = forbidden("bool() or `if`")
    __float__ = forbidden("float() or item()")
    __int__ = forbidden("int()")
    __complex__ = forbidden("complex()")
    __index__ = forbidden("use as a Python index")
    __contains__ = forbidden("`in`")
    __array__ = forbidden("conversion to a NumPy array")
    __dlpack__ = forbidden("DLPack export")
    __reduce_ex__ = forbidden("pickling or torch.save")
    __reduce__ = forbidden("pickling or torch.save")
    item = forbidden("float() or item()")
    tolist = forbidden("tolist()")
    numpy = forbidden("numpy()")
    data_ptr = forbidden("data_ptr()")
    storage = forbidden("storage()")
    untyped_storage = forbidden("untyped_storage()")
    share_memory_ = forbidden("share_memory_()")
    is_nonzero = forbidden("bool() or `if`")


def raw_value(leaf: Any) -> Any:
    """The raw tensor of a `Private` leaf; any other leaf as it is. For the wrappers of this room alone."""
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
