"""A method around another one: whatever it does not say itself, the inner method says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor

from equipoise import _validate
from equipoise.methods.base import Context, Method, Parameters, Plan, Setting, State
from equipoise.methods.public_records import PublicRecords


@dataclass(frozen=True)
class MethodWrapper(Method):
    """The inner method's plan, steps, cost and claims; its state is kept under `inner`.

    Args:
        inner: does the work.
    """

    inner: Method

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.instance(Method, "DPSGD(clip_norm=1.0)", inner=self.inner)

    ledger_class = property(attrgetter("inner.ledger_class"))
    recipe = property(attrgetter("inner.recipe"))
    guarantee = property(attrgetter("inner.guarantee"))
    forward_only = property(attrgetter("inner.forward_only"))
    is_whole_step = property(attrgetter("inner.is_whole_step"))

    def plan(self, setting: Setting) -> Plan:
        return self.inner.plan(setting)

    def init(self, context: Context) -> State:
        return {"inner": self.inner.init(context)}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        estimate, inner = self.inner.step(context, state["inner"])
        return estimate, {**state, "inner": inner}

    def rebase(self, state: State, params: Parameters) -> State:
        return {**state, "inner": self.inner.rebase(state["inner"], params)}

    def passes_over(self, draw: str) -> int:
        return self.inner.passes_over(draw)

    def gradients_per_step(self, plan: Plan) -> float:
        return self.inner.gradients_per_step(plan)

    def claimed_epsilon(self, plan: Plan, delta: float) -> float | None:
        return self.inner.claimed_epsilon(plan, delta)

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        return (*super().assumptions(plan), *self.inner.assumptions(plan))

    def public_batches(self) -> Sequence[PublicRecords]:
        return self.inner.public_batches()

    def metrics(self, state: State) -> Mapping[str, float]:
        return self.inner.metrics(state["inner"])
