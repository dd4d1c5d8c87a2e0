"""Methods with an anchor: the gradient as a difference to an old iterate plus the gradient there.

    x_{k+1} = x_k - eta (h_k + g),    h_k about mean[g_i(x_k) - g_i(w)],    g about mean[g_i(w)]

as in SVRG (Johnson and Zhang 2013, "Accelerating Stochastic Gradient Descent using Predictive Variance
Reduction"). g is released once per anchor and used until the next one: what was released may be used again
for nothing. h is released every step in which x and w are different points. Beyond DP-SGD's memory stand one
copy of the parameters (w), one released gradient (g), and the gradients of a micro-batch at the second point.

**When the anchor is renewed.** With x^k the iterate and w^k the anchor at step k, and m the anchor period,

    routine 1    AtRandom(m)                     w^{k+1} = x^k        with probability 1/m, otherwise w^k
    routine 2    Every(m)                        w^{k+1} = x^k        if k = 1 (mod m), otherwise w^k
    routine 3    AtRandom(m, takes_next=True)    w^{k+1} = x^{k+1}    with probability 1/m, otherwise w^k
    routine 4    Every(m, takes_next=True)       w^{k+1} = x^{k+1}    if k = 1 (mod m), otherwise w^k

The random steps of routines 1 and 3 do not depend on data. All are drawn before the training, so that the
number of releases is known and not merely expected (an average of privacy losses is not the loss of the
average). A renewal after the last step would never be used and is left out, so k runs over 0 ... T - 2.

**How the budget is split.** Per step of an anchor period the noise displaces the parameters by a variance
proportional to

    r (z_1 / B)^2 + m (z_2 / n_A)^2,     r = E[C_1^2] / E[C_2^2].

z_1 is set to f times the multiplier z_SGD that DP-SGD would need for the same steps and budget; z_2 follows
from the budget by the accountant. The best f depends on r, which no public knowledge fixes: f = 1.15 is the
best for r = 1 at usual sizes.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.methods.base import Context, Method, Parameters, Plan, Setting, State
from equipoise.methods.clip_rules import Abadi
from equipoise.methods.configuration import FromOne, Option, Positive
from equipoise.methods.named_tensors import copied, mean_of
from equipoise.methods.thresholds import ReleasedQuantile, Threshold, resolve_threshold
from equipoise.privacy.bounds.clipping import clip
from equipoise.privacy.errors import BudgetError
from equipoise.privacy.mechanisms import Gaussian
from equipoise.privacy.plan import PrivacyPlan, Release
from equipoise.privacy.sampling import (
    BallsInBins,
    FixedEpochs,
    FullBatch,
    Poisson,
    Sampling,
    TruncatedPoisson,
    WithoutReplacement,
)

BATCHES_OF_ANCHOR = 16
"""The anchor batch, where none is given, in expected batches: 4096 records to 256.

A choice: a larger one makes the anchor's mean less noisy, costs more gradients, and amplifies less.
"""

# ---- when the anchor is renewed


@dataclass(frozen=True)
class Renewal(Option, ABC):
    """When the anchor is renewed.

    Args:
        period: m >= 1; by default half the anchor batch over the batch, so that the anchors cost two passes
            over a batch per step.
        takes_next: the new anchor is the iterate after the step, and not the one before.
        fresh_noise: release the anchor gradient anew in every step, and pay for each; once per anchor
            otherwise. With all records as anchor batch that is line 10 of the box that DP-C4's authors print,
            new noise on one sum; a drawn anchor batch is drawn anew, too.
    """

    period: FromOne | None = None
    takes_next: bool = False
    fresh_noise: bool = False

    @abstractmethod
    def renewals(self, steps: int, period: float, rng: torch.Generator) -> set[int]:
        """The steps of 0 ... `steps` - 1 after which the anchor is renewed."""

    def draw(self, steps: int, period: float, rng: torch.Generator) -> AnchorSchedule:
        """The schedule of a training of T = `steps` steps; `rng` is public randomness."""
        return AnchorSchedule(steps, self.takes_next, frozenset(self.renewals(steps - 1, period, rng)))


@dataclass(frozen=True)
class Every(Renewal):
    """After every `period`-th step, a whole number: routines 2 and 4.

    Example:
        >>> schedule = Every(3).draw(6, 3, torch.Generator())
        >>> sorted(schedule.renewals), schedule.num_anchors, schedule.num_coupled
        ([1, 4], 3, 5)
    """

    kind: ClassVar[str] = "every"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period is not None and round(self.period) != self.period:
            raise ValueError(
                f"period={self.period!r}: Every renews the anchor every so many steps, so it must be a whole "
                "number; AtRandom takes its inverse as a probability"
            )

    def renewals(self, steps: int, period: float, rng: torch.Generator) -> set[int]:
        return {k for k in range(steps) if k % period == 1 % period}


@dataclass(frozen=True)
class AtRandom(Renewal):
    """After a step with probability 1 / `period`: routines 1 and 3."""

    kind: ClassVar[str] = "at_random"

    def renewals(self, steps: int, period: float, rng: torch.Generator) -> set[int]:
        # In float64, and on the CPU: every machine draws the same schedule from a seed.
        starts = torch.rand(steps, generator=rng, dtype=torch.float64) < 1 / period
        return set(starts.nonzero().flatten().tolist())


@dataclass(frozen=True)
class AnchorSchedule:
    """The steps after which the anchor is renewed.

    Attributes:
        steps: T.
        takes_next: whether a new anchor is the iterate after the step (routines 3 and 4).
        renewals: the steps k, 0 <= k <= T - 2.
    """

    steps: int
    takes_next: bool
    renewals: frozenset[int]

    def coincides(self, step: int) -> bool:
        """Whether iterate and anchor are the same point at this step, so that nothing coupled is released.

        Decided from the schedule: two points that happen to be equal would be a private coincidence at worst
        and rounding at best.
        """
        return step == 0 or (self.takes_next and step - 1 in self.renewals)

    def renews(self, step: int) -> bool:
        return step in self.renewals

    @property
    def num_anchors(self) -> int:
        """K, the anchor points of the whole training, the first one included."""
        return 1 + len(self.renewals)

    @property
    def num_coupled(self) -> int:
        """The steps with a coupled term."""
        return self.steps - (self.num_anchors if self.takes_next else 1)


# ---- how the budget is split


@dataclass(frozen=True)
class NoiseFactor(Option):
    """How a budget is split: z_1 is `factor` times DP-SGD's multiplier for the same budget.

    Args:
        factor: f > 0.
    """

    kind: ClassVar[str] = "factor"
    factor: Positive = 1.15


# ---- the methods


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

    Guarantee: two kinds of Gaussian releases. "coupled" is on the step's draw and moves by at most C_1 with a
    record; "anchor" is on a draw of its own, once per anchor, and moves by at most C_2. Given all earlier
    releases, x, w and both thresholds are constants, so they compose as (q_1, z_1) and (q_2, z_2) events,
    each as often as the schedule, which was fixed before, says. A count released with one is one more
    coordinate of the same Gaussian. The use of g in later steps is post-processing.

    Args:
        clip_norm: C > 0, the clip norm or its cap; a function of the step or a schedule, too.
        schedule: when the anchor moves: `Every` (default) or `AtRandom`.
        anchor_batch_size: n_A, expected records of an anchor gradient; the population means all records. By
            default 16 batches, at most the population.
        split: z_1 over DP-SGD's multiplier for the same budget.
        noise_multiplier: z_1, noise of the coupled sum over its bound; calibrated when None.
        anchor_noise_multiplier: z_2, noise of the anchor sum over its bound; calibrated when None.
    """

    coupled_releases: ClassVar[tuple[str, ...]] = ("coupled",)
    """What leaves with the coupled term, each with noise z_1."""

    clip_norm: float | Callable[[int], float] | Threshold = 1.0
    schedule: Renewal = Every()
    anchor_batch_size: Positive | None = None
    split: NoiseFactor = NoiseFactor()
    noise_multiplier: Positive | None = None
    anchor_noise_multiplier: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.threshold, ReleasedQuantile):
            raise ValueError(
                "clip_norm=ReleasedQuantile(...) is not offered for methods with anchors: one count cannot "
                "steer two kinds of sums; give a number or a schedule"
            )

    @property
    def threshold(self) -> Threshold:
        """C_k."""
        return resolve_threshold(self.clip_norm)

    def clip_norm_at(self, step: int) -> float:
        """C at a step."""
        return self.threshold.at(step, 0.0)

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
        sampling, size = setting.sampling, self.anchor_size(setting.sampling)
        period = self.schedule.period or max(1, round(size / (2 * sampling.expected_size)))
        schedule = self.schedule.draw(sampling.steps, period, setting.public_rng())
        # A fresh anchor gradient is a release of its own in every step.
        count = sampling.steps if self.schedule.fresh_noise else schedule.num_anchors
        anchor = anchor_sampling(sampling, size, count)
        bounds = self.max_bounds(sampling.steps)
        counts = self.counts(sampling.expected_size, anchor.expected_size)

        def with_noise(coupled: float, at_anchor: float) -> PrivacyPlan:
            releases = [Release("anchor", bounds[1], Gaussian(at_anchor), count, "anchor", anchor)]
            if "anchor" in counts:
                name, number = "anchor_count", schedule.num_anchors
                releases.append(Release(name, 0.5, Gaussian(counts["anchor"]), number, "anchor", anchor))
            if schedule.num_coupled:
                number = schedule.num_coupled
                names = self.coupled_releases
                releases[:0] = [Release(name, bounds[0], Gaussian(coupled), number) for name in names]
                if "coupled" in counts:
                    releases.append(Release("coupled_count", 0.5, Gaussian(counts["coupled"]), number))
            return PrivacyPlan(releases, sampling, setting.relation, unit=setting.unit)

        anchors = Anchors(anchor, period, schedule)
        z, at_anchor = self.noise_multiplier, self.anchor_noise_multiplier
        published = self.published_noise(setting, anchors) if z is None and at_anchor is None else None
        if published is not None:
            plan = with_noise(*published)
        elif not schedule.num_coupled:  # without a coupled term its multiplier is in no release
            plan = setting.calibrated(lambda scale: with_noise(1.0, scale), at_anchor)
        elif at_anchor is not None:
            plan = setting.calibrated(lambda scale: with_noise(scale, at_anchor), z)
        else:
            plan = setting.kept(lambda: with_noise(1.0, 1.0)) or self._split(with_noise, setting, anchors)
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

    def _split(
        self, with_noise: Callable[[float, float], PrivacyPlan], setting: Setting, anchors: Anchors
    ) -> PrivacyPlan:
        """The plan of the factor; the anchor noise fills what is left."""
        sampling, anchor, schedule = setting.sampling, anchors.anchor, anchors.schedule
        # At equal shares of a large noise the multipliers are to each other as rate times root of count.
        spread = math.sqrt(schedule.num_anchors / schedule.num_coupled)
        ratio = anchor.sampling_rate / sampling.sampling_rate * spread

        def filled(coupled: float) -> PrivacyPlan:
            try:
                return setting.calibrated(lambda scale: with_noise(coupled, scale), start=coupled * ratio)
            except BudgetError as error:
                raise BudgetError(
                    f"the coupled releases with noise multiplier {coupled:.4g} and the counts leave nothing "
                    "of the budget to the anchor gradients: raise the factor of split=NoiseFactor(...), the "
                    f"noise_multiplier or count_noise. ({error})"
                ) from error

        if self.noise_multiplier is not None:
            return filled(self.noise_multiplier)

        def of_dp_sgd(scale: float) -> PrivacyPlan:
            return PrivacyPlan([Release("gradient", 1.0, Gaussian(scale))], sampling, setting.relation)

        z = setting.calibrated(of_dp_sgd)["gradient"].noise_multiplier
        return filled(self.split.factor * z)

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
    if isinstance(sampling, (WithoutReplacement, FixedEpochs, BallsInBins)):
        # Of the training's kind, so that the neighbouring relation and the amplification are the same.
        return dataclasses.replace(sampling, batch_size=round(size), steps=count)
    raise TypeError(
        f"sampling={sampling!r}: anchors can be sampled with Poisson, TruncatedPoisson, WithoutReplacement, "
        "FullBatch, FixedEpochs and BallsInBins draws. Turns of records serve noise over steps (dp-mf), "
        "which methods with anchors do not offer: take Poisson"
    )


@dataclass(frozen=True, kw_only=True)
class DPSVRG(AnchoredMethod):
    """Differentially private SVRG: differences to an anchor, both points clipped at one threshold.

        h = (sum_S [clip(g_i(x), C) - clip(g_i(w), C)] + N(0, (2 z_1 C)^2 I)) / B,    x <- x - eta (h + g),
        g = (sum_D clip(g_i(w), C) + N(0, (z_2 C)^2 I)) / n_A,  released once per anchor

    The arguments are those of `AnchoredMethod`; a schedule such as `ExponentialDecay` for `clip_norm` makes
    it the authors' DP-SVRG-TD. Near the anchor the two clipped rows nearly cancel while the noise keeps the
    size 2C: this baseline pays for the difference as if it were large, which is what DP-C4 changes.

    Guarantee: that of `AnchoredMethod` with C_1 = 2C and C_2 = C. The pair of clipped gradients of a record
    is one row of norm at most 2C; `equipoise.published.DPSVRG` noises the two sums apart, as the box does.

    Source: Lee 2017, "Differentially Private Variance Reduced Stochastic Gradient Descent", in the form that
    the authors of DP-C4 compare with.

    Example:
        >>> from equipoise.privacy import Budget
        >>> setting = Setting(sampling=Poisson(64, 2000, 100), budget=Budget(4.0, 1e-5))
        >>> plan = DPSVRG(clip_norm=0.5).plan(setting).releases
        >>> [(release.name, release.max_bound) for release in plan.releases]
        [('coupled', 1.0), ('anchor', 0.5)]
    """

    def max_bounds(self, steps: int) -> tuple[float, float]:
        upper = self.threshold.upper(steps)
        return 2 * upper, upper

    def release_anchor(self, context: Context, state: State, new: bool) -> State:
        clip_norm = self.clip_norm_at(context.step)
        draw = context.draw("anchor")
        sums = draw.query(lambda rows, ids: {"anchor": clip(rows, Abadi(), clip_norm)}, at=(state["anchor"],))
        released = context.ledger.release(draw, sums)["anchor"]
        return {**state, "gradient": mean_of(released, context.plan.constants.anchor.expected_size)}

    def release_coupled(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """The difference of the two clipped sums, as one query of bound 2C."""
        clip_norm = self.clip_norm_at(context.step)
        draw = context.draw("batch")
        sums = draw.query(
            lambda x, w, ids: {"coupled": clip(x, Abadi(), clip_norm) - clip(w, Abadi(), clip_norm)},
            at=(context.params, state["anchor"]),
        )
        released = context.ledger.release(draw, sums)["coupled"]
        return mean_of(released, context.sampling.expected_size), state
