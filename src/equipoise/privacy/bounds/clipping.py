"""Clipped sums of rows, and what every sum of rows does with a record that is not finite.

`clip` limits every weight to C / |g_i| whatever the clip rule asked for. Records with a non-finite norm get
weight zero and their rows are left out of the sums (0 * inf would poison them).

Records may have weights v_i of their own in [0, 1] (`PrivateRows(weights=...)`), which multiply what the clip
left of them:

    S = sum_i v_i w_i g_i,   0 <= v_i <= 1,  |w_i g_i| <= C   =>   |v_i w_i g_i| <= v_i C <= C

So a record that enters or leaves still moves S by at most C. One that is replaced moves it by at most
v_i C + v_j C <= 2C. Whatever is less at every w_i g_i of norm up to C keeps its bound: v_i w_i g_i is one of
these. v_i may depend on record i and on public values alone, as g_i does.

Source: Abadi et al. 2016 for clipped sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from equipoise._tree import map_leaves
from equipoise.privacy.bounds.bounded import Bounded, make_bounded, weighted_sums
from equipoise.privacy.bounds.requirements import (
    answers_by_record,
    check_groups,
    known_answers,
    one_value_a_record,
    public_threshold,
    require_by_record,
)
from equipoise.privacy.noise.streams import released_type
from equipoise.privacy.private import Draw, Private, as_private, unwrap
from equipoise.privacy.rows import PrivateRows

#: Squares of the smallest floats vanish: a norm that reads zero may be as large as 1e-15. Rows that read
#: shorter than this get the weights of one that does not, which keep them far below any bound. With a smaller
#: number a row whose squares vanished could pass its bound.
SMALLEST_NORM = 1e-12
#: Weights are cut so that |weight * norm| <= threshold * (1 + WEIGHT_SLACK), the rounding of float32 (8 eps).
#: A larger one lets rows pass their bound by as much, a smaller one steps weights down that only rounded.
WEIGHT_SLACK = 1e-6


class WeightRule(Protocol):
    """Anything that turns row norms into row weights."""

    def weights(self, norms: torch.Tensor, threshold: Any) -> torch.Tensor:
        """Weights [B] for norms [B]; |weight * norm| must not exceed the threshold."""


def clip(
    rows: PrivateRows,
    rule: WeightRule,
    threshold: float | Sequence[float],
    groups: Sequence[Sequence[str]] | None = None,
) -> Bounded:
    """The clipped sum of the rows: add-or-remove bound C, replace bound 2C.

    Args:
        rows: per-sample rows, B x P.
        rule: clip rule; `rule.weights(norms [B], threshold) -> [B]`. Whatever it returns, the weights are
            cut to
            |weight| <= threshold / norm.
        threshold: C, a public number; with groups one number per group, or one number for the whole, shared
            equally (C / sqrt(m) each).
        groups: disjoint lists of parameter names that are clipped apart; the bound is the root of the sum of
            squares.

    Returns:
        The sum as named tensors of the parameters' shapes.

    Raises:
        PrivateError: if a threshold is `Private`.
        ValueError: if the groups do not cover every parameter exactly once.
    """
    if groups is None:
        total = public_threshold("threshold", threshold)
        require_rows(rows)
        raw, ask = rows._rows, None
        if rows._weights is None and hasattr(raw, "weighed"):
            name = f"{type(rule).__name__}.weights"
            ask = known_answers(name, rule, lambda n: rule.weights(n, total), raw.dtype, raw.device, total)
        if ask is not None:
            # Rows that are replayed are finite, or it is known that some are not (`Attempt`).
            value, numbers = raw.weighed((rule, total), partial(_weights_and_counts, ask, total))
            counts = Private(numbers, rows.draw)
        else:
            kept, norms, usable = usable_rows(rows)
            weights = limited_weights(rule, norms, total)
            value = weighted_sums(kept, weights, total, rows.draw)
            counts = counts_of(usable, is_shorter(weights), rows.draw)
        return make_bounded(as_private(value, rows.draw), total, 2 * total, rows.draw, counts)
    require_rows(rows)
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
        raise ValueError(f"threshold has {len(limits)} entries for {len(groups)} groups; give one per group")
    kept, norms, usable = usable_rows(rows, groups)
    per_tensor = {}
    cut = torch.zeros(len(norms), dtype=torch.bool, device=norms.device)
    for column, (group, limit) in enumerate(zip(groups, limits, strict=True)):
        weights = limited_weights(rule, norms[:, column], limit)
        per_tensor.update(dict.fromkeys(group, weights))
        cut |= is_shorter(weights)
    # The parts of a row in disjoint groups are orthogonal.
    bound = math.hypot(*limits)
    value = as_private(weighted_sums(kept, per_tensor, bound, rows.draw), rows.draw)
    return make_bounded(value, bound, 2 * bound, rows.draw, counts_of(usable, cut, rows.draw))


def _weights_and_counts(
    ask: Callable[[torch.Tensor], torch.Tensor],
    threshold: float,
    norms: torch.Tensor,
    here: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut weights of the rows that are meant, zero for others; and their counts, as `counts_of`."""
    weights = cut_to(threshold, ask(norms), norms)
    counts = torch.stack([here, torch.zeros_like(here), here & is_shorter(weights)]).sum(1)
    return torch.where(here, weights, torch.zeros_like(weights)), counts


def clip_coordinates(
    coordinates: Private,
    rule: WeightRule,
    threshold: float,
    name: str = "coordinates",
    norms: Private | None = None,
) -> Bounded:
    """The clipped sum of subspace coordinates [B, K]: bound C, 2C.

    Args:
        coordinates: one row per record.
        rule: clip rule.
        threshold: C.
        name: of the tensor that holds the sum.
        norms: what the rule looks at, [B]: one number per record, which must be a function of that record
            alone, such as the norm of its whole row; the norms of the coordinates when None. The weights
            are cut by the coordinates' own norms in both cases.
    """
    if not isinstance(coordinates, Private) or coordinates.ndim != 2:
        raise TypeError(
            "coordinates must be a Private tensor of shape [B, K]; see PrivateRows.coordinates(subspace)"
        )
    total = public_threshold("threshold", threshold)
    raw = require_by_record("coordinates", coordinates)
    raw = raw.to(released_type(raw))
    # Added up in float64: a norm that reads short would let a row be long.
    own = torch.linalg.vector_norm(raw, dim=1, dtype=torch.float64).to(raw.dtype)
    finite = torch.isfinite(own)
    if norms is None:
        raw, own = raw[finite], own[finite]
        weights = limited_weights(rule, own, total)
    else:
        seen = one_value_a_record("norms", norms)
        finite &= torch.isfinite(seen)
        raw, own, seen = raw[finite], own[finite], seen[finite].to(own.dtype)
        weights = cut_to(total, limited_weights(rule, seen, total), own)
    value = Private(weights @ raw, coordinates.draw)
    counts = counts_of(finite, is_shorter(weights), coordinates.draw)
    return make_bounded({name: value}, total, 2 * total, coordinates.draw, counts)


def unbounded_sum(rows: PrivateRows, weights: torch.Tensor | None = None) -> Bounded:
    """The plain or weighted sum of the rows, with no bound: for recipes as published.

    Its bounds are infinite, so that `ledger.release` refuses it; `release_unproven` and
    `disclose` of `published` take its `value`. Rows with a non-finite norm or weight are left out.

    Args:
        rows: per-sample rows, B x P.
        weights: [B], public or private; ones by default.
    """
    norms = unwrap(rows.row_norms())
    given = torch.ones_like(norms) if weights is None else unwrap(weights).to(norms.dtype)
    finite = torch.isfinite(norms) & torch.isfinite(given)
    kept, given = without_bad(rows, given, finite)
    value = kept.weighted_sums(given)
    return make_bounded(
        as_private(value, rows.draw), math.inf, math.inf, rows.draw, counts_of(finite, None, rows.draw)
    )


def limited_weights(rule: WeightRule, norms: torch.Tensor, threshold: float) -> torch.Tensor:
    """The rule's weights [B] for raw norms [B], cut to |weight| * norm <= threshold.

    Raises:
        PrivateError: for a rule whose weight of one record depends on others, such as a median of the norms:
            cut or not, the sum has no bound then. See `answers_by_record`.
    """
    name = f"{type(rule).__name__}.weights"
    given = answers_by_record(name, rule, lambda some: rule.weights(some, threshold), norms, threshold)
    return cut_to(threshold, given, norms)


def cut_to(threshold: float, weights: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """The weights [B], cut to |weight| * norm <= threshold; zero where they are not finite.

    Every bound rests on this cut, and on nothing that a clip rule promises.
    """
    if weights.shape != norms.shape:
        raise ValueError(f"a clip rule returned {weights.shape[1:].numel()} weights per record: return one")
    limit = weights_for(threshold, norms)
    weights = torch.nan_to_num(weights.to(norms.dtype), nan=0.0, posinf=0.0, neginf=0.0)
    return torch.clamp(weights, -limit, limit)


def weights_for(lengths: float | torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """The weights that give rows of these norms these lengths, and shorter ones where a norm is too small to
    be read (`SMALLEST_NORM`).

    Args:
        lengths: [B] or [B, m], or one number for all; non-negative.
        norms: [B] or [B, m], raw.
    """
    # A number stays on the processor: a device takes it along with the operation, and nobody waits.
    if not isinstance(lengths, torch.Tensor):
        lengths = torch.full((), lengths, dtype=norms.dtype)
    lengths = lengths.to(norms.dtype)
    if lengths.ndim > norms.ndim:
        norms = norms.unsqueeze(1)
    weights = lengths / norms.clamp_min(SMALLEST_NORM)
    # The quotient is rounded, coarsely so among the smallest floats: a step down where it is above.
    over = weights * norms.double() > lengths.double() * (1 + WEIGHT_SLACK)
    down = torch.nextafter(weights, torch.zeros_like(weights))
    return torch.where(over, down, weights)


def require_rows(rows: PrivateRows) -> None:
    """Refuse raw rows, whose draw nobody knows."""
    if not isinstance(rows, PrivateRows):
        raise TypeError(
            f"rows must be PrivateRows, got {type(rows).__name__}; wrap raw rows: PrivateRows(rows, draw)"
        )


def usable_rows(
    rows: PrivateRows, groups: Sequence[Sequence[str]] | None = None
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """As `without_bad`, for the norms of the rows themselves, [B], or [B, m] for m groups of names.

    Returns:
        Raw rows and norms of the usable records, and which records these are, [B].
    """
    require_rows(rows)
    raw = rows._rows
    norms = raw.row_norms() if groups is None else raw.row_norms(groups)
    finite = norms < math.inf  # nor NaN; a norm is at least 0
    if groups is not None:
        finite = finite.all(dim=1)
    return *without_bad(rows, norms, finite), finite


def without_bad(rows: PrivateRows, norms: torch.Tensor, finite: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Raw rows and norms of the usable records.

    Args:
        rows: of B records.
        norms: [B] or [B, m], or other numbers of the records.
        finite: which records are usable, [B].
    """
    raw = rows._rows if rows._weights is None else Weighted(rows._rows, rows._weights)
    if rows._all_finite is not None:
        rows._all_finite.append(finite.all())
        # Such a record's weights are NaN or zero: a sum that is not thrown away is refused, or lacks it.
        return raw, torch.where(finite.view(-1, *[1] * (norms.ndim - 1)), norms, math.nan)
    if bool(finite.all()):  # inside the room: the branch changes speed, never the result
        return raw, norms
    # A bad row is left out, not weighted by zero: 0 * inf would make the whole sum NaN.
    keep = finite.nonzero().flatten()
    return raw.rows(keep), norms[keep]


class Weighted:
    """Raw rows of records that have weights of their own: sums of the clipped rows count each by its weight.

    Args:
        rows: raw, B x P; all that is asked of them is sums, and which to leave out.
        of_records: [B]. Their bounds rest on the cut to [0, 1] here, and on nothing that was checked before.
    """

    def __init__(self, rows: Any, of_records: torch.Tensor) -> None:
        self._rows, self._own = rows, torch.nan_to_num(of_records, nan=0.0).clamp(0, 1)

    def rows(self, index: torch.Tensor) -> Weighted:
        """Some of the rows."""
        return Weighted(self._rows.rows(index), self._own[index])

    def summed_in(self, unit: float) -> Weighted:
        """The same rows, whose sums over processes are whole numbers of this unit."""
        return Weighted(self._rows.summed_in(unit), self._own) if hasattr(self._rows, "summed_in") else self

    def weighted_sums(self, weights: torch.Tensor | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """{name: sum} for weights [B], [B, m] or a mapping from parameter name to these."""

        def counted(of_clip: torch.Tensor) -> torch.Tensor:
            return of_clip * self._own.to(of_clip).view(-1, *[1] * (of_clip.ndim - 1))

        found: dict[str, torch.Tensor] = self._rows.weighted_sums(map_leaves(counted, weights))
        return found


def is_shorter(weights: torch.Tensor) -> torch.Tensor:
    """Whether rows of these weights are made shorter, by more than rounding."""
    return weights.abs() < 1 - WEIGHT_SLACK


def counts_of(finite: torch.Tensor, cut: torch.Tensor | None, draw: Draw | None) -> Private:
    """The private counts of a sum's records: those that are finite, those that are not, and those whose row
    is made shorter, int64 [2] or [3].

    Args:
        finite: of all records, [B].
        cut: of the usable ones, [B] or fewer; None for a sum that shortens none.
        draw: of the records.
    """
    alike = [finite, ~finite] if cut is None else [finite, ~finite, cut]
    if len(alike[-1]) == len(finite):
        return Private(torch.stack(alike).sum(1), draw)
    return Private(torch.stack([flags.sum() for flags in alike]), draw)
