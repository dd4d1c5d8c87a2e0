"""DC-DPSGD: large gradients ("tail") and small ones ("body") are clipped at two thresholds c_1 > c_2.

    c_i = c_2 + t_i (c_1 - c_2),     h_i = g_i min(1, c_i / ||g_i||),     t_i = 1[score_i > tau]
    estimate = (sum_i h_i + N(0, (z c_1)^2 I)) / B

Source: Sha et al., "DC-DPSGD" (ICLR 2025 submission, arXiv 2405.17529). The variants:

============  ======================================  ==============  =================================
variant       tail                                    released sum    its bound (noise is z times it)
============  ======================================  ==============  =================================
`PerSample`   score_i above tau                       sum_i h_i       c_1
`TwoChannel`  the same                                tail and body   c_1 and c_2, as one release
`TopShare`    the top floor(p |batch|) by score       sum_i h_i       2 c_1 - c_2
============  ======================================  ==============  =================================

tau is a public number, or follows the tail fraction p through a released count m = sum_i t_i +
N(0, sigma_b^2), one more coordinate of the same Gaussian query:

    tau <- tau exp(clip(0.3 (m / B - p) / max(p, 0.02), -0.9, 0.9)).

The step 1[score > tau] is a ramp from 0.95 tau to 1.05 tau (`privacy.bounds.counts.soft_indicator`), since a
norm rounds differently in batches of different sizes: a record more could otherwise flip every label within a
unit in the last place of tau. Random scores are exact and keep the step. The top share has an order where a
ramp would be needed; that no scores are so close is an assumption, which the statement names.

No label leaves the private side. With c_1 and the noise of DP-SGD(c_1), the method is DP-SGD(c_1) with
weights in [c_2 / c_1, 1] on the body: it weighs records anew, it does not lower the noise.

What the paper and its authors' program do is `equipoise.published.DCDPSGD`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from equipoise import _validate
from equipoise.methods.base import Context, DrawHandle, Method, Plan, Setting, State
from equipoise.methods.card import Card, card_of
from equipoise.methods.clip_rules import Abadi, ClipRule
from equipoise.methods.configuration import Option
from equipoise.methods.named_tensors import mean_of
from equipoise.methods.two_thresholds.scores import Norm, Score, Scorer, Trace
from equipoise.methods.two_thresholds.sums import clip_channels, clip_either, clip_selected, top_share
from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.bounds.counts import capped, soft_indicator
from equipoise.privacy.mechanisms import Gaussian
from equipoise.privacy.plan import PrivacyPlan, Release
from equipoise.privacy.private import Private
from equipoise.privacy.rows import PrivateRows

__all__ = [
    "DCDPSGD",
    "ORDER",
    "AdaptiveTail",
    "FixedTail",
    "NullTail",
    "PerSample",
    "TailThreshold",
    "TopShare",
    "TwoChannel",
    "TwoClipNorms",
    "TwoThresholds",
]


ORDER = (
    "the order of the records' scores does not follow from how they are rounded: batches of different sizes "
    "round a score differently, and records whose scores are some units in the last place apart could all "
    "change places when one record enters or leaves"
)


# ---- what the tail is, and what is released of it


class TwoThresholds(Option):
    """Which records are the tail, and how the sum is released."""


@dataclass(frozen=True, kw_only=True)
class PerSample(TwoThresholds):
    """The records whose score is above tau; one sum of bound c_1."""

    kind: ClassVar[str] = "per_sample"


@dataclass(frozen=True, kw_only=True)
class TwoChannel(TwoThresholds):
    """The records whose score is above tau; tail and body apart, as one release.

    Args:
        tail_weight: in [0, 1], of the tail's sum in the update.
    """

    kind: ClassVar[str] = "two_channel"
    tail_weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.tail_weight <= 1:
            raise ValueError(f"tail_weight={self.tail_weight!r}: a weight lies between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class TopShare(TwoThresholds):
    """The tail fraction of the draw with the highest scores; one sum of bound 2 c_1 - c_2, in two passes."""

    kind: ClassVar[str] = "top_share"


# ---- where the tail begins


class TailThreshold(Option):
    """tau, above which a score makes a record tail."""

    @abstractmethod
    def first(self, start: float) -> float:
        """tau of the first step; `start` is the score's own."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveTail(TailThreshold):
    """tau follows the tail fraction through a released count.

    Args:
        initial: where it starts; c_1 (norm) or the null quantile (trace) when None.
        count_noise: sigma_b as a share of the expected batch size.
    """

    kind: ClassVar[str] = "adaptive"
    initial: float | None = None
    count_noise: float = 0.1

    def __post_init__(self) -> None:
        _validate.positive(count_noise=self.count_noise)
        _validate.positive_if_given(initial=self.initial)

    def first(self, start: float) -> float:
        return start if self.initial is None else float(self.initial)

    def moved(self, threshold: float, fraction: float, wanted: float) -> float:
        """The next tau, from the released share of the tail."""
        push = 0.3 * (fraction - wanted) / max(wanted, 0.02)
        moved = threshold * math.exp(min(max(push, -0.9), 0.9))
        return min(max(moved, 1e-30), 1e30)  # neither zero nor infinity, from where no factor leads back


@dataclass(frozen=True, kw_only=True)
class NullTail(TailThreshold):
    """The quantile of a trace that has no information."""

    kind: ClassVar[str] = "null"

    def first(self, start: float) -> float:
        return start


@dataclass(frozen=True)
class FixedTail(TailThreshold):
    """A public number.

    Args:
        value: at least 0; infinity for no tail at all.
    """

    kind: ClassVar[str] = "fixed"
    value: float

    def __post_init__(self) -> None:
        number = isinstance(self.value, (int, float)) and not isinstance(self.value, bool)
        if not (number and self.value >= 0):
            raise ValueError(f"tail_threshold={self.value!r}: give a number of at least 0, or AdaptiveTail()")

    def first(self, start: float) -> float:
        return float(self.value)


# ---- the method


@dataclass(frozen=True, kw_only=True)
class TwoClipNorms(Method):
    """What DC-DPSGD in the library and as published share.

    Args:
        clip_norm: c_1 > 0, of the tail; the noise follows it.
        body_clip_norm: c_2 in (0, c_1]; c_1 / 10 when None.
        tail_fraction: p in (0, 1), the wanted share of the tail.
        clip_rule: weighs the rows at both thresholds.
        noise_multiplier: z; calibrated to the budget when None.
    """

    clip_norm: float = 1.0
    body_clip_norm: float | None = None
    tail_fraction: float = 0.2
    clip_rule: ClipRule = Abadi()
    noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        _validate.positive(clip_norm=self.clip_norm)
        _validate.positive_if_given(body_clip_norm=self.body_clip_norm)
        if self.body > self.clip_norm:
            raise ValueError(
                f"body_clip_norm={self.body_clip_norm!r} exceeds clip_norm={self.clip_norm!r}: the tail has "
                "the larger threshold; swap them"
            )
        _validate.share(tail_fraction=self.tail_fraction)
        _validate.instance(ClipRule, "Abadi()", clip_rule=self.clip_rule)
        _validate.positive_if_given(noise_multiplier=self.noise_multiplier)

    @property
    def body(self) -> float:
        """c_2."""
        return float(self.clip_norm) / 10 if self.body_clip_norm is None else float(self.body_clip_norm)

    @property
    def top_share_bound(self) -> float:
        """2 c_1 - c_2: a record that enters the tail also pushes another one out of it."""
        return 2 * float(self.clip_norm) - self.body

    def top_share_sum(self, draw: DrawHandle, scorer: Scorer) -> dict[str, Bounded]:
        """The sum of the clipped rows; the tail fraction of the draw with the highest scores is the tail."""
        found = draw.rows(lambda rows, ids: {"score": scorer(rows, ids), "id": ids})
        chosen = top_share(found["score"], found["id"], self.tail_fraction)
        radii = (float(self.clip_norm), self.body)
        return draw.query(
            lambda rows, ids: {"gradient": clip_selected(rows, ids, chosen, *radii, self.clip_rule)}
        )


@dataclass(frozen=True, kw_only=True)
class DCDPSGD(TwoClipNorms):
    """Two clip norms, the larger one for the records that a score puts into the tail.

    Further arguments are those of `TwoClipNorms`.

    Args:
        variant: `PerSample`, `TwoChannel` or `TopShare`.
        score: `Norm`, `Trace`, or `Random` (labels at random: the control).
        tail_threshold: `AdaptiveTail` (follows p through a released count), `NullTail` (of `Trace`), or a
            public number of at least 0. `TopShare` and `Random` have no use for it.

    Example:
        >>> DCDPSGD(clip_norm=2.0).body
        0.2
    """

    name: ClassVar[str] = "dc-dpsgd"
    card: ClassVar[Card] = card_of("dc-dpsgd")

    variant: TwoThresholds = PerSample()
    score: Score = Norm()
    tail_threshold: float | TailThreshold = AdaptiveTail()

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.instance(TwoThresholds, "TopShare()", variant=self.variant)
        _validate.instance(Score, "Norm()", score=self.score)
        threshold = self.threshold
        if isinstance(threshold, NullTail) and not isinstance(self.score, Trace):
            raise ValueError(
                f"tail_threshold={threshold!r} is the quantile of an uninformative trace; "
                f"score={self.score!r} has none. Give a number or AdaptiveTail()"
            )
        if not isinstance(threshold, AdaptiveTail) and (self._joint or self.score.exact):
            raise ValueError(
                f"tail_threshold={threshold!r} is not used: variant={self.variant!r} takes the top share of "
                "the batch, and random labels have the threshold 1 - tail_fraction. Leave it out"
            )

    @property
    def threshold(self) -> TailThreshold:
        """tau."""
        given = self.tail_threshold
        return given if isinstance(given, TailThreshold) else FixedTail(given)

    @property
    def _joint(self) -> bool:
        """Whether the labels are decided over the whole draw."""
        return isinstance(self.variant, TopShare)

    @property
    def _counter(self) -> AdaptiveTail | None:
        """What follows the released number of tail records; None where none is released."""
        # At equal thresholds the labels are of no consequence.
        used = not (self._joint or self.score.exact) and self.clip_norm != self.body
        return self.threshold if used and isinstance(self.threshold, AdaptiveTail) else None

    def plan(self, setting: Setting) -> Plan:
        """One release of the gradient per step, with the count where the threshold is learned."""
        # How far one record, added or removed, can move the released sum.
        bound = self.top_share_bound if self._joint else float(self.clip_norm)

        def with_noise(noise_multiplier: float) -> PrivacyPlan:
            releases = [Release("gradient", bound, Gaussian(noise_multiplier))]
            if self._counter is not None:
                # A label is in [0, 1]: adding, removing or replacing a record moves the count by at most 1.
                sigma = float(self._counter.count_noise) * setting.sampling.expected_size
                sigma = setting.count_noise(sigma, noise_multiplier)
                releases.append(Release("tail_count", 1.0, Gaussian(sigma), replace_ratio=1.0))
            return PrivacyPlan(releases, setting.sampling, setting.relation)

        return Plan(setting.calibrated(with_noise, self.noise_multiplier))

    def passes_over(self, draw: str) -> int:
        """Two where the labels are decided over the whole draw: one for the scores, one for the sum."""
        return 2 if self._joint else 1

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        return (ORDER,) if self._joint else ()

    def init(self, context: Context) -> State:
        """The threshold of the first step: a public constant, never a quantile of the first batch."""
        start = self.score.start(self.tail_fraction, float(self.clip_norm), context.params)
        return {"threshold": start if self.score.exact else self.threshold.first(start)}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        draw = context.draw("batch")
        scorer = self.score.of_step(context, draw)
        if self._joint:
            sums = self.top_share_sum(draw, scorer)
        else:
            sums = draw.query(partial(self._sums, scorer, state["threshold"]))
        released = context.ledger.release(draw, sums)
        size = context.sampling.expected_size
        if self._counter is not None:
            (count,) = released["tail_count"].values()
            fraction = float(count) / size
            state = {"threshold": self._counter.moved(state["threshold"], fraction, self.tail_fraction)}
        total = released["gradient"]
        if isinstance(self.variant, TwoChannel):
            # The body was scaled up by c_1 / c_2, so that one noise fits both channels.
            back = self.body / self.clip_norm
            names = [name.removeprefix("tail/") for name in total if name.startswith("tail/")]
            total = {
                name: total[f"body/{name}"] * back + self.variant.tail_weight * total[f"tail/{name}"]
                for name in names
            }
        return mean_of(total, size), state

    def _sums(self, scorer: Scorer, threshold: float, rows: PrivateRows, ids: Private) -> dict[str, Bounded]:
        scores = scorer(rows, ids)
        # A score that is not finite comes from a bad record: body, and no part of the count.
        if self.score.exact:
            tail = scores > threshold  # there is no rounding that a step could make large
            assert isinstance(tail, Private)
        else:
            tail = soft_indicator(scores, threshold, "above")
        clipped = clip_channels if isinstance(self.variant, TwoChannel) else clip_either
        out = {"gradient": clipped(rows, tail, float(self.clip_norm), self.body, self.clip_rule)}
        if self._counter is not None:
            out["tail_count"] = capped(tail, 1.0, name="count")
        return out
