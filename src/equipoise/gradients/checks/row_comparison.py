"""Check at the start: the engine's rows against those of ordinary autograd."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["distance_and_length", "rows_differ"]


#: Relative error of rows that is taken for rounding, by the parameter's type.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}


LOW_PRECISION = 1e-1


#: In units of eps: what two orders of adding the same terms may differ by, relative to the terms' sizes.
ROUNDING = 64


#: The same where the terms come in half precision.
LOW_PRECISION_ROUNDING = 5e-2


def distance_and_length(row: Tensor, expected: Tensor) -> Tensor:
    """How far a row lies from the expected one, and how long that one is, [2], in float64."""
    return torch.stack([torch.linalg.vector_norm(t, dtype=torch.float64) for t in (row - expected, expected)])


def rows_differ(
    found: Tensor, dtype: torch.dtype, low_precision: bool = False, sizes: Tensor | None = None
) -> str | None:
    """Why rows are not the expected ones, or None if they are.

    Args:
        found: `distance_and_length` of each row, [B, 2].
        dtype: of the expected rows.
        low_precision: whether the model computes in a shorter type than its parameters.
        sizes: what the rounding of each row is relative to, [B]: the sizes of the terms that it adds, and of
            the record's whole gradient. Where terms cancel, here or before (the key bias of an attention
            layer has a gradient of zero), both sides hold nothing but rounding.
    """
    tolerance = LOW_PRECISION if low_precision else TOLERANCE.get(dtype, LOW_PRECISION)
    difference = found[:, 0]
    scale = found[:, 1].norm() + 1e-30
    worst = float(difference.max() / scale)
    if worst <= tolerance or float(difference.max()) < 1e-12:
        return None
    if sizes is not None:
        share = LOW_PRECISION_ROUNDING if low_precision else ROUNDING * torch.finfo(dtype).eps
        if bool((difference <= share * sizes.double()).all()):
            return None
    return f"its rows differ from single records by {worst:.1e} of their norm, more than {tolerance:.0e}"
