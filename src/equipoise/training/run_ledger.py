"""The ledger of a training: opened in its folder, and shared where several processes train.

One process uses `equipoise.privacy.Ledger` itself. Of several, rank 0 alone has the key, the journal and the
ledger. Opening a draw and sampling its records happen there and are broadcast. It books a release and hands
out the key of that release's noise; every process adds a part of the noise to the (already added) sums, and
the parts are joined. Other noise than normal numbers is added on rank 0, and what was released is broadcast.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import torch
from dp_accounting import DpEvent
from torch import Tensor

from equipoise._dtensor import local_part
from equipoise._host import Unread
from equipoise.privacy import (
    Bounded,
    Draw,
    EpsilonResult,
    Journal,
    JournalError,
    Ledger,
    LedgerError,
    PrivacyPlan,
    Secrets,
    digest,
)
from equipoise.privacy.digests import KeyedDigest, keyed_digest
from equipoise.privacy.ledger.journal import RunEntry
from equipoise.privacy.ledger.journal_records import JournalRecords, events_of
from equipoise.privacy.mechanisms.gaussian import Gaussian
from equipoise.privacy.noise.streams import NOISE, ReleaseStreams, released_type
from equipoise.privacy.private import exact
from equipoise.training.arguments import Run
from equipoise.training.distributed import Processes
from equipoise.training.folder.run_folder import RunFolder
from equipoise.training.setup.training_setup import TrainingSetup

__all__ = [
    "SharedLedger",
    "booked_plan",
    "open_ledger",
    "own_ledger",
    "secrets_of",
]


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
        records, keys = setup.rows.fingerprint(), None
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
                if run.reproducible and not resume:
                    _check_seed_is_new(journal, secrets, run)
                kind = ledger_class or setup.method.ledger_class
                return kind(setup.plan, setup.budget, journal, secrets, **options, **(place or {}))
        except BaseException:
            journal.close()
            raise

    ledger: Ledger | SharedLedger
    if processes.count == 1 and not setup.is_sharded:
        ledger = on_rank_0()
    else:
        ledger = SharedLedger(setup.plan, processes, on_rank_0, setup.is_sharded)
    owners = setup.rows.owners
    if owners is not None and processes.count > 1:
        owners.choose(processes.first(lambda: own_ledger(ledger).secrets.stream_key(0, _CHOICE)))
    return ledger


_CHOICE = "records of a user"  # what the key of `Owners.choose` serves


class SharedLedger:
    """Rank 0's ledger, for the training on every process: its methods give every process the same result.

    Args:
        plan: what may be released.
        processes: who shares the work.
        open_on_rank_0: gives the ledger there.
        is_sharded: every process holds a part of the parameters and of the sums.

    Attributes:
        own: rank 0's ledger; None on the others.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        processes: Processes,
        open_on_rank_0: Callable[[], Ledger],
        is_sharded: bool = False,
    ) -> None:
        self.plan, self._processes, self._is_sharded = plan, processes, is_sharded
        self.own: Ledger | None = None

        def start() -> bytes:
            self.own = open_on_rank_0()
            return self.own.secrets.stream_key(0, "digests of other processes")

        # Of digests that the first process takes for its own; no noise and no draw follows from it.
        self._key = processes.first(start)
        self._digest_of_step = KeyedDigest(self._key, "what a step depends on")

    @property
    def _ledger(self) -> Ledger:
        return own_ledger(self)

    def digest(self, value: Any) -> str:
        """As `Ledger.digest` on rank 0; elsewhere a digest of what this process has."""
        return self.unread_digest(value).value()

    def unread_digest(self, value: Any) -> Unread[str]:
        """As `digest`, without a wait for a device."""
        if self.own is not None:
            return self.own.unread_digest(value)
        return self._digest_of_step(value)

    def require(self, value: Unread[Any], check: Callable[[Any], None]) -> None:
        """As `Ledger.require`, at once: what each process finds is known to no other."""
        check(value.value())

    def check_required(self) -> None:
        """As `Ledger.check_required`: nothing is left."""

    @property
    def place(self) -> dict[str, Any]:
        """On rank 0, where the ledger stands."""
        return {} if self.own is None else self.own.place

    def rewind(self, place: Mapping[str, Any]) -> None:
        """As `Ledger.rewind`, on rank 0."""
        if self.own is not None:
            self.own.rewind(place)

    def open_and_sample(self, name: str, parameters: str, num_records: int) -> tuple[Draw, Tensor]:
        """A draw and its records, in one exchange."""
        # Of sharded parameters each process knows the digest of its own part.
        parts = self._processes.all_of(parameters) if self._is_sharded else [parameters]

        def on_rank_0() -> tuple[Draw, Tensor]:
            ledger = self._ledger
            draw = ledger.open(name, parameters if len(parts) == 1 else ledger.digest({"parts": parts}))
            return draw, ledger.sample(draw, num_records)

        return self._processes.first(on_rank_0)

    def release(self, draw: Draw, sums: Mapping[str, Bounded]) -> dict[str, dict[str, Tensor]]:
        if self._is_sharded:
            return self._release_parts(draw, sums)
        if _are_normal(self.plan, draw, sums):
            found = self._release_shared(draw, sums)
            if found is not None:
                return found
        # The sums are the same everywhere; only the first process has the key, and its noise is broadcast.
        like = {
            name: {
                key: torch.empty_like(exact(value), dtype=released_type(value))
                for key, value in bounded.value.items()
            }
            for name, bounded in sums.items()
        }
        return self._processes.first_tensors(lambda: self._ledger.release(draw, sums), like)

    def _release_shared(self, draw: Draw, sums: Mapping[str, Bounded]) -> dict[str, dict[str, Tensor]] | None:
        """As `Ledger.release`, where every process noises a part of the sums that all of them have.

        None, with nothing booked, where the ledger makes its noise in a way of its own.
        """

        def on_rank_0() -> bytes | None:
            ledger = self._ledger
            if type(ledger)._noised is not Ledger._noised or type(ledger)._streams is not Ledger._streams:
                return None
            return ledger.book(draw, sums).streams.key(NOISE)

        key = self._processes.first_bytes(on_rank_0, 32)
        if key is None:
            return None
        out: dict[str, dict[str, Tensor]] = {}
        streams, processes = ReleaseStreams(lambda purpose: _only_noise(key, purpose)), self._processes
        for mechanism, members in self.plan.groups(sums, draw.ordinal):
            for name in members:
                std = mechanism.standard_deviation(name, sums[name].add_remove)
                # In the order in which one process adds them up: see `normals`.
                raws = {key: exact(sums[name].value[key]) for key in sorted(sums[name].value)}
                kind = released_type(next(iter(sums[name].value.values())))
                sizes = [raw.numel() for raw in raws.values()]
                count, device = sum(sizes), next(iter(raws.values())).device
                start, stop = processes.part_of(count)
                mine = streams.normal().draw_ranges(count, std, [(start, stop)], kind, device)
                ends = itertools.accumulate(sizes)
                for raw, size, end in zip(raws.values(), sizes, ends, strict=True):
                    low, high = max(start, end - size), min(stop, end)
                    if low < high:
                        begin = end - size
                        mine[low - start : high - start] += raw.reshape(-1)[low - begin : high - begin]
                noised = processes.joined_parts(mine, count)
                pieces = torch.split(noised, sizes)
                made = {key: piece.view(raws[key].shape) for key, piece in zip(raws, pieces, strict=True)}
                out[name] = {key: made[key] for key in sums[name].value}
        return {name: out[name] for name in sums}

    def _release_parts(self, draw: Draw, sums: Mapping[str, Bounded]) -> dict[str, dict[str, Tensor]]:
        """Every process noises its part of the sums; the noise joined is that of one process.

        Rank 0 books the release by everybody's digests, and hands out the key of its noise only.
        """
        values = {name: dict(bounded.value) for name, bounded in sums.items()}
        is_finite = all(
            bool(torch.isfinite(local_part(exact(value))).all())
            for tensors in values.values()
            for value in tensors.values()
        )
        mine = keyed_digest(values, self._key, "what a draw answers") if is_finite else ""
        parts = self._processes.all_of(mine)

        def on_rank_0() -> bytes:
            if not all(parts):
                raise LedgerError(
                    f"the sums {sorted(sums)} are not finite in a process though bad records were left out: "
                    "a bug in a factor or a kernel, or an overflow. Nothing was released"
                )
            return self._ledger.book(draw, sums, parts[1:]).streams.key(NOISE)

        key = self._processes.first(on_rank_0)
        streams = ReleaseStreams(lambda purpose: _only_noise(key, purpose))
        out: dict[str, dict[str, Tensor]] = {}
        for mechanism, members in self.plan.groups(sums, draw.ordinal):
            out |= mechanism.noised({name: sums[name] for name in members}, streams)
        return {name: out[name] for name in sums}

    def call(self, operation: str, *arguments: Any, **options: Any) -> Any:
        """As `Ledger.call`, on rank 0; every process gets what it gives."""
        return self._processes.first(lambda: self._ledger.call(operation, *arguments, **options))

    @property
    def can_go_on(self) -> bool:
        return self._processes.first_flag(lambda: self._ledger.can_go_on)

    def synced_place(self) -> dict[str, Any]:
        """As `Ledger.synced_place`; the place itself, with the keys of earlier noise, stays on rank 0."""
        self._processes.first(lambda: self._ledger.journal.sync())
        return self.place

    def spent(self, delta: float | None = None) -> EpsilonResult:
        return self._processes.first(lambda: self._ledger.spent(delta))

    def progress(self, delta: float | None = None) -> float:
        return self._processes.first(lambda: self._ledger.progress(delta))


def _are_normal(plan: PrivacyPlan, draw: Draw, sums: Mapping[str, Bounded]) -> bool:
    """Whether the noise of these sums is one stream of normal numbers that may be drawn in parts."""
    mechanisms = {type(plan[name].at(draw.ordinal)) for name in sums}
    values = [value for bounded in sums.values() for value in bounded.value.values()]
    types = {(value.device, released_type(value)) for value in values}
    return mechanisms == {Gaussian} and len(types) == 1


def _only_noise(key: bytes, purpose: str) -> bytes:
    """The key of the one stream that a process was handed."""
    if purpose != NOISE:
        raise LedgerError(
            f"noise of the stream {purpose!r} is not made by processes that hold parts of the sums: train a "
            "model that is not sharded, or take a method with independent Gaussian noise"
        )
    return key


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
    seed = run.seed if run.reproducible else None
    return Secrets(None if folder is None else folder.path, seed, existing=existing)


def _check_seed_is_new(journal: Journal, secrets: Secrets, run: Run) -> None:
    """The name of a run is that of its key, and a public seed gives every run the same one."""
    if secrets.identity in JournalRecords.of(journal).runs:
        raise LedgerError(
            f"seed={run.seed} with reproducible=True names a run that journal={run.journal!r} holds "
            "already: its noise would be repeated and nothing charged. Give another seed or another journal, "
            "or go on with that run. Nothing was spent"
        )
