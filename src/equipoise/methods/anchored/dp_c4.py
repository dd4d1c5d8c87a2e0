"""DP-C4 and DP-C4+: the difference to an anchor is clipped as a whole, and thresholds follow what they clip.

    h = (sum_S clip(g_i(x) - g_i(w), C_1) + N(0, (z_1 C_1)^2 I)) / B
    g = (sum_D clip(g_i(w), C_2)          + N(0, (z_2 C_2)^2 I)) / n_A,   released once an anchor
    x <- x - eta (h + g)

Source: the anonymous submission nw0pePP5qd at OpenReview, 2025 (a later version is listed for ICML 2026 as
"Eliminating Solution Bias in Differentially Private Optimization"). C_1 shrinks with ||x - w|| and C_2 with
the gradient at the anchor, so that noise and clipping error vanish where both do. They do when every record's
gradient vanishes at the optimum (interpolation), and in general they do not: see the documentation page.

**Library recipe, proven.** Every threshold is a function of released values (rules: `anchor_thresholds`).
Given all earlier releases, x, w, C_1 and C_2 are constants; a release is a Gaussian on a sum of rows of norm
at most its threshold, so the coupled releases are (q_1, z_1) events and the anchor releases (q_2, z_2) events
whatever the thresholds are, and a count released beside one is one more coordinate of the same Gaussian.

**As published, no guarantee.** C_1 of DP-C4 and C_2 of both are un-noised functions of private data: the
scale of the noise tells of the data, and one record rescales all clipped rows. They leave through the
ledger's `disclose`, and the statement says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from equipoise import _validate
from equipoise.methods.anchored.anchor_thresholds import (
    ANCHOR_RULES,
    COUPLED_RULES,
    FLOOR,
    RAW_RULES,
    Released,
    distance_between,
    next_anchor_threshold,
    next_factor,
    norm_of,
)
from equipoise.methods.anchored.anchored_method import AnchoredMethod
from equipoise.methods.base import Context, Parameters, Plan, Setting, State
from equipoise.methods.card import Card
from equipoise.methods.clip_rules import Abadi
from equipoise.methods.named_tensors import mean_of
from equipoise.methods.published.dp_c4_formulas import (
    ANCHOR_HOLE,
    COUPLED_HOLE,
    claimed_epsilon,
    disclosed_mean_norm,
    published_noise_multipliers,
)
from equipoise.methods.thresholds import ReleasedQuantile
from equipoise.privacy import PrivacyPlan
from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.bounds.clipping import clip
from equipoise.privacy.bounds.counts import centred_indicator, soft_indicator
from equipoise.privacy.rows import PrivateRows
from equipoise.privacy.sampling import Sampling

if TYPE_CHECKING:
    pass

__all__ = ["DPC4", "DPC4Plus"]


SOURCE = "DP-C4, anonymous submission nw0pePP5qd at OpenReview, 2025"


TRACKED_COUNT_NOISE = 0.1
"""Noise of the count beside the coupled sum, as a share of the expected batch."""


# How large the rounding of the two forward passes is follows from private activations: no threshold could be
# floored above it by public or released numbers.
ROUNDING = (
    "clipped differences of gradients are large beside the rounding of the two forward passes: in float32, "
    "where losses vanish to rounding and the two points are a few units in the last place apart, a search "
    "found sums that moved by up to 1.8 times the threshold; in float64 it found none above it"
)


class _DPC4(AnchoredMethod):
    """What DP-C4 and DP-C4+ share: everything but the rules that they take by default."""

    proven_rules: ClassVar[tuple[str, str]]
    published_rules: ClassVar[tuple[str, str]]

    def __init__(
        self,
        clip_norm: float = 1.0,
        *,
        recipe: Literal["library", "as_published"] = "library",
        coupled_scale: float = 1.0,
        anchor_scale: float = 1.0,
        coupled_rule: str | None = None,
        anchor_rule: str | None = None,
        routine: int = 2,
        anchor_period: float | None = None,
        anchor_batch_size: float | None = None,
        anchor_noise: Literal["once", "every_step"] = "once",
        quantile: float = 0.8,
        quantile_learning_rate: float = 3.0,
        count_noise: float = 0.05,
        shrink_limit: float = 0.5,
        min_anchor_clip_norm: float = 0.0,
        noise_multiplier: float | None = None,
        anchor_noise_multiplier: float | None = None,
        coupled_noise_factor: float | Literal["optimal"] = 1.15,
        threshold_ratio: float = 1.0,
    ) -> None:
        settings = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__(
            routine=routine,
            anchor_period=anchor_period,
            anchor_batch_size=anchor_batch_size,
            noise_multiplier=noise_multiplier,
            anchor_noise_multiplier=anchor_noise_multiplier,
            coupled_noise_factor=coupled_noise_factor,
            threshold_ratio=threshold_ratio,
            anchor_noise=anchor_noise,
        )
        _validate.one_of(("library", "as_published"), recipe=recipe)
        for name, value in (
            ("clip_norm", clip_norm),
            ("coupled_scale", coupled_scale),
            ("anchor_scale", anchor_scale),
        ):
            _validate.positive("a cap or a scale of a threshold", **{name: value})
        if not 0 < shrink_limit <= 1:
            raise ValueError(f"shrink_limit={shrink_limit!r}: it lies in (0, 1]; 1 never lets C_2 shrink")
        if not 0 <= min_anchor_clip_norm <= clip_norm:
            raise ValueError(
                f"min_anchor_clip_norm={min_anchor_clip_norm!r}: it lies between 0 and "
                f"clip_norm={clip_norm!r}"
            )
        self.recipe = recipe  # type: ignore[misc]
        rules = self.published_rules if recipe == "as_published" else self.proven_rules
        self.coupled_rule = coupled_rule or rules[0]
        self.anchor_rule = anchor_rule or rules[1]
        self._check_rules()
        self.clip_norm, self.coupled_scale, self.anchor_scale = clip_norm, coupled_scale, anchor_scale
        self.shrink_limit, self.min_anchor_clip_norm = shrink_limit, min_anchor_clip_norm
        self.quantile = ReleasedQuantile(
            initial=clip_norm,
            quantile=quantile,
            learning_rate=quantile_learning_rate,
            count_noise=count_noise,
            minimum=min(max(min_anchor_clip_norm, FLOOR), clip_norm),
            maximum=clip_norm,
        )
        self._settings = settings

    def _check_rules(self) -> None:
        for name, rule, known in (
            ("coupled_rule", self.coupled_rule, COUPLED_RULES),
            ("anchor_rule", self.anchor_rule, ANCHOR_RULES),
        ):
            _validate.one_of(known, **{name: rule})
            if rule in RAW_RULES and self.recipe != "as_published":
                raise ValueError(
                    f"{name}={rule!r} sets a threshold from raw private gradients, which no guarantee "
                    f'covers; give recipe="as_published" to run it all the same, or a rule without "raw"'
                )

    # ---- plan

    def max_bounds(self, steps: int) -> tuple[float, float]:
        """The cap C for both."""
        return self.clip_norm, self.clip_norm

    def counts(self, batch: float, anchor_batch: float) -> Mapping[str, float]:
        """2 sigma_b for the counts that the rules release."""
        out = {}
        if self.anchor_rule == "quantile":
            out["anchor"] = self.quantile.count_noise_multiplier(anchor_batch)
        if self.coupled_rule == "tracked":
            out["coupled"] = 2 * TRACKED_COUNT_NOISE * batch
        return out

    def published_noise(
        self, setting: Setting, anchor: Sampling, period: float
    ) -> tuple[float, float] | None:
        """Theorem 3's noise, under the recipe as published."""
        if self.recipe != "as_published" or setting.budget is None:
            return None
        return published_noise_multipliers(
            setting.budget.epsilon,
            setting.budget.delta,
            steps=setting.sampling.steps,
            batch=setting.sampling.expected_size,
            anchor_batch=anchor.expected_size,
            probability=1 / period,
            routine=self.routine,
        )

    def claimed_epsilon(self, plan: Plan, delta: float) -> float | None:
        """Theorem 3's epsilon for the planned noise (replace-one, whatever the relation), as published."""
        if self.recipe != "as_published":
            return None
        noise = {release.name: release.noise_multiplier for release in plan.releases.releases}
        return claimed_epsilon(
            noise.get("coupled", float("inf")),
            noise["anchor"],
            delta,
            steps=plan.releases.sampling.steps,
            probability=1 / plan.constants.period,
            routine=self.routine,
        )

    @classmethod
    def best_guarantee(cls, config: Mapping[str, Any]) -> str:
        """As the card has it, but for rules without raw thresholds under the recipe as published."""
        rules = zip(("coupled_rule", "anchor_rule"), cls.published_rules, strict=True)
        raw = any((config.get(name) or default) in RAW_RULES for name, default in rules)
        return super().best_guarantee(config) if raw else "proven"

    def passes_over(self, draw: str) -> int:
        """A threshold from raw gradients takes them once more."""
        raw = {self.coupled_rule if draw == "batch" else self.anchor_rule} & set(RAW_RULES)
        return super().passes_over(draw) * (2 if raw else 1)

    # ---- steps

    def init(self, context: Context) -> State:
        """The first anchor, its threshold C, and a coupled factor of 1."""
        cap = float(self.clip_norm)
        learned = {"anchor_clip_norm": cap, "next_anchor_clip_norm": cap, "coupled_factor": 1.0}
        return super().init(context) | learned

    def release_anchor(self, context: Context, state: State, new: bool) -> State:
        """g at the anchor, its count, and the threshold of the next anchor."""
        draw, at = context.draw("anchor"), (state["anchor"],)
        clip_norm = following = state["next_anchor_clip_norm"] if new else state["anchor_clip_norm"]
        if new and self.anchor_rule in RAW_RULES:
            raw = disclosed_mean_norm(context, draw, at, lambda rows: rows, ANCHOR_HOLE)
            following = max(min(self.clip_norm, self.anchor_scale * raw), FLOOR)
            if self.anchor_rule == "raw_current":
                clip_norm = following
        count = new and self.anchor_rule == "quantile"

        def sums(rows: PrivateRows, ids: Tensor) -> dict[str, Bounded]:
            return _clipped(rows, clip_norm, "anchor", count)

        released = context.ledger.release(draw, draw.query(sums, at=at))
        size = context.plan.constants.anchor.expected_size
        gradient = mean_of(released["anchor"], size)
        if not new:
            return {**state, "gradient": gradient}
        if self.anchor_rule not in RAW_RULES:
            following = next_anchor_threshold(
                self.anchor_rule,
                clip_norm,
                _released(context.plan.releases, "anchor", gradient, clip_norm, size, released),
                cap=self.clip_norm,
                floor=self.min_anchor_clip_norm,
                scale=self.anchor_scale,
                shrink_limit=self.shrink_limit,
                quantile=self.quantile,
            )
        thresholds = {"anchor_clip_norm": clip_norm, "next_anchor_clip_norm": following}
        return {**state, "gradient": gradient, **thresholds}

    def release_coupled(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """h, and what its release teaches the factor of the coupled threshold."""
        draw, at = context.draw("batch"), (context.params, state["anchor"])
        distance, factor = distance_between(context.params, state["anchor"]), state["coupled_factor"]
        if self.coupled_rule == "raw":
            size = disclosed_mean_norm(context, draw, at, lambda x, w: x - w, COUPLED_HOLE)
        else:
            size = factor * distance
        clip_norm = max(min(self.clip_norm, self.coupled_scale * size), FLOOR)
        count = self.coupled_rule == "tracked"

        def sums(at_x: PrivateRows, at_w: PrivateRows, ids: Tensor) -> dict[str, Bounded]:
            return _clipped(at_x - at_w, clip_norm, "coupled", count)

        released = context.ledger.release(draw, draw.query(sums, at=at))
        batch = context.sampling.expected_size
        coupled = mean_of(released["coupled"], batch)
        if self.coupled_rule in ("curvature", "tracked"):
            found = _released(context.plan.releases, "coupled", coupled, clip_norm, batch, released)
            factor = next_factor(self.coupled_rule, factor, distance, found)
        return coupled, {**state, "coupled_factor": factor}

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        """That differences do not drown in rounding, of which no public number tells."""
        return (ROUNDING, *super().assumptions(plan))

    def config(self) -> dict[str, Any]:
        """The settings, as plain values."""
        return {"name": self.name, **self._settings}


class DPC4Plus(_DPC4):
    """DP-C4+: the coupled threshold follows the distance to the anchor.

    Args:
        clip_norm: C > 0, cap of both thresholds and the first anchor threshold.
        recipe: "library" is proven; "as_published" takes raw thresholds and Theorem 3's noise, and has no
            guarantee.
        coupled_scale: c_1 > 0, the coupled threshold over the distance: a guess of the losses' smoothness.
        anchor_scale: c_2 > 0, the anchor threshold over the norm of the mean gradient (rules "released" and
            raw).
        coupled_rule: "dist" (default), "curvature", "tracked"; "raw" as published alone.
        anchor_rule: "quantile" (default), "released", "fixed"; "raw_current" and "raw_prev" as published
            alone.
        routine: 1 to 4, when the anchor moves: 2 takes the iterate before every anchor_period-th step.
        anchor_period: m >= 1 steps between anchors; half the anchor batch over the batch by default.
        anchor_batch_size: n_A, expected records of an anchor gradient; 16 batches by default, at most all.
        anchor_noise: "once" noises an anchor gradient once; "every_step" releases, and pays for, a fresh one
            every step.
        quantile, quantile_learning_rate, count_noise: of rule "quantile": the wanted share of anchor rows
            inside, the rate of the geometric update, the noise of the count as a share of n_A.
        shrink_limit: of rule "released": the least ratio of consecutive anchor thresholds, in (0, 1].
        min_anchor_clip_norm: floor of the anchor threshold.
        noise_multiplier: z_1, noise of the coupled sum over its threshold; calibrated when None.
        anchor_noise_multiplier: z_2, noise of the anchor sum over its threshold; calibrated when None.
        coupled_noise_factor: z_1 over DP-SGD's multiplier for the same budget; "optimal" scans for
            `threshold_ratio`.
        threshold_ratio: expected C_1^2 / C_2^2, for "optimal".

    Example:
        >>> from equipoise.privacy import Budget, Poisson
        >>> setting = Setting(sampling=Poisson(64, 2000, 100), budget=Budget(4.0, 1e-5))
        >>> plan = DPC4Plus(clip_norm=0.5).plan(setting).releases
        >>> [release.name for release in plan.releases]
        ['coupled', 'anchor', 'anchor_count']
    """

    name: ClassVar[str] = "dp-c4-plus"
    card: ClassVar[Card] = Card(
        summary="Clips differences to an old iterate, with thresholds that shrink as training converges.",
        claim="Claimed to reach the optimum in general. It does where every record's gradient vanishes there "
        "(interpolation), with this proven recipe too; elsewhere it stalls at a point that clipping sets.",
        source=SOURCE,
        guarantee="proven",
        published_guarantee="none",
        cost="four passes over a batch a step at the default anchors; one copy of the parameters, one "
        "gradient, and a second set of factors a micro-batch",
        use_when="The model can fit every record, and the budget allows many steps.",
        avoid_when="Labels are noisy, or compute is short: DP-SGD takes three to four times the steps.",
    )
    proven_rules: ClassVar[tuple[str, str]] = ("dist", "quantile")
    published_rules: ClassVar[tuple[str, str]] = ("dist", "raw_prev")


class DPC4(_DPC4):
    """DP-C4: the coupled threshold follows the size of the coupled term itself.

    In the library's recipe that size is predicted from released coupled terms (rule "curvature"): its ratio
    to the distance is learned, where DP-C4+ takes a constant. As published it is the raw norm of the batch's
    mean difference. All arguments are those of `DPC4Plus`.

    Example:
        >>> DPC4().coupled_rule, DPC4(recipe="as_published").coupled_rule
        ('curvature', 'raw')
    """

    name: ClassVar[str] = "dp-c4"
    card: ClassVar[Card] = Card(
        summary="As DP-C4+, but the coupled threshold follows the size of the coupled term itself.",
        claim="Claimed to reach the optimum in general; as DP-C4+, it does under interpolation. As published "
        "its thresholds betray the data, most of all near convergence; here they come from releases.",
        source=SOURCE,
        guarantee="proven",
        published_guarantee="none",
        cost="as DP-C4+; as published one more pass over the batch and the anchor batch",
        use_when="As DP-C4+, where no guess of the losses' smoothness is at hand.",
        avoid_when="As DP-C4+.",
    )
    proven_rules: ClassVar[tuple[str, str]] = ("curvature", "quantile")
    published_rules: ClassVar[tuple[str, str]] = ("raw", "raw_current")


def _clipped(rows: PrivateRows, clip_norm: float, name: str, count: bool) -> dict[str, Bounded]:
    """The clipped sum of the rows, with the centred count of the rows inside where it is wanted."""
    sums = {name: clip(rows, Abadi(), clip_norm)}
    if count:
        sums[f"{name}_count"] = centred_indicator(soft_indicator(rows.row_norms(), clip_norm, "below"))
    return sums


def _released(
    plan: PrivacyPlan,
    name: str,
    mean: Parameters,
    clip_norm: float,
    size: float,
    released: Mapping[str, Mapping[str, Tensor]],
) -> Released:
    """A release as the threshold rules see it."""
    counts = [float(value) for value in released.get(f"{name}_count", {}).values()]
    return Released(
        norm=norm_of(mean),
        num_parameters=sum(value.numel() for value in mean.values()),
        noise_std=plan[name].noise_multiplier * clip_norm / size,
        count=counts[0] if counts else None,
        expected_size=size,
    )
