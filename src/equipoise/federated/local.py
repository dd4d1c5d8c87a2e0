"""The training at a client: the library's own, whose parameters a server may move between steps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch

from equipoise.methods import Context, State
from equipoise.methods.base import Parameters
from equipoise.methods.named_tensors import copied
from equipoise.privacy import Journal, Statement
from equipoise.training import PrivateTraining
from equipoise.training.folder import RunFolder

__all__ = ["LocalTraining", "discard_unstarted"]

Answer = TypeVar("Answer")


def discard_unstarted(path: str | os.PathLike[str]) -> None:
    """Remove a run whose process ended before its first checkpoint, so that it can be started anew.

    Only a run that has released nothing goes: its journal holds at most its own head, and the client has
    never come to note a round. Anything else is left as it is.

    Raises:
        RuntimeError: another process is starting this run.
        JournalError: the journal is damaged.
    """
    folder = RunFolder(path)
    if not folder.config.exists() or not folder.private.is_dir() or _started(folder):
        return
    folder.lock()
    try:
        if not _started(folder):  # the lock holds now: nobody starts it meanwhile
            folder.discard()
    finally:
        folder.unlock()


def _started(folder: RunFolder) -> bool:
    if folder.checkpoints.steps() or (folder.private / "rounds.jsonl").exists():
        return True
    if not folder.journal.exists():
        return False
    journal = Journal(folder.journal, read_only=True)
    try:
        entries = journal.entries()
    finally:
        journal.close()
    # a journal may be shared: what other runs booked here is not this one's to discard
    heads_alone = all(entry.get("type") in ("run", "close") for entry in entries)
    return not heads_alone or len({entry.get("run") for entry in entries}) > 1


DISJOINT = (
    "no person's records lie at several owners: for one whose records do, the epsilons of these owners add up"
)


class LocalTraining(PrivateTraining):
    """`PrivateTraining`, with the parameters moved from outside and questions asked between steps."""

    def move(self, values: Parameters) -> None:
        """Put other parameters into the model; the method's state is rebased."""
        self._stepper.move(values)

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Put parameters and method state back where they were if what is done within fails."""
        before = copied(self.parameters)
        state = self._stepper.state
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(before[name])
            self._stepper.state = state
            raise

    def ask(self, question: Callable[[Context, State], Answer]) -> Answer:
        """What `question(context, state)` releases between two steps; it is on disk when this returns."""
        answer = self._stepper.ask(question)
        self.desk.position()  # syncs the journal: an answer that has left cannot be uncharged any more
        return answer

    def statement(self) -> Statement:
        """What may be claimed, with what an owner beside others takes for granted."""
        found = super().statement()
        return replace(found, assumptions=[*found.assumptions, DISJOINT])

    @property
    def method_state(self) -> State:
        """What the method carries, after the first step or question."""
        assert self._stepper.state is not None
        return self._stepper.state

    def steer(self, change: Callable[[State], State]) -> None:
        """Let `change` set public numbers of the method's state."""
        if self._stepper.state is None:
            self._stepper.ask(lambda context, state: None)  # makes the first state; releases nothing
        state = self._stepper.state
        assert state is not None
        self._stepper.state = change(state)
