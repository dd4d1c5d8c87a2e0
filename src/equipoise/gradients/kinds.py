"""What a tensor may depend on: the kinds that a proof gives to each, and how they meet.

| kind | meaning |
|---|---|
| `Public` | depends on no record; it is known along which axes all records would find the same values |
| `ByRecord` | an entry depends on one record and public values; the axis says on which record |
| `One` | depends on one record: a loop over records takes them one by one, and `stack` joins them |
| `Sum` | a sum over records, each term of which depends on one record and public values |
| `Fault` | a mixture, or an operation without a rule |

Public values that differ along the records' axis, such as their numbers, may not meet records: what came out
would depend on a record's place among the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor


class Axis(NamedTuple):
    """Where records are: entry ``(o * records + r) * places + p`` of a dimension is of record r."""

    dim: int
    outer: int = 1
    places: int = 1


@dataclass(frozen=True)
class Public:
    """Depends on no record.

    Attributes:
        alike: the axes along which all records would find the same values, or random ones of their own.
        counts: the dimension along which the values are 0, `step`, 2 `step`, ..., if there is one.
        step: see `counts`.
    """

    alike: frozenset[Axis] = frozenset()
    counts: int | None = None
    step: int = 1


@dataclass(frozen=True)
class ByRecord:
    """An entry depends on one record and public values.

    Attributes:
        axis: says on which.
        first: the first record; other records may be in other tensors.
    """

    axis: Axis
    first: int = 0


@dataclass(frozen=True)
class Fault:
    """Why there is no proof.

    Attributes:
        mixes: whether it is known that records mix; else an operation has no rule.
        operation: its name.
        what: happens there.
        where: line of the source, if it is known.
        module: path and class of the module that ran, if there was one.
    """

    mixes: bool
    operation: str
    what: str
    where: str = ""
    module: tuple[str | None, str] | None = None

    def __str__(self) -> str:
        said = f"{self.operation} mixes records" if self.mixes else f"there is no rule for {self.operation}"
        module = "" if self.module is None else "{} ({})".format(self.module[0] or "a module", self.module[1])
        places = ", ".join(filter(None, (module, self.where)))
        return f"{said}: {self.what}" + f" ({places})" * bool(places)


@dataclass(frozen=True)
class Sum:
    """A sum over records of terms that depend on one record each.

    Attributes:
        made: what an error says if a record meets the sum.
    """

    made: Fault


@dataclass(frozen=True)
class One:
    """Depends on one record as a whole, and public values: what a loop over records computes.

    Attributes:
        record: its number.
        way: how it was computed; the same number for other records that were treated alike.
    """

    record: int
    way: int


Kind = Public | ByRecord | One | Sum | Fault


class Seen(NamedTuple):
    """A tensor that an operation takes, or makes (then its kind is not known yet)."""

    kind: Any
    shape: tuple[int, ...]
    records: int
    value: Tensor | None = None


class MixesError(Exception):
    """Records mix; the text says what happens to them."""


class NoRuleError(Exception):
    """The table does not know this form of an operation."""


#: What a rule returns for a sum over records; where it is made is added later.
SUMMED = Sum(Fault(True, "", ""))


# ---- what rules are made of

#: A tensor and the labels of its dimensions. None: the operation may mix all that is there.
Operand = tuple[Seen, Sequence[Hashable]]


def labelled(
    operands: Sequence[Operand],
    results: Sequence[Sequence[Hashable]],
    sums: bool = False,
    additive: bool = False,
) -> list[Kind]:
    """The kinds of results whose dimensions bear these labels.

    Args:
        operands: what the operation takes.
        results: the labels of each result.
        sums: whether it adds up along labels that a result lacks; else it mixes there.
        additive: whether it adds its operands, so that several may be sums.
    """
    held: tuple[Hashable, int, int, int, int] | None = None
    for seen, labels in operands:
        if isinstance(seen.kind, One):
            raise NoRuleError("a record alone meets others")
        if isinstance(seen.kind, ByRecord):
            (dim, outer, places), first = seen.kind.axis, seen.kind.first
            if labels[dim] is None:
                raise MixesError("over the records' axis")
            one = (labels[dim], outer, places, first, seen.shape[dim])
            if held not in (None, one):
                raise MixesError("records meet other records")
            held = one
    totals = [seen.kind.made for seen, _ in operands if isinstance(seen.kind, Sum)]
    if held is not None and totals:
        raise MixesError(f"single records meet what {totals[0].operation} adds up over records")
    if len(totals) > 1 and not additive:
        raise MixesError("a sum over records meets another")
    if held is None:
        if totals:
            return [SUMMED for _ in results]
        return [
            Public(frozenset(Axis(d, *a) for d, label in enumerate(labels) for a in _alike(operands, label)))
            for labels in results
        ]
    label, outer, places, first, size = held
    for seen, labels in operands:
        for dim in (d for d, other in enumerate(labels) if other == label and isinstance(seen.kind, Public)):
            if seen.shape[dim] != size:
                raise NoRuleError("sizes differ along the records' axis")
            if Axis(dim, outer, places) not in seen.kind.alike:
                raise NoRuleError("what differs from place to place meets records")
    if not sums and not all(label in labels for labels in results):
        raise MixesError("over the records' axis")
    return [
        ByRecord(Axis(list(labels).index(label), outer, places), first) if label in labels else SUMMED
        for labels in results
    ]


def _alike(operands: Sequence[Operand], label: Hashable) -> set[tuple[int, int]]:
    """The axes (outer, places) along a label along which all public operands are alike."""
    found: set[tuple[int, int]] | None = None
    sizes = {s.shape[d] for s, labels in operands for d, other in enumerate(labels) if other == label}
    if label is not None and len(sizes) > 1:  # one of them covers a part alone
        return set()
    for seen, labels in operands:
        for dim in (d for d, other in enumerate(labels) if other == label and label is not None):
            axes = {(a.outer, a.places) for a in seen.kind.alike if a.dim == dim}
            found = axes if found is None else found & axes
    return found or set()


def tensors(*given: Any) -> list[Seen]:
    """Those of the arguments that are tensors."""
    return [one for one in given if isinstance(one, Seen)]


def listed(given: Any) -> list[Any]:
    """One result or several, as a list."""
    return list(given) if isinstance(given, list) else [given]


def dims(seen: Seen, *whole: int) -> list[Hashable]:
    """Each dimension's number as its label, but None for `whole`."""
    mixed = {dim % max(1, len(seen.shape)) for dim in whole}
    return [None if dim in mixed else dim for dim in range(len(seen.shape))]


def formed(
    out: Any, given: Sequence[Seen], form: Callable[[Seen], Sequence[Hashable]], sums: bool = False
) -> Any:
    """The kinds of results, where `form` gives the labels of an operand's or a result's dimensions."""
    found = labelled([(one, form(one)) for one in given], [form(one) for one in listed(out)], sums=sums)
    return found if isinstance(out, list) else found[0]


def broadcast(labels: Sequence[Hashable], shape: Sequence[int], *operands: Any) -> list[Operand]:
    """Operands whose dimensions align from the right with a shape, whose labels they get."""
    found: list[Operand] = []
    for seen in tensors(*operands):
        ahead = len(shape) - len(seen.shape)
        own = list(labels[ahead:])
        for dim, size in enumerate(seen.shape):
            if size == 1 != shape[ahead + dim]:
                if isinstance(seen.kind, ByRecord) and seen.kind.axis.dim == dim:
                    raise MixesError("one record is copied to others")
                own[dim] = object()  # the same for all: no label that must agree
        found.append((seen, own))
    return found


def moved(seen: Seen, move: Callable[[Axis], Axis | None], what: str = "") -> Kind:
    """The kind of the same values at other places; `move` says where an axis goes, if it is one there."""
    if isinstance(seen.kind, ByRecord):
        axis = move(seen.kind.axis)
        if axis is None:
            raise NoRuleError(what)
        return replace(seen.kind, axis=axis)
    if isinstance(seen.kind, Public):
        counts = None if seen.kind.counts is None else move(Axis(seen.kind.counts))
        alike = frozenset(axis for axis in map(move, seen.kind.alike) if axis is not None)
        dim = counts.dim if counts is not None and counts[1:] == (1, 1) else None
        return Public(alike, dim, seen.kind.step)
    if isinstance(seen.kind, One):
        raise NoRuleError("a record alone meets others")
    return seen.kind


def every_axis(shape: Sequence[int], records: int, of: Iterable[int] | None = None) -> frozenset[Axis]:
    """All axes that so many records can have: those of values that are the same everywhere."""
    found = set()
    for dim in range(len(shape)) if of is None else of:
        each, rest = divmod(shape[dim], records)
        if rest == 0:
            found |= {Axis(dim, outer, each // outer) for outer in _divisors(each)}
    return frozenset(found)


def every_block(shape: Sequence[int]) -> frozenset[Axis]:
    """All axes that any number of records can have, once."""
    return frozenset(Axis(dim, 1, places) for dim, size in enumerate(shape) for places in _divisors(size))


@cache
def _divisors(size: int) -> set[int]:
    small = {number for number in range(1, math.isqrt(size) + 1) if size % number == 0}
    return small | {size // number for number in small}
