"""The ledger of a training: opened in its folder, and shared where several processes train.

One process uses `equipoise.privacy.Ledger` itself. Of several, rank 0 alone has the key, the journal and the
ledger. Opening a draw and sampling its records happen there and are broadcast. A release adds noise to the
(already added) sums there; what was released is broadcast, since it is public from then on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any

from dp_accounting import DpEvent
from torch import Tensor

from equipoise.privacy import (
    Bounded,
    Draw,
    EpsilonResult,
    Journal,
    JournalError,
    Ledger,
    LedgerError,
    PrivacyPlan,
    Private,
    Secrets,
)
from equipoise.privacy.digests import keyed_digest
from equipoise.privacy.ledger.journal import RunEntry, read_journal
from equipoise.privacy.ledger.run_record import costs_over_time
from equipoise.training.distributed import Processes
from equipoise.training.folder.run_folder import RunFolder
from equipoise.training.setup.training_settings import TrainingSettings
from equipoise.training.setup.training_setup import TrainingSetup

__all__ = ["SharedLedger", "open_ledger", "others_at_start", "own_ledger"]


def open_ledger(
    setup: TrainingSetup,
    folder: RunFolder | None = None,
    *,
    place: Mapping[str, Any] | None = None,
    resume: bool = False,
    ledger_class: Callable[..., Ledger] = Ledger,
) -> Ledger | SharedLedger:
    """The ledger of a training.

    Args:
        setup: the plan, the budget and the settings.
        folder: of the run, or None to keep key and journal in memory.
        place: of the ledger in the checkpoint that is resumed.
        resume: the run was begun before: key and journal are there, and nothing is made in their place.
        ledger_class: `Ledger`, or a kind of it that an audit looks through.

    Raises:
        LedgerError: a run that begins has the public seed of one that the journal holds already.
    """
    processes, settings = setup.processes, setup.settings

    def on_rank_0() -> Ledger:
        secrets = _secrets(folder, settings, existing=resume)
        file = settings.ledger_file or (None if folder is None else folder.journal)
        options = {
            "data_fingerprint": setup.rows.source.fingerprint(),
            "kernels": setup.kernels(),
        }
        journal = Journal(file, existing=resume)
        try:
            # Held over both, so that of two runs that begin at once one finds the other.
            with journal.locked():
                if settings.reproducible and not resume:
                    _check_seed_is_new(journal, secrets, settings)
                return ledger_class(setup.plan, setup.budget, journal, secrets, **options, **(place or {}))
        except BaseException:
            journal.close()
            raise

    if processes.count == 1:
        return on_rank_0()
    return SharedLedger(setup.plan, processes, on_rank_0)


class SharedLedger:
    """Rank 0's ledger, for the training on every process: its methods give every process the same result.

    Args:
        plan: what may be released.
        processes: who shares the work.
        open_on_rank_0: gives the ledger there.

    Attributes:
        own: rank 0's ledger; None on the others.
    """

    def __init__(self, plan: PrivacyPlan, processes: Processes, open_on_rank_0: Callable[[], Ledger]) -> None:
        self.plan, self._processes = plan, processes
        self.own: Ledger | None = None
        # Digests of this process are compared with one another alone, so that any key serves.
        self._key = os.urandom(32)

        def start() -> None:
            self.own = open_on_rank_0()

        processes.first(start)

    @property
    def _ledger(self) -> Ledger:
        return own_ledger(self)

    def digest(self, value: Any) -> str:
        """As `Ledger.digest` on rank 0; elsewhere a digest to be compared with others of this process."""
        if self.own is not None:
            return self.own.digest(value)
        return keyed_digest(value, self._key, "what a step depends on")

    @property
    def place(self) -> dict[str, Any]:
        """On rank 0, where the ledger stands."""
        return {} if self.own is None else self.own.place

    def rewind(self, place: Mapping[str, Any]) -> None:
        """As `Ledger.rewind`, on rank 0."""
        if self.own is not None:
            self.own.rewind(place)

    def open(self, name: str, parameters: str) -> Draw:
        return self._processes.first(lambda: self._ledger.open(name, parameters))

    def sample(self, draw: Draw, num_records: int) -> Tensor:
        return self._processes.first(lambda: self._ledger.sample(draw, num_records))

    def release(self, draw: Draw, sums: Mapping[str, Bounded]) -> dict[str, dict[str, Tensor]]:
        # A private value of another process must not reach this one unnoised: only the result is broadcast.
        like: dict[str, dict[str, Tensor]] = {n: dict(bounded.value) for n, bounded in sums.items()}
        return self._processes.first_tensors(lambda: self._ledger.release(draw, sums), like)

    def release_unproven(
        self, draw: Draw, name: str, value: Mapping[str, Private], std: float, **options: Any
    ) -> dict[str, Tensor]:
        return self._processes.first(lambda: self._ledger.release_unproven(draw, name, value, std, **options))

    def disclose(self, value: Any, hole: str) -> Any:
        return self._processes.first(lambda: self._ledger.disclose(value, hole))

    @property
    def can_go_on(self) -> bool:
        return self._processes.first(lambda: self._ledger.can_go_on)

    def synced_place(self) -> dict[str, Any]:
        """As `Ledger.synced_place`; the place itself, with the keys of earlier noise, stays on rank 0."""
        self._processes.first(lambda: self._ledger.journal.sync())
        return self.place

    def spent(self, delta: float | None = None) -> EpsilonResult:
        return self._processes.first(lambda: self._ledger.spent(delta))

    def progress(self, delta: float | None = None) -> float:
        return self._processes.first(lambda: self._ledger.progress(delta))


def own_ledger(ledger: Ledger | SharedLedger) -> Ledger:
    """The ledger itself.

    Raises:
        RuntimeError: this process does not keep it.
    """
    if isinstance(ledger, Ledger):
        return ledger
    if ledger.own is None:
        raise RuntimeError(
            "only the first process keeps the ledger: ask there (training.processes.is_first), or call "
            "finish() on every process, which gives the statement to all"
        )
    return ledger.own


def others_at_start(folder: RunFolder, settings: TrainingSettings) -> list[tuple[DpEvent, ...]]:
    """What the other runs in its journal may have cost when a run was planned, the latest state first.

    The run was planned before its first line, and other runs may have begun and ended between the two. So its
    noise was fitted to one of the states before that line, of which the journal does not say which.

    Args:
        folder: of a run that goes on; its key says which one it is.
        settings: of the run.

    Raises:
        RuntimeError: the run has ended, and its key is deleted.
        JournalError: `ledger_file` is another file, which was opened only for reading.
    """
    run, file = _secrets(folder, settings, existing=True).identity, settings.ledger_file
    if file is None:
        return [()]
    entries = read_journal(file)
    # The path comes from the folder, which may come from elsewhere: only a journal of this key is written to.
    if not any(isinstance(entry, RunEntry) and entry.run == run for entry in entries):
        raise JournalError(
            f"private/ledger_file names {file!r}, which holds no run of this folder's key; it was not "
            "touched. Write the path of the journal that the run was given into private/ledger_file"
        )
    before = takewhile(lambda entry: entry.run != run, entries)
    # Every state that the other runs had before this one was booked; the plan was fitted to one of them.
    states = [tuple(costs.values()) for _, costs in costs_over_time(before, run, settings.relation)]
    return states[::-1]


def _secrets(folder: RunFolder | None, settings: TrainingSettings, existing: bool) -> Secrets:
    seed = settings.seed if settings.reproducible else None
    return Secrets(None if folder is None else folder.path, seed, existing=existing)


def _check_seed_is_new(journal: Journal, secrets: Secrets, settings: TrainingSettings) -> None:
    """The name of a run is that of its key, and a public seed gives every run the same one."""
    if any(entry.run == secrets.identity for entry in journal.entries()):
        raise LedgerError(
            f"seed={settings.seed} with reproducible=True names a run that ledger_file="
            f"{settings.ledger_file!r} holds already: its noise would be repeated and nothing charged. Give "
            "another seed or another journal, or go on with that run. Nothing was spent"
        )
