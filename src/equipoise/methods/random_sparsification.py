"""RSDP: a random part of the coordinates is dropped at every step, before clipping, and with it their noise.

    estimate = m * (sum_i min(1, C / ||m * g_i||) (m * g_i) + N(0, (z C)^2 I)) / B,   m in {0, 1}^P public

Noise on the dropped coordinates is drawn and thrown away, which is post-processing: the step costs what a
step of DP-SGD costs.

Source: Zhu and Blaschko 2021, "Improving Differentially Private SGD via Randomly Sparsified Gradients"
(arXiv 2112.00845).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from equipoise import _validate
from equipoise.methods.base import Context, Method, Plan, Setting, State
from equipoise.methods.card import Card
from equipoise.methods.clip_rules import Abadi, ClipRule
from equipoise.privacy.bounds.clipping import clip
from equipoise.privacy.mechanisms import Gaussian
from equipoise.privacy.plan import PrivacyPlan, Release

__all__ = ["RandomSparsification"]


@dataclass(frozen=True, kw_only=True)
class RandomSparsification(Method):
    """DP-SGD on a fresh random part of the coordinates at every step.

    The norms of masked rows need the rows, which are formed parameter by parameter: dearer than DP-SGD.

    Args:
        clip_norm: C > 0.
        clip_rule: weighs the rows.
        drop_rate: share of the coordinates that is dropped, in [0, 1).
        noise_multiplier: z; calibrated to the budget when None.

    Example:
        >>> RandomSparsification(clip_norm=0.1, drop_rate=0.5).config()["drop_rate"]
        0.5
    """

    name: ClassVar[str] = "rsdp"
    card: ClassVar[Card] = Card(
        summary="DP-SGD on a fresh random part of the coordinates at every step.",
        claim="Less noise for the same budget; private, and proved so.",
        source="Zhu and Blaschko 2021, Improving DP-SGD via Randomly Sparsified Gradients, arXiv 2112.00845",
        guarantee="proven",
        cost="one forward and one backward pass; rows are formed parameter by parameter for their norms",
        use_when="As a comparison.",
        avoid_when="Models are large: the rows of every layer are formed.",
    )

    clip_norm: float = 1.0
    clip_rule: ClipRule = Abadi()
    drop_rate: float = 0.3
    noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        _validate.positive(clip_norm=self.clip_norm)
        _validate.instance(ClipRule, "PSAC(regulariser=0.1)", clip_rule=self.clip_rule)
        _validate.noise_if_given(noise_multiplier=self.noise_multiplier)
        if not 0 <= self.drop_rate < 1:
            raise ValueError(
                f"drop_rate={self.drop_rate!r}: it is a share of the coordinates, at least 0 and below 1"
            )

    def plan(self, setting: Setting) -> Plan:
        def at(scale: float) -> PrivacyPlan:
            releases = [Release("gradient", self.clip_norm, Gaussian(scale))]
            return PrivacyPlan(releases, setting.sampling, setting.relation)

        return Plan(setting.calibrated(at, self.noise_multiplier))

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        # Public chance: a mask that followed the gradients would say where they are large.
        rng = context.public_rng(context.step)
        masks = {
            name: (torch.rand(value.shape, generator=rng) >= self.drop_rate).to(value)
            for name, value in context.params.items()
        }
        draw = context.draw("batch")
        sums = draw.query(
            lambda rows, ids: {"gradient": clip(rows.scaled(masks), self.clip_rule, self.clip_norm)}
        )
        released = context.ledger.release(draw, sums)["gradient"]
        # The mask again, now on the noise: what it throws away is post-processing and costs nothing.
        size = context.sampling.expected_size
        return {name: value * masks[name] / size for name, value in released.items()}, state
