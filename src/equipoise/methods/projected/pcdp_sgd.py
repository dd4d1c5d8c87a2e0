"""PCDP-SGD: project every record's gradient on a subspace of public gradients, then clip it.

    estimate = V (sum_i min(1, C / ||V^T g_i||) V^T g_i + N(0, (z C)^2 I_K)) / B

Source: arXiv 2312.03792, "PCDP-SGD: Improving the Convergence of Differentially Private SGD via Projection in
Advance" (version 2 withdraws the paper). Form and proof: `equipoise.methods.projected.projected_gradient`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from equipoise.methods.card import Card
from equipoise.methods.projected.projected_gradient import ProjectedGradient

__all__ = ["PCDPSGD"]


@dataclass(frozen=True, kw_only=True)
class PCDPSGD(ProjectedGradient):
    """PCDP-SGD: clipped and noised in the coordinates of a subspace of public gradients.

    The arguments are those of `ProjectedGradient`. Against DP-SGD the noise falls from P to K dimensions;
    what the subspace misses of the gradient is a bias that stays.

    Example:
        >>> import torch
        >>> from equipoise.methods import PublicRecords, PublicSubspace
        >>> source = PublicSubspace(PublicRecords(torch.eye(3)), dimension=2)
        >>> PCDPSGD(source=source, clip_norm=0.1).config()["source"]["dimension"]
        2
    """

    name: ClassVar[str] = "pcdp-sgd"
    card: ClassVar[Card] = Card(
        summary="Projects every record's gradient on the span of public gradients, then clips it there.",
        claim="Less noise and less clipping bias than DP-SGD. Private, and proved so, if the public "
        "records are public; what the subspace misses of the gradient is a bias that the paper "
        "hides in a constant.",
        source="PCDP-SGD, arXiv 2312.03792 (withdrawn by its authors in version 2)",
        guarantee="proven",
        cost="one forward and one backward pass, one more over the public records a refresh",
        use_when="Noise is heavy and public records of the task capture nine tenths of the gradient.",
        avoid_when="Noise is mild, or one can train on the public records first: see public-warm-start.",
    )
