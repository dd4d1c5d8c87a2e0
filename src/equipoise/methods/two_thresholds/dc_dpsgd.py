"""DC-DPSGD: large gradients ("tail") and small ones ("body") are clipped at two thresholds c_1 > c_2.

    c_i = c_2 + t_i (c_1 - c_2),     h_i = g_i min(1, c_i / ||g_i||),     t_i = 1[score_i > tau]
    estimate = (sum_i h_i + N(0, (z c_1)^2 I)) / B

Source: Sha et al., "DC-DPSGD" (ICLR 2025 submission, arXiv 2405.17529). The variants of the library:

==============  ======================================  ==============  =================================
variant         tail                                    released sum    its bound (noise is z times it)
==============  ======================================  ==============  =================================
`per_sample`    score_i above tau                       sum_i h_i       c_1
`two_channel`   the same                                tail and body   c_1 and c_2, as one release
`joint_topk`    the top floor(p |batch|) by score       sum_i h_i       2 c_1 - c_2
==============  ======================================  ==============  =================================

tau is a public number, or follows the tail fraction p through a released count m = sum_i t_i +
N(0, sigma_b^2), one more coordinate of the same Gaussian query:

    tau <- tau exp(clip(0.3 (m / B - p) / max(p, 0.02), -0.9, 0.9)).

The step 1[score > tau] is a ramp from 0.95 tau to 1.05 tau (`privacy.counting.soft_indicator`), since a norm
rounds differently in batches of different sizes: a record more could otherwise flip every label within a unit
in the last place of tau. Lots are exact and keep the step. The top share has an order where a ramp would be
needed; that no scores are so close is an assumption, which the statement names.

No label leaves the private side. With c_1 and the noise of DP-SGD(c_1), the method is DP-SGD(c_1) with
weights in [c_2 / c_1, 1] on the body: it weighs records anew, it does not lower the noise.

`recipe="as_published"` has the variants "alg1" and "code": see `dc_published`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from equipoise import _validate
from equipoise.gradients.subspaces.seeded import SeededSubspace
from equipoise.methods.base import (
    Context,
    DrawHandle,
    Method,
    Parameters,
    Plan,
    Setting,
    State,
)
from equipoise.methods.card import Card
from equipoise.methods.clip_rules import ClipRule, resolve_rule
from equipoise.methods.named_tensors import mean_of
from equipoise.methods.published.dc_dpsgd_formulas import (
    claimed,
    code_step,
    printed_multiplier,
    share_multipliers,
)
from equipoise.methods.two_thresholds.scores import (
    Signs,
    Trace,
    null_threshold,
    record_normals,
    record_uniforms,
    sub_weibull,
)
from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.bounds.counts import capped, soft_indicator
from equipoise.privacy.bounds.two_thresholds import clip_channels, clip_either, clip_selected, top_share
from equipoise.privacy.mechanisms import Gaussian
from equipoise.privacy.plan import PrivacyPlan, Release, Unproven
from equipoise.privacy.private import Private
from equipoise.privacy.rows import PrivateRows

if TYPE_CHECKING:
    pass

__all__ = ["DCDPSGD"]


Score = Literal["norm", "trace", "trace_abs", "random"]


Scorer = Callable[[PrivateRows, Private], Private]


VARIANTS = {"library": ("per_sample", "joint_topk", "two_channel"), "as_published": ("alg1", "code")}


_SCORES = ("norm", "trace", "trace_abs", "random")


_TRACES = ("trace", "trace_abs")


ORDER = (
    "the order of the records' scores does not follow from how they are rounded: batches of different sizes "
    "round a score differently, and records whose scores are some units in the last place apart could all "
    "change places when one record enters or leaves"
)


class DCDPSGD(Method):
    """Two clip norms, the larger one for the records that a score puts into the tail.

    Args:
        clip_norm: c_1 > 0, of the tail; the noise follows it.
        body_clip_norm: c_2 in (0, c_1]; c_1 / 10 when None.
        recipe: "library" or "as_published".
        variant: "per_sample" (default), "joint_topk" or "two_channel"; as published "alg1" (default) or
            "code".
        score: "norm" (default), "trace", "trace_abs" (of the gradient's entries without their signs, as in
            the authors' program; forms every record's gradient and all columns) or "random" (labels by lot:
            the control); as published "trace".
        tail_fraction: p in (0, 1), the wanted share of the tail; 0.2, as published 0.1.
        tail_threshold: "adaptive" (follows p through a released count), "null" (score "trace": the quantile
            that a direction without information has) or a public number above zero. `joint_topk` and the
            random score have no use for it.
        initial_threshold: where an adaptive threshold starts; c_1 (norm) or the null quantile (trace).
        count_noise: sigma_b as a share of the expected batch size.
        tail_weight: weight in [0, 1] of the tail's sum in the update (`two_channel`).
        clip_rule: "abadi", "auto_s", "nsgd", "psac", or a `ClipRule`, for both thresholds.
        subspace_dimension: k, of the trace; at most the number of parameters.
        tail_index: theta >= 1/2 of the columns' entries.
        subspace_signs: "symmetric" or "positive".
        subspace_structure: "khatri_rao" (default: matrix parameters get columns vec(u w^T), so that nothing
            of size P k is formed) or "dense" (default of "alg1").
        refresh_every: steps between new subspaces.
        layers: names of the parameters that the trace looks at; all when None. The variant "code" looks at
            one, the first when None.
        trace_share: share of epsilon that the published recipe sets aside for the trace.
        noise_multiplier: z; calibrated to the budget when None. As published it is sigma_dp and sigma_tr.

    Example:
        >>> DCDPSGD(clip_norm=2.0).body_clip_norm
        0.2
    """

    name: ClassVar[str] = "dc-dpsgd"
    card: ClassVar[Card] = Card(
        summary="Clips a tail of large gradients at one threshold and the rest at a smaller one.",
        claim=(
            "Smaller bias at less noise on heavy-tailed gradients, by a trace that finds the tail. We found "
            "that the trace says nothing about the tail and that the published noise is not that of the "
            "proof; with the norm as score the method wins on skewed heavy tails and loses elsewhere."
        ),
        source="Sha et al., DC-DPSGD, arXiv 2405.17529",
        guarantee="proven",
        published_guarantee="none",
        cost="score norm: as DP-SGD; score trace: k numbers a record and k (in + out) a layer more; "
        "joint_topk: two passes",
        use_when="Gradients are skewed and heavy-tailed, as in regression with rare large errors.",
        avoid_when="Noise is symmetric or light-tailed, or classes are rare: a single threshold is better.",
    )

    noise_arguments: ClassVar[Mapping[str, str]] = {"noise_multiplier": "gradient"}
    variants: ClassVar[Mapping[str, Sequence[str]]] = VARIANTS

    def __init__(
        self,
        clip_norm: float = 1.0,
        body_clip_norm: float | None = None,
        *,
        recipe: Literal["library", "as_published"] = "library",
        variant: str | None = None,
        score: Score | None = None,
        tail_fraction: float | None = None,
        tail_threshold: float | str = "adaptive",
        initial_threshold: float | None = None,
        count_noise: float = 0.1,
        tail_weight: float = 1.0,
        clip_rule: str | ClipRule = "abadi",
        subspace_dimension: int = 200,
        tail_index: float = 2.0,
        subspace_signs: Signs = "symmetric",
        subspace_structure: Literal["khatri_rao", "dense"] | None = None,
        refresh_every: int = 1,
        layers: Sequence[str] | None = None,
        trace_share: float = 0.5,
        noise_multiplier: float | None = None,
    ) -> None:
        _validate.positive(clip_norm=clip_norm)
        self.clip_norm = float(clip_norm)
        self.body_clip_norm = self.clip_norm / 10 if body_clip_norm is None else float(body_clip_norm)
        _validate.positive(body_clip_norm=self.body_clip_norm)
        if self.body_clip_norm > self.clip_norm:
            raise ValueError(
                f"body_clip_norm={body_clip_norm!r} exceeds clip_norm={clip_norm!r}: the tail has the larger "
                "threshold; swap them"
            )
        _validate.one_of(tuple(VARIANTS), recipe=recipe)
        published = recipe == "as_published"
        variant = VARIANTS[recipe][0] if variant is None else variant
        score = ("trace" if published else "norm") if score is None else score
        tail_fraction = (0.1 if published else 0.2) if tail_fraction is None else tail_fraction
        if subspace_structure is None:
            subspace_structure = "dense" if published else "khatri_rao"
        _validate.one_of(VARIANTS[recipe], variant=variant)
        _validate.one_of(("trace",) if published else _SCORES, score=score)
        _validate.one_of(("symmetric", "positive"), subspace_signs=subspace_signs)
        _validate.one_of(("khatri_rao", "dense"), subspace_structure=subspace_structure)
        if not 0 <= tail_weight <= 1:
            raise ValueError(f"tail_weight={tail_weight!r}: a weight lies between 0 and 1")
        for argument, share in (("tail_fraction", tail_fraction), ("trace_share", trace_share)):
            _validate.share(**{argument: share})
        optional = {"noise_multiplier": noise_multiplier, "initial_threshold": initial_threshold}
        for argument, number in {"count_noise": count_noise, **optional}.items():
            if number is not None:
                _validate.positive(**{argument: number})
        if tail_index < 0.5:
            raise ValueError(f"tail_index={tail_index!r}: the sub-Weibull laws have theta of at least 1/2")
        for argument, count in (("subspace_dimension", subspace_dimension), ("refresh_every", refresh_every)):
            _validate.count(**{argument: count})
        self.recipe, self.variant, self.score = recipe, variant, score  # type: ignore[misc]
        self.tail_fraction, self.tail_weight = float(tail_fraction), float(tail_weight)
        self.tail_threshold, self.initial_threshold = tail_threshold, initial_threshold
        self.count_noise = float(count_noise)
        self.clip_rule = resolve_rule(clip_rule)
        self.subspace_dimension, self.tail_index = subspace_dimension, float(tail_index)
        self.subspace_signs, self.subspace_structure = subspace_signs, subspace_structure
        self.refresh_every = refresh_every
        self.layers = None if layers is None else tuple(layers)
        self.trace_share, self.noise_multiplier = float(trace_share), noise_multiplier
        self._check_threshold()

    def _check_threshold(self) -> None:
        value = self.tail_threshold
        if isinstance(value, str):
            _validate.one_of(("adaptive", "null"), tail_threshold=value)
        else:
            # Infinity is a threshold, too: no tail at all.
            if isinstance(value, bool) or math.isnan(value) or value < 0:
                raise ValueError(f"tail_threshold={value!r}: give a number of at least 0, or 'adaptive'")
        if value == "null" and self.score not in _TRACES:
            raise ValueError(
                f"tail_threshold='null' is the quantile of an uninformative trace; score={self.score!r} has "
                "none. Give a number or 'adaptive'"
            )
        if value != "adaptive" and (self._joint or self.score == "random"):
            raise ValueError(
                f"tail_threshold={value!r} is not used: variant={self.variant!r} takes the top share of the "
                "batch, and random labels have the threshold 1 - tail_fraction. Leave it out"
            )

    @property
    def _joint(self) -> bool:
        """Whether the labels are decided over the whole draw."""
        return self.variant in ("joint_topk", "alg1", "code")

    @property
    def _bound(self) -> float:
        """How far one record, added or removed, can move the released sum."""
        if self._joint:
            return 2 * self.clip_norm - self.body_clip_norm
        return self.clip_norm

    @property
    def _counts(self) -> bool:
        """Whether a step releases the number of tail records."""
        return (
            not self._joint
            and self.score != "random"
            and self.tail_threshold == "adaptive"
            and self.clip_norm != self.body_clip_norm  # the labels are then of no consequence
        )

    def plan(self, setting: Setting) -> Plan:
        """One release of the gradient a step, the count beside it where the threshold is learned."""

        def with_noise(noise_multiplier: float) -> PrivacyPlan:
            releases = [Release("gradient", self._bound, Gaussian(noise_multiplier))]
            if self._counts:
                sigma = self.count_noise * setting.sampling.expected_size
                releases.append(Release("tail_count", 1.0, Gaussian(sigma), replace_ratio=1.0))
            return PrivacyPlan(releases, setting.sampling, setting.relation)

        if self.recipe == "as_published":
            return self._published_plan(setting)
        return Plan(setting.calibrated(with_noise, self.noise_multiplier))

    def _published_plan(self, setting: Setting) -> Plan:
        """The noise multipliers of gradient and trace are the plan's constants."""
        sampling, relation = setting.sampling, setting.relation
        if self.noise_multiplier is not None:
            multipliers = (self.noise_multiplier, self.noise_multiplier)
        else:
            multipliers = share_multipliers(setting.required_budget(), sampling, self.trace_share)
        if self.variant == "code":
            return Plan(PrivacyPlan([], sampling, relation, unproven=[Unproven("gradient")]), multipliers)
        multiplier = printed_multiplier(
            multipliers[0],
            self.clip_norm,
            self.body_clip_norm,
            self.tail_fraction,
            sampling.expected_size,
        )
        releases = [Release("gradient", self._bound, Gaussian(multiplier))]
        return Plan(PrivacyPlan(releases, sampling, relation), multipliers)

    @classmethod
    def best_guarantee(cls, config: Mapping[str, Any]) -> str:
        """As the card has it, but for the published Algorithm 1, whose one release is proven."""
        return "proven" if config.get("variant") == "alg1" else super().best_guarantee(config)

    def passes_over(self, draw: str) -> int:
        """Two where the labels are decided over the whole draw: one for the scores, one for the sum."""
        return 2 if self._joint else 1

    def claimed_epsilon(self, plan: Plan, delta: float) -> float | None:
        """As published: epsilon of the trace plus epsilon of the gradient, known once the plan is made."""
        return None if plan.constants is None else claimed(plan.constants, plan.releases.sampling, delta)

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        """For the top share, that rounding does not order the records."""
        return (ORDER,) if self.variant in ("joint_topk", "alg1") else ()

    def init(self, context: Context) -> State:
        """The threshold of the first step: a public constant, never a quantile of the first batch."""
        if self.variant == "code":
            return {}
        if self.score in _TRACES:
            size = sum(context.params[name].numel() for name in self._looked_at(context.params))
            if self.subspace_dimension > size:
                raise ValueError(
                    f"subspace_dimension={self.subspace_dimension} exceeds the {size} parameters that the "
                    "trace looks at; take at most that many"
                )
            null = null_threshold(self.tail_fraction, self.subspace_dimension, size)
        if not isinstance(self.tail_threshold, str):
            return {"threshold": float(self.tail_threshold)}
        if self.score == "random":
            return {"threshold": 1 - self.tail_fraction}
        if self.initial_threshold is not None and self.tail_threshold == "adaptive":
            return {"threshold": float(self.initial_threshold)}
        return {"threshold": null if self.score in _TRACES else self.clip_norm}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """One draw, one release; joint variants pass over the draw twice."""
        if self.variant == "code":
            return self._code_step(context), state
        draw = context.draw("batch")
        scorer = self._scorer(context, draw)
        if self._joint:
            sums = self._top_share(draw, scorer)
        else:
            sums = draw.query(partial(self._sums, scorer, state["threshold"]))
        released = context.ledger.release(draw, sums)
        size = context.sampling.expected_size
        if self._counts:
            (count,) = released["tail_count"].values()
            state = {"threshold": self._moved(state["threshold"], float(count) / size)}
        total = released["gradient"]
        if self.variant == "two_channel":
            back = self.body_clip_norm / self.clip_norm
            names = [name.removeprefix("tail/") for name in total if name.startswith("tail/")]
            total = {
                name: total[f"body/{name}"] * back + self.tail_weight * total[f"tail/{name}"]
                for name in names
            }
        return mean_of(total, size), state

    def _sums(self, scorer: Scorer, threshold: float, rows: PrivateRows, ids: Private) -> dict[str, Bounded]:
        scores = scorer(rows, ids)
        # A score that is not finite comes from a bad record: body, and no part of the count.
        if self.score == "random":
            tail = scores > threshold  # lots are exact: there is no rounding that a step could make large
            assert isinstance(tail, Private)
        else:
            tail = soft_indicator(scores, threshold, "above")
        clipped = clip_channels if self.variant == "two_channel" else clip_either
        out = {"gradient": clipped(rows, tail, self.clip_norm, self.body_clip_norm, self.clip_rule)}
        if self._counts:
            out["tail_count"] = capped(tail, 1.0, name="count")
        return out

    def _top_share(self, draw: DrawHandle, scorer: Scorer) -> dict[str, Bounded]:
        found = draw.rows(lambda rows, ids: {"score": scorer(rows, ids), "id": ids})
        selection = top_share(found["score"], found["id"], self.tail_fraction)

        def sums(rows: PrivateRows, ids: Private) -> dict[str, Bounded]:
            return {
                "gradient": clip_selected(
                    rows, ids, selection, self.clip_norm, self.body_clip_norm, self.clip_rule
                )
            }

        return draw.query(sums)

    def _code_step(self, context: Context) -> dict[str, Tensor]:
        names = self._looked_at(context.params)
        if self.layers is not None and len(names) != 1:
            raise ValueError(f"layers={self.layers!r}: the variant 'code' looks at one parameter tensor")
        total = code_step(
            context,
            layer=names[0],
            dimension=self.subspace_dimension,
            multipliers=context.plan.constants,
            tail=self.clip_norm,
            body=self.body_clip_norm,
            fraction=self.tail_fraction,
            rule=self.clip_rule,
        )
        return mean_of(total, context.sampling.expected_size)

    def _moved(self, threshold: float, fraction: float) -> float:
        """The next threshold, from the released share of the tail."""
        push = 0.3 * (fraction - self.tail_fraction) / max(self.tail_fraction, 0.02)
        moved = threshold * math.exp(min(max(push, -0.9), 0.9))
        return min(max(moved, 1e-30), 1e30)

    def _scorer(self, context: Context, draw: DrawHandle) -> Scorer:
        """The score of this step: the subspace is public, the lots of records are secret."""
        if self.score == "norm":
            return lambda rows, ids: rows.row_norms()
        lots = draw.secret_number("lots")
        if self.score == "random":
            return lambda rows, ids: record_uniforms(ids, lots)
        rng = context.public_rng(context.step - context.step % self.refresh_every)
        seed = int(torch.randint(2**62, (), generator=rng, device=rng.device))
        names = self._looked_at(context.params)
        subspace = self._subspace(seed, {name: context.params[name] for name in names})
        trace = Trace(subspace, absolute=self.score == "trace_abs")

        def score(rows: PrivateRows, ids: Private) -> Private:
            found = trace(rows if self.layers is None else rows.select(names))
            if context.plan.constants is None:
                return found
            noisy = found + context.plan.constants[1] * record_normals(ids, lots)
            assert isinstance(noisy, Private)
            return noisy

        return score

    def _subspace(self, seed: int, params: Parameters) -> SeededSubspace:
        some = next(iter(params.values()))
        return SeededSubspace(
            seed,
            {name: value.shape for name, value in params.items()},
            self.subspace_dimension,
            dtype=some.dtype,
            device=some.device,
            dense_limit=4096 if self.subspace_structure == "khatri_rao" else 2**62,
            entries=partial(sub_weibull, tail_index=self.tail_index, signs=self.subspace_signs),
        )

    def _looked_at(self, params: Parameters) -> tuple[str, ...]:
        if self.layers is None:
            return tuple(params)
        unknown = [name for name in self.layers if name not in params]
        if unknown:
            raise ValueError(
                f"layers names {unknown}, which are no trainable parameters; there are {sorted(params)}"
            )
        return tuple(name for name in params if name in self.layers)
