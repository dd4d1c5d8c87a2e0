"""Losses without gradients: a method that asks for no others replays the trace of a forward alone.

It keeps nothing for a backward, so that the memory is that of inference. A model without a trace runs as it
was planned, and record by record if no parameter is served by a rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from equipoise.gradients.checks.oracle import losses_one_by_one
from equipoise.gradients.engine import GradientEngine, Numbers
from equipoise.gradients.engine_inputs import num_records, record_leaves, trainable_parameters
from equipoise.gradients.operator import LossesOnly
from equipoise.gradients.trace import Line


@dataclass(frozen=True)
class TracedLosses:
    """The line of one form of micro-batch; it stands in the place of a `Traced`."""

    rows: Line
    shapes: Mapping[str, torch.Size]
    written: tuple[str, ...] = ()
    launches: ClassVar[tuple[()]] = ()

    @torch.no_grad()
    def gradients(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Any
    ) -> tuple[LossesOnly, dict[str, Tensor]]:
        (losses,) = self.rows(*parameters.values(), *buffers.values(), *record_leaves(batch))
        return LossesOnly(losses, self.shapes), {}


class LossEngine(GradientEngine):
    """The engine of a method with `forward_only`: it gives `LossesOnly`. Checks of rows are left out."""

    forward_only: ClassVar[bool] = True

    def traced(self, batch: Any, sources: nn.Module | None = None) -> Any:
        return TracedLosses(self.line_of_losses(batch), self._shapes)

    def run_plan(
        self, batch: Any, params: Mapping[str, Tensor] | None, upstream: Tensor | None = None
    ) -> LossesOnly:
        leaves, substitute = self._leaves(params)
        if num_records(batch) == 0:
            return LossesOnly(torch.zeros(0, device=self.device), self._shapes)
        plan = self.plan_for(batch)
        if not plan.ruled:  # nothing is held against a plan: a record at a time, as dense rows are
            losses = losses_one_by_one(self.model, self.loss, batch, substitute)
            return LossesOnly(losses, self._shapes)
        capture, losses = self._run(plan, batch, leaves, substitute)
        capture.let_go()
        for kept in capture.inputs:  # no hook will run
            kept.clear()
        capture.check_followed()
        return LossesOnly(losses.detach(), self._shapes)

    def alone(
        self,
        batch: Any,
        params: Mapping[str, Tensor] | None = None,
        numbers: Numbers | None = None,
        place: int = 0,
    ) -> LossesOnly:
        with self._watched(params, numbers):
            return LossesOnly(self.losses(batch, params)[place : place + 1], self._shapes)

    @property
    def _shapes(self) -> dict[str, torch.Size]:
        return {name: p.shape for name, p in trainable_parameters(self.model).items()}
