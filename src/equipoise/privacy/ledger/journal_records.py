"""The records of all runs in a journal, and what the runs cost each other."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import dp_accounting

from equipoise._files import PathLike
from equipoise.privacy.errors import JournalError
from equipoise.privacy.ledger.journal import (
    CloseEntry,
    Entry,
    Journal,
)
from equipoise.privacy.ledger.run_record import RunRecord


class JournalRecords:
    """The records of a journal's runs, as far as its entries were taken in.

    Attributes:
        runs: the records by name.
        lines: how many entries were taken in.
        length: the journal's length with them.
    """

    def __init__(self) -> None:
        self.runs: dict[str, RunRecord] = {}
        self.lines = self.length = 0

    @classmethod
    def of(cls, journal: Journal) -> JournalRecords:
        """The records of a journal as it is now; to be called under its lock.

        Raises:
            JournalError: its lines are not what ledgers write.
        """
        records = cls()
        for length, entry in journal.since():
            records.take(entry, length)
        return records

    def take(self, entry: Entry, length: int = 0) -> None:
        """Take the next entry in, with which the journal has this length.

        Raises:
            JournalError: no ledger writes it after the entries before.
        """
        self.lines, self.length = self.lines + 1, length
        if entry.run in self.runs:
            self.runs[entry.run] = self.runs[entry.run].after(entry)
        else:
            self.runs[entry.run] = RunRecord.begun(entry)


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
    check_neighbours(records, relation, unit, owners)
    return {run: record.reserved_event for run, record in records.items()}


def check_neighbours(records: Mapping[str, RunRecord], relation: str, unit: str, owners: str = "") -> None:
    """Refuse runs that were accounted under another relation, for another unit or for other users.

    Raises:
        JournalError: naming the run.
    """
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


def runs_in(journal_file: PathLike | None) -> Mapping[str, RunRecord]:
    """The runs in a shared journal; none for None, or a path where nothing lies yet."""
    if journal_file is None or not Path(journal_file).is_file():
        return {}
    with closing(Journal(journal_file, read_only=True)) as journal, journal.locked():
        return JournalRecords.of(journal).runs


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
    return tuple(events_of(runs_in(journal_file), relation, unit).values())


def book_end(journal: Journal, run: str, stop_fixed_beforehand: bool) -> None:
    """Book that a run has ended, once; it is on the device when this returns."""
    with journal.locked():  # a killed run's end may be booked by two processes
        if not JournalRecords.of(journal).runs[run].closed:
            journal.append(CloseEntry(run=run, stop_fixed_beforehand=stop_fixed_beforehand))
    # The key is deleted next: after a loss of power the run must not stand as open, and never to be ended.
    journal.sync()
