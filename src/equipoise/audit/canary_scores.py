"""A method with an attacker inside: at every step it asks how far the estimate points along each canary.

    score_i = sum_t <estimate_t, g_i(x_t) / |g_i(x_t)|>

at the parameters x_t that were public before the step: what an adversary who sees every released step can
compute. The estimate and everything that leaves is the inner method's, unchanged. The scores speak of records
and are private: they are part of the state, marked, and go nowhere but into the private part of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from equipoise.methods import Context, Method, State
from equipoise.methods.base import Plan
from equipoise.methods.subspaces import held
from equipoise.methods.wrapper import MethodWrapper
from equipoise.privacy import Private
from equipoise.privacy.private import unwrap

CANARIES = (
    "{count} made-up records (canaries), functions of the seed and of the test records only, were "
    "added to the training records, each with probability 1/2 by a secret random choice of its own, whoever "
    "the training records are"
)


def scores_of(method: Method, state: State | None) -> Tensor | None:
    """The canaries' scores after a step, [m], for the data owner only; None where the method has none."""
    return method.scores(state) if isinstance(method, WithCanaryScores) else None


@dataclass(frozen=True, eq=False)
class WithCanaryScores(MethodWrapper):
    """Any method, which also adds up scores of canaries.

    Args:
        inner: does the work.
        canaries: the fields of all canaries, present or not, [m, ...] each.
    """

    canaries: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        super().__post_init__()
        # A run with canaries is a run of the inner method: it is described as one.
        object.__setattr__(self, "name", self.inner.name)
        object.__setattr__(self, "card", self.inner.card)

    def scores(self, state: State | None) -> Tensor | None:
        """The scores after a step, [m], raw: for the data owner only. None before the first."""
        return None if state is None or state["scores"] is None else unwrap(state["scores"])

    def init(self, context: Context) -> State:
        return {**super().init(context), "scores": None}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        estimate, following = super().step(context, state)
        rows = context.public_gradients(self.canaries)
        along = held({name: value[None] for name, value in estimate.items()}).coordinates(rows)[:, 0]
        scores = along.double() / rows.row_norms().double().clamp(min=1e-30)
        before = self.scores(state)
        scores = scores if before is None else before + scores
        return estimate, {**following, "scores": Private(scores)}

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        """The inner method's, and the canaries by their public number."""
        count = len(next(iter(self.canaries.values())))
        return [*self.inner.assumptions(plan), CANARIES.format(count=count)]

    def config(self) -> dict[str, Any]:
        return self.inner.config()
