"""RPDP: PCDP-SGD in a random subspace, the control that shows what the public directions are worth.

    estimate = V (sum_i min(1, C / ||V^T g_i||) V^T g_i + N(0, (z C)^2 I_K)) / B,   V random and orthonormal

The projection of a fixed random subspace keeps K/P of the gradient's squared norm in the mean.

Source: the baseline "RPDP-SGD" of arXiv 2312.03792; Kasiviswanathan 2021 studies random projections in
    DP-SGD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from equipoise.methods.card import Card
from equipoise.methods.projected.projected_gradient import ProjectedGradient
from equipoise.methods.projected.sources import RandomSubspace

__all__ = ["RandomProjection"]


@dataclass(frozen=True, kw_only=True)
class RandomProjection(ProjectedGradient):
    """Clipped and noised in the coordinates of random orthonormal columns.

    Args:
        source: the blocks, the columns per block (the paper takes 800 to 1,000), and the steps between fresh
            ones.
        clip_norm, clip_rule, noise_multiplier: as for `ProjectedGradient`.

    Example:
        >>> RandomProjection(clip_norm=0.1, source=RandomSubspace(dimension=800)).source.dimension
        800
    """

    name: ClassVar[str] = "rpdp"
    card: ClassVar[Card] = Card(
        summary="Clips and noises gradients in a random subspace.",
        claim="Private, and proved so; a control for methods that choose their subspace.",
        source="the baseline RPDP-SGD of arXiv 2312.03792",
        guarantee="proven",
        cost="one forward and one backward pass, and the columns held in memory",
        use_when="To see what public directions are worth.",
        avoid_when="Accuracy counts.",
    )

    source: RandomSubspace = RandomSubspace()
