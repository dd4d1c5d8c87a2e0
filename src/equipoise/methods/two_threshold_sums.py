"""Clipped sums with two thresholds: some records are clipped at a large radius, the others at a small one.

=================  ============================================  =============  ============
function           which records are clipped at c_1              add or remove  replace
=================  ============================================  =============  ============
`clip_either`      by a label h_i in [0, 1] of their own         c_1            2 c_1
`clip_channels`    the same, tail and body as separate sums      c_1            2 c_1
`clip_selected`    the top share of the whole draw by a score    2 c_1 - c_2    2 c_1
=================  ============================================  =============  ============

A record with the label h is clipped at c(h) = c_2 + h (c_1 - c_2). Labels between 0 and 1 come from
`soft_indicator`: a step would turn the rounding of a score, which follows the size of the batch, into c_1 or
c_2 for every record near the threshold. With l <= c_2 the length that the rule gives a row under c_2, its
length under h is at most l + h (c_1 - c_2) <= c(h) <= c_1, that of its two parts in

    body  (1 - h) l                              <= (1 - h) c_2,
    tail  l + h (c_1 - c_2) - (1 - h) l          <= h c_1.

In units of (c_2, c_1), which is how the channels are scaled, the pair is no longer than ((1 - h)^2 +
h^2)^(1/2) <= 1: the unit ball is convex and holds both ends. So the bound of two channels is that of one sum.

The third row: a record that enters the top share contributes up to c_1 and may push one other record out of
it, whose contribution shrinks by up to c_1 - c_2. That holds for every fixed order of the records that each
score decides on its own; ties are settled by the record's number, never by its place in the batch. An order
has no ramp: scores whose order changes with their rounding are beyond the bound, which methods must name as
an assumption.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from equipoise.privacy.bounds.bounded import Bounded, make_bounded, weighted_sums
from equipoise.privacy.bounds.clipping import (
    WeightRule,
    counts_of,
    limited_weights,
    require_rows,
    weights_for,
    without_bad,
)
from equipoise.privacy.bounds.requirements import one_value_a_record, public_threshold, require_length
from equipoise.privacy.private import Draw, Private, PrivateError, as_private, unwrap
from equipoise.privacy.rows import PrivateRows

_KEY = object()


class Selection:
    """The records of a draw with the highest scores; made only by `top_share`.

    Attributes:
        draw: the draw.
    """

    __slots__ = ("_numbers", "draw")

    def __init__(self, numbers: torch.Tensor, draw: Draw | None, *, _key: object = None) -> None:
        if _key is not _KEY:
            raise PrivateError("Selection cannot be made directly; use top_share(scores, ids, fraction)")
        self._numbers, self.draw = numbers, draw


def top_share(scores: Private, ids: Private, fraction: float) -> Selection:
    """The floor(fraction * B) records of a whole draw with the highest scores.

    Args:
        scores: [B], by record, of all records of the draw; a score that is not a number ranks last.
        ids: their numbers, [B], which settle ties.
        fraction: public share in [0, 1].

    Raises:
        PrivateError: scores that depend on other records.
    """
    raw, numbers = one_value_a_record("scores", scores), one_value_a_record("ids", ids)
    require_length("ids", numbers, raw)
    if isinstance(fraction, Private) or not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be a public number in [0, 1], got {fraction}")
    raw = torch.where(torch.isnan(raw), torch.full_like(raw, -math.inf), raw)
    order = numbers.argsort()
    order = order[raw[order].argsort(descending=True, stable=True)]
    return Selection(numbers[order[: int(fraction * len(raw))]], scores.draw, _key=_KEY)


def clip_selected(
    rows: PrivateRows, ids: Private, selection: Selection, upper: float, lower: float, rule: WeightRule
) -> Bounded:
    """The sum with the selected records clipped at `upper`, the others at `lower`.

    Args:
        rows: rows of a micro-batch of the selection's draw.
        ids: the numbers of its records, [b].
        selection: made by `top_share` from the scores of the whole draw.
        upper, lower: c_1 >= c_2 > 0, public.
        rule: clip rule for both. Where it would give a record less under c_1 than under c_2, or more by
            above c_1 - c_2, it is cut.

    Returns:
        The sum: bound 2 c_1 - c_2 under add-or-remove, 2 c_1 under replace-one.
    """
    if not isinstance(selection, Selection):
        raise TypeError(f"selection must come from top_share, got {type(selection).__name__}")
    if selection.draw != rows.draw:
        raise ValueError(f"selection is of {selection.draw}, the rows of {rows.draw}")
    mask = torch.isin(one_value_a_record("ids", ids), selection._numbers)
    upper, lower = thresholds(upper, lower)
    kept, norms, label, bad = _usable(rows, mask, "ids")
    low = limited_weights(rule, norms, lower).clamp(min=0)
    gap = weights_for(upper - lower, norms)
    high = torch.minimum(torch.maximum(limited_weights(rule, norms, upper), low), low + gap)
    value = weighted_sums(kept, torch.where(label > 0, high, low), 2 * upper - lower, rows.draw)
    return make_bounded(as_private(value, rows.draw), 2 * upper - lower, 2 * upper, rows.draw, bad)


def clip_either(rows: PrivateRows, tail: Private, upper: float, lower: float, rule: WeightRule) -> Bounded:
    """The sum with every record clipped at `lower + h (upper - lower)`, h its label: the bound of `upper`.

    Args:
        rows: per-sample rows, B x P.
        tail: the labels h, [B], by record: in [0, 1] (see `counting.soft_indicator`) or bool.
        upper, lower: c_1 >= c_2 > 0, public.
        rule: clip rule for both. Where its length of a row grows with the threshold by more than the
            threshold does, or falls, it is cut for labels between 0 and 1.

    Returns:
        The sum: bound c_1 under add-or-remove, 2 c_1 under replace-one.

    Raises:
        PrivateError: for labels that depend on other records.
    """
    upper, lower = thresholds(upper, lower)
    value, bad = sum_of_either(rows, one_value_a_record("tail", tail), upper, lower, rule)
    return make_bounded(value, upper, 2 * upper, rows.draw, bad)


def clip_channels(rows: PrivateRows, tail: Private, upper: float, lower: float, rule: WeightRule) -> Bounded:
    """The sum of `clip_either` as two: what the labels put into the tail, and the rest, the body.

    Returns:
        Tensors "tail/NAME" and "body/NAME". The second is multiplied by c_1 / c_2, so that a record moves
        both together by at most c_1: bound c_1 under add-or-remove, 2 c_1 under replace-one. Divide it again
        after the release.
    """
    upper, lower = thresholds(upper, lower)
    kept, norms, label, bad = _usable(rows, one_value_a_record("tail", tail), "tail")
    whole, low = _between(rule, norms, label, upper, lower)
    body = (1 - label) * low
    weights = torch.stack([whole - body, body * (upper / lower)], dim=1)
    value: dict[str, torch.Tensor] = {}
    for name, pair in weighted_sums(kept, weights, upper, rows.draw).items():
        value[f"tail/{name}"], value[f"body/{name}"] = pair[0], pair[1]
    return make_bounded(as_private(value, rows.draw), upper, 2 * upper, rows.draw, bad)


def sum_of_either(
    rows: PrivateRows, tail: torch.Tensor, upper: float, lower: float, rule: WeightRule
) -> tuple[dict[str, Private], Private]:
    """The values of `clip_either` for raw labels, and the count of records without a finite norm."""
    kept, norms, label, bad = _usable(rows, tail, "tail")
    whole, _ = _between(rule, norms, label, upper, lower)
    return as_private(weighted_sums(kept, whole, upper, rows.draw), rows.draw), bad


def _between(
    rule: WeightRule, norms: torch.Tensor, label: torch.Tensor, upper: float, lower: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of rows under their labels, and under `lower`; at both ends they are the rule's own."""
    low = limited_weights(rule, norms, lower)
    high = limited_weights(rule, norms, upper)
    gap = weights_for(upper - lower, norms)
    partly = torch.minimum(torch.maximum(high, low), low + label * gap)
    return torch.where(label >= 1, high, torch.where(label <= 0, low, partly)), low


def _usable(
    rows: PrivateRows, labels: torch.Tensor, name: str
) -> tuple[Any, torch.Tensor, torch.Tensor, Private]:
    """Rows, norms and labels in [0, 1] of the records with finite norms, and the counts of all."""
    require_rows(rows)
    if labels.dtype != torch.bool and not labels.is_floating_point():
        raise TypeError(f"{name} must be bool or labels in [0, 1], got {labels.dtype}; see soft_indicator")
    norms = unwrap(rows.row_norms())
    require_length(name, labels, norms)
    both = torch.stack([norms, labels.to(norms.dtype)], dim=1)
    finite = norms < math.inf
    kept, numbers = without_bad(rows, both, finite)
    label = torch.nan_to_num(numbers[:, 1], nan=0.0).clamp(0, 1)
    return kept, numbers[:, 0], label, counts_of(finite, None, rows.draw)


def thresholds(upper: float, lower: float) -> tuple[float, float]:
    """The two thresholds, checked."""
    upper, lower = public_threshold("upper", upper), public_threshold("lower", lower)
    if lower > upper:
        raise ValueError(
            f"lower={lower} exceeds upper={upper}; the selected records have the larger threshold"
        )
    return upper, lower
