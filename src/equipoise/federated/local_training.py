"""The training at a client: the library's own, whose parameters a server may move between steps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from equipoise.methods import Context, State
from equipoise.methods.base import Parameters
from equipoise.methods.named_tensors import copied
from equipoise.privacy import Journal, Sampling, Secrets
from equipoise.privacy.ledger.journal import CloseEntry, Entry, RunEntry
from equipoise.privacy.ledger.run_record import book_end
from equipoise.privacy.ledger.write_ahead_log import WriteAheadLog
from equipoise.privacy.noise.secrets import delete_key
from equipoise.statements import Statement
from equipoise.statements.verify_federation import DISJOINT
from equipoise.training import PrivateTraining
from equipoise.training.run_folder import RunFolder
from equipoise.training.setup import rebuild

__all__ = ["LocalTraining", "check_settings", "discard_unstarted", "end_of"]


Answer = TypeVar("Answer")


def discard_unstarted(path: str | os.PathLike[str]) -> None:
    """Remove a run whose process ended before its first checkpoint, so that it can be started anew.

    Only a run that has released nothing goes: its journal holds at most its own head, and the client has
    never come to note a round. Anything else is left as it is. In a journal that is shared its end is booked
    first: without its key nobody could give back what it reserves.

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
            settings = folder.read_config()["settings"]
            run = _run_of(folder, settings)
            if run is not None and "ledger_file" in settings:
                _end_in(settings["ledger_file"], run)
            folder.discard()
    finally:
        folder.unlock()


def _started(folder: RunFolder) -> bool:
    if folder.checkpoints.steps() or (folder.private / "rounds.jsonl").exists():
        return True
    settings = folder.read_config()["settings"]
    if "ledger_file" in settings:
        run = _run_of(folder, settings)
        entries = [entry for entry in _entries(settings["ledger_file"]) if entry.run == run]
    else:
        entries = _entries(folder.journal)
    # a journal may be shared: what other runs booked here is not this one's to discard
    nothing_left = all(isinstance(entry, (RunEntry, CloseEntry)) for entry in entries)
    return not nothing_left or len({entry.run for entry in entries}) > 1


def _run_of(folder: RunFolder, settings: Mapping[str, Any]) -> str | None:
    """The name of the folder's run in a journal; None where it has no whole key, before or after."""
    if settings["reproducible"]:
        return Secrets(reproducible_seed=settings["seed"]).identity
    if not (folder.private / "key").exists():
        return None
    try:
        return Secrets(folder.path).identity
    except RuntimeError:  # killed while it wrote or deleted the key
        return None


def _end_in(place: str | os.PathLike[str], run: str) -> None:
    """Book the end of a run that the journal there holds; a journal that is gone reserves nothing."""
    if any(isinstance(entry, RunEntry) and entry.run == run for entry in _entries(place)):
        journal = Journal(place, existing=True)
        try:
            book_end(journal, run)
        finally:
            journal.close()


def check_settings(path: str | os.PathLike[str], given: Mapping[str, Any]) -> None:
    """See that a client which goes on is asked for what its run was started with.

    Args:
        path: the run's folder.
        given: budget, sampling, relation, reproducible, hardened, ledger_file and local_steps, as the client
            is given them now.

    Raises:
        ValueError: some differ; all of them are named with both values.
    """
    folder = RunFolder(path)
    sampling, budget, settings = rebuild(folder.read_config())
    kept = {
        "budget": budget,
        "sampling": sampling,
        "relation": settings.relation,
        "reproducible": settings.reproducible,
        "hardened": settings.hardened,
        "ledger_file": settings.ledger_file,
    }
    steps = [entry["local_steps"] for entry in _rounds(folder) if "local_steps" in entry]
    if steps:
        kept["local_steps"] = steps[-1]
    plain = {name: value.describe() for name, value in given.items() if isinstance(value, Sampling)}
    differing = [
        f"{name}={given[name]!r}, and the run has {value!r}"
        for name, value in kept.items()
        if (value.describe() if isinstance(value, Sampling) else value) != plain.get(name, given[name])
    ]
    if differing:
        raise ValueError(
            f"folder={str(path)!r} holds a run of this client with other settings: "
            f"{'; '.join(differing)}. A run keeps what its noise was calibrated for: give the run's own "
            "values to go on with it, or another folder to start anew, where what this run spent stays "
            "spent. Nothing was spent now."
        )


def end_of(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What a client that has finished left in its log: its statement, epsilon and number of rounds.

    A process can be killed between that entry and the key's deletion: what is missing of the end in the
    ledger is booked now, and a key that is still there goes.

    Raises:
        JournalError: the run's journal is damaged, or cannot be written.
    """
    folder = RunFolder(path)
    end = next((entry for entry in _rounds(folder) if entry["type"] == "finish"), None)
    if end is None:
        return None
    settings = folder.read_config()["settings"]
    run = _run_of(folder, settings)
    if run is not None:  # the key goes last: where it is gone the end is booked
        _end_in(settings.get("ledger_file") or folder.journal, run)
    delete_key(folder.private / "key")
    return end


def _rounds(folder: RunFolder) -> list[dict[str, Any]]:
    """What the client's log of rounds holds; nothing where there is none."""
    place = folder.private / "rounds.jsonl"
    if not place.exists():
        return []
    log = WriteAheadLog(place, read_only=True)
    try:
        return log.read()
    finally:
        log.close()


def _entries(place: str | os.PathLike[str]) -> list[Entry]:
    """What a journal holds; nothing where there is none."""
    if not os.path.exists(place):
        return []
    journal = Journal(place, read_only=True)
    try:
        return journal.entries()
    finally:
        journal.close()


class LocalTraining(PrivateTraining):
    """`PrivateTraining`, with the parameters moved from outside and questions asked between steps."""

    def move(self, values: Parameters) -> None:
        """Put other parameters into the model; the method's state is rebased."""
        self._steps.move(values)

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Put parameters and method state back where they were before what is done within."""
        before = copied(self.parameters)
        state = self._steps.state
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(before[name])
            self._steps.state = state

    def ask(self, question: Callable[[Context, State], Answer]) -> Answer:
        """What `question(context, state)` releases between two steps; it is on disk when this returns."""
        answer = self._steps.ask(question)
        self.synced_position()  # an answer that has left cannot be uncharged any more
        return answer

    def statement(self) -> Statement:
        """What may be claimed, with what an owner beside others takes for granted."""
        found = super().statement()
        return replace(found, assumptions=[*found.assumptions, DISJOINT])

    @property
    def method_state(self) -> State:
        """What the method carries, after the first step or question."""
        assert self._steps.state is not None
        return self._steps.state

    def steer(self, change: Callable[[State], State]) -> None:
        """Let `change` set public numbers of the method's state."""
        if self._steps.state is None:
            self._steps.ask(lambda context, state: None)  # makes the first state; releases nothing
        state = self._steps.state
        assert state is not None
        self._steps.state = change(state)
