"""Private numbers: tensors that compute, and that only the ledger can read.

A `Private` tensor holds a value computed from private records. Every tensor operation works on it and gives
`Private` results. Everything that would carry the value out of the private side raises `PrivateError` and
says how to release it: `float`, `bool`, `if`, `item`, `numpy`, printing, pickling, writing into an ordinary
tensor, shapes that depend on values.

The class is a wrapper subclass: the ordinary tensor object has no storage, and the value sits behind
`__torch_dispatch__`, below every public entry of PyTorch. `torch.tensor(p)`, `p.data`,
`p.as_subclass(torch.Tensor)` and `p.untyped_storage()` therefore yield `Private` tensors or errors, never
the value. This guards against accidents. It does not guard against an adversary who writes code in the same
process: Python has no such wall.

Provenance. A sum ``S = sum_i f(x_i)`` has the sensitivity of f only if f looks at one record. A mask such as
``norms > norms.median()`` looks at all of them. A record that enters moves the median, and with it every
other entry, so that no bound holds however the entries are capped. Therefore every `Private` tensor knows
whether it is *by record*: entry i along the first axis was computed from record i and from public values. The
statistics of `PrivateRows` (norms, losses, coordinates) start out so, and each operation decides whether its
result still is:

======================================  =============================================================
stays by record                         loses it
======================================  =============================================================
elementwise operations of by-record     reductions, sorts, cumulative sums, indexing, flips along the
tensors of one length with numbers and  first axis; a mixture with a private value that is not by
with public tensors that are constant   record; a public tensor that differs from row to row (a row's
along the first axis                    position depends on who else is there); randomness
reductions, slices and new axes behind
the first; tensors joined there;
products ``[B, K] @ public``
======================================  =============================================================

Whatever is not in the left column loses the mark, and is refused where a bound needs it. The mark cannot tell
two micro-batches of equal length of one draw apart. A query that carries a tensor from one micro-batch into
the next must not mix them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from equipoise._tree import leaves, map_leaves
from equipoise.privacy.draw import Draw as Draw
from equipoise.privacy.whole_sums import WholeSum

_aten = torch.ops.aten
_AT_ONCE = 1 << 18  # numbers that stay in the cache (1 MiB of float32); it moves time and no bit

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

# Arguments that the fast path of `Private.__torch_dispatch__` hands on as they are.
_PLAIN = frozenset(
    {int, float, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


@dataclass(frozen=True, slots=True)
class _Operation:
    """What the schema of an operation says; the same at every call.

    Attributes:
        elementwise: entry i of the result comes from entry i of the arguments.
        simple: elementwise, and it gives one new tensor and does nothing else: the fast path serves it.
        written: places of the arguments that it writes to, as (position, name).
        random: it draws random numbers.
        shows_values: it gives a Python number that depends on values.
        shape_shows_values: it gives a shape that depends on values.
        shares_memory: its result is a view of an argument.
    """

    elementwise: bool
    simple: bool
    written: tuple[tuple[int, str], ...]
    random: bool
    shows_values: bool
    shape_shows_values: bool
    shares_memory: bool


@functools.cache
def _operation(func: Any) -> _Operation:
    schema, tags = func._schema, func.tags
    written = [
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if schema.is_mutable and argument.alias_info is not None and argument.alias_info.is_write
    ]
    random = torch.Tag.nondeterministic_seeded in tags
    elementwise = not random and (torch.Tag.pointwise in tags or func.overloadpacket in _COPIES)
    shows_values = torch.Tag.data_dependent_output in tags
    shape_shows_values = torch.Tag.dynamic_output_shape in tags
    returns = schema.returns
    shares_memory = bool(returns) and returns[0].alias_info is not None
    simple = elementwise and not (written or shows_values or shape_shows_values or shares_memory)
    simple = simple and len(returns) == 1 and str(returns[0].type) == "Tensor"
    return _Operation(
        elementwise, simple, tuple(written), random, shows_values, shape_shows_values, shares_memory
    )


def _keeps_records_apart(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], values: Sequence[Any], out: Any
) -> bool:
    """Whether the result of an operation on `Private` tensors is by record.

    Args:
        func: the overload that ran.
        args, kwargs: its arguments, private tensors still wrapped.
        values: the values among them.
        out: its raw result.
    """
    if not isinstance(out, torch.Tensor) or out.ndim == 0:
        return False
    operation = _operation(func)
    if operation.random:
        return False
    if operation.elementwise:
        return _all_fit([leaf for leaf in values if isinstance(leaf, torch.Tensor)], out)
    packet, first = func.overloadpacket, args[0]
    if packet in (_aten.stack, _aten.cat):
        parts = [part for part in first if isinstance(part, Private) and part.by_record]
        return len(parts) == len(first) and _avoids_records(
            _argument(func, args, kwargs, "dim") or 0, out.ndim
        )
    if not (isinstance(first, Private) and first.by_record):
        return False
    if packet is _aten.mm:
        return not isinstance(args[1], Private)
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


def _all_fit(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> bool:
    """Whether each argument of an elementwise operation brings entry i nothing but record i."""
    ndim = out.ndim
    if ndim == 0:
        return False
    for tensor in tensors:
        if isinstance(tensor, Private):
            if tensor._mixed[0] or not tensor._apart or tensor.ndim != ndim or len(tensor) != len(out):
                return False
        elif tensor.ndim >= ndim and len(tensor) != 1:
            return False
    return True


def _avoids_records(dim: Any, ndim: int) -> bool:
    axes = [dim] if isinstance(dim, int) else list(dim or ())
    return bool(axes) and all(axis % ndim != 0 for axis in axes)


def _argument(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name)
    return None


_REMEDY = (
    "Private values leave only through the ledger: bound the quantity (clip, indicator, capped) and pass it "
    "to ledger.release(draw, {name: bounded}). Or keep computing with Private tensors: torch.where, clamp, "
    "comparisons and sorting all work."
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
        by_record: whether entry i along the first axis was computed only from record i. Results of
            operations know it by themselves; who wraps raw values vouches for it.

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
    # Whether a write has mixed records in; tensors that share memory share this list of one entry.
    _mixed: list[bool]
    draw: Draw | None

    @staticmethod
    def __new__(cls, value: torch.Tensor, draw: Draw | None = None, by_record: bool = True) -> Private:
        if isinstance(value, Private):
            draw = value.draw if draw is None else draw
            return _wrapped(value._held, draw, by_record and value.by_record, value._mixed)
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"value must be a tensor, got {type(value).__name__}; wrap numbers with torch.tensor first"
            )
        return _wrapped(value, draw, by_record)

    @property
    def by_record(self) -> bool:
        """Whether entry i along the first axis was computed only from record i."""
        return self._apart and self.ndim > 0 and not self._mixed[0]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation on the held values and wrap what it gives; refuse what would show a value."""
        kwargs = kwargs or {}
        if not _operation(func).simple or not _PLAIN.issuperset(map(type, kwargs.values())):
            return _dispatch(func, args, kwargs)
        tensors: list[torch.Tensor] = []
        draws: list[Draw] = []
        raw = []
        for value in args:
            if isinstance(value, Private):
                tensors.append(value)
                raw.append(value._held)
                if value.draw is not None and value.draw not in draws:
                    draws.append(value.draw)
            elif isinstance(value, torch.Tensor):
                tensors.append(value)
                raw.append(value)
            elif type(value) in _PLAIN:
                raw.append(value)
            else:
                return _dispatch(func, args, kwargs)
        out = func(*raw, **kwargs)
        made = _wrapped(out, draws[0] if len(draws) == 1 else None, _all_fit(tensors, out))
        if (notes := _NOTES.get()) is not None:
            notes.append((func, args, kwargs, made))
        return made

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


def _wrapped(
    value: torch.Tensor, draw: Draw | None, by_record: bool, mixed: list[bool] | None = None
) -> Private:
    """A `Private` tensor around a raw one, without looks at the arguments."""
    if value.requires_grad:
        value = value.detach()
    made = torch.Tensor._make_wrapper_subclass(
        Private,
        value.shape,
        strides=value.stride(),
        storage_offset=value.storage_offset(),
        dtype=value.dtype,
        device=value.device,
    )
    made._held, made._apart, made.draw = value, by_record, draw
    made._mixed = [False] if mixed is None else mixed
    return made


_Note = tuple[Any, tuple, Mapping[str, Any], Private]
_NOTES: ContextVar[list[_Note | None] | None] = ContextVar("notes of operations", default=None)


def noted(
    function: Callable[[Private], Any], given: Private
) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor] | None]:
    """What a function of private numbers gives, and what computes the same from others, on raw tensors.

    The second is None where the function asks for anything but elementwise operations that give one new
    tensor, or where other private numbers go into them.

    Example:
        >>> answer, again = noted(lambda some: some.clamp(max=1.0) * 2, Private(torch.tensor([3.0, 0.5])))
        >>> again(torch.tensor([0.25, 7.0]))
        tensor([0.5000, 2.0000])
    """
    notes: list[_Note | None] = []
    token = _NOTES.set(notes)
    try:
        answer = function(given)
    finally:
        _NOTES.reset(token)
    places, steps = {id(given): 0}, []
    for note in notes:
        if note is None:
            return answer, None
        func, args, kwargs, made = note
        if any(isinstance(one, Private) and id(one) not in places for one in args):
            return answer, None
        # No private number stays: where one went in, its place is known.
        known = [None if id(one) in places else one for one in args]
        private = [(at, places[id(one)]) for at, one in enumerate(args) if id(one) in places]
        steps.append((func, known, private, kwargs))
        places[id(made)] = len(steps)
    if id(answer) not in places:
        return answer, None
    last = places[id(answer)]

    def again(raw: torch.Tensor) -> torch.Tensor:
        values = [raw]
        for func, known, private, kwargs in steps:
            all_args = known.copy()
            for at, place in private:
                all_args[at] = values[place]
            values.append(func(*all_args, **kwargs))
        return values[last]

    return answer, again


def _dispatch(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """`Private.__torch_dispatch__` for any operation: nested arguments, writes, views, several results."""
    if (notes := _NOTES.get()) is not None:
        notes.append(None)
    operation = _operation(func)
    values = leaves((args, kwargs))
    private = [leaf for leaf in values if isinstance(leaf, Private)]
    written: list[Any] = []
    for position, name in operation.written:
        value = args[position] if position < len(args) else kwargs.get(name)
        written += list(value) if isinstance(value, (list, tuple)) else [value]
    written = [leaf for leaf in written if leaf is not None]
    # Before the operation runs: a refused write must not have happened.
    if any(not isinstance(leaf, Private) for leaf in written):
        refuse(f"writing a Private tensor into an ordinary one ({func})")
    if operation.shows_values or (operation.shape_shows_values and _shape_is_private(func, args)):
        name = str(func)
        refuse("float() or item()" if "_local_scalar_dense" in name else f"the result of {name}")
    out = func(*map_leaves(unwrap, args), **map_leaves(unwrap, kwargs))
    by_record = _keeps_records_apart(func, args, kwargs, values, out)
    if written:
        if not by_record:  # views of the same memory see the write too: they share the mark
            for leaf in written:
                leaf._mixed[0] = True
        changed = written[0]
        if changed._held.shape != changed.shape:
            raise PrivateError(
                f"{func} changes the shape of a Private tensor in place; use the form that returns a new one"
            )
        return changed if len(written) == 1 else tuple(written)
    draws = {p.draw for p in private if p.draw is not None}
    draw = next(iter(draws)) if len(draws) == 1 else None
    mixed = private[0]._mixed if operation.shares_memory else None

    def wrap(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _wrapped(leaf, draw, by_record, mixed)
        if leaf is None:
            return None
        refuse(f"the number returned by {func}")

    return map_leaves(wrap, out)


def _shape_is_private(func: Any, args: tuple) -> bool:
    """Whether a result's shape depends on private values; that of x[mask] does where the mask is private."""
    if func.overloadpacket is not _aten.index:
        return True
    return any(isinstance(i, Private) and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def unwrap(value: Any) -> Any:
    """The raw tensor behind a `Private` one; anything else as it is. For the ledger and the wrappers."""
    return value._held if isinstance(value, Private) else value


class _Sum(Private):
    """A sum that was added up in whole numbers or in float64 and counts as float32: it is released in that.

    Its noise is added before it is rounded. Rounded first, a sum of 4 million bounds, which lies among floats
    that are half a bound apart, would move by up to half a bound more than the record that moves it.
    """

    _exact: torch.Tensor | WholeSum

    @property
    def _held(self) -> torch.Tensor:  # type: ignore[override]
        found: torch.Tensor = exact(self).to(self.dtype)
        return found


def as_sum(value: torch.Tensor | WholeSum, dtype: torch.dtype, draw: Draw | None) -> Private:
    """A raw sum, in its own type, in float64 or in whole numbers, that counts as a tensor of this type."""
    if isinstance(value, torch.Tensor) and value.dtype == dtype:
        return _wrapped(value, draw, True)
    like = value if isinstance(value, torch.Tensor) else value.total
    made = torch.Tensor._make_wrapper_subclass(
        _Sum, like.shape, strides=like.stride(), dtype=dtype, device=like.device
    )
    made._exact, made._apart, made.draw, made._mixed = value, True, draw, [False]
    return made


def summed(value: Any) -> Any:
    """As `unwrap`, of a sum that was added up in whole numbers those, and of one in float64 that."""
    if isinstance(value, Private):
        return value._exact if isinstance(value, _Sum) else value._held
    return value


def exact(value: Any) -> Any:
    """As `summed`, in floats; for what adds noise, and for what a release looks at."""
    return exact_values({"": value})[""]


def exact_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The `exact` values by name, in one call: a release looks at all parameters."""
    found = {}
    for name, value in values.items():
        if isinstance(value, Private):
            value = value._exact if isinstance(value, _Sum) else value._held
        found[name] = value.floats() if isinstance(value, WholeSum) else value
    return found


def add_exact(
    totals: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Raw tensors plus sums, raw or `Private`: computed in the wider type, in the memory of `totals`."""
    found, together = {}, []  # of those, one operation on a device
    for name, more in exact_values(values).items():
        total = found[name] = totals[name]
        if type(total) is type(more) is torch.Tensor and total.dtype == more.dtype:
            together.append((total, more))
            continue
        one, other = getattr(total, "_local_tensor", total), getattr(more, "_local_tensor", more)
        is_plain = one.device.type != "cpu" or not (one.is_contiguous() and other.is_contiguous())
        if is_plain or one.dtype == other.dtype:
            total.add_(more)
            continue
        # For two types a processor copies one of them first: of 40 million numbers that took seven times as
        # long.
        for some, of in zip(*(torch.split(t.view(-1), _AT_ONCE) for t in (one, other)), strict=True):
            some.add_(of)
    if together:
        torch._foreach_add_(*map(list, zip(*together, strict=True)))
    return found


def as_private(values: Mapping[str, torch.Tensor], draw: Draw | None) -> dict[str, Private]:
    """The tensors, raw or `Private`, as `Private` ones of this draw."""
    return {
        name: _wrapped(value, draw, True)
        if type(value) is torch.Tensor
        else as_sum(summed(value), value.dtype, draw)
        for name, value in values.items()
    }


def join(parts: Sequence[torch.Tensor], order: torch.Tensor) -> torch.Tensor:
    """The values of disjoint records of a draw, in this order, LongTensor [B]; by record if every part is."""
    joined = torch.cat(list(parts))[order.to(parts[0].device)]
    by_record = all(isinstance(part, Private) and part.by_record for part in parts)
    return Private(unwrap(joined), parts[0].draw) if by_record else joined  # type: ignore[attr-defined]


# ---- in saved state: a method may carry private state from step to step, and it lies in checkpoints

_MARK = "private tensor"


def mark(state: Any) -> Any:
    """The state with every `Private` tensor as a marked plain one, for a checkpoint.

    Example:
        >>> import torch
        >>> state = {"memory": Private(torch.ones(2)), "step": 3}
        >>> mark(state)["memory"]
        {'private tensor': tensor([1., 1.])}
        >>> unmark(mark(state))["memory"]
        Private(shape=(2,), dtype=torch.float32, device=cpu)
    """
    if isinstance(state, Private):
        return {_MARK: unwrap(state)}
    if isinstance(state, Mapping):
        return {key: mark(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [mark(value) for value in state]
    return state


def unmark(state: Any) -> Any:
    """The state that `mark` was given, tuples as lists."""
    if isinstance(state, Mapping):
        if set(state) == {_MARK}:
            return Private(state[_MARK])
        return {key: unmark(value) for key, value in state.items()}
    if isinstance(state, list):
        return [unmark(value) for value in state]
    return state
