"""One ledger for several processes.

Rank 0 alone has the key, the journal and the ledger. Opening a draw and sampling its records happen there and
are broadcast. It books a release and hands out the key of that release's noise; every process adds a part of
the noise to the (already added) sums, and the parts are joined. Other noise than normal numbers is added on
rank 0, and what was released is broadcast.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise._dtensor import local_part
from equipoise.distributed.processes import Processes
from equipoise.privacy import Bounded, Draw, EpsilonResult, Ledger, LedgerError, PrivacyPlan
from equipoise.privacy.digests import KeyedDigest, keyed_digest
from equipoise.privacy.ledger.ledger import Check, run_checks
from equipoise.privacy.mechanisms.gaussian import Gaussian
from equipoise.privacy.noise.streams import NOISE, ReleaseStreams, released_type
from equipoise.privacy.private import exact


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
        #: As `digest`, without a wait for a device.
        self.unread_digest = KeyedDigest(self._key, "what a step depends on")
        if self.own is not None:
            self.unread_digest = self.own.unread_digest

    def digest(self, value: Any) -> str:
        """As `Ledger.digest` on rank 0; elsewhere a digest of what this process has."""
        return self.unread_digest(value).value()

    @property
    def place(self) -> dict[str, Any]:
        """On rank 0, where the ledger stands."""
        return {} if self.own is None else self.own.place

    def rewind(self, place: Mapping[str, Any]) -> None:
        """As `Ledger.rewind`, on rank 0."""
        if self.own is not None:
            self.own.rewind(place)

    def open_and_sample(self, name: str, parameters: str, num_records: int) -> tuple[Draw, Tensor]:
        """As `Ledger.open_and_sample`, in one exchange."""
        # Of sharded parameters each process knows the digest of its own part.
        parts = self._processes.all_of(parameters) if self._is_sharded else [parameters]

        def on_rank_0() -> tuple[Draw, Tensor]:
            ledger = own_ledger(self)
            draw = ledger.open(name, parameters if len(parts) == 1 else ledger.digest({"parts": parts}))
            return draw, ledger.sample(draw, num_records)

        return self._processes.first(on_rank_0)

    def release(
        self, draw: Draw, sums: Mapping[str, Bounded], checks: Sequence[Check] = ()
    ) -> dict[str, dict[str, Tensor]]:
        """As `Ledger.release`; the checks run first, since what a process finds is known to no other."""
        run_checks(checks)
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
        return self._processes.first_tensors(lambda: own_ledger(self).release(draw, sums), like)

    def _release_shared(self, draw: Draw, sums: Mapping[str, Bounded]) -> dict[str, dict[str, Tensor]] | None:
        """As `Ledger.release`, where every process noises a part of the sums that all of them have.

        None, with nothing booked, where the ledger makes its noise in a way of its own.
        """

        def on_rank_0() -> bytes | None:
            ledger = own_ledger(self)
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
            return own_ledger(self).book(draw, sums, parts[1:]).streams.key(NOISE)

        key = self._processes.first(on_rank_0)
        streams = ReleaseStreams(lambda purpose: _only_noise(key, purpose))
        out: dict[str, dict[str, Tensor]] = {}
        for mechanism, members in self.plan.groups(sums, draw.ordinal):
            out |= mechanism.noised({name: sums[name] for name in members}, streams)
        return {name: out[name] for name in sums}

    def call(self, operation: str, *arguments: Any, **options: Any) -> Any:
        """As `Ledger.call`, on rank 0; every process gets what it gives."""
        return self._processes.first(lambda: own_ledger(self).call(operation, *arguments, **options))

    @property
    def can_go_on(self) -> bool:
        return self._processes.first_bytes(lambda: b"" if own_ledger(self).can_go_on else None) is not None

    def synced_place(self) -> dict[str, Any]:
        """As `Ledger.synced_place`; the place itself, with the keys of earlier noise, stays on rank 0."""
        self._processes.first(lambda: own_ledger(self).journal.sync())
        return self.place

    def spent(self, delta: float | None = None) -> EpsilonResult:
        return self._processes.first(lambda: own_ledger(self).spent(delta))

    def progress(self, delta: float | None = None) -> float:
        return self._processes.first(lambda: own_ledger(self).progress(delta))


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
