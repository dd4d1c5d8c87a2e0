"""Bounded counts and sums of one number per record.

The sensitivity of an un-normalised indicator or capped sum is its upper value under both relations, since a
summand moves within [0, U].

A score that was computed, such as a norm, is not compared with a threshold t by a step but by a ramp:

    h(s) = min(1, max(0, (s / t - 1 + a) / (2 a))),      a = 1/20, the half-width relative to t.

Linear algebra rounds a record's norm differently in batches of different sizes. A step would turn a unit in
the last place into a whole vote, for all records whose scores lie so near to t. Then one record more could
move everybody's vote. The ramp carries a relative change d of a score to at most (1 + a) d / (2 a) = 10.5 d.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from equipoise import _validate
from equipoise.privacy.bounds.bounded import Bounded, make_bounded
from equipoise.privacy.bounds.requirements import one_value_a_record, public_threshold
from equipoise.privacy.noise.streams import released_type
from equipoise.privacy.private import Private, PrivateError

RAMP = 0.05
"""a, half the width of the ramp of `soft_indicator`, as a share of the threshold.

A choice: on a narrower ramp the rounding of a score near the threshold moves its part more, up to a whole
vote; a wider one blurs which share of the rows lies below. The bound of the sum is 1 with any.
"""


def soft_indicator(
    scores: Private, threshold: float, side: Literal["above", "below"], width: float = RAMP
) -> Private:
    """How clearly each score lies on one side of a public threshold: in [0, 1], and continuous in the score.

    Args:
        scores: [B], by record, at least 0.
        threshold: public, in [0, inf]. No finite score is above infinity; all are above zero, zero itself
            too.
        side: "above" (1 from threshold * (1 + width) on) or "below" (1 up to threshold * (1 - width)).
        width: a in (0, 1), public.

    Returns:
        [B], of the scores' type, by record; 0 on either side for a score that is not finite.

    Raises:
        PrivateError: scores that depend on other records, or a threshold that is private.
        ValueError: a threshold below zero or a width outside (0, 1).

    Example:
        >>> found = soft_indicator(Private(torch.tensor([0.5, 1.0, 2.0])), 1.0, "above")
        >>> found.by_record, capped(found, 1.0).add_remove  # 0 + 1/2 + 1, a sum that moves by at most 1
        (True, 1.0)
    """
    given = one_value_a_record("scores", scores)
    raw = given.double()
    if isinstance(threshold, Private) or isinstance(width, Private):
        raise PrivateError("threshold and width must be public; a raw private number cannot set a threshold")
    if not threshold >= 0:
        raise ValueError(f"threshold={threshold!r}: scores start at 0; give a threshold of at least 0")
    if not 0 < width < 1:
        raise ValueError(f"width={width!r}: half the ramp is a share of the threshold, in (0, 1)")
    if threshold > 0:
        above = ((raw / threshold - 1 + width) / (2 * width)).clamp(0, 1)
    else:
        above = torch.ones_like(raw)
    found = above if side == "above" else 1 - above
    found = torch.where(torch.isfinite(raw), found, torch.zeros_like(found))
    return Private(found.to(given.dtype), scores.draw)


def indicator(mask: Private, name: str = "count") -> Bounded:
    """The number of records for which `mask` [B] holds: bound 1 under both relations.

    For masks that are exact, such as which rows are finite; see `soft_indicator` for scores that round.
    """
    raw = one_value_a_record("mask", mask)
    if raw.dtype != torch.bool:
        raise TypeError(f"mask must be bool, got {raw.dtype}; compare first, or use capped(values, upper)")
    total = raw.sum().to(torch.float32)
    return make_bounded({name: Private(total, mask.draw)}, 1.0, 1.0, mask.draw)


def capped(values: Private, upper: float, name: str = "sum") -> Bounded:
    """The sum of `values` [B] cut to [0, upper]: bound `upper`; non-finite ones count zero."""
    raw = one_value_a_record("values", values)
    upper = public_threshold("upper", upper)
    raw = raw.to(released_type(raw))
    raw = torch.where(torch.isfinite(raw), raw, torch.zeros_like(raw)).clamp(0, upper)
    return make_bounded({name: Private(raw.sum(), values.draw)}, upper, upper, values.draw)


def histogram(places: Private, bins: int, records: int = 1, name: str = "histogram") -> Bounded:
    """How many records lie at each of so many places: bound 1, replace bound sqrt(2).

    A record between two places counts at both, in the shares a and 1 - a by its distance from them. So its
    part has the length (a^2 + (1 - a)^2)^(1/2) <= 1, moves continuously with the place, and two parts, whose
    entries are at least 0, are at most sqrt(2) apart. A user of several records moves it by as many bounds.

    Args:
        places: [B], by record, in [0, bins - 1]; cut to it, and left out where not finite.
        bins: K >= 2, public.
        records: the most that one whose privacy is protected owns, where these are not drawn by themselves.
        name: of the tensor that holds the sum, [K].

    Example:
        >>> found = histogram(Private(torch.tensor([0.0, 2.0, 1.25])), 3)
        >>> found.add_remove, round(found.replace, 3)
        (1.0, 1.414)
    """
    raw = one_value_a_record("places", places).double()
    _validate.count("the places of a histogram", bins=bins - 1)
    _validate.count("the records of a user", records=records)
    finite = torch.isfinite(raw)
    raw = torch.where(finite, raw, 0.0).clamp(0, bins - 1)
    distances = (raw[:, None] - torch.arange(bins, device=raw.device)).abs()
    total = ((1 - distances).clamp(min=0) * finite[:, None]).sum(0)
    value = {name: Private(total, places.draw)}
    return make_bounded(value, records, records * math.sqrt(2), places.draw)


def centred_indicator(inside: Private, name: str = "count") -> Bounded:
    """The sum of h_i - 1/2: bound 1/2, replace bound 1.

    Args:
        inside: [B], by record: h_i in [0, 1] (a `soft_indicator`; cut to it, and 0 where it is not a number),
            or a mask.
        name: of the tensor that holds the sum.
    """
    raw = one_value_a_record("inside", inside)
    raw = raw.to(released_type(raw))
    total = (torch.nan_to_num(raw, nan=0.0).clamp(0, 1) - 0.5).sum()
    return make_bounded({name: Private(total, inside.draw)}, 0.5, 1.0, inside.draw)
