"""DP-SGD whose clipping radius follows the root mean square of the gradient norms.

    estimate_t = (sum_i clip(g_i, C_t) + N(0, (z C_t)^2 I)) / B
    m_t = (sum_i min(|g_i|^2, U_t) + N(0, (z_C U_t)^2)) / B_C,      (C, U) = rule(m)  (see `rms_radius`)

variant="fused" (default): both sums come from one draw and are one Gaussian release of multiplier
(z^-2 + z_C^-2)^(-1/2); m_t sets the radius of step t + 1, since a radius must not be computed from the batch
that it clips. variant="round": every `round_length` steps a draw of its own is asked for the mean square at
the current parameters, and the radius holds for the steps that follow. The squares are released in units of
U, so that no radius, however small, runs out of floats.

Source: Fukami, Murata and Niwa, TMLR 2025, "AdaptDP-FedAvg" with one client. As published that is
variant="round" with the paper's offset, scale and noise (`rms_claim`); the releases are the same as the
library's, so that the ledger proves them, at an epsilon of its own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from equipoise import _validate
from equipoise.methods.adaptive_rms.radius import RMSRadius
from equipoise.methods.base import Context, DrawHandle, Method, Plan, Setting, State
from equipoise.methods.card import Card
from equipoise.methods.clip_rules import Abadi
from equipoise.methods.named_tensors import mean_of
from equipoise.methods.published.adaptive_rms_formulas import claimed_epsilon, published_noise
from equipoise.privacy import calibrate, gaussian_mu
from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.bounds.clipping import clip
from equipoise.privacy.bounds.counts import capped
from equipoise.privacy.mechanisms import Gaussian
from equipoise.privacy.plan import PrivacyPlan, Release
from equipoise.privacy.private import Private
from equipoise.privacy.rows import PrivateRows
from equipoise.privacy.sampling import FixedEpochs, FullBatch, Poisson, Sampling, WithoutReplacement

if TYPE_CHECKING:
    pass

__all__ = ["AdaptiveRMS"]


class AdaptiveRMS(Method):
    """RMS-adaptive clipping; the estimate suits any optimiser.

    Args:
        clip_norm: G > 0, the largest radius and the first one.
        recipe: "library" or "as_published".
        variant: "fused" or "round"; as published "round" alone.
        tau: > 0, factor of the mean square.
        offset: "sd", "paper" or "none"; "sd" for the library, "paper" as published, when None.
        scale: "g_hat" or "self"; as published "g_hat" alone.
        kappa: of scale="self"; by the noise when None.
        radius_share: rho in (0, 1), the radius' share of 1/z^2 (fused) or of mu^2 (round).
        ema_beta: in [0, 1), averages the released means.
        minimum_clip_norm: least radius; see `RMSRadius`.
        initial_clip_norm: public first radius of variant "fused"; G when None.
        round_length: K, steps a round; variant "round".
        radius_sampling_rate: q_C of variant "round": 1 asks all records; as the steps' own when None, which
            is the default as published.
        noise_multiplier, radius_noise_multiplier: z and z_C; calibrated to the budget when None.

    Raises:
        ValueError: a value out of range, or an argument that the recipe or the variant does not have.

    Example:
        >>> from equipoise.privacy import Poisson
        >>> method = AdaptiveRMS(0.5, noise_multiplier=1.026, radius_noise_multiplier=4.47)
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
        published_guarantee="proven",
        cost="fused: that of DP-SGD and one number a step; round: one more pass over the records of a query",
        use_when="The model can fit every record and many steps are affordable, or no clip norm is known.",
        avoid_when="A clip norm is tuned and no point fits all data, or few records have gradients at all.",
    )

    noise_arguments: ClassVar[Mapping[str, str]] = {
        "noise_multiplier": "gradient",
        "radius_noise_multiplier": "squares",
    }
    of_rounds: ClassVar[Sequence[str]] = ("round_length", "radius_sampling_rate")
    """Arguments that variant "fused" does not have."""

    variants: ClassVar[Mapping[str, Sequence[str]]] = {
        "library": ("fused", "round"),
        "as_published": ("round",),
    }

    def __init__(
        self,
        clip_norm: float = 1.0,
        *,
        recipe: Literal["library", "as_published"] = "library",
        variant: Literal["fused", "round"] | None = None,
        tau: float = 1.0,
        offset: Literal["sd", "paper", "none"] | None = None,
        scale: Literal["g_hat", "self"] = "g_hat",
        kappa: float | None = None,
        radius_share: float = 0.2,
        ema_beta: float = 0.0,
        minimum_clip_norm: float | None = None,
        initial_clip_norm: float | None = None,
        round_length: int | None = None,
        radius_sampling_rate: float | None = None,
        noise_multiplier: float | None = None,
        radius_noise_multiplier: float | None = None,
    ) -> None:
        _validate.one_of(("library", "as_published"), recipe=recipe)
        self._settings: dict[str, Any] = {
            "clip_norm": clip_norm, "recipe": recipe, "variant": variant, "tau": tau, "offset": offset,
            "scale": scale, "kappa": kappa, "radius_share": radius_share, "ema_beta": ema_beta,
            "minimum_clip_norm": minimum_clip_norm, "initial_clip_norm": initial_clip_norm,
            "round_length": round_length, "radius_sampling_rate": radius_sampling_rate,
            "noise_multiplier": noise_multiplier, "radius_noise_multiplier": radius_noise_multiplier,
        }  # fmt: skip
        _validate.positive(clip_norm=clip_norm)
        self.recipe, self._published = recipe, recipe == "as_published"  # type: ignore[misc]
        self.variant = variant or ("round" if self._published else "fused")
        self.round_length = 1 if round_length is None else round_length
        self.radius_sampling_rate = radius_sampling_rate
        self.radius_share, self.initial_clip_norm = radius_share, initial_clip_norm
        self.noise_multiplier, self.radius_noise_multiplier = noise_multiplier, radius_noise_multiplier
        self.radius = RMSRadius(
            g_hat=float(clip_norm),
            tau=tau,
            offset=offset or ("paper" if self._published else "sd"),
            scale=scale,
            kappa=kappa,
            ema_beta=ema_beta,
            minimum=minimum_clip_norm,
        )
        self._check()

    def _check(self) -> None:
        _validate.one_of(("fused", "round"), variant=self.variant)
        _validate.share(radius_share=self.radius_share)
        if isinstance(self.round_length, bool) or not isinstance(self.round_length, int):
            raise TypeError(f"round_length={self.round_length!r}: give a whole number of steps")
        if self.round_length < 1:
            raise ValueError(f"round_length={self.round_length!r}: a round has at least one step")
        for name in ("noise_multiplier", "radius_noise_multiplier"):
            if getattr(self, name) is not None:
                _validate.positive(**{name: getattr(self, name)})
        if self.radius_noise_multiplier is not None and self.noise_multiplier is None:
            raise ValueError(
                f"radius_noise_multiplier={self.radius_noise_multiplier!r} without a noise_multiplier: give "
                "both, or none to have both calibrated to the budget"
            )
        if self.initial_clip_norm is not None:
            self.radius.start(self.initial_clip_norm)  # refuses
        rate = self.radius_sampling_rate
        if rate is not None and not 0 < rate <= 1:
            raise ValueError(f"radius_sampling_rate={rate!r}: a sampling rate lies in (0, 1]")
        given = self._settings
        if self.variant == "fused":
            for name in self.of_rounds:
                if given[name] is not None:
                    raise ValueError(f"{name}={given[name]!r} belongs to variant='round'")
        elif self.initial_clip_norm is not None:
            raise ValueError(
                f"initial_clip_norm={self.initial_clip_norm!r} belongs to variant='fused': a round begins "
                "with a radius of its own"
            )
        if self._published and (self.variant, self.radius.scale) != ("round", "g_hat"):
            raise ValueError(
                f"variant={self.variant!r}, scale={self.radius.scale!r}: the published algorithm has "
                "variant='round' and scale='g_hat'; use recipe='library' for the others"
            )

    # ---- privacy

    def plan(self, setting: Setting) -> Plan:
        """The gradient of every step and the squares of every step or round."""
        sampling = setting.sampling
        if self._published and isinstance(sampling, FixedEpochs):
            raise ValueError(
                f"sampling={sampling!r} with recipe='as_published': equation (1) assumes a fresh sample for "
                "every step, which slices of an epoch are not. Give WithoutReplacement(...), as its proof "
                "does, or use recipe='library'"
            )
        rounds = math.ceil(sampling.steps / self.round_length)
        query = sampling if self.variant == "fused" else self._query_sampling(sampling, rounds)
        z, radius_z = self.noise_multiplier, self.radius_noise_multiplier
        if z is not None and radius_z is None:
            if self.variant == "round":
                raise ValueError(
                    f"noise_multiplier={z!r} without radius_noise_multiplier: variant='round' needs both, or "
                    "none to have both calibrated to the budget"
                )
            radius_z = z * math.sqrt((1 - self.radius_share) / self.radius_share)
        if z is not None and radius_z is not None:
            plan = self._plan(setting, query, z, radius_z)
        elif self._published:
            plan = self._plan(setting, query, *self._published_noise(setting, query))
        else:
            plan = self._calibrated(setting, query, rounds)
        doubt = self.radius.doubt(_radius_noise(plan, query))
        if doubt is not None:
            warnings.warn(doubt, stacklevel=2)
        return Plan(plan, query)

    def _calibrated(self, setting: Setting, query: Sampling, rounds: int) -> PrivacyPlan:
        share, budget = self.radius_share, setting.required_budget("noise multipliers")
        if self.variant == "fused":

            def jointly(scale: float) -> PrivacyPlan:
                gradient, radius = scale / math.sqrt(1 - share), scale / math.sqrt(share)
                return self._plan(setting, query, gradient, radius)

            return calibrate(jointly, budget)
        fixed = math.sqrt(rounds / share) / gaussian_mu(budget.epsilon, budget.delta)
        return calibrate(lambda scale: self._plan(setting, query, scale, fixed), budget)

    def _query_sampling(self, sampling: Sampling, rounds: int) -> Sampling:
        rate = self.radius_sampling_rate
        if rate is None and self._published:
            return replace(sampling, steps=rounds)  # type: ignore[type-var]
        if rate is None or rate == 1:
            return FullBatch(sampling.population, rounds)
        return Poisson(rate * sampling.population, sampling.population, rounds)

    def _plan(self, setting: Setting, query: Sampling, z: float, radius_z: float) -> PrivacyPlan:
        of_draw: dict[str, Any] = {} if self.variant == "fused" else {"draw": "radius", "sampling": query}
        releases = [
            Release("gradient", self.radius.g_hat, Gaussian(z)),
            Release("squares", 1.0, Gaussian(radius_z), replace_ratio=1.0, **of_draw),
        ]
        return PrivacyPlan(releases, setting.sampling, setting.relation)

    def _published_noise(self, setting: Setting, query: Sampling) -> tuple[float, float]:
        """(z, z_C) of equation (1), which needs batches that are drawn afresh for every step."""
        sampling, budget = setting.sampling, setting.required_budget("noise multipliers")
        target, records = (budget.epsilon, budget.delta), sampling.population
        size, query_size = sampling.expected_size, query.expected_size
        noise = published_noise(*target, population=records, batch=size, steps=sampling.steps)
        radius = published_noise(
            *target, population=records, batch=query_size, steps=query.steps, part="radius"
        )
        return noise * size, radius * query_size

    def claimed_epsilon(self, plan: Plan, delta: float) -> float | None:
        """As published: what equation (1) grants to the planned noise; infinite above 1e9."""
        if not self._published:
            return None
        query, sampling = plan.constants, plan.releases.sampling
        return claimed_epsilon(
            plan.releases["gradient"].noise_multiplier / sampling.expected_size,
            _radius_noise(plan.releases, query),
            delta,
            population=sampling.population,
            batch=sampling.expected_size,
            steps=sampling.steps,
            rounds=query.steps,
            radius_batch=query.expected_size,
        )

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        """As published: what the claim of equation (1) was proved for and this run does not do."""
        if plan is None or not self._published:
            return ()
        differs = " and ".join(_other_than_proved(plan.releases.sampling, plan.releases.relation))
        if not differs:
            return ()
        return (
            "the published claim alone, and no part of this guarantee: equation (1) is proved for subsets "
            f"without replacement under replace-one, and this run has {differs}",
        )

    # ---- steps

    def init(self, context: Context) -> State:
        """The first radius, G or the given one."""
        return dict(self.radius.start(self.initial_clip_norm))

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """One draw, one release; at the beginning of a round of variant "round" a query before it."""
        if self.variant == "round" and context.step % self.round_length == 0:
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
            state = self.learn(context.plan, state, _mean(released["squares"], size))
        return mean_of(released["gradient"], size), state

    def measures(self, state: State) -> bool:
        """Whether the next step releases squares beside its gradient: every one of variant "fused"."""
        return self.variant == "fused"

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
        return dict(
            self.radius.update(state, limit * mean, limit * self.radius_noise(plan), plan.constants.steps)
        )

    def metrics(self, state: State) -> Mapping[str, float]:
        """The radius of the next step."""
        return {"radius": state["clip_norm"]}

    def config(self) -> dict[str, Any]:
        """The settings, as plain values."""
        return {"name": self.name, **self._settings}


def _other_than_proved(sampling: Sampling, relation: str) -> list[str]:
    """Where a run differs from what equation (1) is proved for."""
    found = [] if isinstance(sampling, WithoutReplacement) else [f"{type(sampling).__name__} sampling"]
    return found + ([] if relation == "replace_one" else ["add-or-remove-one neighbours"])


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
