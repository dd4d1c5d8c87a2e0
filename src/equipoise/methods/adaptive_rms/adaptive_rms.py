"""DP-SGD whose clipping radius follows the root mean square of the gradient norms.

    estimate_t = (sum_i clip(g_i, C_t) + N(0, (z C_t)^2 I)) / B
    m_t = (sum_i min(|g_i|^2, U_t) + N(0, (z_C U_t)^2)) / B_C,      (C, U) = rule(m)  (see `radius`)

variant=Fused() (default): both sums come from one draw and are one Gaussian release of multiplier
(z^-2 + z_C^-2)^(-1/2); m_t sets the radius of step t + 1, since a radius must not be computed from the batch
that it clips. variant=Round(length): every `length` steps a draw of its own is asked for the mean square at
the current parameters, and the radius holds for the steps that follow. The squares are released in units of
U, so that no radius, however small, runs out of floats.

Source: Fukami, Murata and Niwa, TMLR 2025, "AdaptDP-FedAvg" with one client. Their offset, scale and noise
are those of `equipoise.published.AdaptiveRMS`.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from equipoise import _validate
from equipoise.methods.adaptive_rms.radius import MeanSquareRule, RMSRadius
from equipoise.methods.base import Context, DrawHandle, Method, Plan, Setting, State
from equipoise.methods.card import Card
from equipoise.methods.clip_rules import Abadi
from equipoise.methods.configuration import Option
from equipoise.methods.named_tensors import mean_of
from equipoise.privacy import gaussian_mu
from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.bounds.clipping import clip
from equipoise.privacy.bounds.counts import capped
from equipoise.privacy.mechanisms import Gaussian
from equipoise.privacy.plan import PrivacyPlan, Release
from equipoise.privacy.private import Private
from equipoise.privacy.rows import PrivateRows
from equipoise.privacy.sampling import FullBatch, Poisson, Sampling, WithoutReplacement

__all__ = ["AdaptiveRMS", "Fused", "MeanSquareQuery", "RMSClipping", "Round", "sampling_at"]


class RMSClipping(Method):
    """What all forms of RMS-adaptive clipping share: the releases, the steps, and how the radius follows.

    The plan's constant is the sampling of the squares.
    """

    clip_norm: float
    radius_share: float
    noise_multiplier: float | None
    radius_noise_multiplier: float | None

    @property
    @abstractmethod
    def fused(self) -> bool:
        """Whether squares are released with the gradient, from the same draw."""

    @property
    @abstractmethod
    def steps_per_round(self) -> int:
        """K; 1 where there are no rounds."""

    @property
    @abstractmethod
    def rule(self) -> RMSRadius:
        """How the radius follows the released mean squares."""

    @abstractmethod
    def query_sampling(self, sampling: Sampling, rounds: int) -> Sampling:
        """The sampling of queries that are not fused."""

    def _check_noise(self) -> None:
        """Of the multipliers, for constructors."""
        _validate.positive_if_given(
            noise_multiplier=self.noise_multiplier, radius_noise_multiplier=self.radius_noise_multiplier
        )
        if self.radius_noise_multiplier is not None and self.noise_multiplier is None:
            raise ValueError(
                f"radius_noise_multiplier={self.radius_noise_multiplier!r} without a noise_multiplier: give "
                "both, or none to have both calibrated to the budget"
            )

    # ---- privacy

    def plan(self, setting: Setting) -> Plan:
        sampling = setting.sampling
        rounds = math.ceil(sampling.steps / self.steps_per_round)
        query = sampling if self.fused else self.query_sampling(sampling, rounds)
        z, radius_z = self.noise_multiplier, self.radius_noise_multiplier
        if z is not None and radius_z is None:
            if not self.fused:
                raise ValueError(
                    f"noise_multiplier={z!r} without radius_noise_multiplier: a query of its own needs both, "
                    "or none to have both calibrated to the budget"
                )
            # 1/z^2 is what a release of a joint Gaussian costs: the radius gets its share of the sum of both.
            radius_z = z * math.sqrt((1 - self.radius_share) / self.radius_share)
        if z is not None and radius_z is not None:
            plan = self._releases(setting, query, z, radius_z)
        else:
            plan = self._calibrated(setting, query)
        doubt = self.rule.doubt(_radius_noise(plan, query))
        if doubt is not None:
            warnings.warn(doubt, stacklevel=2)
        return Plan(plan, query)

    def _calibrated(self, setting: Setting, query: Sampling) -> PrivacyPlan:
        share = self.radius_share
        if self.fused:

            def jointly(scale: float) -> PrivacyPlan:
                # (1 - share) / scale^2 + share / scale^2: the pair costs what one of `scale` does.
                gradient, radius = scale / math.sqrt(1 - share), scale / math.sqrt(share)
                return self._releases(setting, query, gradient, radius)

            return setting.calibrated(jointly)
        # The radius has its share of mu^2 in a run that has the budget to itself.
        alone = replace(setting, other_runs=())
        budget = alone.required_budget("noise multipliers")
        # Squares of mu add up; all queries are counted without amplification, which errs towards more noise.
        radius = math.sqrt(query.steps / share) / gaussian_mu(budget.epsilon, budget.delta)
        plan = alone.calibrated(lambda scale: self._releases(setting, query, scale, radius))
        if not setting.other_runs:
            return plan
        z = plan["gradient"].noise_multiplier
        return setting.calibrated(lambda scale: self._releases(setting, query, scale * z, scale * radius))

    def _releases(self, setting: Setting, query: Sampling, z: float, radius_z: float) -> PrivacyPlan:
        of_draw: dict[str, Any] = {} if self.fused else {"draw": "radius", "sampling": query}
        releases = [
            Release("gradient", float(self.clip_norm), Gaussian(z)),
            Release("squares", 1.0, Gaussian(radius_z), replace_ratio=1.0, **of_draw),
        ]
        return PrivacyPlan(releases, setting.sampling, setting.relation)

    # ---- steps

    def init(self, context: Context) -> State:
        return dict(self.rule.start())

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """One draw, one release; where squares are not fused, a query at the beginning of every round."""
        if not self.fused and context.step % self.steps_per_round == 0:
            state = self.begin_round(context, state)
        clip_norm, limit = state["clip_norm"], state["square_limit"]

        def sums(rows: PrivateRows, ids: Tensor) -> dict[str, Bounded]:
            out = {"gradient": clip(rows, Abadi(), clip_norm)}
            if self.measures(state):
                out["squares"] = _squares(rows, limit)
            return out

        draw = context.draw("batch")
        released = context.ledger.release(draw, draw.query(sums))
        size = context.sampling.expected_size
        if "squares" in released:
            # For the next step: a radius from the very draw that it clips would be no function of releases.
            state = self.learn(context.plan, state, _mean(released["squares"], size))
        return mean_of(released["gradient"], size), state

    def measures(self, state: State) -> bool:
        """Whether the next step releases squares with its gradient."""
        return self.fused

    def begin_round(self, context: Context, state: State) -> State:
        """The state with the radius of the round that begins, from a query of its own."""
        return self.learn(context.plan, state, self.ask(context, state))

    def ask(self, context: Context, state: State) -> float:
        """The released mean of min(|g|^2 / U, 1) at the current parameters, from the draw "radius"."""
        draw: DrawHandle = context.draw("radius")
        square_limit = state["square_limit"]
        sums = draw.query(lambda rows, ids: {"squares": _squares(rows, square_limit)})
        return _mean(context.ledger.release(draw, sums)["squares"], context.plan.constants.expected_size)

    def radius_noise(self, plan: Plan) -> float:
        """z_C / B_C, the standard deviation of an answer of `ask`; public."""
        return _radius_noise(plan.releases, plan.constants)

    def learn(self, plan: Plan, state: State, mean: float) -> State:
        """The state after a released mean of min(|g|^2 / U, 1): its radius follows."""
        limit = state["square_limit"]
        noise = limit * self.radius_noise(plan)
        return dict(self.rule.update(state, limit * mean, noise, plan.constants.steps))

    def metrics(self, state: State) -> Mapping[str, float]:
        return {"radius": state["clip_norm"]}


class MeanSquareQuery(Option):
    """When the mean square of the gradient norms is released."""


@dataclass(frozen=True, kw_only=True)
class Fused(MeanSquareQuery):
    """In every step, from the step's own draw, for the radius of the next step.

    Args:
        initial_clip_norm: public first radius; G when None.
    """

    kind: ClassVar[str] = "fused"
    initial_clip_norm: float | None = None


@dataclass(frozen=True, kw_only=True)
class Round(MeanSquareQuery):
    """Before every `length` steps, from a draw of its own, for the radius of these steps.

    Args:
        length: K, steps per round.
        sampling_rate: q_C of the query; None or 1 asks all records.
    """

    kind: ClassVar[str] = "round"
    length: int = 1
    sampling_rate: float | None = None

    def __post_init__(self) -> None:
        _validate.count(length=self.length)
        require_rate("sampling_rate", self.sampling_rate)


@dataclass(frozen=True, kw_only=True)
class AdaptiveRMS(RMSClipping):
    """RMS-adaptive clipping; the estimate suits any optimiser.

    Args:
        clip_norm: G > 0, the largest radius and the first one.
        variant: `Fused` or `Round`.
        radius: how the radius follows.
        radius_share: rho in (0, 1), the radius' share of 1/z^2 (fused) or of mu^2 (round).
        noise_multiplier, radius_noise_multiplier: z and z_C; calibrated to the budget when None.

    Raises:
        ValueError: a value out of range.

    Example:
        >>> from equipoise.privacy import Poisson
        >>> method = AdaptiveRMS(clip_norm=0.5, noise_multiplier=1.026, radius_noise_multiplier=4.47)
        >>> plan = method.plan(Setting(sampling=Poisson(256, 60_000, 4680))).releases
        >>> round(plan.epsilon(1e-5).value, 2)
        1.57
    """

    name: ClassVar[str] = "adaptive-rms"
    card: ClassVar[Card] = Card(
        summary="DP-SGD whose clipping radius follows the released root mean square of the gradient norms.",
        claim="That the radius, and with it the noise, shrinks as training succeeds: true where one point "
        "fits every record, down to a floor that the radius' own noise sets; scale='self' has no such floor. "
        "Where the labels are noisy it costs a little and gains nothing.",
        source="Fukami, Murata and Niwa 2025, TMLR, AdaptDP-FedAvg, with one client",
        guarantee="proven",
        cost="fused: that of DP-SGD and one number per step; round: one more pass over a query's records",
        use_when="The model can fit every record and many steps are affordable, or no clip norm is known.",
        avoid_when="A clip norm is tuned and no point fits all data, or few records have gradients at all.",
    )

    clip_norm: float = 1.0
    variant: MeanSquareQuery = Fused()
    radius: MeanSquareRule = MeanSquareRule()
    radius_share: float = 0.2
    noise_multiplier: float | None = None
    radius_noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        _validate.positive(clip_norm=self.clip_norm)
        _validate.instance(MeanSquareQuery, "Round(length=10)", variant=self.variant)
        _validate.instance(MeanSquareRule, 'MeanSquareRule(scale="self")', radius=self.radius)
        _validate.share(radius_share=self.radius_share)
        self._check_noise()
        self.rule.start(self.initial_clip_norm)  # refuses what is above G

    @property
    def fused(self) -> bool:
        return isinstance(self.variant, Fused)

    @property
    def steps_per_round(self) -> int:
        return self.variant.length if isinstance(self.variant, Round) else 1

    @property
    def initial_clip_norm(self) -> float | None:
        """The first radius of `Fused`; a round begins with a radius of its own."""
        return self.variant.initial_clip_norm if isinstance(self.variant, Fused) else None

    @property
    def rule(self) -> RMSRadius:
        return RMSRadius(float(self.clip_norm), **asdict(self.radius))

    def query_sampling(self, sampling: Sampling, rounds: int) -> Sampling:
        assert isinstance(self.variant, Round)
        return sampling_at(self.variant.sampling_rate, sampling, rounds)

    def init(self, context: Context) -> State:
        return dict(self.rule.start(self.initial_clip_norm))


def sampling_at(rate: float | None, sampling: Sampling, count: int) -> Sampling:
    """The sampling of queries at a rate: all records where it is None or 1, else as the steps sample.

    No accountant covers Poisson samples and subsets of a fixed size in one plan.
    """
    if rate is None or rate == 1:
        return FullBatch(sampling.population, count)
    if isinstance(sampling, WithoutReplacement):
        return WithoutReplacement(max(1, round(rate * sampling.population)), sampling.population, count)
    return Poisson(rate * sampling.population, sampling.population, count)


def require_rate(argument: str, rate: float | None) -> None:
    """Raise a ValueError unless it is None or a sampling rate."""
    if rate is not None and not 0 < rate <= 1:
        raise ValueError(f"{argument}={rate!r}: a sampling rate lies in (0, 1]")


def _radius_noise(plan: PrivacyPlan, query: Sampling) -> float:
    """z_C / B_C, the standard deviation of a released mean of squares."""
    return plan["squares"].noise_multiplier / query.expected_size


def _squares(rows: PrivateRows, limit: float) -> Bounded:
    """The sum of min(|g|^2 / U, 1); a record whose norm is not finite counts 1, like any large one.

    Were it to count nothing, records that overflow would pull the radius down.
    """
    relative = (rows.row_norms() / math.sqrt(limit)).nan_to_num(nan=math.inf).clamp(max=1.0).square()
    assert isinstance(relative, Private)
    return capped(relative, 1.0)


def _mean(released: Mapping[str, Tensor], size: float) -> float:
    (total,) = released.values()
    return float(total) / size
