"""DiceSGD as published: raw memory, noise on the update alone, and the two references without noise.

    v = sum_i clip(g_i, C1) / B + clip(e, C2)
    estimate = v + N(0, sigma1^2 I)
    e = e + sum_i g_i / B - v

Source: Zhang, Bu, Wu and Hong, ICLR 2024, Algorithm 2; Algorithm 4 with u / |u| for clip(u, C). The memory
holds raw gradients and never leaves the private side; only the estimate does, as an un-proven release with
the worst case that can be proved of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from equipoise.methods import dice_noise
from equipoise.methods.base import Context, require_budget
from equipoise.methods.clip_rules import Abadi, ClipRule
from equipoise.methods.memory import clipped
from equipoise.privacy import Bounded, PrivacyPlan, PrivateRows, Sampling, Unproven, clip, gaussian_mu
from equipoise.privacy import unbounded_sum as plain_sum

if TYPE_CHECKING:
    from equipoise.privacy import Budget

__all__ = ["HOLE", "Normalise", "Published", "clipped_and_plain_sums"]

HOLE = (
    "the memory of DiceSGD is a sum of raw gradients without noise, and the published proof counts each "
    "past batch as if it were drawn anew at every later step"
)


class Normalise(ClipRule):
    """Every row gets the length of the threshold: C / n, the limit of AUTO-S for gamma = 0; 0 at n = 0."""

    name = "normalise"

    def _weights(self, norms: Tensor, threshold: float | Tensor) -> Tensor:
        return torch.where(norms > 0, threshold / norms, torch.zeros_like(norms))


@dataclass(frozen=True)
class Published:
    """The published algorithm with its constants.

    Attributes:
        clip_norm: C1.
        feedback_clip_norm: C2, on the mean scale.
        normalising: Algorithm 4.
        noise: "algorithm_4" (the formula with C = C2), "theorem" (C = B C2) or "worst_case".
    """

    clip_norm: float
    feedback_clip_norm: float
    normalising: bool
    noise: Literal["algorithm_4", "theorem", "worst_case"]

    def plan(self, sampling: Sampling, relation: str) -> PrivacyPlan:
        """No proven release: one un-proven update a step."""
        return PrivacyPlan([], sampling, relation, [Unproven("update")])

    def noise_std(
        self, sampling: Sampling, budget: Budget | None, relation: str, noise_multiplier: float | None
    ) -> float:
        """sigma1 on the mean scale: noise_multiplier C1 / B, or the chosen formula at the budget."""
        if noise_multiplier is not None:
            return noise_multiplier * self.clip_norm / sampling.expected_size
        budget = require_budget(budget)
        if self.noise == "worst_case":
            largest = 1 / self.worst_case_multiplier(1.0, sampling, relation)
            return math.sqrt(sampling.steps) / gaussian_mu(budget.epsilon, budget.delta) * largest
        return dice_noise.published_noise_std(
            budget.epsilon,
            budget.delta,
            clip_norm=self.clip_norm,
            radius=self._radius(sampling),
            population=sampling.population,
            steps=sampling.steps,
        )

    def worst_case_multiplier(self, noise_std: float, sampling: Sampling, relation: str) -> float:
        """sigma1 over the largest change of one update."""
        return dice_noise.worst_case_multiplier(
            noise_std,
            clip_norm=self.clip_norm,
            feedback_clip_norm=self.feedback_clip_norm,
            expected_batch_size=sampling.expected_size,
            relation=relation,
        )

    def claimed_epsilon(self, noise_std: float, sampling: Sampling, delta: float) -> float:
        """What the paper's formula says of this noise."""
        return dice_noise.claimed_epsilon(
            noise_std,
            delta,
            clip_norm=self.clip_norm,
            radius=self._radius(sampling),
            population=sampling.population,
            steps=sampling.steps,
        )

    def _radius(self, sampling: Sampling) -> float:
        if self.noise == "algorithm_4":
            return self.feedback_clip_norm
        return self.feedback_clip_norm * sampling.expected_size  # the theorem asks for C2 <= C / B

    def step(
        self, context: Context, memory: Mapping[str, Tensor], noise_std: float, relation: str
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The noised estimate, and the next memory as `Private` tensors."""
        size = context.sampling.expected_size
        rule = Normalise() if self.normalising else Abadi()
        draw = context.draw("batch")
        sums = draw.query(lambda rows, ids: clipped_and_plain_sums(rows, rule, self.clip_norm))
        feedback = clipped(memory, self.feedback_clip_norm, normalised=self.normalising)
        body, raw = sums["clipped"].value, sums["plain"].value
        update = {name: body[name] / size + feedback[name] for name in memory}
        estimate = context.ledger.release_unproven(
            draw,
            "update",
            update,
            noise_std,
            hole=HOLE,
            worst_case_multiplier=self.worst_case_multiplier(noise_std, context.sampling, relation),
        )
        return estimate, {name: memory[name] + raw[name] / size - update[name] for name in memory}


def clipped_and_plain_sums(rows: PrivateRows, rule: ClipRule, clip_norm: float) -> dict[str, Bounded]:
    """The clipped sum and the plain one, of the records whose gradient is finite."""
    return {"clipped": clip(rows, rule, clip_norm), "plain": plain_sum(rows)}
