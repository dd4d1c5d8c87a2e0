"""Bounded sums: private sums over one draw that carry their sensitivity.

    S = sum_i w_i g_i,  |w_i| |g_i| <= C   =>   sensitivity C (one record added or removed), 2C (one replaced)

A `Bounded` is made only by the functions of this file, which enforce the bound themselves: `clip` limits
every weight to C / |g_i| whatever the clip rule asked for. Records with a non-finite norm get weight zero
and their rows are left out of the sums (0 * inf would poison them).

Sources: Abadi et al. 2016 for clipped sums; the sensitivity of an un-normalised indicator or capped sum is
    its upper value
under both relations, since a summand moves within [0, U].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from .draws import Draw
from .errors import check_positive
from .private import Private, PrivateError, PrivateRows, unwrap

_KEY = object()
_SMALLEST_NORM = 1e-12
SLACK = 1e-6  # weights are cut so that |weight * norm| <= threshold * (1 + SLACK), the rounding of float32


class ClipRule(Protocol):
    """Anything that turns row norms into row weights."""

    def weights(self, norms: torch.Tensor, threshold: Any) -> torch.Tensor:
        """Weights [B] for norms [B]; |weight * norm| must not exceed the threshold."""
        ...


class Bounded:
    """A private sum over one draw with its sensitivity under both relations.

    Made by `clip`, `indicator`, `capped`, `top_k` and by `+`, `-` and scaling with public numbers. Never
    directly.

    Attributes:
        value: the sum, named `Private` tensors.
        add_remove: bound on the norm of its change when one record enters or leaves.
        replace: bound on the norm of its change when one record is replaced.
        draw: the draw that it was computed from.
        counts: `Private` int64 counts for the diagnostics, summed over micro-batches, or None: records,
            records left out for a non-finite norm and, for clipped sums, records whose row was made shorter.
        joint: identity of the correlated noise that it was made for, or None.
    """

    __slots__ = ("_sealed", "add_remove", "counts", "draw", "joint", "replace", "value")

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
                "Bounded cannot be made directly, since nothing would prove its bound; use clip(rows, "
                "rule, threshold), "
                "indicator(mask), capped(values, upper) or top_k(rows, ...)"
            )
        self.value = dict(value)
        for tensor in self.value.values():
            tensor._storage.mixed = True  # a sum speaks of all records, whatever its length
        self.add_remove = float(add_remove)
        self.replace = float(replace)
        self.draw = draw
        self.counts = counts
        self.joint = joint
        self._sealed = True

    @property
    def bad_records(self) -> Private | None:
        """How many records were left out for a non-finite norm, or None."""
        return None if self.counts is None else Private(unwrap(self.counts)[1], self.draw)

    @property
    def clip_fraction(self) -> Private | None:
        """The share of the usable records whose row was made shorter, or None if the sum is not clipped."""
        if self.counts is None or len(self.counts) < 3:
            return None
        records, bad, cut = unwrap(self.counts)
        return Private(cut / (records - bad).clamp(min=1), self.draw)

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, "_sealed"):
            raise PrivateError(
                f"{name} of a bounded sum cannot be changed: its bound was proved when it was made"
            )
        object.__setattr__(self, name, value)

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
        value = {name: Private(unwrap(tensor) * factor, self.draw) for name, tensor in self.value.items()}
        size = abs(factor)
        return _make(value, self.add_remove * size, self.replace * size, self.draw, self.counts)

    __rmul__ = __mul__

    @staticmethod
    def union(parts: Sequence[Bounded]) -> Bounded:
        """The sum over the union of disjoint parts of one draw (its micro-batches): bounds do not add.

        Args:
            parts: bounded sums of disjoint records of the same draw, equal in names and bounds.

        Raises:
            ValueError: for an empty list, or parts of different draws, names or bounds.
        """
        parts = list(parts)
        if not parts:
            raise ValueError(
                "parts is empty; a draw without records still has one (empty) micro-batch: run the query "
                "on it"
            )
        if len({id(part) for part in parts}) < len(parts):
            raise ValueError("a part is given twice; the parts of a draw hold disjoint records")
        first = parts[0]
        for part in parts[1:]:
            if part.draw != first.draw:
                raise ValueError(f"parts come from different draws: {first.draw} and {part.draw}")
            if part.value.keys() != first.value.keys():
                raise ValueError(
                    f"parts hold different tensors: {sorted(first.value)} and {sorted(part.value)}"
                )
            if (part.add_remove, part.replace, part.joint) != (first.add_remove, first.replace, first.joint):
                raise ValueError(
                    f"parts have different bounds: {(first.add_remove, first.replace)} and "
                    f"{(part.add_remove, part.replace)}; "
                    "a query must use the same threshold for all micro-batches of a draw"
                )
        if len(parts) == 1:
            return first
        value = {}
        for name, tensor in first.value.items():
            total = unwrap(tensor).clone()
            for part in parts[1:]:
                total += unwrap(part.value[name])
            value[name] = Private(total, first.draw)
        known = [unwrap(part.counts) for part in parts if part.counts is not None]
        counts = Private(torch.stack(known).sum(0), first.draw) if known else None
        return _make(value, first.add_remove, first.replace, first.draw, counts, first.joint)

    def all_reduce(self, group: Any = None) -> Bounded:
        """The sum over the processes of a group, each of which holds disjoint records of the draw."""
        value = {}
        for name in sorted(self.value):
            total = unwrap(self.value[name]).clone()
            torch.distributed.all_reduce(total, group=group)
            value[name] = Private(total, self.draw)
        counts = self.counts
        if counts is not None:
            total = unwrap(counts).clone()
            torch.distributed.all_reduce(total, group=group)
            counts = Private(total, self.draw)
        return _make(
            {name: value[name] for name in self.value},
            self.add_remove,
            self.replace,
            self.draw,
            counts,
            self.joint,
        )


def _make(
    value: Mapping[str, Private],
    add_remove: float,
    replace: float,
    draw: Draw | None,
    counts: Private | None = None,
    joint: str | None = None,
) -> Bounded:
    return Bounded(value, add_remove, replace, draw, counts, joint, _key=_KEY)


def _combine(a: Bounded, b: Bounded, sign: int) -> Bounded:
    if not isinstance(b, Bounded):
        raise TypeError(f"only bounded sums can be added to a bounded sum, got {type(b).__name__}")
    if a.draw != b.draw:
        raise ValueError(f"bounded sums of different draws cannot be combined: {a.draw} and {b.draw}")
    if a.value.keys() != b.value.keys():
        raise ValueError(f"bounded sums hold different tensors: {sorted(a.value)} and {sorted(b.value)}")
    value = {n: Private(unwrap(t) + sign * unwrap(b.value[n]), a.draw) for n, t in a.value.items()}
    return _make(value, a.add_remove + b.add_remove, a.replace + b.replace, a.draw, a.counts)


def merge(parts: Mapping[str, Bounded]) -> Bounded:
    """One bounded sum holding the tensors of several (e.g. separately clipped layers).

    The tensors lie in orthogonal coordinates, so bounds add in squares: (C_1^2 + C_2^2 + ...)^(1/2).
    """
    items = list(parts.values())
    if not items:
        raise ValueError("parts is empty; give at least one bounded sum")
    value: dict[str, Private] = {}
    for label, part in parts.items():
        if part.draw != items[0].draw:
            raise ValueError(
                f"bounded sums of different draws cannot be merged: {items[0].draw} and {part.draw}"
            )
        for name, tensor in part.value.items():
            if name in value:
                raise ValueError(
                    f"tensor {name!r} appears twice (again in {label!r}): coordinates must be disjoint"
                )
            value[name] = tensor
    return _make(
        value,
        math.hypot(*(p.add_remove for p in items)),
        math.hypot(*(p.replace for p in items)),
        items[0].draw,
        items[0].counts,
    )


def public_threshold(name: str, value: Any) -> float:
    """A public positive bound as a float.

    Raises:
        PrivateError: for a `Private` value: a bound computed from private rows has no sensitivity proof.
    """
    if isinstance(value, Private):
        raise PrivateError(
            f"{name} is a Private value; a raw private number cannot set a bound. Use a public constant, a "
            "public schedule, "
            "or a value that the ledger released"
        )
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} must be one number, got shape {tuple(value.shape)}")
        value = float(value)
    return float(check_positive(name, value))


def clip(
    rows: PrivateRows,
    rule: ClipRule,
    threshold: float | Sequence[float],
    groups: Sequence[Sequence[str]] | None = None,
) -> Bounded:
    """The clipped sum of the rows: add-or-remove bound C, replace bound 2C.

    Args:
        rows: per-sample rows, B x P.
        rule: clip rule; `rule.weights(norms [B], threshold) -> [B]`. Whatever it returns, the weights are
            cut to
            |weight| <= threshold / norm.
        threshold: C, a public number; with groups one number a group, or one number for the whole, shared
            equally (C / sqrt(m) each).
        groups: disjoint lists of parameter names that are clipped apart; the bound is the root of the sum of
            squares.

    Returns:
        The sum as named tensors of the parameters' shapes.

    Raises:
        PrivateError: if a threshold is `Private`.
        ValueError: if the groups do not cover every parameter exactly once.
    """
    if not isinstance(rows, PrivateRows):
        raise TypeError(
            f"rows must be PrivateRows, got {type(rows).__name__}; wrap raw rows: PrivateRows(rows, draw)"
        )
    if groups is None:
        total = public_threshold("threshold", threshold)
        norms = unwrap(rows.row_norms())
        finite = torch.isfinite(norms)
        kept, kept_norms, counts = _without_bad(rows, norms, finite)
        weights = limited_weights(rule, kept_norms, total)
        value = kept.weighted_sums(weights)
        counts = _with_cut(counts, weights.abs() < 1)
        return _make(_private(value, rows.draw), total, 2 * total, rows.draw, counts)
    groups = check_groups(groups, rows.names)
    if isinstance(threshold, Private):
        public_threshold("threshold", threshold)
    if isinstance(threshold, (int, float)) or (
        isinstance(threshold, torch.Tensor) and threshold.numel() == 1
    ):
        limits = [public_threshold("threshold", threshold) / math.sqrt(len(groups))] * len(groups)
    else:
        limits = [public_threshold(f"threshold[{i}]", t) for i, t in enumerate(threshold)]
    if len(limits) != len(groups):
        raise ValueError(f"threshold has {len(limits)} entries for {len(groups)} groups; give one a group")
    norms = unwrap(rows.row_norms(groups))
    kept, kept_norms, counts = _without_bad(rows, norms, torch.isfinite(norms).all(dim=1))
    per_tensor = {}
    cut = torch.zeros(len(kept_norms), dtype=torch.bool, device=norms.device)
    for column, (group, limit) in enumerate(zip(groups, limits, strict=True)):
        weights = limited_weights(rule, kept_norms[:, column], limit)
        per_tensor.update(dict.fromkeys(group, weights))
        cut |= weights.abs() < 1
    bound = math.hypot(*limits)
    value = _private(kept.weighted_sums(per_tensor), rows.draw)
    return _make(value, bound, 2 * bound, rows.draw, _with_cut(counts, cut))


def check_groups(groups: Sequence[Sequence[str]], names: Sequence[str]) -> list[tuple[str, ...]]:
    """The groups of parameter names, if they hold every name exactly once.

    Raises:
        ValueError: naming what is missing, repeated or unknown.
    """
    checked = [tuple(group) for group in groups]
    flat = [name for group in checked for name in group]
    if sorted(flat) != sorted(names):
        missing = sorted(set(names) - set(flat))
        twice = sorted({name for name in flat if flat.count(name) > 1})
        unknown = sorted(set(flat) - set(names))
        raise ValueError(
            f"groups must hold every parameter exactly once; missing {missing}, repeated {twice}, unknown "
            f"{unknown}"
        )
    return checked


def unbounded_sum(rows: PrivateRows, weights: torch.Tensor | None = None) -> Bounded:
    """The plain or weighted sum of the rows, with no bound: for recipes as published.

    Its bounds are infinite, so that `ledger.release` refuses it; `ledger.release_unproven` and
    `ledger.disclose` take its `value`. Rows with a non-finite norm or weight are left out.

    Args:
        rows: per-sample rows, B x P.
        weights: [B], public or private; ones by default.
    """
    norms = unwrap(rows.row_norms())
    given = torch.ones_like(norms) if weights is None else unwrap(weights).to(norms.dtype)
    finite = torch.isfinite(norms) & torch.isfinite(given)
    kept, given, bad = _without_bad(rows, given, finite)
    value = kept.weighted_sums(given)
    return _make(_private(value, rows.draw), math.inf, math.inf, rows.draw, bad)


def clip_weighted(rows: PrivateRows, weights: Private, threshold: float) -> Bounded:
    """The sum of rows with given weights [B], cut to |weight * norm| <= threshold: the bound of `clip`.

    Raises:
        PrivateError: for weights that are not by record (see `provenance`).
    """
    total = public_threshold("threshold", threshold)
    given = one_value_a_record("weights", weights)
    norms = unwrap(rows.row_norms())
    require_length("weights", given, norms)
    finite = torch.isfinite(norms)
    kept, kept_norms, counts = _without_bad(rows, norms, finite)
    cut = limited_weights(_Given(given[finite]), kept_norms, total)
    value = _private(kept.weighted_sums(cut), rows.draw)
    return _make(value, total, 2 * total, rows.draw, _with_cut(counts, cut.abs() < 1))


def limited_weights(rule: ClipRule, norms: torch.Tensor, threshold: float) -> torch.Tensor:
    """The rule's weights [B] for raw norms [B], cut to |weight| * norm <= threshold.

    Raises:
        PrivateError: for a rule whose weight of one record depends on others (a median of the norms): cut or
            not, the sum has no bound then. A rule whose operations do not show it is asked again, in halves.
    """
    answer = rule.weights(Private(norms), threshold)
    proved = (isinstance(answer, Private) and answer.by_record) or isinstance(rule, _Given)
    given = unwrap(answer).to(norms.dtype)
    if given.shape != norms.shape:
        raise ValueError(
            f"{type(rule).__name__}.weights returned shape {tuple(given.shape)} for norms of shape "
            f"{tuple(norms.shape)}; "
            "it must return one weight a record"
        )
    if len(norms) > 1 and not proved:
        halves = [unwrap(rule.weights(Private(part), threshold)) for part in norms.chunk(2)]
        if not torch.allclose(torch.cat(halves).to(given.dtype), given, rtol=1e-4, equal_nan=True):
            raise PrivateError(
                f"{type(rule).__name__}.weights gives a record another weight when other records are there; "
                "a clip rule must look at each norm on its own, since the sum has no bound otherwise"
            )
    # Squares of the smallest floats vanish: a norm that reads zero may be as large as 1e-15. A weight of
    # threshold / 1e-12 keeps even such a row far below the threshold.
    limit = threshold / norms.clamp_min(_SMALLEST_NORM)
    given = torch.where(torch.isfinite(given), given, torch.zeros_like(given))
    given = torch.maximum(torch.minimum(given, limit), -limit)
    # The quotient is rounded, coarsely so among the smallest floats: a step down where it is above.
    over = given.abs().double() * norms.double() > threshold * (1 + SLACK)
    return torch.where(over, torch.nextafter(given, torch.zeros_like(given)), given)


class _Given:
    def __init__(self, weights: torch.Tensor) -> None:
        self._weights = weights

    def weights(self, norms: torch.Tensor, threshold: Any) -> torch.Tensor:
        return self._weights


def _private(value: Mapping[str, torch.Tensor], draw: Draw | None) -> dict[str, Private]:
    return {name: Private(unwrap(tensor), draw) for name, tensor in value.items()}


def _without_bad(
    rows: PrivateRows, norms: torch.Tensor, finite: torch.Tensor
) -> tuple[Any, torch.Tensor, Private]:
    """Raw rows and norms of the usable records, and the private counts of all records and of the others."""
    raw, counts = rows._rows, _counts(finite, rows.draw)
    if bool(finite.all()):  # inside the room: the branch changes speed, never the result
        return raw, norms, counts
    keep = finite.nonzero().flatten()
    return raw.rows(keep), norms[keep], counts


def _counts(finite: torch.Tensor, draw: Draw | None) -> Private:
    """All records, and those that are not finite, [2]."""
    bad = (~finite).sum()
    return Private(torch.stack([torch.full_like(bad, len(finite)), bad]), draw)


def _with_cut(counts: Private, cut: torch.Tensor) -> Private:
    """The counts with one more: the records whose row is made shorter, [3]."""
    return Private(torch.cat([unwrap(counts), cut.sum().reshape(1)]), counts.draw)


def one_value_a_record(name: str, values: torch.Tensor) -> torch.Tensor:
    """The raw values [B] of a `Private` tensor, after a look at where they come from.

    Raises:
        TypeError: not `Private`.
        ValueError: not one value a record.
        PrivateError: an entry may depend on other records, so that no bound would hold.
    """
    if not isinstance(values, Private):
        raise TypeError(
            f"{name} must be a Private tensor with one value a record, got {type(values).__name__}"
        )
    if values.ndim != 1:
        raise ValueError(f"{name} must have one value a record (shape [B]), got shape {tuple(values.shape)}")
    return require_by_record(name, values)


def require_by_record(name: str, values: Private) -> torch.Tensor:
    """The raw values, if entry i is known to come from record i alone; see `provenance`."""
    if not values.by_record:
        raise PrivateError(
            f"{name} must look at each record on its own: an entry that depends on other records (a median, "
            "a sort, a mean, a position in the batch) moves when one of them enters or leaves, and the sum "
            "has no bound. Compute it from the rows' own statistics with elementwise operations and public "
            "numbers; a quantile of the batch goes through a release first"
        )
    return unwrap(values)


def require_length(name: str, values: torch.Tensor, norms: torch.Tensor) -> None:
    """Refuse values that are not one a row."""
    if values.shape[0] != norms.shape[0]:
        raise ValueError(f"{name} has {values.shape[0]} entries for {norms.shape[0]} rows; give one a record")


def indicator(mask: Private, name: str = "count") -> Bounded:
    """The number of records for which `mask` [B] holds: bound 1 under both relations."""
    raw = one_value_a_record("mask", mask)
    if raw.dtype != torch.bool:
        raise TypeError(f"mask must be bool, got {raw.dtype}; compare first, or use capped(values, upper)")
    total = raw.sum().to(torch.float32)
    return _make({name: Private(total, mask.draw)}, 1.0, 1.0, mask.draw)


def capped(values: Private, upper: float, name: str = "sum") -> Bounded:
    """The sum of `values` [B] cut to [0, upper]: bound `upper`; non-finite ones count zero."""
    raw = one_value_a_record("values", values)
    upper = public_threshold("upper", upper)
    raw = raw.to(torch.float64 if raw.dtype == torch.float64 else torch.float32)
    raw = torch.where(torch.isfinite(raw), raw, torch.zeros_like(raw)).clamp(0, upper)
    return _make({name: Private(raw.sum(), values.draw)}, upper, upper, values.draw)


def centred_indicator(mask: Private, name: str = "count") -> Bounded:
    """The sum of +1/2 for records inside the mask [B] and -1/2 outside: bound 1/2, replace bound 1."""
    raw = one_value_a_record("mask", mask)
    if raw.dtype != torch.bool:
        raise TypeError(f"mask must be bool, got {raw.dtype}; compare first")
    total = (raw.to(torch.float32) - 0.5).sum()
    return _make({name: Private(total, mask.draw)}, 0.5, 1.0, mask.draw)


def clip_coordinates(
    coordinates: Private,
    rule: ClipRule,
    threshold: float,
    name: str = "coordinates",
    norms: Private | None = None,
) -> Bounded:
    """The clipped sum of subspace coordinates [B, K]: bound C, 2C.

    Args:
        coordinates: a row a record.
        rule: clip rule.
        threshold: C.
        name: of the tensor that holds the sum.
        norms: what the rule looks at, [B]: one number a record, which must be a function of that record
            alone, such as the norm of its whole row; the norms of the coordinates when None. The weights
            are cut by the coordinates' own norms in both cases.
    """
    if not isinstance(coordinates, Private) or coordinates.ndim != 2:
        raise TypeError(
            "coordinates must be a Private tensor of shape [B, K]; see PrivateRows.coordinates(subspace)"
        )
    total = public_threshold("threshold", threshold)
    raw = require_by_record("coordinates", coordinates)
    raw = raw.to(torch.float64 if raw.dtype == torch.float64 else torch.float32)
    own = raw.norm(dim=1)
    finite = torch.isfinite(own)
    if norms is None:
        raw, own = raw[finite], own[finite]
        weights = limited_weights(rule, own, total)
    else:
        seen = one_value_a_record("norms", norms)
        finite &= torch.isfinite(seen)
        raw, own, seen = raw[finite], own[finite], seen[finite].to(own.dtype)
        weights = limited_weights(_Given(limited_weights(rule, seen, total)), own, total)
    value = Private(weights @ raw, coordinates.draw)
    counts = _with_cut(_counts(finite, coordinates.draw), weights.abs() < 1)
    return _make({name: value}, total, 2 * total, coordinates.draw, counts)


def sums_of(parts: Iterable[Mapping[str, Bounded]]) -> dict[str, Bounded]:
    """Unite the query results of the micro-batches of a draw, name by name."""
    results = list(parts)
    if not results:
        raise ValueError(
            "no micro-batch results to unite; run the query at least once, on an empty batch if need be"
        )
    return {name: Bounded.union([result[name] for result in results]) for name in results[0]}
