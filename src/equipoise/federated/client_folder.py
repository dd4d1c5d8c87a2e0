"""A client's folder around its training: the log of its rounds, and how the folder is taken up again.

`private/rounds.jsonl` has a line for every round that was begun, for every query that was answered, and for
the end. Lines are parsed and checked here; the client sees dataclasses.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from equipoise._files import PathLike
from equipoise.privacy import Journal, Secrets
from equipoise.privacy.errors import JournalError
from equipoise.privacy.ledger.journal_records import JournalRecords, book_end
from equipoise.privacy.ledger.run_record import RunRecord
from equipoise.privacy.ledger.write_ahead_log import WriteAheadLog
from equipoise.privacy.noise.secrets import delete_key
from equipoise.training.arguments import TrainingInputs
from equipoise.training.folder.config_file import ARGUMENTS, rebuild, settings_of
from equipoise.training.folder.run_folder import RunFolder

__all__ = [
    "AnsweredQuery",
    "BegunRound",
    "Finished",
    "LoggedRound",
    "check_reopened",
    "discard_unstarted",
    "end_of",
    "read_rounds",
    "rounds_file",
]


# ---- the log of rounds


@dataclass(frozen=True, kw_only=True)
class LoggedRound:
    """One line of the log. `kind` is what stands under "type".

    Example:
        >>> LoggedRound.from_json(BegunRound(round=2, request="a1", step=4, local_steps=4).to_json(), line=1)
        BegunRound(round=2, request='a1', step=4, local_steps=4)
        >>> LoggedRound.from_json({"type": "train", "round": "two"}, line=7)
        Traceback (most recent call last):
        ...
        equipoise.privacy.errors.JournalError: line 7 of rounds.jsonl was not written by this library ...
    """

    kind: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        return {"type": self.kind, **asdict(self)}

    @staticmethod
    def from_json(values: Mapping[str, Any], line: int) -> LoggedRound:
        """The entry that `to_json` wrote.

        Raises:
            JournalError: naming the line. A client that cannot tell what it answered must not go on.
        """
        given = dict(values)
        try:
            found = _KINDS[str(given.pop("type", None))](**given)
            for item in fields(found):
                if not isinstance(getattr(found, item.name), _TYPES[item.name]):
                    raise ValueError(f"{item.name} is {getattr(found, item.name)!r:.60}")
        except (KeyError, TypeError, ValueError) as error:
            raise JournalError(
                f"line {line} of rounds.jsonl was not written by this library ({error}): the file was "
                "edited, or it is another file. The client answers nothing more with it: restore a copy"
            ) from error
        return found


@dataclass(frozen=True, kw_only=True)
class BegunRound(LoggedRound):
    """The local steps of a round were begun.

    Attributes:
        round: its number.
        request: digest of the request, by which it is known again.
        step: how many steps were done before it.
        local_steps: K; None in files of the first version.
    """

    kind = "train"
    round: int
    request: str
    step: int
    local_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class AnsweredQuery(LoggedRound):
    """A query was answered.

    Attributes:
        round, request: as for a round.
        reports: the released numbers, which answer the same request again.
    """

    kind = "query"
    round: int
    request: str
    reports: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Finished(LoggedRound):
    """The client has stopped taking part.

    Attributes:
        rounds: how many are complete.
        epsilon: of all that was released.
        statement: the fields of the statement.
    """

    kind = "finish"
    rounds: int
    epsilon: float
    statement: dict[str, Any]


_KINDS: dict[str, type[LoggedRound]] = {kind.kind: kind for kind in (BegunRound, AnsweredQuery, Finished)}

_TYPES: dict[str, Any] = {
    "round": int, "request": str, "step": int, "local_steps": int | None, "reports": dict,
    "rounds": int, "epsilon": float | int, "statement": dict,
}  # fmt: skip


def rounds_file(path: PathLike) -> Path:
    """Where a client's folder holds the log."""
    return RunFolder(path).private / "rounds.jsonl"


def read_rounds(log: WriteAheadLog) -> list[LoggedRound]:
    """The entries of an open log.

    Raises:
        JournalError: it is damaged.
    """
    return [LoggedRound.from_json(row, line) for line, row in enumerate(log.read(), 1)]


def _logged(folder: RunFolder) -> list[LoggedRound]:
    """The entries of the folder's log; none if there is no file."""
    place = rounds_file(folder.path)
    if not place.exists():
        return []
    with closing(WriteAheadLog(place, read_only=True)) as log:
        return read_rounds(log)


# ---- taking up a folder


def discard_unstarted(path: PathLike) -> None:
    """Remove a run whose process ended before its first checkpoint, so that it can be started again.

    Only a run that has released nothing is removed: its journal holds at most its own first entry, and the
    client has noted no round. Anything else is left as it is. In a shared journal the run's end is booked
    first: without the run's key nobody could give back what it reserves.

    Raises:
        RuntimeError: another process is starting this run.
        JournalError: the journal is damaged.
    """
    folder = RunFolder(path)
    if not folder.config.exists() or not folder.private.is_dir() or _started(folder):
        return
    folder.lock()
    try:
        if not _started(folder):  # again, now that the lock keeps other processes out
            settings = folder.read_config()["settings"]
            run = _run_of(folder, settings)
            if run is not None and "ledger_file" in settings:
                # it released nothing, so that no release can have ended it
                _end_in(settings["ledger_file"], run, stop_fixed_beforehand=True)
            folder.discard()
    finally:
        folder.unlock()


def _started(folder: RunFolder) -> bool:
    if folder.checkpoints.steps() or rounds_file(folder.path).exists():
        return True
    settings = folder.read_config()["settings"]
    if "ledger_file" in settings:
        run = _run_of(folder, settings)
        own = _booked(settings["ledger_file"]).get(run or "")
        booked = {} if own is None else {own.run: own}
    else:
        booked = _booked(folder.journal)
    # A journal may be shared: the entries of other runs must not be discarded.
    return len(booked) > 1 or any(record.has_entries for record in booked.values())


def check_reopened(path: PathLike, given: TrainingInputs, local_steps: int) -> None:
    """See that a client is opened again with the settings that its run was started with.

    Args:
        path: the run's folder.
        given, local_steps: now.

    Raises:
        ValueError: some differ; all of them are named with both values.
    """
    folder = RunFolder(path)
    began = rebuild(folder.read_config())
    now = settings_of(given)
    pairs: dict[str, tuple[Any, Any]] = {
        "budget": (given.budget, began.budget),
        "sampling": (given.sampling.describe(), began.sampling.describe()),
        **{ARGUMENTS.get(name, name): (now[name], began.settings[name]) for name in now},
    }
    del pairs["microbatch_size"]  # the run holds the size that was chosen
    steps = [entry.local_steps for entry in _logged(folder) if isinstance(entry, BegunRound)]
    if steps and steps[-1] is not None:
        pairs["local_steps"] = local_steps, steps[-1]
    differing = [
        f"{name}={one!r}, and the run has {kept!r}" for name, (one, kept) in pairs.items() if one != kept
    ]
    if differing:
        raise ValueError(
            f"folder={str(path)!r} holds a run of this client with other settings: {'; '.join(differing)}. "
            "The run's noise was calibrated for its own settings: give those to go on with it, or another "
            "folder to start anew; what this run spent stays spent. Nothing was spent now."
        )


def end_of(path: PathLike) -> Finished | None:
    """How a client that has finished ended; None for one that has not.

    A process can be killed between the log's last entry and the key's deletion. So the end is booked now if
    it is missing in the ledger, and a key that is still there is deleted.

    Raises:
        JournalError: the run's journal is damaged, or cannot be written.
    """
    folder = RunFolder(path)
    end = next((entry for entry in _logged(folder) if isinstance(entry, Finished)), None)
    if end is None:
        return None
    settings = folder.read_config()["settings"]
    run = _run_of(folder, settings)
    if run is not None:  # the key goes last: where it is gone the end is booked
        fixed = bool(end.statement.get("stop_fixed_beforehand", False))
        _end_in(settings.get("ledger_file") or folder.journal, run, fixed)
    delete_key(folder.private / "key")
    return end


def _run_of(folder: RunFolder, settings: Mapping[str, Any]) -> str | None:
    """The name of the folder's run in a journal; None if it has no whole key, not yet or no longer."""
    if settings["reproducible"]:
        return Secrets(reproducible_seed=settings["seed"]).identity
    if not (folder.private / "key").exists():
        return None
    try:
        return Secrets(folder.path).identity
    except RuntimeError:  # killed while it wrote or deleted the key
        return None


def _booked(place: PathLike) -> dict[str, RunRecord]:
    """What a journal says of its runs, by name; nothing if there is no file."""
    if not os.path.exists(place):
        return {}
    with closing(Journal(place, read_only=True)) as journal, journal.locked():
        return JournalRecords.of(journal).runs


def _end_in(place: PathLike, run: str, stop_fixed_beforehand: bool) -> None:
    """Book the end of a run in the journal at `place`, if that holds the run."""
    if run in _booked(place):
        with closing(Journal(place, existing=True)) as journal:
            book_end(journal, run, stop_fixed_beforehand)
