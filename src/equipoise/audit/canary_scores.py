"""A method with an attacker inside: at every step it asks how far the estimate points along each canary.

    score_i = sum_t <estimate_t, g_i(x_t) / |g_i(x_t)|>

at the parameters x_t that were public before the step: what an adversary who sees every released step can
compute. The estimate and everything that leaves is the inner method's, unchanged. The scores speak of records
and are private: they are part of the state, marked, and go nowhere but into the private part of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from equipoise.gradients.subspaces.held import HeldSubspace
from equipoise.methods import Context, Method, State
from equipoise.methods.base import Plan
from equipoise.methods.wrapper import MethodWrapper
from equipoise.privacy import Private
from equipoise.privacy.private import unwrap

__all__ = ["Watched"]


CANARIES = (
    "{count} made-up records (canaries), functions of the seed and of the test records alone, were put "
    "beside the training records, each by a secret coin of its own, whoever the training records are"
)


class Watched(MethodWrapper):
    """Any method, with scores of canaries added up beside it.

    Args:
        inner: does the work.
        canaries: the fields of all canaries, present or not, [m, ...] each.

    Attributes:
        scores: of the last step, [m], raw: for the data's keeper alone. None before the first.
    """

    def __init__(self, inner: Method, canaries: Mapping[str, Tensor]) -> None:
        super().__init__(inner)
        self.canaries = dict(canaries)
        self.scores: Tensor | None = None
        self.name, self.card = inner.name, inner.card  # type: ignore[misc]

    def init(self, context: Context) -> State:
        """The inner method's state, and no score yet."""
        return {**super().init(context), "scores": None}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """The inner method's step; then the scores."""
        estimate, following = super().step(context, state)
        rows = context.public_gradients(self.canaries)
        along = HeldSubspace({name: value[None] for name, value in estimate.items()}).coordinates(rows)[:, 0]
        scores = along.double() / rows.row_norms().double().clamp(min=1e-30)
        if state["scores"] is not None:
            scores = scores + unwrap(state["scores"])
        self.scores = scores
        return estimate, {**following, "scores": Private(scores)}

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        """The inner method's, and the canaries by their public number."""
        count = len(next(iter(self.canaries.values())))
        return [*self.inner.assumptions(plan), CANARIES.format(count=count)]

    def config(self) -> dict[str, Any]:
        """The inner method's: a run with canaries is a run of that method."""
        return self.inner.config()
