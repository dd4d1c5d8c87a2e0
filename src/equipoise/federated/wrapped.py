"""A method around another one: it changes the noised estimate or the answer, and releases nothing itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.federated.hooks import RoundHooks
from equipoise.methods import Context, Method, State
from equipoise.methods.base import Parameters

if TYPE_CHECKING:
    from equipoise.privacy import Budget, PrivacyPlan, Sampling

__all__ = ["Wrapped", "copied"]


class Wrapped(RoundHooks, Method):
    """The inner method's plan, cost, claims and state, and the point where the server put the client.

    Args:
        method: what estimates the gradient.
    """

    def __init__(self, method: Method) -> None:
        self.inner, self.recipe = method, method.recipe

    def plan(
        self, sampling: Sampling, budget: Budget | None, relation: str, public_rng: torch.Generator
    ) -> PrivacyPlan:
        """The inner method's."""
        return self.inner.plan(sampling, budget, relation, public_rng)

    def init(self, context: Context) -> State:
        """The inner state, and the point where the round begins."""
        return {"inner": self.inner.init(context), "start": copied(context.params)}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """The inner estimate."""
        estimate, inner = self.inner.step(context, state["inner"])
        return estimate, {**state, "inner": inner}

    def rebase(self, state: State, params: Parameters) -> State:
        """The round begins where the server put the parameters."""
        return {**state, "inner": self.inner.rebase(state["inner"], params), "start": copied(params)}

    def passes_over(self, draw: str) -> int:
        """The inner method's."""
        return self.inner.passes_over(draw)

    def gradients_per_step(self, sampling: Sampling, plan: PrivacyPlan) -> float:
        """The inner method's."""
        return self.inner.gradients_per_step(sampling, plan)

    def claimed_epsilon(self, sampling: Sampling, relation: str, delta: float) -> float | None:
        """The inner method's."""
        return self.inner.claimed_epsilon(sampling, relation, delta)

    def assumptions(self) -> Sequence[str]:
        """The inner method's."""
        return self.inner.assumptions()

    def metrics(self, state: State) -> Mapping[str, float]:
        """The inner method's."""
        return self.inner.metrics(state["inner"])

    def config(self) -> dict[str, Any]:
        """The inner method's settings under `method`."""
        return {"name": self.name, "method": self.inner.config()}


def copied(params: Parameters) -> dict[str, Tensor]:
    """Copies that no optimiser moves."""
    return {name: value.detach().clone() for name, value in params.items()}
