"""The ledger as the steps of all processes see it: rank 0 keeps it, the others get its answers.

Rank 0 alone has the key, the journal and the ledger. Opening a draw and sampling its records happen there
and are broadcast; a release noises the (already added) sums there, and what was released is broadcast,
since it is public from then on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from equipoise.privacy import (
    Bounded,
    Budget,
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
from equipoise.statements import Statement, statement_of
from equipoise.training.context import TrainingDraw
from equipoise.training.distributed import Processes
from equipoise.training.run_folder import RunFolder
from equipoise.training.setup import Settings

__all__ = ["SharedLedger"]


class SharedLedger:
    """Takes releases for methods and answers for the privacy spent.

    Args:
        plan: what may be released.
        budget: the limit, or None.
        folder: of the run, or None to keep key and journal in memory.
        settings: for `reproducible`, `seed` and `ledger_file`.
        processes: who shares the work.
        position, history: the ledger's, in the checkpoint that is resumed.
        resume: the run was begun before: its journal is there, and nothing is made in its place.
        data_fingerprint, kernels: what the released numbers depend on besides the parameters.
        make_ledger: `Ledger`, or a kind of it that an audit looks through.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        budget: Budget | None,
        folder: RunFolder | None,
        settings: Settings,
        processes: Processes,
        *,
        position: int = 0,
        history: Mapping[str, Any] | None = None,
        resume: bool = False,
        data_fingerprint: str = "",
        kernels: str = "",
        make_ledger: Callable[..., Ledger] | None = None,
    ) -> None:
        # looked up when it is called: tests put ledgers of their own in its place
        make_ledger = make_ledger or Ledger
        self._plan, self._processes = plan, processes
        self._noise = (0.0, 0.0)
        self._ledger: Ledger | None = None
        self._used_up = False

        self._booked = -1
        self._began: tuple[int, Mapping[str, Any] | None] | None = None
        self._other_key = os.urandom(32)

        def start() -> None:
            secrets = Secrets(
                None if folder is None else folder.path,
                reproducible_seed=settings.seed if settings.reproducible else None,
            )
            place = settings.ledger_file or (None if folder is None else folder.journal)
            if resume and settings.ledger_file:
                _check_own(settings.ledger_file, secrets)
            journal = Journal(place, existing=resume)

            def open_at(position: int, history: Mapping[str, Any] | None) -> Ledger:
                return make_ledger(
                    plan,
                    budget,
                    journal,
                    secrets,
                    position=position,
                    history=history,
                    data_fingerprint=data_fingerprint,
                    kernels=kernels,
                    hardened=settings.hardened,
                )

            self._open_at = open_at
            try:
                self._take_over(open_at(position, history))
            except BaseException:
                journal.close()
                raise

        processes.first(start)

    def digest(self, value: Any) -> str:
        """Digest of tensors and plain values, to be compared with others of this process.

        On the first process, which has the run's key, with those of the run before a crash as well.
        """
        key = self._other_key if self._ledger is None else self._ledger.secrets.key
        return keyed_digest(value, key, "what a step depends on")

    def _take_over(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._booked = max(ledger.record.draws, default=-1)

    @property
    def ledger(self) -> Ledger:
        """Rank 0's ledger."""
        if self._ledger is None:
            raise RuntimeError("only the first process keeps the ledger; ask through the desk")
        return self._ledger

    @property
    def last_noise(self) -> tuple[float, float]:
        """Noise (standard deviation) and bound of the first sum of the last release; both public."""
        return self._noise

    def begin_step(self) -> None:
        """Remember where the ledger stands; a step that does not end is repeated from there."""
        if self._ledger is not None:
            self._settle()
            self._began = self.ledger.position, self.ledger.history

    def end_step(self) -> None:
        """The step is done: its releases will not be asked for again."""
        self._began = None

    def _settle(self) -> None:
        """Bring the ledger back to where a step began that did not end.

        It is opened anew at that position, as after a crash: what was booked is given again to the same
        question, with the same noise and without a charge.
        """
        if self._began is not None:
            self._take_over(self._open_at(*self._began))
            self._began = None

    def open(self, name: str, parameters: Callable[[], str], num_records: int) -> tuple[Draw, Tensor]:
        """Open a draw and sample its records, the same on every process."""

        def compute() -> tuple[Draw, Tensor]:
            draw = self.ledger.open(name, parameters)
            return draw, self.ledger.sample(draw, num_records)

        return self._processes.first(compute)

    def release(self, draw: TrainingDraw, sums: Mapping[str, Bounded]) -> dict[str, dict[str, Tensor]]:
        """As `Ledger.release`, on every process."""
        name, first = next(iter(sums.items()))
        std = self._plan[name].mechanism.standard_deviation(name, first.add_remove)
        self._noise = (std, first.add_remove)
        # A private value of another process must not reach this one unnoised: only the result is broadcast.
        like: dict[str, dict[str, Tensor]] = {n: dict(bounded.value) for n, bounded in sums.items()}
        return self._processes.first_tensors(lambda: self.ledger.release(draw.token, sums), like)

    def disclose(self, value: Any, hole: str) -> Any:
        """As `Ledger.disclose`, on every process."""
        return self._processes.first(lambda: self.ledger.disclose(value, hole))

    def release_unproven(
        self, draw: TrainingDraw, name: str, value: Mapping[str, Private], std: float, **options: Any
    ) -> dict[str, Tensor]:
        """As `Ledger.release_unproven`, on every process."""
        self._noise = (std, self._noise[1])
        return self._processes.first(
            lambda: self.ledger.release_unproven(draw.token, name, value, std, **options)
        )

    def use_up(self) -> None:
        """Note that the next step needs a release of which the plan has none left."""
        self._used_up = True

    def can_go_on(self) -> bool:
        """Whether the plan has releases left, or booked ones that are yet to be repeated, or none at all.

        A run that was resumed with other numbers (changed data, another machine) is charged again for the
        steps that it repeats, so its plan can be used up before its last step.
        """

        def ask() -> bool:
            self._settle()
            if self._used_up:
                return False
            left = self.ledger.releases_left
            return not left or any(left.values()) or self.ledger.position <= self._booked

        return self._processes.first(ask)

    def position(self) -> int:
        """For checkpoints: how many draws were opened.

        The journal is synced to its device first: after a loss of power a checkpoint must not stand beside a
        journal that lacks charges it has seen.
        """

        def settled() -> int:
            self._settle()
            self.ledger.journal.sync()
            return self.ledger.position

        return self._processes.first(settled)

    def history(self) -> dict[str, Any]:
        """For checkpoints, after `position`: keys of noise that later releases may use again; private."""
        return self._processes.first(lambda: self.ledger.history)

    def spent(self, delta: float) -> EpsilonResult:
        """Epsilon of all releases so far, by the exact accountant."""
        return self._processes.first(lambda: self.ledger.spent(delta))

    def progress(self, delta: float) -> float:
        """Epsilon so far to about 2%, cheap."""
        return self._processes.first(lambda: self.ledger.progress(delta))

    def statement(self, **facts: Any) -> Statement:
        """What may be claimed so far."""
        return self._processes.first(lambda: statement_of(self.ledger, **facts))

    def close(self) -> None:
        """Book the end of the run, and delete the key: nothing more can be released."""

        def end() -> None:
            self.ledger.close()
            self.ledger.secrets.delete()

        self._processes.first(end)

    def abandon(self, for_good: bool) -> None:
        """Let go of the journal because the training could not start.

        Args:
            for_good: book the end of the run as well, so that it reserves nothing in a shared journal.
        """
        if self._ledger is not None:
            if for_good:
                self._ledger.close()
            self._ledger.journal.close()


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
