"""Methods with an anchor: the gradient as a difference to an old iterate plus the gradient there.

    x_{k+1} = x_k - eta (h_k + g),    h_k about mean[g_i(x_k) - g_i(w)],    g about mean[g_i(w)]

as in SVRG (Johnson and Zhang 2013, "Accelerating Stochastic Gradient Descent using Predictive Variance
Reduction"). g is released once per anchor and used until the next one: what was released may be used again
for nothing. h is released every step in which x and w are different points. `schedule` says when the
anchor moves, `noise_split` how the budget is divided; a method adds how the two sums are bounded.

Beyond DP-SGD's memory stand one copy of the parameters (w), one released gradient (g), and the gradients of a
micro-batch at the second point.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from equipoise import _validate
from equipoise.methods.anchored.noise_split import (
    NoiseFactor,
    NoiseSplit,
    TwoMultipliers,
    anchor_noise,
    displacement,
)
from equipoise.methods.anchored.schedule import AnchorSchedule, Every, Renewal
from equipoise.methods.base import Context, Method, Parameters, Plan, Setting, State
from equipoise.methods.named_tensors import copied
from equipoise.methods.thresholds import Threshold
from equipoise.privacy import calibrate, calibrate_noise_multiplier
from equipoise.privacy.mechanisms import Gaussian
from equipoise.privacy.plan import PrivacyPlan, Release
from equipoise.privacy.sampling import (
    FixedEpochs,
    FullBatch,
    Poisson,
    Sampling,
    TruncatedPoisson,
    WithoutReplacement,
)

__all__ = ["AnchoredMethod", "Anchors", "anchor_sampling"]


BATCHES_OF_ANCHOR = 16
"""The anchor batch, where none is given, in expected batches: 4096 records to 256."""


FRESH_NOISE = (
    "fresh_noise=True takes new records for the anchor gradient in every step, and is charged for them; the "
    "paper's pseudocode puts new noise on one and the same sum until the anchor moves, which is neither done "
    "nor covered"
)


@dataclass(frozen=True)
class Anchors:
    """What the plan fixes of the anchors.

    Attributes:
        anchor: sampling of the anchor gradients; its expected size is n_A.
        period: m.
        schedule: when the anchor moves.
    """

    anchor: Sampling
    period: float
    schedule: AnchorSchedule


@dataclass(frozen=True, kw_only=True)
class AnchoredMethod(Method):
    """What DP-SVRG, DP-C4 and DP-C4+ share: schedule, split of the budget, and the step.

    Args:
        clip_norm: C > 0, the clip norm or its cap.
        schedule: when the anchor moves: `Every` (default) or `AtRandom`.
        anchor_batch_size: n_A, expected records of an anchor gradient; the population means all records. By
            default 16 batches, at most the population.
        split: z_1 over DP-SGD's multiplier for the same budget: `NoiseFactor` or `LeastDisplacement`.
        noise_multiplier: z_1, noise of the coupled sum over its bound; calibrated when None.
        anchor_noise_multiplier: z_2, noise of the anchor sum over its bound; calibrated when None.
    """

    threshold_ratio: ClassVar[float] = 1.0
    """Expected ratio of the squared thresholds, coupled over anchor."""

    clip_norm: float | Callable[[int], float] | Threshold = 1.0
    schedule: Renewal = Every()
    anchor_batch_size: float | None = None
    split: NoiseSplit = NoiseFactor()
    noise_multiplier: float | None = None
    anchor_noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        _validate.instance(Renewal, "Every(8)", schedule=self.schedule)
        _validate.instance(NoiseSplit, "NoiseFactor(1.15)", split=self.split)
        _validate.positive_if_given(
            "or None to have it chosen",
            noise_multiplier=self.noise_multiplier,
            anchor_noise_multiplier=self.anchor_noise_multiplier,
            anchor_batch_size=self.anchor_batch_size,
        )

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        return (FRESH_NOISE,) if self.schedule.fresh_noise else ()

    def passes_over(self, draw: str) -> int:
        """The coupled term takes the gradients of its records at two points."""
        return 2 if draw == "batch" else 1

    # ---- what a method adds

    @abstractmethod
    def max_bounds(self, steps: int) -> tuple[float, float]:
        """The largest add-or-remove bounds of the coupled sum and of the anchor sum."""

    def counts(self, batch: float, anchor_batch: float) -> Mapping[str, float]:
        """Noise multipliers of counts released with "coupled" and "anchor", by the name of that release."""
        return {}

    def published_noise(self, setting: Setting, anchors: Anchors) -> tuple[float, float] | None:
        """Noise multipliers (z_1, z_2) of a recipe as published; None to calibrate."""
        return None

    @abstractmethod
    def release_anchor(self, context: Context, state: State, new: bool) -> State:
        """The state with "gradient" released at the anchor; `new` where the anchor has just moved."""

    @abstractmethod
    def release_coupled(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """The released coupled mean h and the state."""

    # ---- plan

    def plan(self, setting: Setting) -> Plan:
        sampling = setting.sampling
        size = self.anchor_size(sampling)
        period = self.period(sampling)
        schedule = self.schedule.draw(sampling.steps, period, setting.public_rng())
        every = self.schedule.fresh_noise
        # A fresh anchor gradient is a release of its own in every step.
        count = sampling.steps if every else schedule.num_anchors
        anchor = anchor_sampling(sampling, size, count)
        coupled_bound, anchor_bound = self.max_bounds(sampling.steps)
        counts = self.counts(sampling.expected_size, anchor.expected_size)

        def with_noise(coupled: float, at_anchor: float) -> PrivacyPlan:
            releases = [Release("anchor", anchor_bound, Gaussian(at_anchor), count, "anchor", anchor)]
            if "anchor" in counts:
                name, number = "anchor_count", schedule.num_anchors
                releases.append(Release(name, 0.5, Gaussian(counts["anchor"]), number, "anchor", anchor))
            if schedule.num_coupled:
                number = schedule.num_coupled
                releases.insert(0, Release("coupled", coupled_bound, Gaussian(coupled), number))
                if "coupled" in counts:
                    releases.append(Release("coupled_count", 0.5, Gaussian(counts["coupled"]), number))
            return PrivacyPlan(releases, sampling, setting.relation, unit=setting.unit)

        anchors = Anchors(anchor, period, schedule)
        z, at_anchor = self.noise_multiplier, self.anchor_noise_multiplier
        published = self.published_noise(setting, anchors) if z is None and at_anchor is None else None
        if published is not None:
            plan = with_noise(*published)
        elif at_anchor is not None and (z is not None or not schedule.num_coupled):
            plan = with_noise(z or 1.0, at_anchor)  # without a coupled term its multiplier is in no release
        else:
            plan = self._calibrated(with_noise, setting, anchors)
        return Plan(plan, anchors)

    def anchor_size(self, sampling: Sampling) -> float:
        """n_A, the expected records of an anchor gradient."""
        size = self.anchor_batch_size
        if size is None:
            return min(float(sampling.population), BATCHES_OF_ANCHOR * sampling.expected_size)
        if not sampling.expected_size <= size <= sampling.population:
            raise ValueError(
                f"anchor_batch_size={size!r}: it must lie between the expected batch size "
                f"{sampling.expected_size:g} and the population {sampling.population} (all records)"
            )
        return float(size)

    def period(self, sampling: Sampling) -> float:
        """m, the anchor period."""
        if self.schedule.period is not None:
            return self.schedule.period
        return max(1, round(self.anchor_size(sampling) / (2 * sampling.expected_size)))

    def _calibrated(self, with_noise: TwoMultipliers, setting: Setting, anchors: Anchors) -> PrivacyPlan:
        sampling, anchor, schedule = setting.sampling, anchors.anchor, anchors.schedule
        given, given_anchor = self.noise_multiplier, self.anchor_noise_multiplier
        if setting.other_runs:
            # The ratio of the multipliers is that of a run with the budget to itself; both are then raised
            # together until the other runs fit in with them.
            plan = self._calibrated(with_noise, dataclasses.replace(setting, other_runs=()), anchors)
            at_anchor = plan["anchor"].noise_multiplier
            coupled = plan["coupled"].noise_multiplier if schedule.num_coupled else 1.0
            return setting.calibrated(
                lambda scale: with_noise(
                    given or scale * coupled, scale * at_anchor if given_anchor is None else at_anchor
                )
            )
        budget = setting.required_budget("both noise_multiplier and anchor_noise_multiplier")
        if not schedule.num_coupled:
            return calibrate(lambda scale: with_noise(1.0, scale), budget)
        if given_anchor is not None:
            return calibrate(lambda scale: with_noise(scale, given_anchor), budget)
        # At equal shares of a large noise the multipliers are to each other as rate times root of count.
        spread = math.sqrt(schedule.num_anchors / schedule.num_coupled)
        ratio = anchor.sampling_rate / sampling.sampling_rate * spread
        if given is not None:
            return anchor_noise(with_noise, given, budget, given * ratio)
        of_dp_sgd = calibrate_noise_multiplier(sampling, budget, setting.relation, unit=setting.unit)

        def plan_of(factor: float) -> PrivacyPlan:
            return anchor_noise(with_noise, factor * of_dp_sgd, budget, factor * of_dp_sgd * ratio)

        def moved(plan: PrivacyPlan, ratio_of_squares: float | None) -> float:
            return displacement(
                plan["coupled"].noise_multiplier,
                plan["anchor"].noise_multiplier,
                sampling.expected_size,
                anchor.expected_size,
                anchors.period,
                ratio_of_squares or self.threshold_ratio,
            )

        return self.split.choose(plan_of, moved)

    # ---- steps

    def init(self, context: Context) -> State:
        """The first anchor is the first iterate; its gradient is released in the first step."""
        return {"anchor": copied(context.params), "gradient": None, "takes_next": False}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """An anchor gradient where the anchor is new, a coupled term where it is not the iterate."""
        schedule, step = context.plan.constants.schedule, context.step
        state = dict(state)
        # The iterate after a step is known at the beginning of the next one.
        if state["takes_next"]:
            state |= {"anchor": copied(context.params), "gradient": None, "takes_next": False}
        new = state["gradient"] is None
        if new or self.schedule.fresh_noise:
            state = self.release_anchor(context, state, new)
        # Released once and used until the anchor moves: post-processing costs nothing.
        estimate = state["gradient"]
        if not schedule.coincides(step):
            coupled, state = self.release_coupled(context, state)
            estimate = {name: value + estimate[name] for name, value in coupled.items()}
        if schedule.renews(step):
            if schedule.takes_next:
                state["takes_next"] = True
            else:
                state |= {"anchor": copied(context.params), "gradient": None}
        return dict(estimate), state

    def rebase(self, state: State, params: Parameters) -> State:
        """The state after someone else moved the parameters.

        An anchor whose gradient is yet to be released moves along. One that has its gradient stays until its
        term ends: the release is valid wherever the parameters go, the coupled threshold grows with the
        distance up to its cap, and moving the anchor now would need a release that was not planned.
        """
        if state["gradient"] is None:
            return {**state, "anchor": copied(params)}
        return dict(state)


def anchor_sampling(sampling: Sampling, size: float, count: int) -> Sampling:
    """The sampling of anchor gradients: of the training's kind with `size` expected records, or everybody.

    Example:
        >>> anchor_sampling(Poisson(64, 2000, 3000), 2000, count=189)
        FullBatch(population=2000, steps=189)
        >>> anchor_sampling(Poisson(64, 2000, 3000), 512, count=189).expected_size
        512.0
    """
    population = sampling.population
    if isinstance(sampling, FullBatch) or size >= population:
        return FullBatch(population, count)
    if isinstance(sampling, Poisson):
        return Poisson(size, population, count)
    if isinstance(sampling, TruncatedPoisson):  # with a cap for this size
        return TruncatedPoisson(size, population, count)
    if isinstance(sampling, (WithoutReplacement, FixedEpochs)):
        # Of the training's kind, so that the neighbouring relation and the amplification are the same.
        return dataclasses.replace(sampling, batch_size=round(size), steps=count)
    raise TypeError(
        f"sampling={sampling!r}: anchors can be sampled with Poisson, TruncatedPoisson, WithoutReplacement, "
        "FullBatch and FixedEpochs draws. Turns of records serve noise over steps (dp-mf), which methods "
        "with anchors do not offer: take Poisson"
    )
