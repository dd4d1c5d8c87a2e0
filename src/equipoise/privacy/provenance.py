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
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from equipoise.privacy.nests import leaves_of

__all__ = ["Storage", "keeps_records_apart"]

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
