"""DP-SGD whose clipping radius follows the root mean square of the gradient norms.

    estimate_t = (sum_i clip(g_i, C_t) + N(0, (z C_t)^2 I)) / B
    m_t = (sum_i min(|g_i|^2, U_t) + N(0, (z_C U_t)^2)) / B_C,      (C, U) = rule(m)

variant=Fused() (default): both sums come from one draw and are one Gaussian release of multiplier
(z^-2 + z_C^-2)^(-1/2); m_t sets the radius of step t + 1, since a radius must not be computed from the batch
that it clips. variant=Round(length): every `length` steps a draw of its own is asked for the mean square at
the current parameters, and the radius holds for the steps that follow. The squares are released in units of
U, so that no radius, however small, runs out of floats.

**The radius.** With G a public bound, U the scale at which squared norms were cut, m the released mean of
min(|g|^2, U) and s the standard deviation of its noise,

    C = min(G, sqrt(max(2 tau (m + c s), C_min^2))),

so that under interpolation (every record's loss reaches its minimum at one point) the radius, and with it
the noise, shrinks as the training succeeds: there mean |g|^2 <= 2 L f. The offset c keeps the argument
positive against the noise of m.

With scale="g_hat" U = G^2 for ever: the noise of m keeps that size, and C stalls near
G sqrt(2 tau c s / G^2). With scale="self" U follows the radius, U' = min(G^2, kappa C^2), and nothing stalls;
but if fewer than a share 1 / (2 tau kappa) of the records have a gradient worth mentioning, C collapses, so
that kappa is as large as the noise allows: max(4, 1 / (8 tau s / U)).

Source: Fukami, Murata and Niwa, TMLR 2025, "AdaptDP-FedAvg" with one client (scale="g_hat", offset="paper");
scale="self" and offset="sd" are this library's. Their offset, scale and noise are those of
`equipoise.published.AdaptiveRMS`.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from equipoise import _validate
from equipoise.methods.base import Context, Method, Plan, Setting, State
from equipoise.methods.clip_rules import Abadi
from equipoise.methods.configuration import BelowOne, Count, Option, Positive, Share, UpToOne
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

RadiusState = dict[str, Any]
"""clip_norm C, square_limit U, and mean: the averaged m, None before the first."""


# Of g_hat, the least radius by scale if no minimum is given: a radius of zero could not be noised. Choices:
# with "g_hat" the noise of a mean square is relative to g_hat^2 and hides far larger radii already; with
# "self" it shrinks along with the radius.
_SMALLEST = {"g_hat": 1e-6, "self": 1e-15}


@dataclass(frozen=True, kw_only=True)
class MeanSquareRule(Option):
    """How a radius follows the released mean squares, whatever its upper limit.

    Args:
        tau: > 0, factor of the mean square.
        offset: c s added to the mean: "sd" (c = 1), "paper" (c = sqrt(2 ln(2 N / u)) for N released values
            and u = failure), or "none".
        scale: "g_hat" or "self".
        kappa: of scale="self", with 2 tau kappa > 1; by the noise when None.
        ema_beta: in [0, 1), weight of the past in an average of the released means.
        minimum: least radius; 1e-6 G for scale "g_hat", 1e-15 G for "self" when None.
        failure: u of the paper's offset.
    """

    kind: ClassVar[str] = "mean_square"
    tau: Positive = 1.0
    offset: Literal["sd", "paper", "none"] = "sd"
    scale: Literal["g_hat", "self"] = "g_hat"
    kappa: Positive | None = None
    ema_beta: BelowOne = 0.0
    minimum: Positive | None = None
    failure: Share = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kappa is not None and self.scale != "self":
            raise ValueError(f"kappa={self.kappa!r} belongs to scale='self'")
        if self.kappa is not None and not 2 * self.tau * self.kappa > 1:
            raise ValueError(
                f"kappa={self.kappa!r}: 2 tau kappa must be above 1 (tau={self.tau!r}), or the radius "
                "shrinks to nothing whatever the gradients are"
            )


@dataclass(frozen=True)
class RMSRadius(MeanSquareRule):
    """The rule with its public upper limit G, which the paper tunes as one tunes a fixed clip norm.

    Args:
        g_hat: G > 0.

    Example:
        >>> rule = RMSRadius(g_hat=10.0, offset="none")
        >>> round(rule.update(rule.start(), mean=(9 + 16 + 0.25) / 3, noise=0.0, releases=1)["clip_norm"], 6)
        4.102845
    """

    g_hat: Positive

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.minimum is not None and self.minimum > self.g_hat:
            raise ValueError(f"minimum={self.minimum!r} must lie above 0 and at most at g_hat={self.g_hat!r}")

    def doubt(self, relative_noise: float) -> str | None:
        """Why the radius may collapse, or None; `relative_noise` is s / U."""
        if self.scale != "self" or relative_noise <= 1 / 32:
            return None
        return (
            f"the noise of the mean square is {relative_noise:.3g} of its limit, above 1/32: with "
            "scale='self' the radius may collapse. Take larger batches, a larger radius_share, or "
            "scale='g_hat'"
        )

    def start(self, initial: float | None = None) -> RadiusState:
        """The state before anything was released: C = `initial` (G when None), U = G^2.

        Raises:
            ValueError: `initial` is no number in (0, G].
        """
        if initial is not None:
            _validate.positive(initial_clip_norm=initial)
            if initial > self.g_hat:
                raise ValueError(
                    f"initial_clip_norm={initial!r} is above clip_norm={self.g_hat!r}, the largest radius"
                )
        return {"clip_norm": self.g_hat if initial is None else initial, "square_limit": self.g_hat**2,
                "mean": None}  # fmt: skip

    def growth(self, relative_noise: float) -> float:
        """kappa: as given, or max(4, 1 / (8 tau s / U))."""
        if self.kappa is not None:
            return self.kappa
        if relative_noise <= 0:
            return math.inf
        # 2 tau kappa stays above 1: below it the radius would shrink whatever the gradients are.
        return max(4.0, 1 / (8 * self.tau * relative_noise), 0.6 / self.tau)

    def update(self, state: RadiusState, mean: float, noise: float, releases: int) -> RadiusState:
        """The next state, from a released mean.

        Args:
            state: before.
            mean: m, released; of min(|g|^2, U) with the state's U.
            noise: s, standard deviation of the noise of m.
            releases: N of the paper's offset, over the whole training.
        """
        limit = state["square_limit"]
        averaged, factor = mean, 1.0
        if self.ema_beta and state["mean"] is not None:
            averaged = self.ema_beta * state["mean"] + (1 - self.ema_beta) * mean
            # The deviation that an exponential average leaves of independent noises.
            factor = math.sqrt((1 - self.ema_beta) / (1 + self.ema_beta))
        least = self.g_hat * _SMALLEST[self.scale] if self.minimum is None else self.minimum
        kappa = self.growth(noise / limit)
        if self.scale == "self":
            # U is kappa C^2, so that one bad mean can at most halve the radius.
            least = max(least, math.sqrt(limit / (4 * kappa)))
        square = 2 * self.tau * (averaged + factor * self._offset(releases) * noise)
        clip_norm = min(self.g_hat, math.sqrt(max(square, least**2)))
        if self.scale == "self":
            limit = min(self.g_hat**2, kappa * clip_norm**2)
        return {"clip_norm": clip_norm, "square_limit": limit, "mean": averaged}

    def _offset(self, releases: int) -> float:
        if self.offset == "paper":
            return math.sqrt(2 * math.log(2 * releases / self.failure))
        return 1.0 if self.offset == "sd" else 0.0


class RMSClipping(Method):
    """What all forms of RMS-adaptive clipping share: the releases, the steps, and how the radius follows.

    The plan's constant is the sampling of the squares.

    Guarantee: given all earlier releases C and U are constants. A record moves the sum of clipped gradients
    by at most C, at multiplier z, and the sum of min(|g|^2 / U, 1) by at most 1, at multiplier z_C, also
    where it is replaced, since each of its terms lies in [0, 1]. Fused, the two are one Gaussian of
    multiplier (z^-2 + z_C^-2)^(-1/2); else they compose, each with its own sampling. The radius is made of
    released values and public numbers.
    """

    clip_norm: float
    radius_share: float
    noise_multiplier: float | None
    radius_noise_multiplier: float | None

    round_length: int | None
    """K, steps per round; None where squares are released with the gradient, from the same draw."""

    @property
    @abstractmethod
    def rule(self) -> RMSRadius:
        """How the radius follows the released mean squares."""

    @abstractmethod
    def query_sampling(self, sampling: Sampling, rounds: int) -> Sampling:
        """The sampling of queries that are not fused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.radius_noise_multiplier is not None and self.noise_multiplier is None:
            raise ValueError(
                f"radius_noise_multiplier={self.radius_noise_multiplier!r} without a noise_multiplier: give "
                "both, or none to have both calibrated to the budget"
            )

    # ---- privacy

    def plan(self, setting: Setting) -> Plan:
        sampling = setting.sampling
        query = sampling
        if self.round_length is not None:
            query = self.query_sampling(sampling, math.ceil(sampling.steps / self.round_length))
        z, radius_z = self.noise_multiplier, self.radius_noise_multiplier
        if z is None:
            plan = self._calibrated(setting, query)
        elif radius_z is None and self.round_length is not None:
            raise ValueError(
                f"noise_multiplier={z!r} without radius_noise_multiplier: a query of its own needs both, or "
                "none to have both calibrated to the budget"
            )
        else:
            # 1/z^2 is what a release of a joint Gaussian costs: the radius gets its share of the sum of both.
            radius_z = radius_z or z * math.sqrt((1 - self.radius_share) / self.radius_share)
            plan = self._releases(setting, query, z, radius_z)
        doubt = self.rule.doubt(_radius_noise(plan, query))
        if doubt is not None:
            warnings.warn(doubt, stacklevel=2)
        return Plan(plan, query)

    def _calibrated(self, setting: Setting, query: Sampling) -> PrivacyPlan:
        share = self.radius_share
        if self.round_length is None:

            def jointly(scale: float) -> PrivacyPlan:
                # (1 - share) / scale^2 + share / scale^2: the pair costs what one of `scale` does.
                gradient, radius = scale / math.sqrt(1 - share), scale / math.sqrt(share)
                return self._releases(setting, query, gradient, radius)

            return setting.calibrated(jointly)
        # The radius has its share of mu^2 in a run that has the budget to itself.
        alone = replace(setting, other_runs=(), budget=setting.budget and replace(setting.budget, runs=1))
        budget = alone.required_budget("noise multipliers")
        # Squares of mu add up; all queries are counted without amplification, which errs towards more noise.
        radius = math.sqrt(query.steps / share) / gaussian_mu(budget.epsilon, budget.delta)
        plan = alone.calibrated(lambda scale: self._releases(setting, query, scale, radius))
        if not setting.shares_budget:
            return plan
        z = plan["gradient"].noise_multiplier
        return setting.calibrated(lambda scale: self._releases(setting, query, scale * z, scale * radius))

    def _releases(self, setting: Setting, query: Sampling, z: float, radius_z: float) -> PrivacyPlan:
        of_draw: dict[str, Any] = {} if self.round_length is None else {"draw": "radius", "sampling": query}
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
        fused = self.round_length is None
        if self.round_length is not None and context.step % self.round_length == 0:
            state = self.begin_round(context, state)
        clip_norm, limit = state["clip_norm"], state["square_limit"]

        def sums(rows: PrivateRows, ids: Tensor) -> dict[str, Bounded]:
            out = {"gradient": clip(rows, Abadi(), clip_norm)}
            if fused:
                out["squares"] = _squares(rows, limit)
            return out

        draw = context.draw("batch")
        released = context.ledger.release(draw, draw.query(sums))
        size = context.sampling.expected_size
        if "squares" in released:
            # For the next step: a radius from the very draw that it clips would be no function of releases.
            state = self.learn(context.plan, state, _mean(released["squares"], size))
        return mean_of(released["gradient"], size), state

    def begin_round(self, context: Context, state: State) -> State:
        """The state with the radius of the round that begins, from a query of its own."""
        return self.learn(context.plan, state, self.ask(context, state))

    def ask(self, context: Context, state: State) -> float:
        """The released mean of min(|g|^2 / U, 1) at the current parameters, from the draw "radius"."""
        draw = context.draw("radius")
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
    length: Count = 1
    sampling_rate: UpToOne | None = None


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

    clip_norm: Positive = 1.0
    variant: MeanSquareQuery = Fused()
    radius: MeanSquareRule = MeanSquareRule()
    radius_share: Share = 0.2
    noise_multiplier: Positive | None = None
    radius_noise_multiplier: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule.start(self.initial_clip_norm)  # refuses what is above G

    @property
    def round_length(self) -> int | None:  # type: ignore[override]
        return self.variant.length if isinstance(self.variant, Round) else None

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
