"""The noise and the epsilon that DP-C4's paper states (its Theorem 3): for recipes as published.

The theorem puts noise N(0, (sigma_1 C_1)^2) and N(0, (sigma_2 C_2)^2) on *means* over |S| and |D| records,
counts T coupled and T p anchor releases (p the probability of a new anchor), takes replace-one neighbours,
no amplification by sampling, and the loose half of an RDP bound: with alpha = 1 + 2 log(1/delta) / epsilon,

    2 alpha T / (sigma_1 |S|)^2 + 2 alpha T p / (sigma_2 |D|)^2 <= epsilon / 2.

Its choice of sigma_1^2, sigma_2^2 (least sum) in this library's convention, noise on the sum over the
threshold, is z_1 = sigma_1 |S|, z_2 = sigma_2 |D|. With theta = (|D| / |S|)^2 and
sigma^2 = 4 T (2 log(1/delta) + epsilon) / (|S| epsilon)^2:

    routines 1, 2    sigma_1^2 = (1 + sqrt(p/theta)) sigma^2
                     sigma_2^2 = (p/theta + sqrt(p/theta)) sigma^2
    routines 3, 4    sigma_1^2 = (1 - p + sqrt(p(1-p)/theta)) sigma^2
                     sigma_2^2 = (p/theta + sqrt(p(1-p)/theta)) sigma^2

The theorem does not cover thresholds that are raw private numbers, which the algorithms use; T p is the mean
of a random count and leaves out the first anchor. What comes out here is the paper's figure, not a guarantee.

Raw norms of mean gradients, which set thresholds in DP-C4 as published: they leave as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from equipoise.methods.base import Context, DrawHandle, Parameters
from equipoise.privacy import Bounded, Private, PrivateRows, indicator, unbounded_sum

__all__ = [
    "ANCHOR_HOLE",
    "COUPLED_HOLE",
    "claimed_epsilon",
    "disclosed_mean_norm",
    "published_noise_multipliers",
]


def published_noise_multipliers(
    epsilon: float,
    delta: float,
    *,
    steps: int,
    batch: float,
    anchor_batch: float,
    probability: float,
    routine: int,
) -> tuple[float, float]:
    """(z_1, z_2) of Theorem 3 for a target (epsilon, delta).

    Args:
        epsilon, delta: what the theorem is to claim.
        steps: T.
        batch: |S|, the expected batch size.
        anchor_batch: |D|, the expected size of an anchor batch.
        probability: p, chance of a new anchor in a step; the inverse of the anchor period.
        routine: 1 to 4.

    Example:
        >>> given = dict(steps=1000, batch=64, anchor_batch=2000, probability=0.064)
        >>> [round(z, 3) for z in published_noise_multipliers(1.0, 1e-5, routine=1, **given)]
        [311.258, 875.166]
        >>> [round(z, 3) for z in published_noise_multipliers(1.0, 1e-5, routine=3, **given)]
        [301.173, 860.93]
    """
    theta = (anchor_batch / batch) ** 2
    squared = 4 * steps * (2 * math.log(1 / delta) + epsilon) / (batch * epsilon) ** 2
    share, stays = probability / theta, 1.0 if routine in (1, 2) else 1 - probability
    cross = math.sqrt(share * stays)
    # With every step at an anchor (p = 1, routines 3 and 4) no coupled term is left to be noised.
    coupled = max((stays + cross) * squared, 1e-12)
    return batch * math.sqrt(coupled), anchor_batch * math.sqrt((share + cross) * squared)


def claimed_epsilon(
    noise_multiplier: float,
    anchor_noise_multiplier: float,
    delta: float,
    *,
    steps: int,
    probability: float,
    routine: int,
) -> float:
    """The epsilon that Theorem 3's calculus gives for noise multipliers (z_1, z_2).

    With R alpha the total RDP, half of epsilon is R alpha and alpha = 1 + 2 log(1/delta) / epsilon, so that
    epsilon solves epsilon^2 = 2 R (epsilon + 2 log(1/delta)).

    Example:
        >>> round(claimed_epsilon(311.258, 875.166, 1e-5, steps=1000, probability=0.064, routine=1), 4)
        1.0
    """
    coupled = steps * (1.0 if routine in (1, 2) else 1 - probability)
    rdp = 2 * coupled / noise_multiplier**2 + 2 * steps * probability / anchor_noise_multiplier**2
    return rdp + math.sqrt(rdp**2 + 4 * rdp * math.log(1 / delta))


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
