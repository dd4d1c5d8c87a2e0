"""Check at attach: the engine against single records by ordinary autograd."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rows_differ"]

#: Relative error of rows that is taken for rounding, by the parameter's type.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
LOW_PRECISION = 1e-1


def rows_differ(rows: Tensor, expected: Tensor, low_precision: bool = False) -> str | None:
    """Why rows [B, *shape] are not the expected ones, or None if they are."""
    tolerance = LOW_PRECISION if low_precision else TOLERANCE.get(expected.dtype, LOW_PRECISION)
    difference = (rows.double() - expected.double()).reshape(rows.shape[0], -1).norm(dim=1)
    scale = expected.double().norm() + 1e-30
    worst = float((difference / scale).max()) if difference.numel() else 0.0
    if worst <= tolerance or float(difference.max()) < 1e-12:
        return None
    return f"its rows differ from single records by {worst:.1e} of their norm, more than {tolerance:.0e}"
