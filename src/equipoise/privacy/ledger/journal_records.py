"""The records of all runs in a journal: read from its last snapshot on, followed while it grows, or checked.

`JournalRecords.of` begins at the last snapshot that tells enough, and so costs the same however long the
journal is. `folded` reads every line, holds each snapshot against the lines before it, and forgets draws on
the way, so that its memory does not grow with the runs. Nothing here believes more than the lines say: a
snapshot that does not fit is a `JournalError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import dp_accounting

from equipoise._files import PathLike
from equipoise.privacy.errors import JournalError
from equipoise.privacy.ledger.journal import (
    CloseEntry,
    DisclosureEntry,
    Entry,
    Journal,
    RunEntry,
    SearchEntry,
    Snapshot,
    UnprovenEntry,
)
from equipoise.privacy.ledger.run_record import ForgottenDraw, OtherRuns, RunRecord

_Folded = TypeVar("_Folded")

SNAPSHOT_BYTES = 4 << 20
"""A ledger writes a snapshot after this many bytes: what the next reader has to read."""

SNAPSHOT_SHARE = 8
"""It waits until that many times a snapshot's own bytes are there, which are many where runs are."""

FORGET_EVERY = 10_000
"""Who folds a whole journal forgets draws after this many lines."""


class JournalRecords:
    """The records of a journal's runs, as far as its lines were taken in.

    Args:
        snapshot: to begin at; None begins at the first line.
        forgetful: whether draws are forgotten on the way.

    Attributes:
        runs: the records by name.
        lines: how many lines were taken in.
        length: the journal's length with them.
        snapshot: the last one among them.
        due: the length from which on the next one is due.

    Raises:
        JournalError: the snapshot is not what ledgers write.
    """

    def __init__(self, snapshot: Snapshot | None = None, *, forgetful: bool = False) -> None:
        self.runs: dict[str, RunRecord] = {}
        self.lines = self.length = 0
        self.snapshot: Snapshot | None = None
        self.due: float = SNAPSHOT_BYTES
        self._forgetful = forgetful
        if snapshot is not None:
            self._pass(snapshot)
            self.lines, self.length = snapshot.lines + 1, snapshot.end
            self.runs = {record.run: record for record in map(self._read, snapshot.runs)}

    @classmethod
    def of(cls, journal: Journal, run: str | None = None, position: int = 0) -> JournalRecords:
        """The records of a journal as it is now; to be called under its lock.

        Args:
            journal: is read from the last snapshot that tells enough.
            run: whose draws are to be known.
            position: the index of the draw from which on they are.

        Raises:
            JournalError: the lines that were read are not what ledgers write.
        """
        snapshot = journal.snapshot()
        while snapshot is not None:
            records = cls(snapshot)
            own = records.runs.get(run or "")
            if own is None or own.knows_from(position):
                try:
                    return records._follow(journal)
                except ForgottenDraw:
                    pass
            snapshot = None if snapshot.previous is None else journal.snapshot(snapshot.previous)
        return cls()._follow(journal)

    def _follow(self, journal: Journal) -> JournalRecords:
        for line in journal.lines(self.snapshot):
            self.take(line)
        self.length = journal.length
        return self

    def take(self, line: Entry | Snapshot) -> None:
        """Take the next line in.

        Raises:
            JournalError: no ledger writes it after the lines before.
            ForgottenDraw: it is of a draw that was forgotten.
        """
        self.lines += 1
        if isinstance(line, Snapshot):
            if line.runs != [record.state() for record in self.runs.values()]:
                raise self._misfit()
            self._pass(line)
        elif line.run in self.runs:
            self.runs[line.run].add(line)
        else:
            self.runs[line.run] = RunRecord.begun(line)
        if self._forgetful and self.lines % FORGET_EVERY == 0:
            for record in self.runs.values():
                record.forget()

    def seal(self, journal: Journal) -> None:
        """Write a snapshot, under the journal's lock; one that is kept in memory needs none."""
        if journal.path is None:
            self.due = math.inf
            return
        states = [record.state() for record in self.runs.values()]
        last = None if self.snapshot is None else self.snapshot.start
        snapshot = journal.seal(self.lines, last, states)
        self.lines, self.length = self.lines + 1, snapshot.end
        self._pass(snapshot)

    def _pass(self, snapshot: Snapshot) -> None:
        size = snapshot.end - snapshot.start
        self.snapshot = snapshot
        self.due = snapshot.end + max(SNAPSHOT_BYTES, SNAPSHOT_SHARE * size)

    def _read(self, state: Mapping[str, Any]) -> RunRecord:
        try:
            return RunRecord.from_state(state)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise self._misfit() from error

    def _misfit(self) -> JournalError:
        return JournalError(
            f"the snapshot in line {self.lines} of the journal does not say what the lines before it add up "
            "to: the file was edited. Nothing more can be released under it; restore it from a copy"
        )


def folded(fold: Callable[[JournalRecords], _Folded]) -> _Folded:
    """What `fold` makes of records that it gives every line to; they forget draws if they can.

    Args:
        fold: is called again, with records that keep everything, where a line is of a forgotten draw.
    """
    try:
        return fold(JournalRecords(forgetful=True))
    except ForgottenDraw:
        return fold(JournalRecords())


def records_of(lines: Iterable[Entry | Snapshot]) -> dict[str, RunRecord]:
    """The record of every run among the lines, by name.

    Raises:
        JournalError: the lines are not what ledgers write.
    """
    records = JournalRecords()
    for line in lines:
        records.take(line)
    return records.runs


def events_of(
    records: Mapping[str, RunRecord], relation: str, unit: str = "record", owners: str = ""
) -> dict[str, dp_accounting.DpEvent]:
    """What these runs cost another run over the same data, by name.

    Args:
        records: of the runs.
        relation, unit: that the other run is accounted under.
        owners: of the other run, as `RunEntry.owners`; "" where they are not looked at.

    Raises:
        JournalError: a run was accounted under another relation, for another unit, or for other users.
    """
    _check_neighbours(records, relation, unit, owners)
    return {run: record.reserved_event for run, record in records.items()}


def check_neighbours(records: Mapping[str, RunRecord], own: RunRecord) -> None:
    """Refuse runs that were accounted under another relation, for another unit or for other users than one.

    Raises:
        JournalError: naming the run.
    """
    _check_neighbours(records, own.plan.relation, own.plan.unit.name, own.owners)


def _check_neighbours(records: Mapping[str, RunRecord], relation: str, unit: str, owners: str = "") -> None:
    for run, record in records.items():
        if record.plan.relation != relation:
            raise JournalError(
                f"run {run} in the journal is accounted under {record.plan.relation}, this one under "
                f"{relation}: their costs do not compose; use one relation for all runs over a data set"
            )
        if record.plan.unit.name != unit:
            raise JournalError(
                f"run {run} in the journal is accounted for one {record.plan.unit.name}, this one for one "
                f"{unit}: their costs do not compose; use one unit for all runs over a data set"
            )
        # Neighbours of both runs differ by one user only if both mean the same by a user. How many records
        # of a user a run takes does not matter: each run's cost is that of the whole user.
        if _are_other_users(record.owners, owners):
            raise JournalError(
                f"run {run} in the journal has as many records as this one, and owner groups them into other "
                "users: the costs of one user do not compose with those of another; name users by the same "
                "column in all runs over a data set, with its records in the same order, or take another "
                "journal"
            )


def _are_other_users(one: str, other: str) -> bool:
    """Whether two runs have as many records each, grouped into users in different ways.

    Of data that grew meanwhile nothing can be said; that their users are the same is an assumption.
    """
    return one.partition(":")[0] == other.partition(":")[0] and one != other


# The entries by which a run changes what it costs others: a release changes nothing until its run is closed.
COSTS_TO_OTHERS = (RunEntry, CloseEntry, SearchEntry, UnprovenEntry, DisclosureEntry)


def costs_over_time(
    lines: Iterable[Entry | Snapshot],
    run: str,
    relation: str,
    records: JournalRecords | None = None,
    unit: str = "record",
) -> Iterator[tuple[int, OtherRuns]]:
    """What the other runs cost a run over the same data: at first nothing, then whenever that changes.

    Args:
        lines: of the journal.
        run: its own lines and the snapshots are passed over.
        relation: of the run.
        records: take the lines in; none of them may be known yet.
        unit: of the run.

    Yields:
        How many lines the journal had, and the costs from there on.

    Raises:
        JournalError: the lines are not what ledgers write, or a run was accounted under another relation or
            for another unit.
    """
    records = JournalRecords() if records is None else records
    costs: OtherRuns = {}
    yield 0, costs
    for number, line in enumerate(lines, start=1):
        if isinstance(line, Snapshot) or line.run == run:
            continue
        records.take(line)
        if isinstance(line, COSTS_TO_OTHERS):
            changed = {**costs, **events_of({line.run: records.runs[line.run]}, relation, unit)}
            if changed != costs:
                costs = changed
                yield number, costs


def other_runs(
    journal_file: PathLike | None, relation: str, unit: str = "record"
) -> tuple[dp_accounting.DpEvent, ...]:
    """What the runs in a shared journal cost another run over the same data.

    Args:
        journal_file: None, or a path where nothing lies yet, for no other runs.
        relation, unit: of the other run.

    Raises:
        JournalError: the journal is damaged, or a run was accounted under another relation or for another
            unit.
    """
    if journal_file is None or not Path(journal_file).is_file():
        return ()
    with closing(Journal(journal_file, read_only=True)) as journal, journal.locked():
        return tuple(events_of(JournalRecords.of(journal).runs, relation, unit).values())


def book_end(journal: Journal, run: str, stop_fixed_beforehand: bool) -> None:
    """Book that a run has ended, once; it is on the device when this returns."""
    with journal.locked():  # a killed run's end may be booked by two processes
        if not JournalRecords.of(journal).runs[run].closed:
            journal.append(CloseEntry(run=run, stop_fixed_beforehand=stop_fixed_beforehand))
    # The key is deleted next: after a loss of power the run must not stand as open, and never to be ended.
    journal.sync()
