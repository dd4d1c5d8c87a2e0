"""Check at the start: the engine's rows against those of ordinary autograd."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rows_differ"]


#: Relative error of rows that is taken for rounding, by the parameter's type.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}


LOW_PRECISION = 1e-1


#: In units of eps: what two orders of adding the same terms may differ by, relative to the terms' sizes.
ROUNDING = 64


#: The same where the terms come in half precision.
LOW_PRECISION_ROUNDING = 5e-2


def rows_differ(
    rows: Tensor, expected: Tensor, low_precision: bool = False, sizes: Tensor | None = None
) -> str | None:
    """Why rows [B, *shape] are not the expected ones, or None if they are.

    Args:
        rows: as the engine has them.
        expected: by ordinary autograd.
        low_precision: whether the model computes in a shorter type than its parameters.
        sizes: what the rounding of each row is relative to, [B]: the sizes of the terms that it adds, and of
            the record's whole gradient. Where terms cancel, here or before (the key bias of an attention
            layer has a gradient of zero), both sides hold nothing but rounding.
    """
    tolerance = LOW_PRECISION if low_precision else TOLERANCE.get(expected.dtype, LOW_PRECISION)
    difference = (rows.double() - expected.double()).reshape(rows.shape[0], -1).norm(dim=1)
    scale = expected.double().norm() + 1e-30
    worst = float((difference / scale).max()) if difference.numel() else 0.0
    if worst <= tolerance or float(difference.max()) < 1e-12:
        return None
    if sizes is not None:
        share = LOW_PRECISION_ROUNDING if low_precision else ROUNDING * torch.finfo(expected.dtype).eps
        if bool((difference <= share * sizes.double()).all()):
            return None
    return f"its rows differ from single records by {worst:.1e} of their norm, more than {tolerance:.0e}"
