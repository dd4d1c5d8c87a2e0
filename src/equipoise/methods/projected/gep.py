"""GEP and biased GEP: gradient embedding perturbation, with and without the residual.

    estimate = [V (sum_i clip_C(V^T g_i) + N(0, (z C)^2 I_K)) + sum_i clip_C2(r_i) + N(0, (z_2 C_2)^2 I)] / B
    r_i = g_i - V V^T g_i

Both sums are over the same draw and released together: one Gaussian of multiplier (z^-2 + z_2^-2)^(-1/2).
Biased GEP leaves the residual out and is PCDP-SGD with another choice of V.

Source: Yu, Zhang, Chen and Liu 2021, "Do not Let Privacy Overbill Utility: Gradient Embedding Perturbation
for Private Learning" (arXiv 2102.12677).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from equipoise import _validate
from equipoise.methods.card import Card, card_of
from equipoise.methods.projected.projected_gradient import ProjectedGradient
from equipoise.methods.projected.sources import Blocks, PublicSubspace
from equipoise.methods.subspaces.blocks import BlockSubspace
from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.bounds.clipping import clip, clip_coordinates
from equipoise.privacy.mechanisms import Gaussian
from equipoise.privacy.plan import Release
from equipoise.privacy.rows import PrivateRows

__all__ = ["GEP", "BiasedGEP"]


@dataclass(frozen=True, kw_only=True)
class BiasedGEP(ProjectedGradient):
    """GEP without its residual: blocks are layers, a refresh every step. Arguments of `ProjectedGradient`.

    Example:
        >>> from equipoise.methods import RandomSubspace
        >>> BiasedGEP(source=RandomSubspace()).subspace.blocks
        'per_layer'
    """

    name: ClassVar[str] = "biased-gep"
    card: ClassVar[Card] = card_of("biased-gep")
    default_blocks: ClassVar[Blocks] = "per_layer"
    default_refresh: ClassVar[int | None] = 1


@dataclass(frozen=True, kw_only=True)
class GEP(ProjectedGradient):
    """Gradient embedding perturbation: coordinates and residual, clipped and noised apart.

    Args:
        source, clip_norm, clip_rule, noise_multiplier: as for `ProjectedGradient`. Blocks are layers and the
            subspace is renewed every step by default; for a private subspace that is a release per step. The
            full steps of `ReleasedSubspace` have no residual, and the noise of the coordinates. The columns
            are in memory and orthonormal, since the residual's norm cannot be told from columns that are
            never formed.
        residual_clip_norm: C_2 > 0; `clip_norm` when None.
        residual_noise_multiplier: z_2; from `residual_share` when None.
        residual_share: share of the budget for the residual, in (0, 1); 0.5 gives both the multiplier
            z = sqrt(2) z' where z' alone would spend the budget.

    Example:
        >>> from equipoise.methods import RandomSubspace
        >>> GEP(source=RandomSubspace(), clip_norm=0.2).residual_radius
        0.2
    """

    name: ClassVar[str] = "gep"
    card: ClassVar[Card] = card_of("gep")
    default_blocks: ClassVar[Blocks] = "per_layer"
    default_refresh: ClassVar[int | None] = 1
    orthonormal: ClassVar[bool] = True
    residual_clip_norm: float | None = None
    residual_noise_multiplier: float | None = None
    residual_share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.positive(residual_clip_norm=self.residual_radius)
        _validate.positive_if_given(residual_noise_multiplier=self.residual_noise_multiplier)
        if isinstance(self.source, PublicSubspace) and self.source.basis == "kernel":
            raise ValueError(
                "basis='kernel' with a residual: its norms come from products with public rows, whose "
                "rounding can make them too small, so that the bound would not hold; use basis='held' or "
                "'auto'"
            )
        _validate.share(residual_share=self.residual_share)

    @property
    def residual_radius(self) -> float:
        """C_2."""
        return self.clip_norm if self.residual_clip_norm is None else self.residual_clip_norm

    def _parts(self, scale: float) -> tuple[list[Release], float]:
        """Two releases of one draw; where the noise is calibrated, `scale` is that of both together."""
        share = self.residual_share
        given = self.noise_multiplier is not None
        first = scale if given else scale / math.sqrt(1 - share)
        second = self.residual_noise_multiplier
        if second is None:
            second = first * math.sqrt((1 - share) / share)
        parts = [
            Release("gradient", self.clip_norm, Gaussian(first)),
            Release("residual", self.residual_radius, Gaussian(second)),
        ]
        return parts, 1 / math.hypot(1 / first, 1 / second)

    def _sums(self, rows: PrivateRows, subspace: BlockSubspace) -> dict[str, Bounded]:
        coordinates, residual = rows.split(subspace)
        return {
            "gradient": clip_coordinates(coordinates, self.clip_rule, self.clip_norm),
            "residual": clip(residual, self.clip_rule, self.residual_radius),
        }

    def _lifted(
        self, subspace: BlockSubspace, released: Mapping[str, Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        inside = subspace.lift(released["gradient"]["coordinates"])
        return {name: value + released["residual"][name] for name, value in inside.items()}
