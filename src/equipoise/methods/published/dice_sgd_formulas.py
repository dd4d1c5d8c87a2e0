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
from scipy import stats
from torch import Tensor

from equipoise._roots import crossing
from equipoise.methods.base import Context, Setting
from equipoise.methods.clip_rules import Abadi, ClipRule
from equipoise.methods.feedback.memory import clipped
from equipoise.privacy import Bounded, PrivacyPlan, PrivateRows, Sampling, Unproven, clip, gaussian_mu
from equipoise.privacy import unbounded_sum as plain_sum
from equipoise.privacy.accounting.epsilon import gaussian_log_delta

if TYPE_CHECKING:
    pass

__all__ = [
    "HOLE",
    "Normalise",
    "Published",
    "claimed_epsilon",
    "clipped_and_plain_sums",
    "hidden_state_epsilon",
    "hidden_state_mu",
    "published_noise_std",
    "worst_case_multiplier",
]


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

    def noise_std(self, setting: Setting, noise_multiplier: float | None) -> float:
        """sigma1 on the mean scale: noise_multiplier C1 / B, or the chosen formula at the budget."""
        sampling = setting.sampling
        if noise_multiplier is not None:
            return noise_multiplier * self.clip_norm / sampling.expected_size
        budget = setting.required_budget()
        if self.noise == "worst_case":
            largest = 1 / self.worst_case_multiplier(1.0, sampling, setting.relation)
            return math.sqrt(sampling.steps) / gaussian_mu(budget.epsilon, budget.delta) * largest
        return published_noise_std(
            budget.epsilon,
            budget.delta,
            clip_norm=self.clip_norm,
            radius=self._radius(sampling),
            population=sampling.population,
            steps=sampling.steps,
        )

    def worst_case_multiplier(self, noise_std: float, sampling: Sampling, relation: str) -> float:
        """sigma1 over the largest change of one update."""
        return worst_case_multiplier(
            noise_std,
            clip_norm=self.clip_norm,
            feedback_clip_norm=self.feedback_clip_norm,
            expected_batch_size=sampling.expected_size,
            relation=relation,
        )

    def claimed_epsilon(self, noise_std: float, sampling: Sampling, delta: float) -> float:
        """What the paper's formula says of this noise."""
        return claimed_epsilon(
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
        self, context: Context, memory: Mapping[str, Tensor], noise_std: float
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
            worst_case_multiplier=self.worst_case_multiplier(noise_std, context.sampling, context.relation),
        )
        return estimate, {name: memory[name] + raw[name] / size - update[name] for name in memory}


def clipped_and_plain_sums(rows: PrivateRows, rule: ClipRule, clip_norm: float) -> dict[str, Bounded]:
    """The clipped sum and the plain one, of the records whose gradient is finite."""
    return {"clipped": clip(rows, rule, clip_norm), "plain": plain_sum(rows)}


# ---- the published form
def published_noise_std(
    epsilon: float, delta: float, *, clip_norm: float, radius: float, population: int, steps: int
) -> float:
    """The paper's sigma1 = (32 T (C1^2 + 2 C^2) ln(1/delta))^(1/2) / (N epsilon), on the mean scale.

    Args:
        epsilon, delta: what the paper claims for it. The claim is false: see `worst_case_multiplier`.
        clip_norm: C1.
        radius: C; C2 in Algorithm 4 (with C1 = C2: (96 T ln(1/delta))^(1/2) C / (N epsilon)), B C2 in
            Theorem 3.8, which asks for C2 <= C / B.
        population: N.
        steps: T.

    Example:
        >>> std = published_noise_std(2.0, 1e-5, clip_norm=1.0, radius=1.0, population=50_000, steps=150)
        >>> round(std * 1000, 2)  # in units of C1 / B at B = 1000
        4.07
    """
    weight = clip_norm**2 + 2 * radius**2
    return math.sqrt(32 * steps * weight * math.log(1 / delta)) / (population * epsilon)


def claimed_epsilon(
    noise_std: float, delta: float, *, clip_norm: float, radius: float, population: int, steps: int
) -> float:
    """The epsilon that the paper claims for noise sigma1: `published_noise_std` solved for epsilon."""
    return (
        published_noise_std(
            1.0, delta, clip_norm=clip_norm, radius=radius, population=population, steps=steps
        )
        / noise_std
    )


def worst_case_multiplier(
    noise_std: float,
    *,
    clip_norm: float,
    feedback_clip_norm: float,
    expected_batch_size: float,
    relation: str = "add_or_remove_one",
) -> float:
    """sigma1 over the largest change of a release given the earlier ones: C1 / B + 2 C2, or 2 C1 / B + 2 C2.

    The feedback moves by up to 2 C2 at every step after a record's first participation, drawn or not, so
    that nothing is amplified by sampling: with all batches fixed, T such releases are mu-GDP with
    mu = T^(1/2) / multiplier, and joint convexity over the batches keeps the bound.

    Example:
        >>> from equipoise.privacy import gaussian_epsilon
        >>> z = worst_case_multiplier(
        ...     4.07e-3, clip_norm=1.0, feedback_clip_norm=1.0, expected_batch_size=1000
        ... )
        >>> f"{gaussian_epsilon(math.sqrt(150) / z, 1e-5):.1e}"  # where the paper claims 2
        '1.8e+07'
    """
    times = 1 if relation == "add_or_remove_one" else 2
    return noise_std / (times * clip_norm / expected_batch_size + 2 * feedback_clip_norm)


def hidden_state_mu(
    participations: int,
    noise_std: float,
    *,
    clip_norm: float,
    residual_clip_norm: float,
    expected_batch_size: float,
) -> float:
    """GDP parameter with an un-noised memory of bounded residuals, for K participations of a record.

    The difference of the two memories moves by at most R / B = (Ce - C1) / B at a participation, and by
    firm non-expansiveness of the projection |Pa - Pb|^2 + |(a - Pa) - (b - Pb)|^2 <= |a - b|^2 otherwise.
    Hence the differences d_t of the feedbacks obey sum_t d_t^2 <= (K R / B)^2, and

        mu <= (K^(1/2) C1 + K R) / (B sigma1).

    There is no amplification by sampling, and the cost grows with K.
    """
    span = residual_clip_norm - clip_norm
    total = math.sqrt(participations) * clip_norm + participations * span
    return total / (expected_batch_size * noise_std)


def hidden_state_epsilon(
    noise_std: float,
    delta: float,
    *,
    clip_norm: float,
    residual_clip_norm: float,
    expected_batch_size: float,
    sampling_rate: float,
    steps: int,
) -> float:
    """Epsilon of the same under Poisson sampling: delta(epsilon) averaged over K ~ Binomial(T, q)."""
    counts = range(1, int(stats.binom.ppf(1 - delta * 1e-3, steps, sampling_rate)) + 2)
    mus = [
        hidden_state_mu(
            k,
            noise_std,
            clip_norm=clip_norm,
            residual_clip_norm=residual_clip_norm,
            expected_batch_size=expected_batch_size,
        )
        for k in counts
    ]
    shares = [float(stats.binom.pmf(k, steps, sampling_rate)) for k in counts]
    beyond = float(stats.binom.sf(counts[-1], steps, sampling_rate))  # counted as no privacy at all

    def excess(epsilon: float) -> float:
        deltas = (
            share * math.exp(gaussian_log_delta(epsilon, mu)) for share, mu in zip(shares, mus, strict=True)
        )
        return beyond + sum(deltas) - delta

    if excess(0.0) <= 0:
        return 0.0
    _, enough = crossing(excess, 0.0, 1.0, tolerance=1e-12, relative=1e-9)
    return enough
