"""DP-SGD: the noised sum of clipped per-sample gradients, over the public expected batch size.

    estimate_t = (sum_i w_i g_i + N(0, (z C_t)^2 I)) / B,     w_i = rule.weights(||g_i||, C_t)

Source: Abadi et al. 2016, "Deep Learning with Differential Privacy". B is the *expected* batch size of the
sampling, never the realised one; a draw of no records still releases noise. With per-layer clipping every
layer l has a threshold C_l with sum_l C_l^2 = C^2 (McMahan et al. 2018), so that the whole row keeps the
bound C. With a `ReleasedQuantile` threshold the centred count of rows below C_t is one more coordinate of
the same noised vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from equipoise import _validate
from equipoise.methods.base import Context, Method, Parameters, Plan, Setting, State
from equipoise.methods.card import Card
from equipoise.methods.clip_rules import Abadi, ClipRule, check_shares, layer_shares
from equipoise.methods.named_tensors import mean_of
from equipoise.methods.noise_stages import NoiseStages
from equipoise.methods.thresholds import (
    ReleasedQuantile,
    Threshold,
    resolve_threshold,
)
from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.bounds.clipping import clip
from equipoise.privacy.bounds.counts import centred_indicator, soft_indicator
from equipoise.privacy.mechanisms import Gaussian, Mechanism
from equipoise.privacy.plan import PrivacyPlan, Release
from equipoise.privacy.rows import PrivateRows
from equipoise.privacy.sampling import Sampling

__all__ = ["DPSGD"]


@dataclass(frozen=True, kw_only=True)
class DPSGD(Method):
    """Differentially private SGD; the estimate suits any optimiser.

    Args:
        clip_norm: C > 0; or a function of the step; or a threshold such as `ReleasedQuantile`.
        clip_rule: weighs the rows.
        per_layer: clip every layer (module) on its own, at C / sqrt(number of layers); or a mapping from
            module paths to shares of C^2 that are scaled to sum to one.
        noise_multiplier: z, the noise's standard deviation over the threshold; calibrated to the budget
            when None; or `NoiseStages` for noise that changes over the run.

    Example:
        >>> from equipoise.methods import PSAC
        >>> DPSGD(clip_norm=0.1, clip_rule=PSAC()).config()["clip_rule"]
        {'kind': 'psac', 'regulariser': 0.01}
    """

    name: ClassVar[str] = "dp-sgd"
    split_models: ClassVar[frozenset[str]] = frozenset({"fully_shard", "tensor parallel"})
    card: ClassVar[Card] = Card(
        summary="Clips every record's gradient at a threshold and adds noise to the sum.",
        claim="Private, and proved so; the clipping moves the point where training comes to rest.",
        source="Abadi et al. 2016, Deep Learning with Differential Privacy",
        guarantee="proven",
        cost="one forward and one backward pass; the yardstick of the others",
        use_when="First, always: tuned well it is hard to beat.",
        avoid_when="Gradients are strongly asymmetric, so that any threshold that tames the noise biases.",
    )

    clip_norm: float | Callable[[int], float] | Threshold = 1.0
    clip_rule: ClipRule = Abadi()
    per_layer: bool | Mapping[str, float] = False
    noise_multiplier: float | NoiseStages | None = None

    def __post_init__(self) -> None:
        resolve_threshold(self.clip_norm)  # raises where it is no threshold
        _validate.instance(ClipRule, "PSAC(regulariser=0.1)", clip_rule=self.clip_rule)
        if not isinstance(self.noise_multiplier, NoiseStages):
            _validate.noise_if_given(noise_multiplier=self.noise_multiplier)
        if self.per_layer is not False and isinstance(self.threshold, ReleasedQuantile):
            raise ValueError(
                "per_layer with a ReleasedQuantile threshold is not offered: one count cannot steer several "
                "thresholds. Use a number or a schedule as clip_norm, or per_layer=False."
            )
        check_shares(self.per_layer)

    @cached_property
    def threshold(self) -> Threshold:
        """C_t."""
        return resolve_threshold(self.clip_norm)

    def plan(self, setting: Setting) -> Plan:
        return Plan(self.calibrated(setting, Gaussian))

    def calibrated(
        self,
        setting: Setting,
        mechanism: Callable[[float], Mechanism],
        sampling: Sampling | None = None,
        others: Callable[[float], Sequence[Release]] = lambda noise_multiplier: (),
    ) -> PrivacyPlan:
        """The releases, with the noise that meets the budget.

        Args:
            setting: of the plan.
            mechanism: of the gradient, by its multiplier.
            sampling: of the draws; None takes the setting's.
            others: further releases of each draw, by the same multiplier.
        """
        threshold, steps, size = self.threshold, setting.sampling.steps, setting.sampling.expected_size
        bound = threshold.upper(steps)
        given = self.noise_multiplier
        stages = given if isinstance(given, NoiseStages) else NoiseStages((1.0,), given)

        def with_noise(noise_multiplier: float) -> PrivacyPlan:
            noise = stages.over(mechanism(noise_multiplier), sampling or setting.sampling)
            releases = [Release("gradient", bound, noise, sampling=sampling)]
            if isinstance(threshold, ReleasedQuantile):
                # A centred indicator is -1/2 or +1/2, so one record moves the count by 1/2.
                of_count = setting.count_noise(threshold.count_noise_multiplier(size), noise_multiplier)
                releases.append(Release("below_threshold", 0.5, Gaussian(of_count), sampling=sampling))
            releases += others(noise_multiplier)
            return PrivacyPlan(releases, setting.sampling, setting.relation)

        return setting.calibrated(with_noise, stages.noise_multiplier)

    def init(self, context: Context) -> State:
        return {"threshold": self.threshold.start()}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        return self.clipped_mean(context, state)

    def clipped_mean(
        self,
        context: Context,
        state: State,
        view: Callable[..., PrivateRows] | None = None,
        at: Sequence[Parameters] | None = None,
    ) -> tuple[dict[str, Tensor], State]:
        """The released estimate, and the state with the threshold that it learned.

        Args: as for `released`.
        """
        released, state = self.released(context, state, view, at)
        # The expected size is public; dividing by the realised one would release it.
        return mean_of(released["gradient"], context.sampling.expected_size), state

    def released(
        self,
        context: Context,
        state: State,
        view: Callable[..., PrivateRows] | None = None,
        at: Sequence[Parameters] | None = None,
        others: Callable[..., dict[str, Bounded]] | None = None,
    ) -> tuple[dict[str, dict[str, Tensor]], State]:
        """The sums of a draw once they are released, and the state with the threshold that it learned.

        Args:
            context, state: of the step.
            view: makes the rows that are clipped from those at each point, record by record and from public
                values; the rows themselves when None.
            at: the parameter points; only the current parameters when None.
            others: makes further bounded sums from the rows at each point.
        """
        threshold = self.threshold
        # C_t follows from earlier releases: one from this draw would be an un-noised statistic of it.
        clip_norm = threshold.at(context.step, state["threshold"])
        groups, limits = self._groups(context.params, clip_norm)

        def sums(*given: Any) -> dict[str, Bounded]:
            *points, _ = given  # the rows at each point, then the records' numbers
            rows: PrivateRows = points[0] if view is None else view(*points)
            out = {"gradient": clip(rows, self.clip_rule, limits, groups)}
            if isinstance(threshold, ReleasedQuantile):
                # A record without a finite norm counts as above, and moves the count by 1/2 like any other.
                below = soft_indicator(rows.row_norms(), clip_norm, "below")
                out["below_threshold"] = centred_indicator(below)
            if others is not None:
                out |= others(*points)
            return out

        draw = context.draw("batch")
        released = context.ledger.release(draw, draw.query(sums, at=at))
        if isinstance(threshold, ReleasedQuantile):
            (count,) = released["below_threshold"].values()
            state = self.learn(state, float(count), context.sampling.expected_size)
        return released, state

    def learn(self, state: State, count: float, expected_size: float) -> State:
        """The state after a released count of rows below the threshold."""
        assert isinstance(self.threshold, ReleasedQuantile)
        return {"threshold": self.threshold.update(state["threshold"], count, expected_size)}

    def _groups(
        self, params: Parameters, clip_norm: float
    ) -> tuple[tuple[tuple[str, ...], ...] | None, float | list[float]]:
        """The groups of parameters that are clipped apart, and their thresholds, with sum of squares C^2."""
        if self.per_layer is False:
            return None, clip_norm
        groups, shares = layer_shares(tuple(params), self.per_layer)
        return groups, [clip_norm * share for share in shares]
