"""DP-C4, DP-C4+ and DP-SVRG as one paper prints them, in Algorithms 3, 4 and 2, with Theorem 3's noise.

    DP-C4     C_1 = min(C, c_1 ||mean of g_i(x) - g_i(w)||),    C_2 = min(C, c_2 ||mean of g_i(w)||)
    DP-C4+    C_1 = min(C, c_1 ||x - w||),    C_2 = min(C, c_2 ||mean of g_i(w^{k-1})||), C in the first step

**To the letter** are these defaults: the anchor moves by routine 1; the anchor gradient is that of all
records, and gets new noise in every step (line 10). `schedule`, `anchor_batch_size` and `shift` give what the
text and the experiments have instead: the other routines, one noise per anchor, a drawn anchor batch. c_1,
c_2 and C may be schedules, as the remarks on Theorems 1 and 2 want c_2. Not to the letter:

- means of clipped rows divide by the expected size of a drawn batch, which is the realised one for draws of a
  fixed size; thresholds (lines 6 and 7) by the realised size;
- where x and w are one point by the schedule, nothing coupled is released: of DP-C4(+) it would be zero with
  zero noise; Algorithm 2 prints two noises there, and Appendix D leaves them out;
- thresholds have a floor of 1e-30;
- Algorithm 2 noises every record's gradient, here the means, as Appendix D and Tables 3 and 4 count; a
  record's gradient at w has there one noise in two sums, here two.

`tests/methods/test_published_boxes_dp_c4.py` holds the classes to the boxes.

**No guarantee** for DP-C4(+). C_1 of DP-C4 and C_2 of both are un-noised functions of private data: the
scale of the noise reveals the data, and one record rescales all clipped rows. They leave through the ledger's
`disclose`, and the statement says so.

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

DP-SVRG has constant thresholds and three noises. Tables 3 and 4 give the least sum of their squares, which
is that of the formulas above with p/theta doubled (routines 1, 2) or 1 - p doubled (3, 4); the first part is
split between the two noises of the pair, which is our reading.

The theorem does not cover thresholds that are raw private numbers, which the algorithms use; T p is the mean
of a random count and leaves out the first anchor. What comes out here is the paper's figure, not a guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from equipoise.methods import anchored
from equipoise.methods.anchored import AnchoredMethod, Anchors, AtRandom, NoiseFactor, Renewal
from equipoise.methods.base import Context, DrawHandle, Parameters, Plan, Setting, State
from equipoise.methods.clip_rules import Abadi
from equipoise.methods.configuration import Positive
from equipoise.methods.dp_c4 import FLOOR, ClippedDifferences
from equipoise.methods.named_tensors import mean_of
from equipoise.methods.thresholds import ByStep, at_step
from equipoise.privacy import Bounded, Private, PrivateRows, Sampling, clip, indicator, unbounded_sum
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
    svrg: bool = False,
) -> tuple[float, float]:
    """(z_1, z_2) of Theorem 3 for a target (epsilon, delta).

    Args:
        epsilon, delta: what the theorem is to claim.
        steps: T.
        batch: |S|, the expected batch size.
        anchor_batch: |D|, the expected size of an anchor batch.
        probability: p, chance of a new anchor in a step; the inverse of the anchor period.
        takes_next: whether a new anchor is the iterate after the step (routines 3 and 4).
        svrg: of Tables 3 and 4 for DP-SVRG; z_1 is that of each of the pair.

    Example:
        >>> given = dict(steps=1000, batch=64, anchor_batch=2000, probability=0.064)
        >>> [round(z, 3) for z in published_noise_multipliers(1.0, 1e-5, takes_next=False, **given)]
        [311.258, 875.166]
        >>> [round(z, 3) for z in published_noise_multipliers(1.0, 1e-5, takes_next=True, **given)]
        [301.173, 860.93]
    """
    theta = (anchor_batch / batch) ** 2
    squared = 4 * steps * (2 * math.log(1 / delta) + epsilon) / (batch * epsilon) ** 2
    share, stays = _shares(probability, theta, takes_next, svrg)
    cross = math.sqrt(share * stays)
    # With every step at an anchor (p = 1, routines 3 and 4) no coupled term is left to be noised.
    coupled = max((stays + cross) * squared, 1e-12) / (2 if svrg else 1)
    return batch * math.sqrt(coupled), anchor_batch * math.sqrt((share + cross) * squared)


def _shares(probability: float, theta: float, takes_next: bool, svrg: bool) -> tuple[float, float]:
    """What stands under the roots of the least sum of squares: (sqrt(share) + sqrt(stays))^2 sigma^2."""
    share, stays = probability / theta, 1 - probability if takes_next else 1.0
    if svrg:
        return (share, 2 * stays) if takes_next else (2 * share, stays)
    return share, stays


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
class AsPrinted(AnchoredMethod):
    """What the three boxes share. Further arguments are those of `AnchoredMethod`.

    Args:
        clip_norm: C > 0, cap of both thresholds and the first anchor threshold of DP-C4+.
        schedule: routine 1 with new noise in every step by default.
        anchor_batch_size: expected records of an anchor gradient; all by default.
        noise_multiplier: z_1, noise of the coupled sum over its threshold; Theorem 3's when both are None.
        anchor_noise_multiplier: z_2, noise of the anchor sum over its threshold.
    """

    # Theorem 3 says how the budget is split; as a class variable it is no setting.
    split: ClassVar[NoiseFactor] = NoiseFactor()  # type: ignore[misc]
    schedule: Renewal = AtRandom(fresh_noise=True)

    def anchor_size(self, sampling: Sampling) -> float:
        return super().anchor_size(sampling) if self.anchor_batch_size else float(sampling.population)

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
            svrg=isinstance(self, DPSVRG),
        )


@dataclass(frozen=True, kw_only=True)
class RawThresholds(AsPrinted, ClippedDifferences):
    """DP-C4 and DP-C4+ as published. Further arguments are those of `AsPrinted`.

    Args:
        coupled_scale: c_1 > 0, the coupled threshold over the distance, or over the mean difference; a number
            or a schedule.
        anchor_scale: c_2 > 0, the anchor threshold over the norm of the mean gradient; a number or a
            schedule.
    """

    ledger_class = PublishedLedger

    coupled_scale: Positive | ByStep = 1.0
    anchor_scale: Positive | ByStep = 1.0

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

    @property
    def scales(self) -> tuple[object, ...]:
        return self.coupled_scale, self.anchor_scale

    def passes_over(self, draw: str) -> int:
        """A threshold from raw gradients takes them once more, at a new anchor."""
        return super().passes_over(draw) * (2 if draw == "anchor" else 1)

    def init(self, context: Context) -> State:
        """Line 3 of Algorithm 4: before the first anchor there is a norm so large that C_2 is C."""
        return super().init(context) | {"norm": math.inf, "next_norm": math.inf}

    def _with_norms(self, context: Context, state: State, norm: float, following: float) -> State:
        """The state with C_2 = min(C, c_2 norm), and the norm that the next step or anchor may take."""
        found = self._threshold(context, self.anchor_scale, norm)
        return {**state, "anchor_clip_norm": found, "norm": norm, "next_norm": following}

    def _threshold(self, context: Context, scale: float | ByStep, size: float) -> float:
        return max(min(self.clip_norm_at(context.step), at_step(scale, context.step) * size), FLOOR)


def raw_anchor_norm(context: Context, draw: DrawHandle, state: State) -> float:
    """||mean of g_i(w)||, as it is."""
    return disclosed_mean_norm(context, draw, (state["anchor"],), lambda rows: rows, ANCHOR_HOLE)


@dataclass(frozen=True, kw_only=True)
class DPC4Plus(RawThresholds):
    """DP-C4+, Algorithm 4: the coupled threshold from the distance, the anchor's from w^{k-1}.

    Args:
        shift: `one_step`, line 7 as printed: w^{k-1} is the anchor that was in force one step earlier, which
            is the present one from the second step after a change on. `one_anchor`: the anchor before the
            present one, until the next change. They are one where an anchor gradient is noised once.
    """

    shift: Literal["one_step", "one_anchor"] = "one_step"

    def at_anchor(self, context: Context, draw: DrawHandle, state: State, new: bool) -> State:
        norm = state["next_norm"] if new or self.shift == "one_step" else state["norm"]
        following = raw_anchor_norm(context, draw, state) if new else state["next_norm"]
        return self._with_norms(context, state, norm, following)

    def coupled_threshold(self, context: Context, draw: DrawHandle, state: State, distance: float) -> float:
        return self._threshold(context, self.coupled_scale, distance)


class DPC4(RawThresholds):
    """DP-C4, Algorithm 3: both thresholds from the raw means that they bound."""

    def passes_over(self, draw: str) -> int:
        """Both thresholds take raw gradients once more."""
        return 4 if draw == "batch" else 2

    def at_anchor(self, context: Context, draw: DrawHandle, state: State, new: bool) -> State:
        norm = raw_anchor_norm(context, draw, state) if new else state["norm"]
        return self._with_norms(context, state, norm, norm)

    def coupled_threshold(self, context: Context, draw: DrawHandle, state: State, distance: float) -> float:
        at = (context.params, state["anchor"])
        norm = disclosed_mean_norm(context, draw, at, lambda x, w: x - w, COUPLED_HOLE)
        return self._threshold(context, self.coupled_scale, norm)


class DPSVRG(AsPrinted, anchored.DPSVRG):
    """DP-SVRG, Algorithm 2: three clipped sums with a noise each. Arguments of `AsPrinted`.

        x <- x - eta (mean_S [clip(g_i(x), C)] + n_1 - mean_S [clip(g_i(w), C)] + n_2
                      + mean_D [clip(g_i(w), C)] + n_3)

    The box noises every record's gradient, the appendix the means, as Tables 3 and 4 count; here it is the
    means. The noise of the box is `noise_multiplier` = sigma sqrt(|S|).

    Guarantee: that of `AnchoredMethod`, with two coupled releases of bound C on each draw.
    """

    coupled_releases: ClassVar[tuple[str, ...]] = ("at_x", "at_w")

    def max_bounds(self, steps: int) -> tuple[float, float]:
        upper = self.threshold.upper(steps)
        return upper, upper

    def claimed_epsilon(self, plan: Plan, delta: float) -> float | None:
        """The epsilon for which Tables 3 and 4 have the planned sum of squares."""
        noise = {release.name: release.noise_multiplier for release in plan.releases.releases}
        anchors, sampling = plan.constants, plan.releases.sampling
        sizes = sampling.expected_size, anchors.anchor.expected_size
        total = 2 * (noise.get("at_x", 0.0) / sizes[0]) ** 2 + (noise["anchor"] / sizes[1]) ** 2
        shares = _shares(1 / anchors.period, (sizes[1] / sizes[0]) ** 2, self.schedule.takes_next, svrg=True)
        of_dp_sgd = sizes[0] * math.sqrt(total) / sum(map(math.sqrt, shares))
        return claimed_epsilon(
            of_dp_sgd, math.inf, delta, steps=sampling.steps, probability=0.0, takes_next=False
        )

    def release_coupled(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        clip_norm, draw = self.clip_norm_at(context.step), context.draw("batch")
        sums = draw.query(
            lambda x, w, ids: {"at_x": clip(x, Abadi(), clip_norm), "at_w": clip(w, Abadi(), clip_norm)},
            at=(context.params, state["anchor"]),
        )
        released, size = context.ledger.release(draw, sums), context.sampling.expected_size
        here, there = (mean_of(released[name], size) for name in self.coupled_releases)
        return {name: value - there[name] for name, value in here.items()}, state
