"""The ledger of a training: opened in its folder, and shared where several processes train.

One process uses `equipoise.privacy.Ledger` itself. Of several, rank 0 alone has the key, the journal and the
ledger. Opening a draw and sampling its records happen there and are broadcast. A release adds noise to the
(already added) sums there; what was released is broadcast, since it is public from then on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from equipoise.privacy import (
    Bounded,
    Draw,
    EpsilonResult,
    Journal,
    JournalError,
    Ledger,
    PrivacyPlan,
    Private,
    Secrets,
)
from equipoise.privacy.digests import keyed_digest
from equipoise.privacy.ledger.journal import RunEntry
from equipoise.training.distributed import Processes
from equipoise.training.run_folder import RunFolder
from equipoise.training.setup import TrainingSettings, TrainingSetup

__all__ = ["SharedLedger", "open_ledger", "own_ledger"]


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
        resume: the run was begun before: its journal is there, and nothing is made in its place.
        ledger_class: `Ledger`, or a kind of it that an audit looks through.
    """
    processes, settings = setup.processes, setup.settings

    def on_rank_0() -> Ledger:
        secrets = Secrets(
            None if folder is None else folder.path,
            reproducible_seed=settings.seed if settings.reproducible else None,
        )
        file = settings.ledger_file or (None if folder is None else folder.journal)
        if resume and settings.ledger_file:
            _check_own(settings.ledger_file, secrets)
        journal = Journal(file, existing=resume)
        try:
            return ledger_class(
                setup.plan,
                setup.budget,
                journal,
                secrets,
                data_fingerprint=setup.rows.source.fingerprint(),
                kernels=setup.kernels(),
                hardened=settings.hardened,
                **(place or {}),
            )
        except BaseException:
            journal.close()
            raise

    if processes.count == 1:
        return on_rank_0()
    return SharedLedger(setup.plan, processes, on_rank_0)


class SharedLedger:
    """Rank 0's ledger, for the training on every process.

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
        """As `Ledger.open`, the same on every process."""
        return self._processes.first(lambda: self._ledger.open(name, parameters))

    def sample(self, draw: Draw, num_records: int) -> Tensor:
        """As `Ledger.sample`, the same on every process."""
        return self._processes.first(lambda: self._ledger.sample(draw, num_records))

    def release(self, draw: Draw, sums: Mapping[str, Bounded]) -> dict[str, dict[str, Tensor]]:
        """As `Ledger.release`, on every process."""
        # A private value of another process must not reach this one unnoised: only the result is broadcast.
        like: dict[str, dict[str, Tensor]] = {n: dict(bounded.value) for n, bounded in sums.items()}
        return self._processes.first_tensors(lambda: self._ledger.release(draw, sums), like)

    def release_unproven(
        self, draw: Draw, name: str, value: Mapping[str, Private], std: float, **options: Any
    ) -> dict[str, Tensor]:
        """As `Ledger.release_unproven`, on every process."""
        return self._processes.first(lambda: self._ledger.release_unproven(draw, name, value, std, **options))

    def disclose(self, value: Any, hole: str) -> Any:
        """As `Ledger.disclose`, on every process."""
        return self._processes.first(lambda: self._ledger.disclose(value, hole))

    @property
    def can_go_on(self) -> bool:
        """As `Ledger.can_go_on`, on every process."""
        return self._processes.first(lambda: self._ledger.can_go_on)

    def synced_place(self) -> dict[str, Any]:
        """As `Ledger.synced_place`, on every process."""
        return self._processes.first(lambda: self._ledger.synced_place())

    def spent(self, delta: float | None = None) -> EpsilonResult:
        """As `Ledger.spent`, on every process."""
        return self._processes.first(lambda: self._ledger.spent(delta))

    def progress(self, delta: float | None = None) -> float:
        """As `Ledger.progress`, on every process."""
        return self._processes.first(lambda: self._ledger.progress(delta))


def own_ledger(ledger: Ledger | SharedLedger) -> Ledger:
    """The ledger itself.

    Raises:
        RuntimeError: this process does not keep it.
    """
    if isinstance(ledger, Ledger):
        return ledger
    if ledger.own is None:
        raise RuntimeError("only the first process keeps the ledger")
    return ledger.own


def name_in_journal(folder: RunFolder, settings: TrainingSettings) -> str | None:
    """The name of the folder's run in a journal that it shares with others; None where it has its own."""
    if settings.ledger_file is None:
        return None
    seed = settings.seed if settings.reproducible else None
    return Secrets(folder.path, reproducible_seed=seed).identity


def _check_own(place: str, secrets: Secrets) -> None:
    """A run folder names a journal elsewhere on the disk: it must be one that this run was booked in.

    Raises:
        JournalError: it is another file, which was opened for reading alone.
    """
    journal = Journal(place, read_only=True)
    try:
        begun = {entry.run for entry in journal.entries() if isinstance(entry, RunEntry)}
    finally:
        journal.close()
    if secrets.identity not in begun:
        raise JournalError(
            f"private/ledger_file names {place!r}, which holds no run of this folder's key; it was not "
            "touched. Write the path of the journal that the run was given into private/ledger_file"
        )
