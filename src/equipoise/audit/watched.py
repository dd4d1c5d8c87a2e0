"""A method with an attacker inside: at every step it asks how far the estimate points along each canary.

    score_i = sum_t <estimate_t, g_i(x_t) / |g_i(x_t)|>

at the parameters x_t that were public before the step: what an adversary who sees every released step can
compute. The estimate and everything that leaves is the inner method's, unchanged. The scores speak of records
and are private: they are part of the state, marked, and go nowhere but into the private part of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.gradients.subspace import HeldSubspace
from equipoise.methods import Context, Method, State
from equipoise.methods.base import Parameters
from equipoise.privacy import PrivacyPlan, Private, Sampling
from equipoise.privacy.private import unwrap

if TYPE_CHECKING:
    from equipoise.privacy import Budget

__all__ = ["Watched"]


class Watched(Method):
    """Any method, with scores of canaries added up beside it.

    Args:
        inner: does the work.
        canaries: a batch of all canaries, present or not.

    Attributes:
        scores: of the last step, [m], raw: for the data's keeper alone. None before the first.
    """

    def __init__(self, inner: Method, canaries: Any) -> None:
        self.inner, self.canaries = inner, canaries
        self.scores: Tensor | None = None
        self.name, self.card, self.recipe = inner.name, inner.card, inner.recipe  # type: ignore[misc]

    def plan(
        self, sampling: Sampling, budget: Budget | None, relation: str, public_rng: torch.Generator
    ) -> PrivacyPlan:
        """The inner method's."""
        return self.inner.plan(sampling, budget, relation, public_rng)

    def init(self, context: Context) -> State:
        """The inner method's state, and no score yet."""
        return {"inner": self.inner.init(context), "scores": None}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """The inner method's step; then the scores."""
        estimate, inner = self.inner.step(context, state["inner"])
        rows = context.public_gradients(self.canaries)
        along = HeldSubspace({name: value[None] for name, value in estimate.items()}).coordinates(rows)[:, 0]
        scores = along.double() / rows.row_norms().double().clamp(min=1e-30)
        if state["scores"] is not None:
            scores = scores + unwrap(state["scores"])
        self.scores = scores
        return estimate, {"inner": inner, "scores": Private(scores)}

    def rebase(self, state: State, params: Parameters) -> State:
        """The inner method's."""
        return {**state, "inner": self.inner.rebase(state["inner"], params)}

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
        """The inner method's: a run with canaries is a run of that method."""
        return self.inner.config()
