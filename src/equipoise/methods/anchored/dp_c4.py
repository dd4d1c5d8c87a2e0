"""DP-C4 and DP-C4+: the difference to an anchor is clipped as a whole, and thresholds follow what they clip.

    h = (sum_S clip(g_i(x) - g_i(w), C_1) + N(0, (z_1 C_1)^2 I)) / B
    g = (sum_D clip(g_i(w), C_2)          + N(0, (z_2 C_2)^2 I)) / n_A,   released once per anchor
    x <- x - eta (h + g)

Source: the anonymous submission nw0pePP5qd at OpenReview, 2025 (a later version is listed for ICML 2026 as
"Eliminating Solution Bias in Differentially Private Optimization"). C_1 shrinks with ||x - w|| and C_2 with
the gradient at the anchor, so that noise and clipping error vanish where both do. They do when every record's
gradient vanishes at the optimum (interpolation), and in general they do not: see the documentation page.

Every threshold is a function of released values (rules: `anchor_thresholds`). Given all earlier releases, x,
w, C_1 and C_2 are constants; a release is a Gaussian on a sum of rows of norm at most its threshold, so the
coupled releases are (q_1, z_1) events and the anchor releases (q_2, z_2) events whatever the thresholds are,
and a count released with one is one more coordinate of the same Gaussian.

As published, C_1 of DP-C4 and C_2 of both are raw private numbers: `equipoise.published.DPC4`, `.DPC4Plus`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from equipoise import _validate
from equipoise.methods.anchored.anchor_thresholds import (
    AnchorRule,
    CoupledRule,
    Curvature,
    Distance,
    Quantile,
    Released,
    distance_between,
    public_norm,
)
from equipoise.methods.anchored.anchored_method import AnchoredMethod
from equipoise.methods.base import Context, DrawHandle, Parameters, Plan, State
from equipoise.methods.card import Card
from equipoise.methods.clip_rules import Abadi
from equipoise.methods.named_tensors import mean_of
from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.bounds.clipping import clip
from equipoise.privacy.bounds.counts import centred_indicator, soft_indicator
from equipoise.privacy.rows import PrivateRows

__all__ = ["DPC4", "ROUNDING_ASSUMPTION", "SOURCE", "ClippedDifferences", "DPC4Plus"]


SOURCE = "DP-C4, anonymous submission nw0pePP5qd at OpenReview, 2025"


# How large the rounding of the two forward passes is follows from private activations: no threshold could be
# floored above it by public or released numbers.
ROUNDING_ASSUMPTION = (
    "clipped differences of gradients are large compared with the rounding of the two forward passes: in "
    "float32, where losses vanish to rounding and the two points are a few units in the last place apart, a "
    "search found sums that moved by up to 1.8 times the threshold; in float64 it found none above it"
)


@dataclass(frozen=True, kw_only=True)
class ClippedDifferences(AnchoredMethod):
    """What DP-C4 and DP-C4+ share, in the library and as published: sums clipped at two thresholds.

    The cap of both thresholds is C = `clip_norm`, which is also the first anchor threshold of DP-C4+.
    """

    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.positive("a cap of a threshold", clip_norm=self.clip_norm)

    # ---- how the thresholds follow

    @abstractmethod
    def at_new_anchor(self, context: Context, draw: DrawHandle, state: State) -> State:
        """The state with C_2 of an anchor whose gradient is about to be released."""

    @abstractmethod
    def coupled_threshold(self, context: Context, draw: DrawHandle, state: State, distance: float) -> float:
        """C_1 at the distance ||x - w||."""

    def learn_anchor(self, state: State, released: Released) -> State:
        """The state after the release of a new anchor's gradient."""
        return state

    def learn_coupled(self, state: State, distance: float, released: Released) -> State:
        """The state after the release of a coupled term at this distance."""
        return state

    # ---- the steps

    def max_bounds(self, steps: int) -> tuple[float, float]:
        return self.clip_norm, self.clip_norm

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        return (ROUNDING_ASSUMPTION, *super().assumptions(plan))

    def init(self, context: Context) -> State:
        cap = float(self.clip_norm)
        return super().init(context) | {"anchor_clip_norm": cap, "next_anchor_clip_norm": cap}

    def release_anchor(self, context: Context, state: State, new: bool) -> State:
        draw = context.draw("anchor")
        if new:
            state = self.at_new_anchor(context, draw, state)
        clip_norm, size = state["anchor_clip_norm"], context.plan.constants.anchor.expected_size
        # A count is released once per anchor, however often its gradient is.
        count = new and "anchor" in self.counts(context.sampling.expected_size, size)

        def sums(rows: PrivateRows, ids: Tensor) -> dict[str, Bounded]:
            return _clipped(rows, clip_norm, "anchor", count)

        sent = context.ledger.release(draw, draw.query(sums, at=(state["anchor"],)))
        state = {**state, "gradient": mean_of(sent["anchor"], size)}
        if not new:
            return state
        found = _released(context.plan, "anchor", state["gradient"], clip_norm, size, sent)
        return self.learn_anchor(state, found)

    def release_coupled(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        draw, at = context.draw("batch"), (context.params, state["anchor"])
        distance, size = distance_between(*at), context.sampling.expected_size
        clip_norm = self.coupled_threshold(context, draw, state, distance)
        count = "coupled" in self.counts(size, context.plan.constants.anchor.expected_size)

        def sums(at_x: PrivateRows, at_w: PrivateRows, ids: Tensor) -> dict[str, Bounded]:
            return _clipped(at_x - at_w, clip_norm, "coupled", count)

        sent = context.ledger.release(draw, draw.query(sums, at=at))
        coupled = mean_of(sent["coupled"], size)
        found = _released(context.plan, "coupled", coupled, clip_norm, size, sent)
        return coupled, self.learn_coupled(state, distance, found)


@dataclass(frozen=True, kw_only=True)
class ReleasedThresholds(ClippedDifferences):
    """DP-C4 and DP-C4+ with thresholds from what was released. Further arguments as for `AnchoredMethod`.

    Args:
        clip_norm: C > 0, cap of both thresholds and the first anchor threshold.
        coupled: sets the coupled threshold: `Distance`, `Curvature` or `Tracked`.
        anchor: sets the anchor threshold: `Quantile` (default), `ReleasedNorm` or `Constant`.
    """

    coupled: CoupledRule = Distance()
    anchor: AnchorRule = Quantile()

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.instance(CoupledRule, "Curvature()", coupled=self.coupled)
        _validate.instance(AnchorRule, "Quantile(0.8)", anchor=self.anchor)
        self.anchor.check(self.clip_norm)

    def counts(self, batch: float, anchor_batch: float) -> Mapping[str, float]:
        out = {}
        at_anchor = self.anchor.count_noise_multiplier(anchor_batch)
        if at_anchor is not None:
            out["anchor"] = at_anchor
        if self.coupled.count_noise is not None:
            out["coupled"] = 2 * self.coupled.count_noise * batch
        return out

    def init(self, context: Context) -> State:
        return super().init(context) | {"coupled_factor": 1.0}

    def at_new_anchor(self, context: Context, draw: DrawHandle, state: State) -> State:
        return {**state, "anchor_clip_norm": state["next_anchor_clip_norm"]}

    def coupled_threshold(self, context: Context, draw: DrawHandle, state: State, distance: float) -> float:
        return self.coupled.threshold(self.clip_norm, state["coupled_factor"], distance)

    def learn_anchor(self, state: State, released: Released) -> State:
        following = self.anchor.following(state["anchor_clip_norm"], released, self.clip_norm)
        return {**state, "next_anchor_clip_norm": following}

    def learn_coupled(self, state: State, distance: float, released: Released) -> State:
        factor = self.coupled.next_factor(state["coupled_factor"], distance, released)
        return {**state, "coupled_factor": factor}


@dataclass(frozen=True, kw_only=True)
class DPC4Plus(ReleasedThresholds):
    """DP-C4+: the coupled threshold follows the distance to the anchor. Arguments of `ReleasedThresholds`.

    Example:
        >>> from equipoise.privacy import Budget, Poisson
        >>> from equipoise.methods.base import Setting
        >>> setting = Setting(sampling=Poisson(64, 2000, 100), budget=Budget(4.0, 1e-5))
        >>> plan = DPC4Plus(clip_norm=0.5).plan(setting).releases
        >>> [release.name for release in plan.releases]
        ['coupled', 'anchor', 'anchor_count']
    """

    name: ClassVar[str] = "dp-c4-plus"
    split_models: ClassVar[frozenset[str]] = frozenset({"fully_shard", "tensor parallel"})
    card: ClassVar[Card] = Card(
        summary="Clips differences to an old iterate, with thresholds that shrink as training converges.",
        claim="Claimed to reach the optimum in general. It does where every record's gradient vanishes there "
        "(interpolation), with this proven recipe too; elsewhere it stalls at a point that clipping sets.",
        source=SOURCE,
        guarantee="proven",
        cost="four gradients per drawn record and step at the default anchors; one copy of the parameters, "
        "one gradient, and a second set of factors a micro-batch",
        use_when="The model can fit every record, and the budget allows many steps.",
        avoid_when="Labels are noisy, or compute is short: DP-SGD takes three to four times the steps.",
    )


@dataclass(frozen=True, kw_only=True)
class DPC4(ReleasedThresholds):
    """DP-C4: the coupled threshold follows the size of the coupled term itself.

    That size is predicted from released coupled terms (`Curvature`): its ratio to the distance is learned,
    where DP-C4+ takes a constant. Arguments of `ReleasedThresholds`.

    Example:
        >>> DPC4().coupled
        Curvature(scale=1.0)
    """

    name: ClassVar[str] = "dp-c4"
    split_models: ClassVar[frozenset[str]] = frozenset({"fully_shard", "tensor parallel"})
    card: ClassVar[Card] = Card(
        summary="Clips differences to an old iterate at a threshold that follows their own released size.",
        claim="Claimed to reach the optimum in general. It does where every record's gradient vanishes there "
        "(interpolation), with this proven recipe too; elsewhere it stalls at a point that clipping sets.",
        source=SOURCE,
        guarantee="proven",
        cost="four gradients per drawn record and step at the default anchors; one copy of the parameters, "
        "one gradient, and a second set of factors a micro-batch",
        use_when="The model can fit every record, the budget allows many steps, and no guess of the losses' "
        "smoothness is at hand.",
        avoid_when="Labels are noisy, or compute is short: DP-SGD takes three to four times the steps.",
    )

    coupled: CoupledRule = Curvature()


def _clipped(rows: PrivateRows, clip_norm: float, name: str, count: bool) -> dict[str, Bounded]:
    """The clipped sum of the rows, with the centred count of the rows inside where it is wanted."""
    sums = {name: clip(rows, Abadi(), clip_norm)}
    if count:
        sums[f"{name}_count"] = centred_indicator(soft_indicator(rows.row_norms(), clip_norm, "below"))
    return sums


def _released(
    plan: Plan,
    name: str,
    mean: Parameters,
    clip_norm: float,
    size: float,
    sent: Mapping[str, Mapping[str, Tensor]],
) -> Released:
    """A release as the threshold rules see it."""
    counts = [float(value) for value in sent.get(f"{name}_count", {}).values()]
    return Released(
        norm=public_norm(mean),
        num_parameters=sum(value.numel() for value in mean.values()),
        noise_std=plan.releases[name].noise_multiplier * clip_norm / size,
        count=counts[0] if counts else None,
        expected_size=size,
    )
