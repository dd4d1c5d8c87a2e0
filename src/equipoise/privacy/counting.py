"""Bounded counts and sums of one number a record.

The sensitivity of an un-normalised indicator or capped sum is its upper value under both relations, since a
summand moves within [0, U].
"""

from __future__ import annotations

import torch

from .bounded import Bounded, make_bounded
from .private import Private
from .requirements import one_value_a_record, public_threshold


def indicator(mask: Private, name: str = "count") -> Bounded:
    """The number of records for which `mask` [B] holds: bound 1 under both relations."""
    raw = one_value_a_record("mask", mask)
    if raw.dtype != torch.bool:
        raise TypeError(f"mask must be bool, got {raw.dtype}; compare first, or use capped(values, upper)")
    total = raw.sum().to(torch.float32)
    return make_bounded({name: Private(total, mask.draw)}, 1.0, 1.0, mask.draw)


def capped(values: Private, upper: float, name: str = "sum") -> Bounded:
    """The sum of `values` [B] cut to [0, upper]: bound `upper`; non-finite ones count zero."""
    raw = one_value_a_record("values", values)
    upper = public_threshold("upper", upper)
    raw = raw.to(torch.float64 if raw.dtype == torch.float64 else torch.float32)
    raw = torch.where(torch.isfinite(raw), raw, torch.zeros_like(raw)).clamp(0, upper)
    return make_bounded({name: Private(raw.sum(), values.draw)}, upper, upper, values.draw)


def centred_indicator(mask: Private, name: str = "count") -> Bounded:
    """The sum of +1/2 for records inside the mask [B] and -1/2 outside: bound 1/2, replace bound 1."""
    raw = one_value_a_record("mask", mask)
    if raw.dtype != torch.bool:
        raise TypeError(f"mask must be bool, got {raw.dtype}; compare first")
    total = (raw.to(torch.float32) - 0.5).sum()
    return make_bounded({name: Private(total, mask.draw)}, 0.5, 1.0, mask.draw)
