"""PDP-SGD: clip every record's gradient, then project the sum on a subspace of public gradients.

    estimate = V (sum_i min(1, C / ||g_i||) V^T g_i + N(0, (z C)^2 I_K)) / B

Source: Zhou, Wu and Banerjee 2021, "Bypassing the Ambient Dimension: Private SGD with Gradient Subspace
Identification".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from equipoise.methods.card import Card
from equipoise.methods.projected.projected_gradient import ProjectedGradient

__all__ = ["PDPSGD"]


@dataclass(frozen=True, kw_only=True)
class PDPSGD(ProjectedGradient):
    """PDP-SGD: the weights come from the whole gradients' norms. Arguments of `ProjectedGradient`.

    Example:
        >>> from equipoise.methods import RandomSubspace
        >>> PDPSGD(source=RandomSubspace(), clip_norm=0.1).clip_norm
        0.1
    """

    name: ClassVar[str] = "pdp"
    card: ClassVar[Card] = Card(
        summary="Clips every record's gradient, then projects the sum on the span of public gradients.",
        claim="Noise of the subspace's dimension, not the model's; proved for gradients that lie in it.",
        source="Zhou, Wu and Banerjee 2021, Bypassing the Ambient Dimension",
        guarantee="proven",
        cost="one forward and one backward pass, one more over the public records a refresh",
        use_when="As a comparison: pcdp-sgd clips after the projection, which is seldom worse.",
        avoid_when="The subspace misses much of the gradient: the bias stays.",
    )
    clips_rows: ClassVar[bool] = True
