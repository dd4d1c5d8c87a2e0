"""DiceSGD as published: raw memory, and noise only on the update.

    v = sum_i clip(g_i, C1) / B + clip(e, C2)
    estimate = v + N(0, sigma1^2 I)
    e = e + sum_i g_i / B - v

Source: Zhang, Bu, Wu and Hong, ICLR 2024, "Differentially Private SGD without clipping bias: an
error-feedback approach", Algorithm 2; Algorithm 4 with u / |u| for clip(u, C); Algorithm 3 is this with Adam
as optimiser. The memory holds raw gradients and never leaves the private side; only the estimate does, as an
un-proven release with the worst case that can be proved of it.

To the letter, but for these: batches are Poisson draws of expected size B; a record whose gradient is not
finite is left out of both sums; min{C^2, G'^2} in the noise is C^2, since nothing enforces G'; Algorithm 3
prints 1 - beta^2 for 1 - beta_2, bias corrections that divide by zero in its first step, and epsilon inside
the root, where Adam has none of these. In Algorithm 4 the radius is `clip_norm`, printed as 1. The authors'
program is not a variant: its "C2" is C2 / C1, on the scale of the sum, and its memory keeps less than line 7
says.

The paper's proof fails: the memory is a sum of raw gradients and is not noised, so that a record drawn once
moves every later release by up to 2 C2. What is proved here is `worst_case_multiplier`, without
amplification.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from equipoise.methods.base import Context, Method, Plan, Setting, State
from equipoise.methods.clip_rules import Abadi, ClipRule
from equipoise.methods.configuration import FromZero, Positive
from equipoise.methods.named_tensors import clipped, zeros_like
from equipoise.privacy import (
    Bounded,
    Private,
    PrivateRows,
    Sampling,
    clip,
    gaussian_mu,
)
from equipoise.privacy import unbounded_sum as plain_sum
from equipoise.published.ledger import PublishedLedger, release_unproven
from equipoise.published.record import PublishedPlan, Unproven

MEMORY_HOLE = (
    "the memory of DiceSGD is a sum of raw gradients without noise, and the published proof counts each past "
    "batch as if it were drawn anew at every later step"
)


class Normalise(ClipRule):
    """Every row gets the length of the threshold: C / n, the limit of AUTO-S for gamma = 0; 0 at n = 0."""

    name = "normalise"

    def _weights(self, norms: Tensor, threshold: float | Tensor) -> Tensor:
        return torch.where(norms > 0, threshold / norms, torch.zeros_like(norms))


@dataclass(frozen=True, kw_only=True)
class DiceSGD(Method):
    """DiceSGD as published: Algorithm 2 or 4, with the paper's noise.

    Args:
        clip_norm: C1 > 0.
        variant: "algorithm_2" (clipping) or "algorithm_4" (normalising, at one radius).
        feedback_clip_norm: C2 >= 0 and finite, on the mean scale; C1 when None.
        noise: "algorithm_4" (the formula with C = C2; for Algorithm 2 the paper prints the theorem's),
            "theorem" (Theorem 3.8 with C = B C2), or "worst_case" (what would have to be added to meet the
            budget).
        noise_multiplier: B sigma1 / C1; from `noise` at the budget when None.

    Raises:
        ValueError: a value out of range.
    """

    ledger_class = PublishedLedger

    clip_norm: Positive = 1.0
    variant: Literal["algorithm_2", "algorithm_4"] = "algorithm_2"
    feedback_clip_norm: FromZero | None = None
    noise: Literal["algorithm_4", "theorem", "worst_case"] = "algorithm_4"
    noise_multiplier: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant == "algorithm_4" and self.feedback_radius != self.clip_norm:
            raise ValueError(
                f"feedback_clip_norm={self.feedback_clip_norm!r}: Algorithm 4 has one radius, clip_norm"
            )

    @property
    def feedback_radius(self) -> float:
        """C2."""
        return self.clip_norm if self.feedback_clip_norm is None else self.feedback_clip_norm

    def plan(self, setting: Setting) -> Plan:
        """No proven release, one un-proven update per step; the plan's constant is sigma1."""
        plan = PublishedPlan([], setting.sampling, setting.relation, unproven=[Unproven("update")])
        return Plan(plan, self._noise_std(setting))

    def _noise_std(self, setting: Setting) -> float:
        sampling = setting.sampling
        if self.noise_multiplier is not None:
            return self.noise_multiplier * self.clip_norm / sampling.expected_size
        budget = setting.required_budget()
        if self.noise == "worst_case":
            largest = 1 / self._worst_case_multiplier(1.0, sampling, setting.relation)
            return math.sqrt(sampling.steps) / gaussian_mu(budget.epsilon, budget.delta) * largest
        return published_noise_std(budget.epsilon, budget.delta, **self._of_formula(sampling))

    def _of_formula(self, sampling: Sampling) -> dict[str, Any]:
        """What the paper's formula takes in addition to epsilon and delta, or to noise and delta."""
        # The theorem asks for C2 <= C / B, Algorithm 4 has C = C2.
        times = 1.0 if self.noise == "algorithm_4" else sampling.expected_size
        return {
            "clip_norm": self.clip_norm,
            "radius": self.feedback_radius * times,
            "population": sampling.population,
            "steps": sampling.steps,
        }

    def _worst_case_multiplier(self, noise_std: float, sampling: Sampling, relation: str) -> float:
        return worst_case_multiplier(
            noise_std,
            clip_norm=self.clip_norm,
            feedback_clip_norm=self.feedback_radius,
            expected_batch_size=sampling.expected_size,
            relation=relation,
        )

    def worst_case_multiplier(self, plan: Plan) -> float:
        """sigma1 over the largest change of one update given the earlier ones."""
        return self._worst_case_multiplier(plan.constants, plan.releases.sampling, plan.releases.relation)

    def claimed_epsilon(self, plan: Plan, delta: float) -> float | None:
        return claimed_epsilon(plan.constants, delta, **self._of_formula(plan.releases.sampling))

    def init(self, context: Context) -> State:
        return {"memory": {name: Private(value) for name, value in zeros_like(context.params).items()}}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        size, memory = context.sampling.expected_size, state["memory"]
        normalising = self.variant == "algorithm_4"
        rule = Normalise() if normalising else Abadi()
        draw = context.draw("batch")
        sums = draw.query(lambda rows, ids: clipped_and_plain_sums(rows, rule, self.clip_norm))
        feedback = clipped(memory, self.feedback_radius, normalised=normalising)
        # The feedback is private, since the memory is: body and feedback leave in one noised update.
        body, raw = sums["clipped"].value, sums["plain"].value
        update = {name: body[name] / size + feedback[name] for name in memory}
        estimate = release_unproven(
            context,
            draw,
            "update",
            update,
            context.plan.constants,
            hole=MEMORY_HOLE,
            worst_case_multiplier=self.worst_case_multiplier(context.plan),
        )
        return estimate, {"memory": {name: memory[name] + raw[name] / size - update[name] for name in memory}}


def clipped_and_plain_sums(rows: PrivateRows, rule: ClipRule, clip_norm: float) -> dict[str, Bounded]:
    """The clipped sum and the plain one, of the records whose gradient is finite."""
    return {"clipped": clip(rows, rule, clip_norm), "plain": plain_sum(rows)}


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


def claimed_epsilon(noise_std: float, delta: float, **of_formula: Any) -> float:
    """The epsilon that the paper claims for noise sigma1: `published_noise_std` solved for epsilon."""
    # The noise is inversely proportional to epsilon.
    return published_noise_std(1.0, delta, **of_formula) / noise_std


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
