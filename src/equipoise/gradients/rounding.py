"""The guard of a norm whose terms cancel inside the row.

A row ``sum_s b_is (outer) a_is`` is never formed: its norm comes from products of the terms, and the weighted
sum over records rounds ``w_i b_is`` first and adds all terms at once. Either errs by some units in the last
place of the terms, not of the row. With M_i >= sum_s |a_is| |b_is|, a row shorter than a tenth of M_i has

    n_i = |g_i| + 4 eps M_i

so that its clipped part in the sum stays below the threshold. Longer rows keep their norm to the bit: to them
4 eps M_i is less than 5e-6 in float32. (As for all rounding here: measured, not proved.)

A sum of T terms that are all alike drifts: each of them is rounded the same way as it is added. Beyond 512
terms, convolutions with many positions and look-ups of one token drift by up to T eps / 12, in the norm and
in the sum; T eps / 4 is added to the norm of rows with so many terms, whatever they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise.gradients.base import PARTIAL_SUM
from equipoise.gradients.outer import CANCELLATION_SHARE

__all__ = ["GUARD", "guarded"]

#: In units of eps: what a guard is of the sizes that were rounded.
GUARD = 4


def guarded(squares: Tensor, magnitudes: Tensor | None, terms: int = 1, by_products: bool = False) -> Tensor:
    """Squared norms [B] with the guards for rows that lost digits.

    Args:
        squares: squared norms [B], float64.
        magnitudes: M, [B], in the type in which the terms are added; None where rows are single terms.
        terms: T, how many terms a row adds.
        by_products: the squares are a difference of products of the terms, which err by eps M^2: the guard
            grows with M / |g|, up to tenfold.

    >>> guarded(torch.tensor([1.0, 0.0]).double(), torch.tensor([2.0, 2.0]))
    tensor([1.0000e+00, 9.0949e-13], dtype=torch.float64)
    """
    if magnitudes is None:
        return squares
    sizes = magnitudes.to(squares.dtype)
    weak = squares < CANCELLATION_SHARE * sizes.square()
    norms = squares.sqrt()
    eps = torch.finfo(magnitudes.dtype).eps
    guard = GUARD * eps * sizes
    if by_products:
        guard = guard * (sizes / (10 * norms)).clamp(1, 10)
    out = torch.where(weak, (norms + guard).square_(), squares)
    return out.mul_((1 + terms * eps / 4) ** 2) if terms > PARTIAL_SUM else out
