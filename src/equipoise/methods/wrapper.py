"""A method around another one: whatever it does not say itself, the inner method says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from equipoise.methods.base import Context, Method, Parameters, Plan, Setting, State

if TYPE_CHECKING:
    from equipoise.methods.public_records import PublicRecords

__all__ = ["MethodWrapper"]


class MethodWrapper(Method):
    """The inner method's plan, steps, cost and claims; its state is kept under `inner`.

    Args:
        inner: does the work.
    """

    def __init__(self, inner: Method) -> None:
        self.inner, self.recipe = inner, inner.recipe

    def plan(self, setting: Setting) -> Plan:
        """The inner method's."""
        return self.inner.plan(setting)

    def init(self, context: Context) -> State:
        """The inner method's state."""
        return {"inner": self.inner.init(context)}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """The inner method's estimate."""
        estimate, inner = self.inner.step(context, state["inner"])
        return estimate, {**state, "inner": inner}

    def rebase(self, state: State, params: Parameters) -> State:
        """The inner method's."""
        return {**state, "inner": self.inner.rebase(state["inner"], params)}

    def passes_over(self, draw: str) -> int:
        """The inner method's."""
        return self.inner.passes_over(draw)

    def gradients_per_step(self, plan: Plan) -> float:
        """The inner method's."""
        return self.inner.gradients_per_step(plan)

    def claimed_epsilon(self, plan: Plan, delta: float) -> float | None:
        """The inner method's."""
        return self.inner.claimed_epsilon(plan, delta)

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        """The inner method's."""
        return self.inner.assumptions(plan)

    def public_batches(self) -> Sequence[PublicRecords]:
        """The inner method's."""
        return self.inner.public_batches()

    def metrics(self, state: State) -> Mapping[str, float]:
        """The inner method's."""
        return self.inner.metrics(state["inner"])

    def config(self) -> dict[str, Any]:
        """The inner method's settings under `method`."""
        return {"name": self.name, "method": self.inner.config()}
