"""References without privacy: plain SGD, SGD on clipped gradients, and the same with clipped error feedback.

    sgd:        estimate = sum_i g_i / B
    clip-sgd:   estimate = sum_i clip(g_i, C1) / B
    ef-sgd:     estimate = sum_i clip(g_i, C1) / B + clip(e, C2),   e = e + sum_i g_i / B - estimate

The distance to the first is the price of privacy. The others show what clipping alone does to a training, and
what feedback undoes, with the noise taken away. They disclose their sums: a run carries no guarantee, and its
statement says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from torch import Tensor

from equipoise import _validate
from equipoise.methods.base import Context, Method, Plan, Setting, State
from equipoise.methods.clip_rules import Abadi
from equipoise.methods.configuration import Positive
from equipoise.methods.named_tensors import clipped, mean_of, zeros_like
from equipoise.privacy import clip, unbounded_sum
from equipoise.published.dice_sgd import clipped_and_plain_sums
from equipoise.published.ledger import PublishedLedger, disclose
from equipoise.published.record import PublishedPlan, Unproven

NO_NOISE = "this method adds no noise: it is a reference, not a private method"


class NonPrivate(Method):
    """A method that adds no noise: its plan holds no release, and no run of it has an epsilon."""

    ledger_class = PublishedLedger

    def plan(self, setting: Setting) -> Plan:
        plan = PublishedPlan([], setting.sampling, setting.relation, unproven=[Unproven("gradient")])
        return Plan(plan)


@dataclass(frozen=True, kw_only=True)
class PlainSGD(NonPrivate):
    """SGD without clipping or noise: NOT PRIVATE. What privacy costs is the distance to it.

    Example:
        >>> PlainSGD().config()
        {'name': 'sgd', 'recipe': 'library'}
    """

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        sums = context.draw("batch").query(lambda rows, ids: {"gradient": unbounded_sum(rows)})
        total = disclose(context, sums["gradient"].value, NO_NOISE)
        return mean_of(total, context.sampling.expected_size), state


@dataclass(frozen=True, kw_only=True)
class ClipSGD(NonPrivate):
    """SGD on clipped gradients, without noise: NOT PRIVATE.

    Args:
        clip_norm: C1 > 0; infinity for plain SGD.

    Example:
        >>> ClipSGD(clip_norm=0.5).config()
        {'name': 'clip-sgd', 'recipe': 'library', 'clip_norm': 0.5}
    """

    clip_norm: Annotated[float, partial(_validate.within, "(0, inf]")] = 1.0

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        limit = min(self.clip_norm, 1e30)  # an infinite threshold times a weight of zero would be no number
        draw = context.draw("batch")
        sums = draw.query(lambda rows, ids: {"gradient": clip(rows, Abadi(), limit)})
        total = disclose(context, sums["gradient"].value, NO_NOISE)
        return mean_of(total, context.sampling.expected_size), state


@dataclass(frozen=True, kw_only=True)
class EFSGD(NonPrivate):
    """SGD on clipped gradients with clipped error feedback, without noise: NOT PRIVATE.

    Args:
        clip_norm: C1 > 0.
        feedback_clip_norm: C2 >= 0 on the mean scale; C1 when None.

    Example:
        >>> EFSGD(clip_norm=0.5).feedback_radius
        0.5
    """

    clip_norm: Positive = 1.0
    feedback_clip_norm: Annotated[float, partial(_validate.within, "[0, inf]")] | None = None

    @property
    def feedback_radius(self) -> float:
        """C2."""
        return self.clip_norm if self.feedback_clip_norm is None else self.feedback_clip_norm

    def init(self, context: Context) -> State:
        return {"memory": zeros_like(context.params)}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """The mean clipped gradient and the fed-back memory; both sums are disclosed."""
        size, memory = context.sampling.expected_size, state["memory"]
        draw = context.draw("batch")
        sums = draw.query(lambda rows, ids: clipped_and_plain_sums(rows, Abadi(), self.clip_norm))
        # Both sums leave in one disclosure: the statement counts one hole per step.
        leaving = {(kind, name): value for kind, b in sums.items() for name, value in b.value.items()}
        total = disclose(context, leaving, NO_NOISE)
        feedback = clipped(memory, self.feedback_radius)
        estimate = {name: total["clipped", name] / size + feedback[name] for name in memory}
        memory = {name: memory[name] + total["plain", name] / size - estimate[name] for name in memory}
        return estimate, {"memory": memory}
