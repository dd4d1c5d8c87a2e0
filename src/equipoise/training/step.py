"""What a step and a training report: plain, frozen, publishable.

One step: the method estimates the gradient, the optimiser moves the parameters.

A step counts as done if and only if the parameters moved. If an error or an interrupt ends it before that,
the ledger goes back to where the step began, so that the repeated step gets the records and the noise that
it had and is not charged again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from equipoise.gradients import ForwardWritesError
from equipoise.methods import Context, State
from equipoise.methods.base import Parameters
from equipoise.privacy import ChangedQueryError, Draw
from equipoise.statements import Statement
from equipoise.training.context import StepContext, StepDiagnostics
from equipoise.training.setup import TrainingSetup
from equipoise.training.shared_ledger import SharedLedger

__all__ = ["Result", "StepOutcome", "StepReport", "StepRunner"]


@dataclass(frozen=True)
class StepReport:
    """What one step did; every number is public.

    Attributes:
        step: number of steps done.
        learning_rate: of the first parameter group, as used.
        clip_norm: bound of the first released sum.
        noise_std: standard deviation of the noise on that sum.
        released_norm: norm of the estimate.
        noise_norm: expected norm of the estimate's noise, for comparison.
        epsilon: spent so far, where it was computed (see `epsilon_every`).
    """

    step: int
    learning_rate: float
    clip_norm: float
    noise_std: float
    released_norm: float
    noise_norm: float
    epsilon: float | None = None


@dataclass(frozen=True)
class Result:
    """How a training ended.

    Attributes:
        steps: steps done in all.
        finished: False after an interrupt.
        epsilon: spent, at `delta`; None where nothing is guaranteed.
        delta: of the guarantee.
        evaluation: the last evaluation.
        run_dir: the run folder, or None.
        statement: the privacy statement.
    """

    steps: int
    finished: bool
    epsilon: float | None
    delta: float
    evaluation: dict[str, float] = field(default_factory=dict)
    run_dir: Path | None = None
    statement: Statement | None = None


Answer = TypeVar("Answer")


@dataclass(frozen=True)
class StepOutcome:
    """What a step leaves for those who write it down.

    Attributes:
        estimate: of the gradient, public.
        learning_rate: of the first parameter group, as used.
        tally: the private numbers.
        seconds: how long it took, private too.
        metrics: public numbers of the method's state.
    """

    estimate: Mapping[str, Tensor]
    learning_rate: float
    tally: StepDiagnostics
    seconds: float
    metrics: Mapping[str, float]


class StepRunner:
    """Takes the steps of a training.

    Args:
        pieces: model, optimiser, method and the rest.
        desk: takes the releases.

    Attributes:
        done: number of steps that moved the parameters.
        state: what the method carries to the next step; None before the first.
    """

    def __init__(
        self, pieces: TrainingSetup, desk: SharedLedger, done: int = 0, state: State | None = None
    ) -> None:
        self._pieces, self._desk = pieces, desk
        self.done, self.state = done, state

    def take(self) -> StepOutcome:
        """Draw, release, move the parameters.

        Raises:
            Whatever the method, the ledger or the optimiser raises; the next call then repeats the step,
            unless the parameters moved before.
        """
        pieces, number, began = self._pieces, self.done, time.perf_counter()
        pieces.restore_modes()
        self._desk.begin_step()
        before = self._desk.digest(pieces.parameters)
        state: State | None = None
        with pieces.processes.together():
            try:
                context, estimate, state = self._estimate(before)
                for name, parameter in pieces.parameters.items():
                    parameter.grad = estimate[name].to(parameter.dtype)
                rate = float(pieces.optimizer.param_groups[0]["lr"])
                pieces.optimizer.step()
                self._count(state)
            except BaseException:
                # `number`: an interrupt can arrive when the step is counted already
                if (
                    state is not None
                    and self.done == number
                    and before != self._desk.digest(pieces.parameters)
                ):
                    self._count(state)
                raise
            finally:
                pieces.optimizer.zero_grad(set_to_none=True)
        # float() refuses private numbers
        metrics = {name: float(value) for name, value in pieces.method.metrics(state).items()}
        return StepOutcome(estimate, rate, context.tally, time.perf_counter() - began, metrics)

    def move(self, values: Parameters) -> None:
        """Someone else moves the parameters (a server, a warm start); the method takes note.

        Args:
            values: one tensor a trainable parameter, in its shape.
        """
        with torch.no_grad():
            for name, parameter in self._pieces.parameters.items():
                parameter.copy_(values[name])
        if self.state is not None:
            self.state = self._pieces.method.rebase(self.state, dict(self._pieces.parameters))

    def ask(self, question: Callable[[Context, State], Answer]) -> Answer:
        """Let `question` release something between two steps, as a step would.

        If it fails, the next call or step takes up the ledger where this one did.
        """
        pieces = self._pieces
        pieces.restore_modes()
        self._desk.begin_step()
        before = self._desk.digest(pieces.parameters)
        with pieces.processes.together():
            if self.state is None:
                self.state = pieces.method.init(self._context(before, None))
            try:
                answer = question(self._context(before, self.state), self.state)
            except ChangedQueryError:
                if pieces.processes.count > 1:
                    raise
                answer = question(self._context(before, self.state), self.state)
        self._desk.end_step()
        return answer

    def _count(self, state: State) -> None:
        """The parameters moved: the step is done."""
        self.state = state
        self.done += 1
        self._desk.end_step()
        if self._pieces.average is not None:
            self._pieces.average.update(self.done - 1)
        if self._pieces.scheduler is not None:
            self._pieces.scheduler.step()

    def _estimate(self, before: str) -> tuple[StepContext, dict[str, Tensor], State]:
        """The method's estimate of the gradient and its next state; nothing of the training changes."""
        method = self._pieces.method
        state = self.state
        if state is None:
            state = method.init(self._context(before, None))
        context = self._context(before, state)
        try:
            estimate, following = method.step(context, state)
        except ChangedQueryError:
            if self._pieces.processes.count > 1:
                raise
            # A step repeated after a crash came out differently: it gets new records, and is charged.
            context = self._context(before, state)
            estimate, following = method.step(context, state)
        if before != self._desk.digest(self._pieces.parameters):
            raise ForwardWritesError(
                list(self._pieces.parameters), "one of them moved before the optimizer's step"
            )
        missing = self._pieces.parameters.keys() - estimate.keys()
        if missing:
            raise RuntimeError(
                f"method {method.name!r} gave no estimate for the parameters {sorted(missing)}"
            )
        return context, estimate, following

    def _context(self, before: str, state: State | None) -> StepContext:
        pieces, desk = self._pieces, self._desk

        def depends_on() -> str:
            return desk.digest({"step": self.done, "parameters": before, "method": state})

        def take_draw(name: str) -> tuple[Draw, Tensor]:
            draw, ids = desk.open(name, depends_on, len(pieces.rows.source))
            return draw, pieces.processes.share(ids)

        return StepContext(
            pieces.parameters,
            self.done,
            pieces.sampling,
            pieces.method_plan,
            desk,
            take_draw,
            pieces.rows,
            pieces.processes,
        )
