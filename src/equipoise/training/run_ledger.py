"""The ledger of a training, opened in its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from dp_accounting import DpEvent

from equipoise.distributed.shared_ledger import SharedLedger, own_ledger
from equipoise.privacy import (
    Journal,
    JournalError,
    Ledger,
    LedgerError,
    PrivacyPlan,
    Secrets,
    digest,
)
from equipoise.privacy.ledger.journal import RunEntry
from equipoise.privacy.ledger.journal_records import JournalRecords, events_of
from equipoise.training.arguments import Run
from equipoise.training.folder.run_folder import RunFolder
from equipoise.training.setup.training_setup import TrainingSetup


def open_ledger(
    setup: TrainingSetup,
    folder: RunFolder | None = None,
    *,
    place: Mapping[str, Any] | None = None,
    resume: bool = False,
    ledger_class: Callable[..., Ledger] | None = None,
) -> Ledger | SharedLedger:
    """The ledger of a training.

    Args:
        setup: the plan, the budget and the settings.
        folder: of the run, or None to keep key and journal in memory.
        place: of the ledger in the checkpoint that is resumed.
        resume: the run was begun before: key and journal are there, and nothing is made in their place.
        ledger_class: of an audit, which looks through it; None for the one that the method names.

    Raises:
        LedgerError: a run that begins has the public seed of one that the journal holds already.
    """
    processes, run = setup.processes, setup.run

    def on_rank_0() -> Ledger:
        secrets = secrets_of(folder, run, existing=resume)
        if setup.rows.owners is not None:
            setup.rows.owners.choose(secrets.stream_key(0, _CHOICE))
        if setup.score is not None:
            setup.score.hold_apart(setup.rows, secrets)
        records, keys = setup.rows.fingerprint(), None
        if setup.score is not None and setup.score.score.data is not None:
            records = digest({"records": records, "scored": setup.score.rows.fingerprint()})
        if setup.plan.takes_turns:
            keys = setup.rows.keys(secrets)
            records = records if keys is None else digest({"records": records, "keys": keys})
        file = run.journal or (None if folder is None else folder.journal)
        options = {
            "data_fingerprint": records,
            "keys": keys,
            "owners": setup.partition,
            "kernels": setup.kernels(),
        }
        journal = Journal(file, existing=resume)
        try:
            # Held over both, so that of two runs that begin at once one finds the other.
            with journal.locked():
                if (run.reproducible or run.secret_seed is not None) and not resume:
                    _check_seed_is_new(journal, secrets, run)
                kind = ledger_class or setup.method.ledger_class
                return kind(setup.plan, setup.budget, journal, secrets, **options, **(place or {}))
        except BaseException:
            journal.close()
            raise

    ledger = setup.rows.backend.ledger(setup.plan, on_rank_0)
    owners, score = setup.rows.owners, setup.score
    if score is not None and processes.count > 1:
        setup.rows.members, score.rows.members = processes.first(
            lambda: (setup.rows.members, score.rows.members)
        )
    if owners is not None and processes.count > 1:
        owners.choose(processes.first(lambda: own_ledger(ledger).secrets.stream_key(0, _CHOICE)))
    return ledger


_CHOICE = "records of a user"  # what the key of `Owners.choose` serves


def booked_plan(folder: RunFolder, begun: Run) -> tuple[PrivacyPlan, tuple[DpEvent, ...]]:
    """The plan that a run booked when it began, and what the runs before it in its journal cost then.

    Args:
        folder: of a run that goes on; its key says which one it is.
        begun: it, as its folder says.

    Raises:
        RuntimeError: the run has ended, and its key is deleted.
        JournalError: the journal does not hold the run; it is only read.
    """
    run, file = secrets_of(folder, begun, existing=True).identity, begun.journal
    with closing(Journal(file or folder.journal, read_only=True)) as journal:
        others = JournalRecords()
        for entry in journal:
            if isinstance(entry, RunEntry) and entry.run == run:
                costs = events_of(others.runs, entry.plan.relation, entry.plan.unit.name)
                return entry.plan, tuple(costs.values())
            others.take(entry)
    # The path comes from the folder, which may come from elsewhere: only a journal of this key is written to.
    raise JournalError(
        f"{file or folder.journal!r} holds no run of this folder's key; it was not touched. "
        + ("Restore it from a copy" if file is None else "Write the path of the run's own journal into ")
        + ("" if file is None else "private/ledger_file")
    )


def secrets_of(folder: RunFolder | None, run: Run, existing: bool) -> Secrets:
    """The key of a run: its folder's, in memory, or of its public seed."""
    seed, secret = run.seed if run.reproducible else None, None
    if run.secret_seed is not None:
        secret = f"{run.seed} ".encode() + Path(run.secret_seed).read_bytes()
    return Secrets(None if folder is None else folder.path, seed, existing=existing, secret_seed=secret)


def _check_seed_is_new(journal: Journal, secrets: Secrets, run: Run) -> None:
    """The name of a run is that of its key, and a public seed gives every run the same one."""
    if secrets.identity in JournalRecords.of(journal).runs:
        raise LedgerError(
            f"seed={run.seed} with reproducible=True or this secret_seed names a run that "
            f"journal={run.journal!r} holds already: its noise would be repeated and nothing charged. Give "
            "another seed or another journal, or go on with that run. Nothing was spent"
        )
