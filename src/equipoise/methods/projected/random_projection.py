"""RPDP: PCDP-SGD in a random subspace, the control that shows what the public directions are worth.

    estimate = V (sum_i min(1, C / ||V^T g_i||) V^T g_i + N(0, (z C)^2 I_K)) / B,   V random and orthonormal

The projection of a fixed random subspace keeps K/P of the gradient's squared norm in the mean.

Source: the baseline "RPDP-SGD" of arXiv 2312.03792; Kasiviswanathan 2021 studies random projections in
    DP-SGD.
"""

from __future__ import annotations

from typing import ClassVar

from equipoise.methods.card import Card
from equipoise.methods.clip_rules import ClipRule
from equipoise.methods.projected.projected_gradient import ProjectedGradient
from equipoise.methods.projected.sources import Blocks

__all__ = ["RandomProjection"]


class RandomProjection(ProjectedGradient):
    """Clipped and noised in the coordinates of random orthonormal columns.

    Args:
        clip_norm, clip_rule, noise_multiplier, blocks: as for `ProjectedGradient`.
        dimension: columns a block (the paper takes 800 to 1,000); 100 when None.
        refresh_every: steps between fresh columns; an epoch of the sampling when None.

    Example:
        >>> RandomProjection(clip_norm=0.1, dimension=800).dimension
        800
    """

    name: ClassVar[str] = "rpdp"
    card: ClassVar[Card] = Card(
        summary="Clips and noises gradients in a random subspace.",
        claim="Private, and proved so; a control for methods that choose their subspace.",
        source="the baseline RPDP-SGD of arXiv 2312.03792",
        guarantee="proven",
        published_guarantee=None,
        cost="one forward and one backward pass, and the columns held in memory",
        use_when="To see what public directions are worth.",
        avoid_when="Accuracy counts.",
    )

    def __init__(
        self,
        clip_norm: float = 1.0,
        clip_rule: str | ClipRule = "abadi",
        *,
        noise_multiplier: float | None = None,
        dimension: int | None = None,
        blocks: Blocks | None = None,
        refresh_every: int | None = None,
    ) -> None:
        super().__init__(
            None,
            clip_norm,
            clip_rule,
            noise_multiplier=noise_multiplier,
            dimension=dimension,
            subspace="random",
            blocks=blocks,
            refresh_every=refresh_every,
        )
