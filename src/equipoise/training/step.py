"""One step: the method estimates the gradient, the optimiser moves the parameters.

A step counts as done if and only if the parameters moved. If an error or an interrupt ends it before that,
the ledger goes back to where the step began. The repeated step then gets the records and the noise that it
had, and is not charged again. After a step in which the model wrote to its own parameters or buffers there is
no other: what it wrote follows private records, and may be there still.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from equipoise._dtensor import is_a_copy, local_part, norm_of_all
from equipoise._host import Unread, read
from equipoise._rounding import plain, rounded_up
from equipoise._tree import leaves
from equipoise.distributed.shared_ledger import SharedLedger
from equipoise.gradients import ForwardWritesError
from equipoise.gradients.capture.attributes import Change
from equipoise.gradients.capture.isolation import write_mark
from equipoise.gradients.capture.sharded import resharded
from equipoise.methods import Context, State
from equipoise.methods.base import Parameters
from equipoise.privacy import ChangedQueryError, Ledger, digest
from equipoise.statements import Statement
from equipoise.statements.assumptions import HOOKED, TRACED
from equipoise.statements.statement import MODEL
from equipoise.training.constants import Constants
from equipoise.training.context import NotFiniteError, ReleaseNoise, StepContext
from equipoise.training.setup.step_number import step_of
from equipoise.training.setup.training_setup import TrainingSetup

__all__ = ["Result", "StepOutcome", "StepReport", "StepRunner"]


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

SPOILT = (
    "the model wrote to its own parameters or buffers in a step that failed: private records may be in it, "
    "without noise, so nothing more is computed, saved or published. Mend the model, build it anew, and "
    "resume the run from its last checkpoint (PrivateTraining.resume)"
)

CHANGED = (
    "{what} changed after the start or the last step, and not by a step: a forward in training mode "
    "(torch.optim.swa_utils.update_bn), a step of another optimizer, a gradient left on a frozen parameter, "
    "load_state_dict, a write to .data, or a model that writes to itself, in a step that was interrupted. It "
    "is saved with the model, and no epsilon covers the change, so nothing more is computed, saved or "
    "published. Resume the run from its last checkpoint (PrivateTraining.resume). What follows public or "
    "released numbers alone may change it by training.public_step(fn), or after every step by "
    "optimizer.register_step_post_hook (weight clipping). Call model.eval() before a forward between steps, "
    "and keep what else a schedule changes in a Python attribute"
)

FIXED = (
    "What is trained is fixed at the start. Nothing was drawn for this step; put it back as it was. To train "
    "a parameter for some of the steps, leave it trainable, give it a group of its own in the optimizer, and "
    "set the rate of that group to 0 for the others; or train in two runs with one journal, which adds "
    "up what they cost"
)


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


@dataclass(frozen=True)
class _Estimate:
    """What a method made of a step's draws.

    Attributes:
        gradient: the estimate of it, public.
        norm: of the estimate.
        state: what the method carries to the next step.
        noise: of its last release.
        diagnostics: the row of private numbers.
    """

    gradient: Mapping[str, Tensor]
    norm: Unread[float]
    state: State
    noise: ReleaseNoise | None
    diagnostics: Unread[dict[str, Any]]


class StepRunner:
    """Takes the steps of a training.

    Args:
        setup: model, optimiser, method and the rest.
        ledger: takes the releases.
        done: number of steps that moved the parameters.
        state: what the method carries to the next step; None before the first.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        ledger: Ledger | SharedLedger,
        done: int = 0,
        state: State | None = None,
    ) -> None:
        self._setup, self._ledger, self._step = setup, ledger, step_of(setup.loss)
        self.done, self.state = done, state
        self._kinds = {name: (p.dtype, p.device) for name, p in setup.parameters.items()}
        # The ledger's place at the beginning of a step that has not ended.
        self._began: Mapping[str, Any] | None = None
        # The parameters' digest after the last step that was counted, or where the first one began; None
        # before. While they have another one nothing goes on, however a step was interrupted.
        self._left: Unread[str] | None = None
        # How often each parameter was written to, but for writes through `.data`: at the end of the last
        # step, and when this one began to look at records.
        self._versions_left: list[int] = []
        self._versions_begun: list[int] = []
        # Of what is saved and no step moves: digests, and marks, which show most changes without hashing.
        self._unmoved = self._digests_of_unmoved()
        self._marks = self._marks_of(self._held())
        # Of it, what a hook or the owner has changed in a model that is not proved for all values.
        self._changes: list[Change] = []
        # Of what the optimizer remembers: a step outside of the training would go into every later one.
        self._remembered = self._optimizer_marks()
        # Why there is no further step; None while there may be one.
        self._stopped: str | None = None
        self.constants = Constants(
            setup.model,
            setup.rows.engine.loss,
            (setup.data.augmentation, setup.data.collate),
            setup.try_again,
            setup.rows.engine.trace_anew,
            () if self._step is None else (self._step,),
        )
        self._noted: tuple[Any, ...] | None = None
        # Takes what a statement has to say of what the training loop changed, before the step draws.
        self.note: Callable[[Sequence[str]], None] = lambda _: None
        self._optimized = _held_by(setup.optimizer)

    @property
    def found(self) -> list[str]:
        """What a statement has to say of model and loss by now, and of what was done to them."""
        engine = self._setup.rows.engine
        return [
            *self.constants.assumptions,
            f"{MODEL}{engine.independence}",
            f"{TRACED}{engine.traces}",
        ]

    def _note(self) -> None:
        engine = self._setup.rows.engine
        state = engine.traces, engine.independence, len(self.constants.changed), len(self.constants.untried)
        if state != self._noted:
            self._noted = state
            self.note(self.found)

    def take(self) -> StepOutcome:
        """Draw, release, move the parameters.

        Raises:
            Whatever the method, the ledger or the optimiser raises; the next call then repeats the step,
            unless the parameters moved before.
            ForwardWritesError: the model wrote to itself; from then on every call is refused.
        """
        setup, number, started = self._setup, self.done, time.perf_counter()
        parameters = setup.parameters
        found: _Estimate | None = None
        with setup.processes.together():
            before = self._begin()
            try:
                found = self._looking(before, lambda: self._estimate(before))
                for name, parameter in parameters.items():
                    parameter.grad = found.gradient[name].to(parameter.dtype)
                rate = float(setup.optimizer.param_groups[0]["lr"])
                if self._marks:
                    self._move_with_buffers()
                else:
                    setup.rows.engine.keep_public_writes()
                    setup.optimizer.step()
                self._count(found.state)
                # All that the host needs of the step, and what the next one begins with, in one wait.
                read(found.norm, found.diagnostics, *([] if self._left is None else [self._left]))
            except BaseException:
                # `number`: an interrupt can arrive when the step is counted already
                if found is not None and self.done == number and before != self._ledger.digest(parameters):
                    self._count(found.state)
                raise
            finally:
                self._remembered = self._optimizer_marks()
                for parameter in parameters.values():
                    parameter.grad = None
        # float() refuses private numbers
        metrics = {name: float(value) for name, value in setup.method.metrics(found.state).items()}
        seconds = time.perf_counter() - started
        return StepOutcome(found.norm.value(), found.noise, rate, found.diagnostics, seconds, metrics)

    def _move_with_buffers(self) -> None:
        """The optimiser's step; its hooks may change what no step moves, since what they know is public."""
        optimizer = self._setup.optimizer
        # A write of theirs through `.data` leaves no mark.
        has_hooks = bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        if has_hooks or self._marks_of(self._held()) != self._marks:
            self._check_unmoved()
        frozen = dict(self._setup.model.named_parameters(remove_duplicate=False))
        # What a loss left on a frozen parameter moves it in the step itself: it stays refused.
        stale = {name for name, parameter in frozen.items() if parameter.grad is not None}
        self._setup.rows.engine.keep_public_writes()
        optimizer.step()
        marks = self._marks_of(self._held())
        if has_hooks or marks != self._marks:
            both = zip(self._unmoved, self._marks, marks, strict=True)
            moved = {name for name, old, new in both if (has_hooks or old != new) and name not in stale}
            now = self._digests_of_unmoved(moved)
            if has_hooks:
                read(*self._unmoved.values(), *now.values())
                moved = {name for name, one in now.items() if one.value() != self._unmoved[name].value()}
            self._note_changes(now)
            self._unmoved |= now
            self._marks = [
                new if name in moved else old
                for name, old, new in zip(self._unmoved, self._marks, marks, strict=True)
            ]
            if (named := HOOKED + ", ".join(sorted(moved & frozen.keys()))) != HOOKED:
                self.constants.also.add(named)
                self.note(self.found)

    def move(self, values: Parameters) -> None:
        """Someone else moves the parameters (a server, a warm start); the method takes note.

        Args:
            values: one tensor per trainable parameter, in its shape.
        """
        with torch.no_grad():
            for name, parameter in self._setup.parameters.items():
                parameter.copy_(values[name])
        self._rebase()

    def accept(self, move: Callable[[], _Answer]) -> _Answer:
        """Let `move` change what is saved with the model, by public or released numbers alone."""
        self.check()
        answer = move()  # if it fails, what it changed is refused
        # Of sharded parameters every process has another part.
        copies = {name: local_part(p) for name, p in self._setup.parameters.items() if is_a_copy(p)}
        self._setup.processes.same("the model after public_step", digest(copies))
        now = self._digests_of_unmoved()
        self._note_changes(now)
        self._unmoved = now
        self._marks = self._marks_of(self._held())
        self._rebase()
        return answer

    def _note_changes(self, now: Mapping[str, Unread[str]]) -> None:
        """Note what is another buffer or frozen parameter now, to be tried: it may be a switch."""
        if self._setup.rows.engine.independence.word == "compared":
            known = [
                (n, self._unmoved[n].value(), one.value()) for n, one in now.items() if n in self._unmoved
            ]
            self._changes += [Change((0, n), n, old, new) for n, old, new in known if old != new]

    def _rebase(self) -> None:
        self.remember()
        if self.state is not None:
            self.state = self._setup.method.rebase(self.state, dict(self._setup.parameters))

    def ask(self, question: Callable[[Context, State], _Answer]) -> _Answer:
        """Let `question` release something between two steps, as a step would.

        If it fails, the next call or step takes up the ledger where this one did.
        """
        with self._setup.processes.together():
            before = self._begin()

            def answered() -> _Answer:
                if self.state is None:
                    self.state, _ = self._answer(
                        before, None, lambda context, _: self._setup.method.init(context)
                    )
                return self._answer(before, self.state, question)[0]

            answer = self._looking(before, answered)
        self._began = None
        return answer

    def stop(self, reason: str) -> None:
        """Let no further step be taken, and nothing be saved or published.

        Args:
            reason: what the errors say from now on.
        """
        self._stopped = reason

    def check(self) -> None:
        """Refuse what comes after `stop`, or after something else than a step changed what is saved.

        Raises:
            RuntimeError: with the reason.
        """
        self._check_places()
        self._check_unmoved()
        if self._left is not None:
            now = self._ledger.unread_digest(self._setup.parameters)
            read(self._left, now)
            self._refuse_moved(self._left.value(), now.value())

    def _refuse_moved(self, left: str, now: str, what: str = "parameters of the model") -> None:
        if now != left:
            self.stop(CHANGED.format(what=what))
            raise RuntimeError(self._stopped)

    def _held(self) -> dict[str, Tensor]:
        """All parameters and buffers as they stand now, by each of their names."""
        model = self._setup.model
        if self._setup.is_sharded:
            resharded(model)  # a forward without a backward leaves whole parameters in place
        buffers = dict(model.named_buffers(remove_duplicate=False))
        return {**dict(model.named_parameters(remove_duplicate=False)), **buffers}

    def _digests_of_unmoved(self, only: Set[str] | None = None) -> dict[str, Unread[str]]:
        """By name, of all, or of only these, that is saved with the model and that no step moves.

        These are frozen parameters, persistent buffers and extra state. What shares its memory with a
        parameter that is trained moves with it.
        """
        held = self._held()
        trained = {write_mark(p)[0] for p in self._setup.parameters.values()}
        found = {}
        for name, value in self._setup.model.state_dict().items():
            value = held.get(name, value)
            is_asked = only is None or name in only
            if is_asked and not (isinstance(value, Tensor) and write_mark(value)[0] in trained):
                with suppress(TypeError):  # extra state of a kind that no checkpoint gives back
                    found[name] = self._ledger.unread_digest(value)
        return found

    def _optimizer_marks(self) -> list[tuple[int, int]]:
        entries = self._setup.optimizer.state.values()
        return [write_mark(leaf) for leaf in leaves([*entries]) if isinstance(leaf, Tensor)]

    def _marks_of(self, held: Mapping[str, Tensor]) -> list[tuple[int, int]]:
        return [write_mark(held.get(name)) for name in self._unmoved]

    def _check_unmoved(self) -> None:
        now = self._digests_of_unmoved()
        read(*self._unmoved.values(), *now.values())
        for name in {**self._unmoved, **now}:
            left, right = ((of[name].value() if name in of else "") for of in (self._unmoved, now))
            self._refuse_moved(left, right, repr(name))
        self._marks = self._marks_of(self._held())

    def _check_places(self) -> Mapping[str, Tensor]:
        """Refuse what comes after `stop`, and parameters that were converted, moved elsewhere or replaced.

        Of what no step moves the marks are looked at, and the values only where a mark differs.

        Returns:
            All parameters and buffers, by each of their names.

        Raises:
            RuntimeError: naming one. Put back as it was, the training goes on.
        """
        if self._stopped is not None:
            raise RuntimeError(self._stopped)
        held = self._held()
        for name, parameter in self._setup.parameters.items():
            if held.get(name) is not parameter:
                raise RuntimeError(
                    f"parameter {name!r} of the model is no longer the tensor that this training moves: "
                    "load_state_dict(assign=True), another layer or a move to another kind of device put a "
                    "new one in its place. No step moves that one, and no epsilon covers it. Put the "
                    "parameter back, or resume the run from its last checkpoint (PrivateTraining.resume)"
                )
            before, kind = self._kinds[name], (parameter.dtype, parameter.device)
            if kind != before:
                raise RuntimeError(
                    f"parameter {name!r} of the model is {kind[0]} on {kind[1]}, and was {before[0]} on "
                    f"{before[1]} when this training began: its kernels and the shape of its forwards were "
                    "chosen for that. Move the model back (model.to(...)). To go on with it as it is, resume "
                    "the run from its last checkpoint (PrivateTraining.resume)"
                )
        if self._marks_of(held) != self._marks:
            self._check_unmoved()
        # What was cleared, as momentum is in a restart, brings nothing into later steps.
        if self._left is not None and not {*self._optimizer_marks()} <= {*self._remembered}:
            self.stop(CHANGED.format(what="what the optimizer remembers"))
            raise RuntimeError(self._stopped)
        return held

    def _check_trainable(self, held: Mapping[str, Tensor]) -> None:
        """Refuse a step that would train other parameters than the start found.

        Args:
            held: the model's parameters and buffers.

        Raises:
            RuntimeError: naming one.
        """
        trained = {id(parameter) for parameter in self._setup.parameters.values()}
        for name, value in held.items():
            if isinstance(value, nn.Parameter) and value.requires_grad is not (id(value) in trained):
                became = "became trainable" if value.requires_grad else "was frozen"
                raise RuntimeError(f"parameter {name!r} of the model {became} after the start. {FIXED}")
        if _held_by(self._setup.optimizer) != self._optimized:
            raise RuntimeError(f"optimizer holds other parameters than at the start. {FIXED}")

    def _looking(self, before: str, look: Callable[[], _Answer]) -> _Answer:
        """What `look` gives, which looks at private records; no parameter has moved.

        Args:
            before: digest of the parameters.
            look: may fail.

        Raises:
            ForwardWritesError: a parameter moved, or `look` raised it; the training has come to its end.
            RuntimeError: something else had moved them before the step.
        """
        self._versions_begun, self._versions_left = (
            self._versions(),
            [],
        )  # until it is known that nothing moved
        try:
            try:
                answer = look()
            finally:
                versions = self._versions()
                if versions != self._versions_begun:
                    self._refuse_written(before, self._ledger.digest(self._setup.parameters))
            self._versions_left = versions
            return answer
        except ForwardWritesError:
            self.stop(SPOILT)
            raise

    def _refuse_written(self, before: str, now: str) -> None:
        """Refuse parameters that the model or the method may have written private values into.

        The digest sees writes through `.data` too, which move no version counter; their time is not known.

        Raises:
            ForwardWritesError: they moved in this step.
            RuntimeError: in this step or before it.
        """
        if now == before:
            return
        names, versions = list(self._setup.parameters), self._versions()
        written = [
            n for n, left, new in zip(names, self._versions_begun, versions, strict=True) if left != new
        ]
        if written or self._setup.rows.engine.runs_model:
            raise ForwardWritesError(written or names, "before the optimizer's step")
        self._refuse_moved(before, now)

    def _versions(self) -> list[int]:
        # Of a DTensor that of the part that is here.
        return [getattr(p, "_local_tensor", p)._version for p in self._setup.parameters.values()]

    def settle(self) -> None:
        """Bring the ledger back to where a step began that did not end."""
        if self._began is not None:
            self._ledger.rewind(self._began)
            self._began = None

    def _begin(self) -> str:
        """Begin a step: the digest of the parameters, from which its records and its noise follow.

        It is that of the end of the last step. Since then no version counter has moved. A write through
        `.data`, which moves none, is seen before anything leaves (`_require_unmoved`).
        """
        self._setup.restore_modes()
        if self._step is not None:
            self._step.fill_(self.done + 1)
        self._check_trainable(self._check_places())
        try:
            self.constants.check(self._changes)
            self._changes = []
            self._note()
        except ForwardWritesError:
            self.stop(SPOILT)
            raise
        if self._left is None:
            self._left = self._ledger.unread_digest(self._setup.parameters)
            self._versions_left = self._versions()
        read(self._left)
        before = self._left.value()
        if self._versions() != self._versions_left:
            now = self._ledger.unread_digest(self._setup.parameters)
            self._refuse_moved(before, now.value())
        self.settle()
        self._setup.rows.has_released = False
        self._began = self._ledger.place
        return before

    def remember(self) -> None:
        """From here on nothing but a step moves the parameters."""
        self._left, self._versions_left = (
            self._ledger.unread_digest(self._setup.parameters),
            self._versions(),
        )
        self._remembered = self._optimizer_marks()

    def _count(self, state: State) -> None:
        """The parameters moved: the step is done."""
        left, versions = self._ledger.unread_digest(self._setup.parameters), self._versions()
        # No call stands between these, so no interrupt comes there. If one did, nothing would go on.
        self.state, self.done, self._began = state, self.done + 1, None
        self._left, self._versions_left = left, versions
        if self._setup.average is not None:
            self._setup.average.update(self.done - 1)
        if self._setup.run.scheduler is not None:
            self._setup.run.scheduler.step()

    def _estimate(self, before: str) -> _Estimate:
        """The method's estimate of the gradient and its next state; nothing of the training changes."""
        method, parameters, state = self._setup.method, self._setup.parameters, self.state
        if state is None:
            state, _ = self._answer(before, None, lambda context, _: method.init(context))
        (estimate, following), context = self._answer(before, state, method.step)
        if not isinstance(estimate, Mapping):
            raise TypeError(
                f"step() of method {method.name!r} gave a {type(estimate).__name__} for the estimate; "
                "let it return (estimate, state), the first a dict of one tensor per parameter"
            )
        missing = parameters.keys() - estimate.keys()
        if missing:
            raise RuntimeError(
                f"method {method.name!r} gave no estimate for the parameters {sorted(missing)}"
            )
        norm = Unread([norm_of_all(estimate.values())], float)
        row = context.diagnostics.row()
        return _Estimate(estimate, norm, following, context.ledger.last_noise, row)

    def _answer(
        self, before: str, state: State | None, question: Callable[[StepContext, Any], _Answer]
    ) -> tuple[_Answer, StepContext]:
        """What a question gives, which may query and release, and the context that it had.

        It is asked once more in each of two cases, in any order. A step repeated after a crash came out
        differently: it gets new records, and is charged; of several processes each has this error. Or a
        record was not finite, which shows on a device when something would leave: now each forward is looked
        at. Nothing was released in the step then.
        """
        met: set[type[Exception]] = set()
        while True:
            context = self._context(before, state)
            try:
                answer = question(context, state)
                self._ledger.check_required()
                return answer, context
            except (ChangedQueryError, NotFiniteError) as error:
                if type(error) in met:
                    raise
                met.add(type(error))
                if isinstance(error, NotFiniteError):
                    self._setup.rows.looks_at_once = True
                    assert self._began is not None
                    self._ledger.rewind(self._began)

    def _context(self, before: str, state: State | None) -> StepContext:
        setup, ledger = self._setup, self._ledger
        depends_on = ledger.digest({"step": self.done, "parameters": before, "method": state})
        return StepContext(
            setup.parameters,
            self.done,
            setup.sampling,
            setup.method_plan,
            ledger,
            depends_on,
            setup.rows,
            setup.processes,
            partial(self._require_unmoved, before),
        )

    def _require_unmoved(self, before: str) -> None:
        """Let nothing leave if the parameters are not those that the last step left."""
        now = self._ledger.unread_digest(self._setup.parameters)
        self._ledger.require(now, partial(self._refuse_written, before))


def _held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    return set(map(id, chain.from_iterable(map(itemgetter("params"), optimizer.param_groups))))
