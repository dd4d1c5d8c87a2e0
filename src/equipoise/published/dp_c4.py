"""DP-C4 and DP-C4+ as published: raw private thresholds, and the noise of Theorem 3. No guarantee.

    DP-C4     C_1 = min(C, c_1 ||mean of g_i(x) - g_i(w)||),    C_2 = min(C, c_2 ||mean of g_i(w)||)
    DP-C4+    C_1 = min(C, c_1 ||x - w||),    C_2 the same of the anchor before, C at first

C_1 of DP-C4 and C_2 of both are un-noised functions of private data: the scale of the noise reveals the
data, and one record rescales all clipped rows. They leave through the ledger's `disclose`, and the statement
says so.

**Theorem 3** puts noise N(0, (sigma_1 C_1)^2) and N(0, (sigma_2 C_2)^2) on *means* over |S| and |D| records,
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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from equipoise.methods.anchored import Anchors, NoiseFactor, NoiseSplit
from equipoise.methods.base import Context, DrawHandle, Parameters, Plan, Setting, State
from equipoise.methods.configuration import Positive
from equipoise.methods.dp_c4 import FLOOR, ClippedDifferences
from equipoise.privacy import Bounded, Private, PrivateRows, indicator, unbounded_sum
from equipoise.published.ledger import PublishedLedger, disclose


def published_noise_multipliers(
    epsilon: float,
    delta: float,
    *,
    steps: int,
    batch: float,
    anchor_batch: float,
    probability: float,
    takes_next: bool,
) -> tuple[float, float]:
    """(z_1, z_2) of Theorem 3 for a target (epsilon, delta).

    Args:
        epsilon, delta: what the theorem is to claim.
        steps: T.
        batch: |S|, the expected batch size.
        anchor_batch: |D|, the expected size of an anchor batch.
        probability: p, chance of a new anchor in a step; the inverse of the anchor period.
        takes_next: whether a new anchor is the iterate after the step (routines 3 and 4).

    Example:
        >>> given = dict(steps=1000, batch=64, anchor_batch=2000, probability=0.064)
        >>> [round(z, 3) for z in published_noise_multipliers(1.0, 1e-5, takes_next=False, **given)]
        [311.258, 875.166]
        >>> [round(z, 3) for z in published_noise_multipliers(1.0, 1e-5, takes_next=True, **given)]
        [301.173, 860.93]
    """
    theta = (anchor_batch / batch) ** 2
    squared = 4 * steps * (2 * math.log(1 / delta) + epsilon) / (batch * epsilon) ** 2
    share, stays = probability / theta, 1 - probability if takes_next else 1.0
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
    takes_next: bool,
) -> float:
    """The epsilon that Theorem 3's calculus gives for noise multipliers (z_1, z_2).

    With R alpha the total RDP, half of epsilon is R alpha and alpha = 1 + 2 log(1/delta) / epsilon, so that
    epsilon solves epsilon^2 = 2 R (epsilon + 2 log(1/delta)).

    Example:
        >>> round(claimed_epsilon(311.258, 875.166, 1e-5, steps=1000, probability=0.064, takes_next=False), 4)
        1.0
    """
    coupled = steps * (1 - probability if takes_next else 1.0)
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
    norm = float(disclose(context, torch.stack(squares).sum().sqrt() / records, hole))
    return norm if math.isfinite(norm) else math.inf


@dataclass(frozen=True, kw_only=True)
class RawThresholds(ClippedDifferences):
    """DP-C4 and DP-C4+ as published. Further arguments are those of `AnchoredMethod`.

    Args:
        clip_norm: C > 0, cap of both thresholds and the first anchor threshold of DP-C4+.
        coupled_scale: c_1 > 0, the coupled threshold over the distance, or over the mean difference.
        anchor_scale: c_2 > 0, the anchor threshold over the norm of the mean gradient.
        noise_multiplier: z_1, noise of the coupled sum over its threshold; Theorem 3's when both are None.
        anchor_noise_multiplier: z_2, noise of the anchor sum over its threshold.
    """

    ledger_class = PublishedLedger
    # Theorem 3 says how the budget is split; as a class variable it is no setting.
    split: ClassVar[NoiseSplit] = NoiseFactor()  # type: ignore[misc]

    coupled_scale: Positive = 1.0
    anchor_scale: Positive = 1.0

    def published_noise(self, setting: Setting, anchors: Anchors) -> tuple[float, float] | None:
        if setting.budget is None:
            return None
        return published_noise_multipliers(
            setting.budget.epsilon,
            setting.budget.delta,
            steps=setting.sampling.steps,
            batch=setting.sampling.expected_size,
            anchor_batch=anchors.anchor.expected_size,
            probability=1 / anchors.period,
            takes_next=self.schedule.takes_next,
        )

    def claimed_epsilon(self, plan: Plan, delta: float) -> float | None:
        """Theorem 3's epsilon for the planned noise (replace-one, whatever the relation)."""
        noise = {release.name: release.noise_multiplier for release in plan.releases.releases}
        return claimed_epsilon(
            noise.get("coupled", math.inf),
            noise["anchor"],
            delta,
            steps=plan.releases.sampling.steps,
            probability=1 / plan.constants.period,
            takes_next=self.schedule.takes_next,
        )

    def passes_over(self, draw: str) -> int:
        """A threshold from raw gradients takes them once more."""
        return super().passes_over(draw) * (2 if draw == "anchor" else 1)

    def _raw_anchor_threshold(self, context: Context, draw: DrawHandle, state: State) -> float:
        norm = disclosed_mean_norm(context, draw, (state["anchor"],), lambda rows: rows, ANCHOR_HOLE)
        return max(min(self.clip_norm, self.anchor_scale * norm), FLOOR)


class DPC4Plus(RawThresholds):
    """DP-C4+ as published: the coupled threshold from the distance, the anchor's from the anchor before."""

    def at_new_anchor(self, context: Context, draw: DrawHandle, state: State) -> State:
        following = self._raw_anchor_threshold(context, draw, state)
        thresholds = {"anchor_clip_norm": state["next_anchor_clip_norm"], "next_anchor_clip_norm": following}
        return {**state, **thresholds}

    def coupled_threshold(self, context: Context, draw: DrawHandle, state: State, distance: float) -> float:
        return max(min(self.clip_norm, self.coupled_scale * distance), FLOOR)


class DPC4(RawThresholds):
    """DP-C4 as published: both thresholds from the raw means that they bound."""

    def passes_over(self, draw: str) -> int:
        """Both thresholds take raw gradients once more."""
        return 4 if draw == "batch" else 2

    def at_new_anchor(self, context: Context, draw: DrawHandle, state: State) -> State:
        raw = self._raw_anchor_threshold(context, draw, state)
        return {**state, "anchor_clip_norm": raw, "next_anchor_clip_norm": raw}

    def coupled_threshold(self, context: Context, draw: DrawHandle, state: State, distance: float) -> float:
        at = (context.params, state["anchor"])
        norm = disclosed_mean_norm(context, draw, at, lambda x, w: x - w, COUPLED_HOLE)
        return max(min(self.clip_norm, self.coupled_scale * norm), FLOOR)
