"""Raw norms of mean gradients, which set thresholds in DP-C4 as published: they leave as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from equipoise.methods.base import Context, DrawHandle, Parameters
from equipoise.privacy import Bounded, Private, PrivateRows, indicator, unbounded_sum

__all__ = ["ANCHOR_HOLE", "COUPLED_HOLE", "disclosed_mean_norm"]

COUPLED_HOLE = (
    "the coupled threshold is the norm of the batch's unclipped mean difference, a raw private number that "
    "scales the noise"
)
ANCHOR_HOLE = (
    "the anchor threshold is the norm of an unclipped mean gradient, a raw private number that scales the "
    "noise"
)


def disclosed_mean_norm(
    context: Context,
    draw: DrawHandle,
    at: Sequence[Parameters],
    rows_of: Callable[..., PrivateRows],
    hole: str,
) -> float:
    """The norm of the mean of the draw's unclipped rows, as it is: for recipes as published.

    The mean is over the realised batch; an empty one has norm zero.
    """

    def sums(*given: Any) -> dict[str, Bounded]:
        rows = rows_of(*given[:-1])
        finite = torch.isfinite(rows.row_norms())
        assert isinstance(finite, Private)
        return {"sum": unbounded_sum(rows), "records": indicator(finite)}

    found = draw.query(sums, at)
    squares = [value.double().square().sum() for value in found["sum"].value.values()]
    records = found["records"].value["count"].clamp(min=1)
    norm = float(context.ledger.disclose(torch.stack(squares).sum().sqrt() / records, hole))
    return norm if math.isfinite(norm) else math.inf
