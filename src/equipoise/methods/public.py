"""Training on the public records, by itself and before a private training.

    public-only:         estimate = mean of the public gradients                      nothing is released
    public-warm-start:   the same, of gradients clipped as the private ones will be, for the first steps; then
                         an inner method

The baselines that papers on public directions leave out. What is computed from public records is free, so the
first says how much of a private result the public records alone explain, and the second starts a private
training where they end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import torch
from torch import Tensor

from equipoise.methods.base import Context, Method, Parameters, Plan, Setting, State
from equipoise.methods.clip_rules import Abadi
from equipoise.methods.configuration import Count, Positive
from equipoise.methods.dp_sgd import DPSGD
from equipoise.methods.public_records import PublicRecords
from equipoise.methods.registry import find
from equipoise.methods.thresholds import Fixed
from equipoise.methods.wrapper import MethodWrapper
from equipoise.privacy import PrivacyPlan, Sampling

if TYPE_CHECKING:
    from equipoise.gradients import PerSampleGradients


@dataclass(frozen=True, kw_only=True)
class PublicOnly(Method):
    """SGD on public records.

    Guarantee: epsilon is zero. Private records are never drawn, and the plan holds no release.

    Args:
        public: the public records, a batch as the loss takes it.
        public_batch_size: records per step, drawn afresh; all of them when None.

    Example:
        >>> PublicOnly(public=PublicRecords(torch.eye(3))).config()["public"]["records"]
        3
    """

    public: PublicRecords
    public_batch_size: Count | None = None

    def plan(self, setting: Setting) -> Plan:
        return Plan(PrivacyPlan([], setting.sampling, setting.relation))

    def gradients_per_step(self, plan: Plan) -> float:
        return self.public.drawn_size(self.public_batch_size)

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        return mean_gradient(context, self.public, self.public_batch_size), state

    def public_batches(self) -> Sequence[PublicRecords]:
        return (self.public,)

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        return (*super().assumptions(plan), *self.public.assumptions())


@dataclass(frozen=True)
class WarmStart:
    """How many steps are public, and the inner method's plan for the others."""

    steps: int
    inner: Plan


@dataclass(frozen=True, kw_only=True)
class PublicWarmStart(MethodWrapper):
    """Public steps first, then an inner method, which is planned for the steps that are left.

    Guarantee: that of the inner method over its own steps. Those before it draw no private record.

    Args:
        public: the public records, a batch as the loss takes it.
        inner: the method of the private steps.
        warm_steps: public steps, of the steps of the sampling; a fifth of them when None.
        warm_clip_norm: norm to which each public record's gradient is clipped. "inner" takes the inner
            method's `clip_norm` where that is a number, so that one learning rate serves both phases; None
            does not clip.
        warm_scale: factor on the public estimate.
        public_batch_size: records a public step, drawn afresh; all of them when None.

    Example:
        >>> public = PublicRecords(torch.eye(3))
        >>> PublicWarmStart(public=public, inner=DPSGD(clip_norm=0.1), warm_steps=50).inner.clip_norm
        0.1
    """

    public: PublicRecords
    inner: Method = DPSGD()
    warm_steps: Count | None = None
    warm_clip_norm: Positive | Literal["inner"] | None = "inner"
    warm_scale: Positive = 1.0
    public_batch_size: Count | None = None

    def _warm(self, sampling: Sampling) -> int:
        warm = max(1, sampling.steps // 5) if self.warm_steps is None else self.warm_steps
        if warm >= sampling.steps:
            raise ValueError(
                f"warm_steps={warm} leaves no private step of the sampling's {sampling.steps}: plan more "
                "steps, or use public-only"
            )
        return warm

    def _warm_norm(self) -> float | None:
        """The clip norm of the public steps."""
        found: Any = self.warm_clip_norm
        if found == "inner":
            found = getattr(self.inner, "clip_norm", None)
            if isinstance(found, Fixed):  # other thresholds are no number
                found = found.clip_norm
        return float(found) if isinstance(found, (int, float)) else None

    def _rest(self, sampling: Sampling) -> Sampling:
        """The sampling of the private steps."""
        left = sampling.steps - self._warm(sampling)
        return dataclasses.replace(sampling, steps=left)  # type: ignore[type-var]

    def plan(self, setting: Setting) -> Plan:
        """The inner method's plan for the steps that are left; its constants are that plan."""
        inner = self.inner.plan(dataclasses.replace(setting, sampling=self._rest(setting.sampling)))
        return Plan(inner.releases, WarmStart(self._warm(setting.sampling), inner))

    def gradients_per_step(self, plan: Plan) -> float:
        start: WarmStart = plan.constants
        public, later = self.public.drawn_size(self.public_batch_size), start.inner.releases.sampling.steps
        total = start.steps * public + later * self.inner.gradients_per_step(start.inner)
        return total / (start.steps + later)

    def init(self, context: Context) -> State:
        return {"inner": None}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        start: WarmStart = context.plan.constants
        if context.step < start.steps:
            estimate = mean_gradient(context, self.public, self.public_batch_size, self._warm_norm())
            return {name: self.warm_scale * value for name, value in estimate.items()}, state
        later = cast(Context, _LaterContext(context, start))
        # The inner method begins where the public steps have led, so its state is made no earlier.
        inner = self.inner.init(later) if state["inner"] is None else state["inner"]
        return super().step(later, {"inner": inner})

    def rebase(self, state: State, params: Parameters) -> State:
        return state if state["inner"] is None else super().rebase(state, params)

    def metrics(self, state: State) -> Mapping[str, float]:
        return {} if state["inner"] is None else super().metrics(state)

    def claimed_epsilon(self, plan: Plan, delta: float) -> float | None:
        return self.inner.claimed_epsilon(plan.constants.inner, delta)

    def public_batches(self) -> Sequence[PublicRecords]:
        return (self.public, *self.inner.public_batches())

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        found = (*super().assumptions(plan), *self.public.assumptions(), *self.inner.assumptions(plan))
        return tuple(dict.fromkeys(found))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], public: PublicRecords | None = None) -> Self:
        """The method that `config` described; the inner one is described, named, or set by dotted names."""
        given = dict(config)
        inner = given.pop("inner", cls.inner.config())
        described = {"name": inner} if isinstance(inner, str) else dict(inner)
        for name in [name for name in given if name.startswith("inner.")]:
            described[name.removeprefix("inner.")] = given.pop(name)
        kind = find(described["name"], described.get("recipe", "library"))
        return super().from_config({**given, "inner": kind.from_config(described, public)}, public)


def mean_gradient(
    context: Context, public: PublicRecords, size: int | None, clip_norm: float | None = None
) -> dict[str, Tensor]:
    """The mean gradient of some public records at the current parameters, each clipped to `clip_norm`.

    Raises:
        ValueError: it is not finite.
    """
    rows = context.public_gradients(public.drawn(size, context.public_rng(context.step)))
    weights = torch.full((rows.num_records,), 1 / rows.num_records, dtype=rows.dtype, device=rows.device)
    if clip_norm is not None:
        weights = weights * Abadi().weights(rows.row_norms(), clip_norm).to(weights.dtype)
    mean = rows.weighted_sums(weights)
    if not all(bool(torch.isfinite(value).all()) for value in mean.values()):
        raise ValueError(
            f"the gradient of the public records is not finite at step {context.step}: the training diverged "
            "(lower the learning rate or warm_scale), or a public record is bad"
        )
    return mean


class _LaterContext:
    """A context whose steps are counted from the end of the public ones; all else is the context's."""

    def __init__(self, context: Context, start: WarmStart) -> None:
        self._context, self._offset = context, start.steps
        self.plan, self.sampling = start.inner, start.inner.releases.sampling
        self.step = context.step - start.steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def public_gradients(
        self, batch: Any, at: Parameters | None = None, step: int | None = None
    ) -> PerSampleGradients:
        # The inner method speaks of its own steps; public randomness follows those of the training.
        later = self._context.step if step is None else step + self._offset
        return self._context.public_gradients(batch, at, later)

    def public_rng(self, step: int) -> torch.Generator:
        return self._context.public_rng(step + self._offset)
