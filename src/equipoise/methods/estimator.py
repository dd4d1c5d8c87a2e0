"""The shape that most methods have: a view of the rows, a clip, a mechanism, and what follows the release.

    v_i = view(g_i)                              of one record's gradients and public values
    u   = sum_i clip(v_i, C_t) + noise           one release, of bound C_t
    m   = back(u / B)                            unscale, unmask, lift: post-processing
    estimate, memory = update(m, memory)         average, filter, debias: post-processing

`Estimator` is this formula. A method overrides what is its own: `view` (with `View.back`), `start` and
`update` (as an optimiser of optax has `init` and `update`), or the mechanism of its `plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from equipoise.methods.base import Context, Method, Parameters, Plan, Setting, State
from equipoise.methods.clip_rules import Abadi, ClipRule, check_shares, layer_shares
from equipoise.methods.configuration import Noise
from equipoise.methods.named_tensors import mean_of
from equipoise.methods.noise_stages import NoiseStages
from equipoise.methods.thresholds import ReleasedQuantile, Threshold, resolve_threshold
from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.bounds.clipping import clip
from equipoise.privacy.bounds.counts import centred_indicator, soft_indicator
from equipoise.privacy.mechanisms import Gaussian, Mechanism
from equipoise.privacy.plan import PrivacyPlan, Release
from equipoise.privacy.rows import PrivateRows
from equipoise.privacy.sampling import Sampling

Sums = Mapping[str, Mapping[str, Tensor]]
"""What was released: sum name -> tensor name -> tensor."""


@dataclass(frozen=True)
class View:
    """What of each record is clipped, and the way back from what was released.

    Attributes:
        rows: makes the rows that are clipped from those at each point, record by record and from public
            values; the rows themselves when None. Its words are the laws of `PrivateRows`: `scaled`,
            `shifted`, `multiplied`, differences and sums of rows at several points.
        at: the parameter points; only the current parameters when None.
        back: from the released mean to an estimate of the gradient.
        sums: makes further bounded sums from the rows at each point; "gradient" among them takes the place of
            the clipped rows.
    """

    rows: Callable[..., PrivateRows] | None = None
    at: Sequence[Parameters] | None = None
    back: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
    sums: Callable[..., dict[str, Bounded]] | None = None


@dataclass(frozen=True, kw_only=True)
class Estimator(Method):
    """A clipped, noised mean of a view of the rows, and what is made of it.

    Guarantee: a step is one Gaussian release of multiplier z, whatever the view is. The view of a record is
    made of that record's gradients and of values that are public or were released before, and is clipped
    last: adding or removing a record moves the sum by at most C_t. `View.back` and `update` see released
    values alone. A learned threshold adds a count to the same release, of sensitivity 1/2.

    Args:
        clip_norm: C > 0; or a function of the step; or a threshold such as `ReleasedQuantile`.
        clip_rule: weighs the rows.
        noise_multiplier: z, the noise's standard deviation over the threshold; calibrated to the budget
            when None; or `NoiseStages` for noise that changes over the run.
    """

    clip_norm: float | Callable[[int], float] | Threshold = 1.0
    clip_rule: ClipRule = Abadi()
    noise_multiplier: Noise | NoiseStages = None

    def __post_init__(self) -> None:
        super().__post_init__()
        resolve_threshold(self.clip_norm)  # raises where it is no threshold
        if self._layers is not False and isinstance(self.threshold, ReleasedQuantile):
            raise ValueError(
                "per_layer with a ReleasedQuantile threshold is not offered: one count cannot steer several "
                "thresholds. Use a number or a schedule as clip_norm, or per_layer=False."
            )
        check_shares(self._layers)

    @property
    def _layers(self) -> bool | Mapping[str, float]:
        return getattr(self, "per_layer", False)

    @cached_property
    def threshold(self) -> Threshold:
        """C_t."""
        return resolve_threshold(self.clip_norm)

    # ---- what a method may say anew

    def view(self, context: Context, state: State) -> View:
        """What of each record is clipped in this step, from the state and public values."""
        return View()

    def start(self, params: Parameters) -> State:
        """What `update` remembers before the first step."""
        return {}

    def update(
        self, context: Context, state: State, mean: dict[str, Tensor], released: Sums
    ) -> tuple[dict[str, Tensor], State]:
        """The estimate, and what changes of the state, from the released mean of this step.

        Args:
            context: of the step.
            state: before it.
            mean: what `View.back` made of the released mean of the gradients.
            released: all that was released.
        """
        return mean, {}

    # ---- the plan and the step

    def plan(self, setting: Setting) -> Plan:
        return Plan(self.calibrated(setting))

    def calibrated(
        self,
        setting: Setting,
        mechanism: Callable[[float], Mechanism] = Gaussian,
        sampling: Sampling | None = None,
        others: Callable[[float], Sequence[Release]] = lambda noise_multiplier: (),
        bound: float | None = None,
    ) -> PrivacyPlan:
        """The releases, with the noise that meets the budget.

        Args:
            setting: of the plan.
            mechanism: of the gradient, by its multiplier.
            sampling: of the draws; None takes the setting's.
            others: further releases, by the same multiplier.
            bound: how far a record moves the sum; the largest C_t when None.
        """
        threshold, steps, size = self.threshold, setting.sampling.steps, setting.sampling.expected_size
        limit = threshold.upper(steps) if bound is None else bound
        given = self.noise_multiplier
        stages = given if isinstance(given, NoiseStages) else NoiseStages((1.0,), given)

        def with_noise(noise_multiplier: float) -> PrivacyPlan:
            noise = stages.over(mechanism(noise_multiplier), sampling or setting.sampling)
            releases = [Release("gradient", limit, noise, sampling=sampling)]
            if isinstance(threshold, ReleasedQuantile):
                # A centred indicator is -1/2 or +1/2, so one record moves the count by 1/2.
                of_count = setting.count_noise(threshold.count_noise_multiplier(size), noise_multiplier)
                releases.append(Release("below_threshold", 0.5, Gaussian(of_count), sampling=sampling))
            releases += others(noise_multiplier)
            return PrivacyPlan(releases, setting.sampling, setting.relation)

        return setting.calibrated(with_noise, stages.noise_multiplier)

    def init(self, context: Context) -> State:
        return {"threshold": self.threshold.start(), **self.start(context.params)}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        view = self.view(context, state)
        if not isinstance(view, View):
            raise _other(view, f"view() of {self.name}", "a View of the rows that are clipped")
        released, learned = self.released(context, state, view)
        # The expected size is public; dividing by the realised one would release it.
        mean = view.back(mean_of(released["gradient"], context.sampling.expected_size))
        found = self.update(context, state, mean, released)
        if not isinstance(found, tuple):
            raise _other(found, f"update() of {self.name}", "(estimate, what it remembers), two dicts")
        estimate, memory = found
        return estimate, {**learned, **memory}

    def released(
        self, context: Context, state: State, view: View | None = None
    ) -> tuple[dict[str, dict[str, Tensor]], State]:
        """The sums of a draw once they are released, and the state with the threshold that it learned."""
        view, threshold = view or View(), self.threshold
        # C_t follows from earlier releases: one from this draw would be an un-noised statistic of it.
        clip_norm = threshold.at(context.step, state["threshold"])
        groups, limits = self._groups(context.params, clip_norm)

        def sums(*given: Any) -> dict[str, Bounded]:
            *points, _ = given  # the rows at each point, then the records' numbers
            own = {} if view.sums is None else view.sums(*points)
            rows = points[0] if view.rows is None else view.rows(*points)
            out = {} if "gradient" in own else {"gradient": clip(rows, self.clip_rule, limits, groups)}
            if isinstance(threshold, ReleasedQuantile):
                # A record without a finite norm counts as above, and moves the count by 1/2 like any other.
                below = soft_indicator(rows.row_norms(), clip_norm, "below")
                out["below_threshold"] = centred_indicator(below)
            return out | own

        draw = context.draw("batch")
        released = context.ledger.release(draw, draw.query(sums, at=view.at))
        if isinstance(threshold, ReleasedQuantile):
            (count,) = released["below_threshold"].values()
            state = self.learn(state, float(count), context.sampling.expected_size)
        return released, state

    def learn(self, state: State, count: float, expected_size: float) -> State:
        """The state after a released count of rows below the threshold."""
        assert isinstance(self.threshold, ReleasedQuantile)
        return {**state, "threshold": self.threshold.update(state["threshold"], count, expected_size)}

    def noise_std(self, context: Context, state: State) -> float:
        """Standard deviation of the noise in each entry of this step's mean, before `View.back`; public."""
        mechanism = context.plan.releases["gradient"].at(context.step)
        clip_norm = self.threshold.at(context.step, state["threshold"])
        return mechanism.standard_deviation("gradient", clip_norm) / context.sampling.expected_size

    def _groups(
        self, params: Parameters, clip_norm: float
    ) -> tuple[tuple[tuple[str, ...], ...] | None, float | list[float]]:
        """The groups of parameters that are clipped apart, and their thresholds, with sum of squares C^2."""
        if self._layers is False:
            return None, clip_norm
        groups, shares = layer_shares(tuple(params), self._layers)
        return groups, [clip_norm * share for share in shares]


def _other(found: object, what: str, wanted: str) -> TypeError:
    return TypeError(f"{what} gave a {type(found).__name__}; let it return {wanted}")
