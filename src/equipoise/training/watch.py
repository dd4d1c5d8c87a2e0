"""Sees to it that nothing but a step moves what is saved with a training.

Epsilon covers what steps make of the parameters. After any other change nothing more is computed, saved or
published, unless the change was accepted:

| what | moves by | is looked at |
|---|---|---|
| trained parameters | the optimizer's step | by marks where a step begins, by value where something leaves |
| frozen parameters, buffers, extra state | hooks of the optimizer | by marks; by value where one differs |
| what the optimizer remembers | the optimizer's step | by marks |

Whoever saves or publishes looks at all values first. A mark (`write_mark`) costs nothing and shows all
changes but writes through `.data`; a value is a digest, which on a device is taken without a wait.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor, nn

from equipoise._host import Unread, read
from equipoise._tree import leaves
from equipoise.distributed.shared_ledger import SharedLedger
from equipoise.gradients import ForwardWritesError
from equipoise.gradients.capture.attributes import Change
from equipoise.gradients.capture.isolation import write_mark
from equipoise.gradients.capture.sharded import resharded
from equipoise.privacy import Ledger
from equipoise.privacy.ledger.ledger import Check
from equipoise.training.setup.training_setup import TrainingSetup

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

_PARAMETERS = "parameters of the model"
_Marks = list[tuple[int, int]]


class Watch:
    """What stood when the last step ended, and whether it stands yet.

    Args:
        setup: model, optimizer, and which parameters are trained.
        ledger: takes digests.

    Attributes:
        left: digest and marks of the trained parameters, as the start or the last step left them. Marks are
            None from where private records are looked at until nothing was seen to move.
        before: digest of the parameters where the step under way began.
        should_have_moved: the last step had a rate and noise.
        changes: of what no step moves, what was accepted in a model that is not proved for all values: it may
            be a switch, to be tried.
    """

    def __init__(self, setup: TrainingSetup, ledger: Ledger | SharedLedger) -> None:
        self._setup, self._ledger = setup, ledger
        self._trained = list(setup.parameters.values())
        self._places = set(map(id, self._trained))
        self._kinds = {name: (p.dtype, p.device) for name, p in setup.parameters.items()}
        self._optimized = self._held_by_optimizer()
        self._fixed = self._digests_of_fixed()
        self._marks = self._marks_of_fixed(self._held())
        self._remembered = self._marks_of_optimizer()
        self._stopped: str | None = None
        self.left: tuple[Unread[str], _Marks | None] = self.now()
        self.before, self._begun, self.should_have_moved = "", list[tuple[int, int]](), False
        self.changes: list[Change] = []

    # ---- what a step does

    def begin(self) -> None:
        """Begin a step, whose records and noise follow from `before`.

        Raises:
            RuntimeError: something moved since the last step, or other parameters would be trained.
        """
        held = self._check_places()
        for name, value in held.items():
            if isinstance(value, nn.Parameter) and value.requires_grad is not (id(value) in self._places):
                became = "became trainable" if value.requires_grad else "was frozen"
                raise RuntimeError(f"parameter {name!r} of the model {became} after the start. {FIXED}")
        if self._held_by_optimizer() != self._optimized:
            raise RuntimeError(f"optimizer holds other parameters than at the start. {FIXED}")
        accumulation = getattr(self._setup.optimizer, "gradient_state", None)  # of accelerate's wrapper
        if accumulation is not None and not accumulation.sync_gradients:
            raise RuntimeError(
                "accelerator.accumulate(model) lets the optimizer skip this step, which would be charged all "
                "the same. Nothing was drawn: leave it out. A private step is one whole draw, and "
                "Data(microbatch_size=...) bounds its memory"
            )
        (digest, marks), self._begun = self.left, _marks(self._trained)
        stood, self.before = self.before, digest.value()
        if self.should_have_moved and stood == self.before:
            warnings.warn(
                "the last optimizer.step() moved no parameter, and its step was charged all the same: let "
                "the optimizer act at every call, at a rate that the parameters' type does not round away",
                stacklevel=2,
            )
        self.should_have_moved = False
        if marks != self._begun:
            self._refuse(self.before, self._digest().value(), _PARAMETERS)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Inside, private records are looked at, and nothing may move the parameters.

        Raises:
            ForwardWritesError: one moved; the training has come to its end.
        """
        digest = self.left[0]
        self.left = digest, None
        try:
            try:
                yield
            finally:
                marks = _marks(self._trained)
                if marks != self._begun:
                    self._refuse_written(self._digest().value())
            self.left = digest, marks
        except ForwardWritesError:
            self.stop(SPOILT)
            raise

    def _refuse_written(self, now: str) -> None:
        """Refuse parameters that the model or the method may have written private values into.

        The digest sees writes through `.data` too, which leave no mark; their time is not known.

        Raises:
            ForwardWritesError: they moved in this step.
            RuntimeError: in this step or before it.
        """
        if now == self.before:
            return
        both = zip(self._setup.parameters, self._begun, _marks(self._trained), strict=True)
        written = [name for name, left, new in both if left != new]
        if written or self._setup.rows.engine.runs_model:
            raise ForwardWritesError(written or [*self._setup.parameters], "before the optimizer's step")
        self._refuse(self.before, now, _PARAMETERS)

    def step(self) -> list[str]:
        """The optimizer's step; its hooks may change what no step moves, since what they know is public.

        Returns:
            Names of the frozen parameters that they moved.
        """
        optimizer, held = self._setup.optimizer, self._held() if self._fixed else {}
        # A write of theirs through `.data` leaves no mark. A wrapper (accelerate's) may have no hooks.
        before, after = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
        has_hooks = bool(getattr(optimizer, before, None) or getattr(optimizer, after, None))
        if self._fixed and (has_hooks or self._marks_of_fixed(held) != self._marks):
            self._check_fixed()
        # What a loss left on a frozen parameter moves it in the step itself: it stays refused.
        stale = {n for n, p in held.items() if isinstance(p, nn.Parameter) and p.grad is not None}
        self._setup.rows.engine.keep_public_writes()
        optimizer.step()
        held = self._held() if self._fixed else {}
        marks = self._marks_of_fixed(held)
        moved = {n for n in self._fixed if n not in stale and (has_hooks or marks[n] != self._marks[n])}
        if moved:
            moved = self._accept_fixed(moved, compare=has_hooks)
        return sorted(name for name in moved if isinstance(held.get(name), nn.Parameter))

    def unmoved(self) -> list[Check]:
        """What must hold before anything leaves: the parameters are those that the last step left."""
        return [(self._ledger.unread_digest(self._setup.parameters, when_read=True), self._refuse_written)]

    def has_moved(self) -> bool:
        """Whether the parameters are others than where the step began."""
        return self._digest().value() != self.before

    def now(self) -> tuple[Unread[str], _Marks]:
        """What `left` is if the parameters are right as they stand."""
        return self._digest(), _marks(self._trained)

    # ---- what is done between steps

    def accept_optimizer(self) -> None:
        """What the optimizer remembers is right as it stands."""
        self._remembered = self._marks_of_optimizer()

    def accept_parameters(self) -> None:
        """The parameters, and what the optimizer remembers, are right as they stand."""
        self.left = self.now()
        self.accept_optimizer()

    def accept(self) -> None:
        """All is right as it stands."""
        self._accept_fixed(None, compare=False)
        self.accept_parameters()

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
        self._check_fixed()
        left, now = self.left[0], self._digest()
        read(left, now)
        self._refuse(left.value(), now.value(), _PARAMETERS)

    # ---- how it is seen

    def _refuse(self, left: object, now: object, what: str) -> None:
        if now != left:
            self.stop(CHANGED.format(what=what))
            raise RuntimeError(self._stopped)

    def _check_places(self) -> Mapping[str, Tensor]:
        """Refuse what comes after `stop`, what leaves a mark, and parameters in another place or type.

        Returns:
            All parameters and buffers, by each of their names.

        Raises:
            RuntimeError: naming one. A parameter put back as it was, the training goes on.
        """
        if self._stopped is not None:
            raise RuntimeError(self._stopped)
        held = self._held()
        for name, parameter in self._setup.parameters.items():
            kind, before = (parameter.dtype, parameter.device), self._kinds[name]
            if held.get(name) is not parameter or kind != before:
                is_there = held.get(name) is parameter
                now = f"{kind[0]} on {kind[1]}" if is_there else "another tensor, which no step moves"
                raise RuntimeError(
                    f"parameter {name!r} of the model is {now}. When this training began it was {before[0]} "
                    f"on {before[1]}, for which kernels and the shape of forwards were chosen. "
                    "load_state_dict(assign=True), another layer or model.to(...) changed it: put it back, "
                    "or resume the run from its last checkpoint (PrivateTraining.resume)"
                )
        if self._marks_of_fixed(held) != self._marks:
            self._check_fixed()
        # What was cleared, as momentum is in a restart, brings nothing into later steps.
        self._refuse(True, self._marks_of_optimizer() <= self._remembered, "what the optimizer remembers")
        return held

    def _check_fixed(self) -> None:
        now = self._digests_of_fixed()
        read(*self._fixed.values(), *now.values())
        for name in {**self._fixed, **now}:
            left, right = ((of[name].value() if name in of else "") for of in (self._fixed, now))
            self._refuse(left, right, repr(name))
        self._marks = self._marks_of_fixed(self._held())

    def _accept_fixed(self, only: Collection[str] | None, compare: bool) -> set[str]:
        """All that no step moves, or only these, is right as it stands.

        Args:
            only: names; None for all.
            compare: look at the values, for which the host waits.

        Returns:
            Names of those that have another value, or may have.
        """
        now, before, changed = self._digests_of_fixed(only), self._fixed, {*(only or ())}
        tries = self._setup.rows.engine.independence.word == "compared"
        if compare or tries:
            known = now.keys() & before.keys()
            read(*(of[name] for name in known for of in (before, now)))
            pairs = {name: (before[name].value(), now[name].value()) for name in known}
            changed = {name for name, (old, new) in pairs.items() if old != new}
            self.changes += [Change((0, name), name, *pairs[name]) for name in changed if tries]
        self._fixed = now if only is None else before | now
        marks = self._marks_of_fixed(self._held())
        self._marks = marks if only is None else self._marks | {name: marks[name] for name in only}
        return changed

    def _held(self) -> dict[str, Tensor]:
        """All parameters and buffers as they stand now, by each of their names."""
        model = self._setup.model
        if self._setup.is_sharded:
            resharded(model)  # a forward without a backward leaves whole parameters in place
        buffers = dict(model.named_buffers(remove_duplicate=False))
        return {**dict(model.named_parameters(remove_duplicate=False)), **buffers}

    def _digests_of_fixed(self, only: Collection[str] | None = None) -> dict[str, Unread[str]]:
        """By name, of all, or of only these, that is saved with the model and that no step moves.

        These are frozen parameters, persistent buffers and extra state. What shares its memory with a
        parameter that is trained moves with it.
        """
        held, trained = self._held(), {place for place, _ in _marks(self._trained)}
        found = {}
        for name, value in self._setup.model.state_dict().items():
            value = held.get(name, value)
            is_asked = only is None or name in only
            if is_asked and not (isinstance(value, Tensor) and write_mark(value)[0] in trained):
                with suppress(TypeError):  # extra state of a kind that no checkpoint gives back
                    found[name] = self._ledger.unread_digest(value)
        return found

    def _digest(self) -> Unread[str]:
        """Of the parameters as they are."""
        return self._ledger.unread_digest(self._setup.parameters)

    def _marks_of_fixed(self, held: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
        return {name: write_mark(held.get(name)) for name in self._fixed}

    def _marks_of_optimizer(self) -> set[tuple[int, int]]:
        entries = [*self._setup.optimizer.state.values()]
        if {dict}.issuperset(map(type, entries)):
            entries = [*chain.from_iterable(map(dict.values, entries))]
        held = entries if _SINGLE.issuperset(map(type, entries)) else leaves(entries)
        return {*_marks([*filter(torch.is_tensor, held)])}

    def _held_by_optimizer(self) -> set[int]:
        return {id(p) for group in self._setup.optimizer.param_groups for p in group["params"]}


_SINGLE = {Tensor, nn.Parameter, float, int, bool, type(None)}


def _marks(tensors: Sequence[Tensor]) -> _Marks:
    """`write_mark` of each; of plain tensors without a call for each, since every step asks for all."""
    are_dense = {torch.strided}.issuperset(map(attrgetter("layout"), tensors))
    are_plain = are_dense and {Tensor, nn.Parameter}.issuperset(map(type, tensors))
    if are_plain and not any(map(Tensor.is_inference, tensors)):
        return [*zip(map(Tensor.data_ptr, tensors), map(attrgetter("_version"), tensors), strict=True)]
    return [*map(write_mark, tensors)]
