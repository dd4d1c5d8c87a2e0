"""A few long rows times many held ones: the product that reads a held subspace.

Nearly all of its time is reading the held rows once. On processors MKL, which `torch.mm` calls, reaches half
of what the memory gives for such shapes; oneDNN, which PyTorch carries for the linear layers of compiled
models, reaches it (V of 100 x 262,144 and 16 rows, one thread: 20.7 ms against 10.7). PyTorch has no public
name for that product of plain tensors; where the operator is missing or refuses, `dots` does the work.
It is true to about 3e-5 of the rows' lengths for a million numbers, all of them alike: for rows that say
they are ``rough``, whose products are coordinates that are clipped by their own norm.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from equipoise.gradients.base import dots

__all__ = ["times_held"]

#: Below so many held numbers the product is short anyway and calls of the operator cost more.
LARGE = 1 << 20


def times_held(rows: Tensor, held: Tensor) -> Tensor:
    """rows held^T, [n, m], for rows [n, p] and held rows [m, p] of one float type.

    >>> times_held(torch.ones(2, 3), torch.ones(4, 3)).shape
    torch.Size([2, 4])
    """
    operator = _linear()
    suited = rows.device.type == "cpu" and rows.dtype == held.dtype == torch.float32
    if operator is None or not suited or held.numel() < LARGE or rows.shape[0] >= held.shape[0]:
        return dots(rows, held)
    product: Tensor = operator(held, rows, None, "none", [], "")
    return product.t()


@cache
def _linear() -> Any:
    """oneDNN's linear layer, tried once; None where PyTorch does not offer it as it is called here."""
    try:
        operator = torch.ops.mkldnn._linear_pointwise
        one = torch.ones(1, 1)
        return operator if operator(one, one, None, "none", [], "").shape == (1, 1) else None
    except (AttributeError, RuntimeError, TypeError):
        return None
