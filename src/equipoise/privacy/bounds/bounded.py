"""Bounded sums: private sums over one draw that carry their sensitivity.

    S = sum_i w_i g_i,  |w_i| |g_i| <= C   =>   sensitivity C (one record added or removed), 2C (one replaced)

Only functions that enforce the bound themselves make a `Bounded`: `clipping` for rows, `counts` for numbers,
`joint` for sums that share noise, `second_moments`, and `two_thresholds` of the methods. What a bound asks of
its ingredients is in `requirements`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from equipoise._collectives import add_up
from equipoise._dtensor import is_dtensor
from equipoise.privacy.private import Draw, Private, PrivateError, as_sum, exact, summed, unwrap
from equipoise.privacy.whole_sums import WholeSum, unit_of

_KEY = object()
# Of a sum whose draw is not known: its unit is that of the smallest capacity.
_NO_DRAW = Draw("none", 0)


class Bounded:
    """A private sum over one draw with its sensitivity under both relations.

    Made by `clip`, `indicator`, `capped` and their kin, and by `+`, `-` and scaling with public numbers.
    Never directly.

    Attributes:
        value: the sum, named `Private` tensors.
        add_remove: bound on the norm of its change when one record enters or leaves.
        replace: bound on the norm of its change when one record is replaced.
        draw: the draw that it was computed from.
        counts: `Private` int64 counts for the diagnostics, summed over micro-batches, or None. They count
            records with a finite norm, those left out for another one and, for clipped sums, those whose row
            was made shorter.
        joint: identity of the shared noise that it was made for, or None.
    """

    __slots__ = ("_identity", "add_remove", "counts", "draw", "joint", "replace", "value")

    value: dict[str, Private]
    add_remove: float
    replace: float
    draw: Draw | None
    counts: Private | None
    joint: str | None
    _identity: object

    def __init__(
        self,
        value: Mapping[str, Private],
        add_remove: float,
        replace: float,
        draw: Draw | None,
        counts: Private | None = None,
        joint: str | None = None,
        *,
        _key: object = None,
    ) -> None:
        if _key is not _KEY:
            raise PrivateError(
                "Bounded cannot be made directly, since nothing would prove its bound; use clip(rows, rule, "
                "threshold), indicator(mask) or capped(values, upper)"
            )
        for tensor in value.values():
            tensor._mixed[0] = True  # a sum speaks of all records, whatever its length
        content = {
            "value": dict(value),
            "add_remove": float(add_remove),
            "replace": float(replace),
            "draw": draw,
            "counts": counts,
            "joint": joint,
            "_identity": object(),  # outlives the sum in a union of micro-batches, and is never met again
        }
        for name, item in content.items():
            object.__setattr__(self, name, item)  # past the seal, here alone

    def __setattr__(self, name: str, value: object) -> None:
        raise PrivateError(
            f"{name} of a bounded sum cannot be changed: its bound was proved when it was made"
        )

    def __repr__(self) -> str:
        shapes = {name: tuple(tensor.shape) for name, tensor in self.value.items()}
        return (
            f"Bounded({shapes}, add_remove={self.add_remove:g}, replace={self.replace:g}, draw={self.draw})"
        )

    def __add__(self, other: Bounded) -> Bounded:
        return _combine(self, other, 1)

    def __sub__(self, other: Bounded) -> Bounded:
        return _combine(self, other, -1)

    def __mul__(self, factor: float) -> Bounded:
        if (
            isinstance(factor, torch.Tensor)
            or not isinstance(factor, (int, float))
            or not math.isfinite(factor)
        ):
            raise TypeError(
                f"a bounded sum can be scaled by a public finite number only, got {type(factor).__name__}"
            )
        value = {n: as_sum(exact(one) * factor, one.dtype, self.draw) for n, one in self.value.items()}
        size = abs(factor)
        # `joint` is lost on purpose: the shared noise was made for the sum at its own scale.
        return make_bounded(value, self.add_remove * size, self.replace * size, self.draw, self.counts)

    __rmul__ = __mul__


def added_over_processes(sums: Mapping[str, Bounded], group: Any = None) -> dict[str, Bounded]:
    """Bounded sums over the processes of a group, each of which holds disjoint records of the draw.

    A tensor of which every process holds a part is the sum over all of them already.
    """

    def added(found: list[Any]) -> list[Any]:
        wholes = [one for one in found if isinstance(one, WholeSum)]
        mine = [one for one in wholes if not is_dtensor(one.total)]
        lost = [one.is_lost().long() for one in wholes]
        counts = [one.clone() for one in found if isinstance(one, torch.Tensor) and not is_dtensor(one)]
        add_up([*(one.total for one in mine), *lost, *counts], group)
        for one, times in zip(wholes, lost, strict=True):
            one.lost = torch.where(times > 0, math.nan, 0.0).double()
        return [*found[: len(found) - len(counts)], *counts]

    def whole(bounded: Bounded, key: str) -> Any:
        value = summed(bounded.value[key])
        return value if is_dtensor(value) else WholeSum.of(value, _unit(bounded.add_remove, bounded.draw))

    return after_exchange(sums, added, whole)


def after_exchange(
    sums: Mapping[str, Bounded],
    exchange: Callable[[list[Any]], list[Any]],
    held: Callable[[Bounded, str], Any] = lambda bounded, key: exact(bounded.value[key]),
) -> dict[str, Bounded]:
    """Bounded sums whose tensors and counts processes exchange; for `training`, which knows what they hold.

    Args:
        sums: of one draw in all processes.
        exchange: from this process' tensors to those that all agree on, which no record moves further.
        held: the tensor of a sum that is exchanged, raw.
    """
    # One order on every process: a collective pairs by position.
    places = [(name, key) for name in sorted(sums) for key in sorted(sums[name].value)]
    counted = [name for name in sorted(sums) if sums[name].counts is not None]
    raws = [held(sums[name], key) for name, key in places]
    found = iter(exchange(raws + [unwrap(sums[name].counts) for name in counted]))
    values = {name: dict(bounded.value) for name, bounded in sums.items()}
    for name, key in places:
        values[name][key] = as_sum(next(found), values[name][key].dtype, sums[name].draw)
    counts_of = {name: Private(next(found), sums[name].draw) for name in counted}
    return {
        name: make_bounded(
            values[name], one.add_remove, one.replace, one.draw, counts_of.get(name), one.joint
        )
        for name, one in sums.items()
    }


def _unit(bound: float, draw: Draw | None) -> float:
    """Of the whole numbers in which sums of this add-or-remove bound are added up."""
    return unit_of(bound, (draw or _NO_DRAW).capacity)


def weighted_sums(rows: Any, weights: Any, bound: float, draw: Draw | None) -> dict[str, torch.Tensor]:
    """Weighted sums of raw rows; those that processes add up on the way, in whole numbers for this bound."""
    if hasattr(rows, "summed_in"):
        rows = rows.summed_in(_unit(bound, draw))
    found: dict[str, torch.Tensor] = rows.weighted_sums(weights)
    return found


def make_bounded(
    value: Mapping[str, Private],
    add_remove: float,
    replace: float,
    draw: Draw | None,
    counts: Private | None = None,
    joint: str | None = None,
) -> Bounded:
    """A bounded sum; for the functions of this room, which prove the bounds that they give.

    Raises:
        ValueError: a tensor is of another draw than the one that the bound is for.
    """
    for name, tensor in value.items():
        if tensor.draw != draw:
            raise ValueError(
                f"value[{name!r}] comes from {tensor.draw} and the bound is for {draw}: a bound says how far "
                "one record of its own draw moves the sum. Compute both from the rows of one draw."
            )
    return Bounded(dict(value), float(add_remove), float(replace), draw, counts, joint, _key=_KEY)


def _combine(a: Bounded, b: Bounded, sign: int) -> Bounded:
    if not isinstance(b, Bounded):
        raise TypeError(f"only bounded sums can be added to a bounded sum, got {type(b).__name__}")
    if a.draw != b.draw:
        raise ValueError(f"bounded sums of different draws cannot be combined: {a.draw} and {b.draw}")
    if a.value.keys() != b.value.keys():
        raise ValueError(f"bounded sums hold different tensors: {sorted(a.value)} and {sorted(b.value)}")
    value = {}
    for name, tensor in a.value.items():
        dtype = torch.promote_types(tensor.dtype, b.value[name].dtype)
        value[name] = as_sum(exact(tensor) + sign * exact(b.value[name]), dtype, a.draw)
    return make_bounded(value, a.add_remove + b.add_remove, a.replace + b.replace, a.draw, a.counts)


def sums_of(parts: Iterable[Mapping[str, Bounded]]) -> dict[str, Bounded]:
    """The sums over a draw from those of its micro-batches, name by name, as they come: bounds do not add.

    Args:
        parts: what a query gave for disjoint records of one draw, equal in names and bounds.

    Raises:
        ValueError: for no parts, a part given twice, or parts of different draws, names or bounds.
    """
    unions: dict[str, _Union] = {}

    def unite(part: Mapping[str, Bounded]) -> None:
        if not isinstance(part, Mapping):
            raise TypeError(
                f"a query gave a {type(part).__name__}; let it give a dict of bounded sums by name, such as "
                "{'gradient': clip(rows, rule, threshold)}"
            )
        if unions and part.keys() != unions.keys():
            raise ValueError(
                f"micro-batches give different sums: {sorted(unions)} and {sorted(part)}; a query gives the "
                "same names for all micro-batches of a draw"
            )
        for name, bounded in part.items():
            if name in unions:
                unions[name].add(bounded)
            else:
                unions[name] = _Union(bounded)

    # No part is held while the next one is made: a device may write it where this one lies.
    deque(map(unite, parts), maxlen=0)
    if not unions:
        raise ValueError(
            "no micro-batch results to unite; run the query at least once, on an empty batch if need be"
        )
    return {name: union.total() for name, union in unions.items()}


class _Union:
    """Adds up the bounded sums of disjoint parts of a draw; holds one sum, however many parts there are.

    It adds whole numbers, so that the parts' order changes no bit (`whole_sums`).

    Args:
        first: of the parts; it is the sum itself where no other follows.
    """

    def __init__(self, first: Bounded) -> None:
        self._first = first
        self._types = {name: one.dtype for name, one in first.value.items()}
        self._values: dict[str, WholeSum] | None = None  # of two parts or more
        self._counts = None if first.counts is None else unwrap(first.counts)
        self._seen = {first._identity}

    def add(self, part: Bounded) -> None:
        first = self._first
        # The identity, not the object: a sum that was let go leaves its address to the next one.
        if part._identity in self._seen:
            raise ValueError("a part is given twice; the parts of a draw hold disjoint records")
        self._seen.add(part._identity)
        if part.draw != first.draw:
            raise ValueError(f"parts come from different draws: {first.draw} and {part.draw}")
        if part.value.keys() != self._types.keys():
            raise ValueError(f"parts hold different tensors: {sorted(self._types)} and {sorted(part.value)}")
        if (part.add_remove, part.replace, part.joint) != (first.add_remove, first.replace, first.joint):
            raise ValueError(
                f"parts have different bounds: {(first.add_remove, first.replace)} and "
                f"{(part.add_remove, part.replace)}; a query must use the same threshold for all "
                "micro-batches of a draw"
            )
        if self._values is None:
            # A copy, once: the first part is the caller's and must not grow.
            unit = _unit(first.add_remove, first.draw)
            self._values = {n: WholeSum.of(summed(one), unit) for n, one in first.value.items()}
            # What it was made of lies where a device may write the next part.
            self._first = make_bounded({}, first.add_remove, first.replace, first.draw, None, first.joint)
        for name, total in self._values.items():
            total.add(summed(part.value[name]))
        if part.counts is not None:
            counts = unwrap(part.counts)
            self._counts = counts.clone() if self._counts is None else self._counts + counts

    def total(self) -> Bounded:
        first, values = self._first, self._values
        if values is None:
            return first
        counts = None if self._counts is None else Private(self._counts, first.draw)
        private = {n: as_sum(total, self._types[n], first.draw) for n, total in values.items()}
        return make_bounded(private, first.add_remove, first.replace, first.draw, counts, first.joint)
