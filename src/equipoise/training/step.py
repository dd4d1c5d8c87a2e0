"""One step: the method estimates the gradient, the optimiser moves the parameters.

A step counts as done if and only if the parameters moved. If an error or an interrupt ends it before that,
the ledger goes back to where the step began. The repeated step then gets the records and the noise that it
had, and is not charged again. After a step in which the model wrote to its own parameters or buffers there is
no other: what it wrote follows private records, and may be there still.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from equipoise._dtensor import is_a_copy, local_part, norm_of_all
from equipoise._host import Unread, host_waits, read
from equipoise._rounding import plain, rounded_up
from equipoise.distributed.shared_ledger import SharedLedger
from equipoise.methods import Context, State
from equipoise.methods.base import Parameters
from equipoise.privacy import ChangedQueryError, Ledger, digest
from equipoise.statements import Statement
from equipoise.statements.assumptions import HOOKED, MODEL
from equipoise.training.constants import Constants
from equipoise.training.context import Attempt, NotFiniteError, ReleaseNoise, StepContext
from equipoise.training.setup.private_scores import SCORE
from equipoise.training.setup.step_number import step_of
from equipoise.training.setup.training_setup import TrainingSetup
from equipoise.training.stages import trained_after
from equipoise.training.watch import Watch


@dataclass(frozen=True)
class StepReport:
    """What one step did; every number is public.

    Attributes:
        step: number of steps done.
        learning_rate: of the first parameter group, as used.
        clip_norm: bound of the first sum of its last release.
        noise_std: standard deviation of the noise on that sum.
        released_norm: norm of the estimate.
        noise_norm: expected norm of the estimate's noise, for comparison.
        epsilon: spent so far, at every twentieth part of the steps; None between them.
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
        steps: steps done in all. They are fewer than planned where a resumed run was charged again for some.
        finished: whether no step is left; False after an interrupt.
        stopped_by: the signal that interrupted it, SIGINT or SIGTERM; None otherwise.
        best_step: with `keep_best` the step whose parameters were published; `evaluation` is of it.
        epsilon: the statement's, at `delta`; None where nothing is guaranteed.
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
    statement: Statement | None = field(default=None, repr=False)
    stopped_by: int | None = None
    best_step: int | None = None

    def __str__(self) -> str:
        """In a line, with epsilon rounded up as the statement shows it."""
        if self.epsilon is None:
            spent = "no epsilon"
        else:
            spent = f"epsilon {rounded_up(self.epsilon)} at delta {plain(self.delta)}"
        scores = [f"{name} {value:.4g}" for name, value in self.evaluation.items()]
        return ", ".join(
            [f"{self.steps:,} steps", *(["stopped early"] if not self.finished else []), *scores, spent]
        )


_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class StepOutcome:
    """What a step leaves for those who write it down.

    Attributes:
        released_norm: of the estimate of the gradient.
        noise: of its last release; None where it released nothing.
        learning_rate: of the first parameter group, as used.
        diagnostics: the row of private numbers.
        seconds: how long it took, private too.
        metrics: public numbers of the method's state.
    """

    released_norm: float
    noise: ReleaseNoise | None
    learning_rate: float
    diagnostics: Unread[dict[str, Any]]
    seconds: float
    metrics: Mapping[str, float]


class StepRunner:
    """Takes the steps of a training.

    Args:
        setup: model, optimiser, method and the rest.
        ledger: takes the releases.
        done: number of steps that moved the parameters.
        state: what the method carries to the next step; None before the first.

    Attributes:
        watch: sees to it that nothing but steps moves what is saved.
        looks_at_once: each forward is looked at for what is not finite; else the sums of a whole step are
            (see `Attempt`). Only time follows it.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        ledger: Ledger | SharedLedger,
        done: int = 0,
        state: State | None = None,
    ) -> None:
        self._setup, self._ledger, self._number = setup, ledger, step_of(setup.loss)
        self._trained = trained_after(setup.stages, setup.parameters, done)
        self._stages_begin = frozenset(stage.begins for stage in setup.stages[1:])
        self.done, self.state, self._engines = done, state, setup.engines
        self.watch = Watch(setup, ledger)
        self.looks_at_once = setup.rows.backend.is_sharded or not host_waits(setup.device)
        # The ledger's place at the beginning of a step that has not ended.
        self._began: Mapping[str, Any] | None = None
        # How many steps average and scheduler have followed, and where that left the scheduler.
        self._followed, self._epoch = done, None
        self.constants = Constants(
            setup.model,
            setup.rows.engine.loss,
            (setup.data.augmentation, setup.data.collate, setup.data.score),
            setup.try_again,
            setup.trace_anew,
            () if self._number is None else (self._number,),
        )
        self._noted: tuple[Any, ...] | None = None
        # Takes what a statement has to say of what the training loop changed, before the step draws.
        self.note: Callable[[Sequence[str]], None] = lambda _: None

    @property
    def found(self) -> list[str]:
        """What a statement has to say of model and loss by now, and of what was done to them."""
        return [*self.constants.assumptions, *(f"{MODEL}{one.independence}" for one in self._engines)]

    def _note(self) -> None:
        of_engines = [one.independence for one in self._engines]
        state = *of_engines, len(self.constants.changed), len(self.constants.untried)
        if state != self._noted:
            self._noted = state
            self.note(self.found)

    # ---- a step

    def take(self) -> StepOutcome:
        """Draw, release, move the parameters.

        Raises:
            Whatever the method, the ledger or the optimiser raises; the next call then repeats the step,
            unless the parameters moved before.
            ForwardWritesError: the model wrote to itself; from then on every call is refused.
        """
        setup, started = self._setup, time.perf_counter()
        gradient, state, context = self._looked(self._estimate)
        norm = Unread([norm_of_all(gradient.values())], float)
        row = context.diagnostics.row()
        rate = float(setup.optimizer.param_groups[0]["lr"])
        self._move(gradient, state)
        # All that the host needs of the step, and what the next one begins with, in one wait.
        read(norm, row, self.watch.left[0])
        self.watch.should_have_moved = bool(rate and context.ledger.last_noise)
        if setup.run.diagnostics is not None:
            hidden = context.diagnostics.beside(gradient, setup.sampling.expected_size)
            clipped = [value for name, value in row.value().items() if name.endswith(".clip_fraction")]
            setup.run.diagnostics(self.done, hidden | ({"clipped": clipped[0]} if clipped else {}))
        # float() refuses private numbers
        metrics = {name: float(value) for name, value in setup.method.metrics(state).items()}
        seconds = time.perf_counter() - started
        return StepOutcome(norm.value(), context.ledger.last_noise, rate, row, seconds, metrics)

    def ask(self, question: Callable[[Context, State], _Answer]) -> _Answer:
        """Let `question` release something between two steps, as a step would.

        If it fails, the next call or step takes up the ledger where this one did.
        """

        def answered() -> _Answer:
            self.state = self._first_state()
            return self._answer(self.state, question)[0]

        with self._setup.processes.together():
            answer = self._looked(answered)
        self._began = None
        return answer

    def _looked(self, look: Callable[[], _Answer]) -> _Answer:
        """What `look` makes of private records, in a step that begins here; it may fail."""
        self._setup.restore_modes()
        if self.done in self._stages_begin:
            self._trained = trained_after(self._setup.stages, self._setup.parameters, self.done)
        if self._number is not None:
            self._number.fill_(self.done + 1)
        self.watch.begin()
        with self.watch.looking():
            self.constants.check(self.watch.changes)
            self.watch.changes = []
            self._note()
            self._follow()
            self.settle()
            self._began, self._attempt = self._ledger.place, self._new_attempt(self.looks_at_once)
            return look()

    def _new_attempt(self, looks: bool) -> Attempt:
        setup = self._setup
        others = {} if setup.score is None else {SCORE: setup.score.rows}
        return Attempt(setup.rows, self._ledger, setup.processes, looks, self.watch.unmoved, others)

    def _estimate(self) -> tuple[Mapping[str, Tensor], State, StepContext]:
        """The method's estimate of the gradient and its next state; nothing of the training changes."""
        method, state = self._setup.method, self._first_state()
        (estimate, following), context = self._answer(state, method.step)
        if not isinstance(estimate, Mapping):
            raise TypeError(
                f"step() of method {method.name!r} gave a {type(estimate).__name__} for the estimate; "
                "let it return (estimate, state), the first a dict of one tensor per parameter"
            )
        missing = self._trained.keys() - estimate.keys()
        if missing:
            raise RuntimeError(
                f"method {method.name!r} gave no estimate for the parameters {sorted(missing)}"
            )
        return estimate, following, context

    def _first_state(self) -> State:
        """What the method carries to this step."""
        if self.state is not None and self.done not in self._stages_begin:
            return self.state
        return self._answer(None, lambda context, _: self._setup.method.init(context))[0]

    def _answer(
        self, state: State | None, question: Callable[[StepContext, Any], _Answer]
    ) -> tuple[_Answer, StepContext]:
        """What a question gives, which may query and release, and the context that it had.

        It is asked once more in each of two cases, in any order. A step repeated after a crash came out
        differently: it gets new records, and is charged; of several processes each has this error. Or a
        record was not finite, which shows on a device when something would leave (`Attempt`).
        """
        setup, ledger, met = self._setup, self._ledger, set[type[Exception]]()
        while True:
            depends_on = ledger.digest({"step": self.done, "parameters": self.watch.before, "method": state})
            attempt = self._attempt
            looks = setup.run.diagnostics is not None
            context = StepContext(
                attempt, self._trained, self.done, setup.sampling, setup.method_plan, depends_on, looks
            )
            try:
                answer = question(context, state)
                attempt.end()
                return answer, context
            except (ChangedQueryError, NotFiniteError) as error:
                if type(error) in met:
                    raise
                met.add(type(error))
                if isinstance(error, NotFiniteError):
                    self.looks_at_once = True
                    assert self._began is not None
                    ledger.rewind(self._began)
                self._attempt = self._new_attempt(self.looks_at_once or attempt.all_finite is None)

    def _move(self, gradient: Mapping[str, Tensor], state: State) -> None:
        """Move the parameters by an estimate of the gradient, and count the step."""
        parameters, done = self._setup.parameters, self.done
        try:
            for name, parameter in self._trained.items():
                parameter.grad = gradient[name].to(parameter.dtype)
            hooked = self.watch.step()
            if hooked and (named := HOOKED + ", ".join(hooked)) not in self.constants.also:
                self.constants.also.add(named)
                self.note(self.found)
            self._count(state)
        except BaseException:
            # An interrupt can arrive when the step is counted already.
            if self.done == done and self.watch.has_moved():
                self._count(state)
            raise
        finally:
            self.watch.accept_optimizer()
            for parameter in parameters.values():
                parameter.grad = None

    def _count(self, state: State) -> None:
        """The parameters moved: the step is done."""
        left = self.watch.now()
        # No call stands between these, so no interrupt comes there. If one did, nothing would go on.
        self.state, self.done, self._began, self.watch.left = state, self.done + 1, None, left
        self._follow()

    def _follow(self) -> None:
        """Let average and scheduler follow the last step, if something kept them from it."""
        if self._followed == self.done:
            return
        average, scheduler = self._setup.average, self._setup.run.scheduler
        if average is not None:
            average.update(self.done - 1)
        if scheduler is None:
            self._followed = self.done
            return
        if self._epoch != getattr(scheduler, "last_epoch", None) and self._epoch is not None:
            warnings.warn(
                "Run(scheduler=...) is stepped after each step, and the training loop steps it too: leave "
                "that out",
                stacklevel=2,
            )
        groups = self._setup.optimizer.param_groups
        has_state = hasattr(scheduler, "state_dict")  # one without it, in memory, is told once
        before = scheduler.state_dict() if has_state else None
        # A rate that is a tensor is written in place.
        settings = [
            {key: one.clone() if isinstance(one, Tensor) else one for key, one in group.items()}
            for group in groups
        ]
        try:
            scheduler.step()
            self._followed, self._epoch = self.done, getattr(scheduler, "last_epoch", None)
        except Exception:  # of the scheduler itself: it is told once
            self._followed = self.done
            raise
        except BaseException:
            if self._followed != self.done and has_state:
                scheduler.load_state_dict(before)
                for group, own in zip(groups, settings, strict=True):
                    group.update(own)
            else:
                self._followed = self.done
            raise

    def settle(self) -> None:
        """Bring the ledger back to where a step began that did not end."""
        if self._began is not None:
            self._ledger.rewind(self._began)
            self._began = None

    # ---- between steps

    def move(self, values: Parameters) -> None:
        """Someone else moves the parameters (a server, a warm start); the method takes note.

        Args:
            values: one tensor per trainable parameter, in its shape.
        """
        with torch.no_grad():
            for name, parameter in self._setup.parameters.items():
                parameter.copy_(values[name])
        self.watch.accept_parameters()
        self._rebase()

    def accept(self, move: Callable[[], _Answer]) -> _Answer:
        """Let `move` change what is saved with the model, by public or released numbers alone."""
        self.check()
        answer = move()  # if it fails, what it changed is refused
        # Of sharded parameters every process has another part.
        copies = {name: local_part(p) for name, p in self._setup.parameters.items() if is_a_copy(p)}
        self._setup.processes.same("the model after public_step", digest(copies))
        self.watch.accept()
        self._rebase()
        return answer

    def _rebase(self) -> None:
        if self.state is not None:
            self.state = self._setup.method.rebase(self.state, dict(self._setup.parameters))

    def check(self) -> None:
        """Refuse what comes after a stop, or after something else than a step changed what is saved."""
        self.watch.check()
        self._follow()
