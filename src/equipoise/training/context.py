"""What a method may use in a step: draws of private records, the ledger, public gradients.

A draw holds record numbers. A query runs over it in micro-batches: take the records, make their gradient
rows at every parameter point with the same dropout masks, guard them (`PrivateRows`), call the method's
function, and unite the bounded sums. With several processes each one runs its slice, and the sums are added.

A record that cannot be read, or that the model or the loss fails on, has weight zero: a micro-batch that
fails is halved until the record is found, and taken again without it. Nothing of it shows but a count in the
diagnostics.
Where all of them fail the step is noise alone, and booked: a step that stopped for a failing record would
tell whoever chose the parameters (a server, say) that it was drawn. Whether model and loss work is checked
when the training is prepared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.gradients import ForwardWritesError
from equipoise.gradients.capture.random_numbers import random_numbers_from
from equipoise.gradients.capture.recorder import PlanMismatch
from equipoise.gradients.engine_inputs import take_records
from equipoise.methods.base import Parameters, Plan, Query
from equipoise.privacy import Bounded, Draw, Ledger, Private, PrivateRows, secret_generator, sums_of
from equipoise.privacy.noise.uniform import uniform_order
from equipoise.privacy.private import join, unwrap
from equipoise.training.distributed import Processes
from equipoise.training.randomness import generator, secret_randomness
from equipoise.training.record_rows import RowSource, out_of_memory
from equipoise.training.run_ledger import SharedLedger

__all__ = ["ReleaseNoise", "StepContext", "StepDiagnostics", "StepLedger", "TrainingDraw"]


@dataclass(frozen=True)
class _MicroBatch:
    """Records of a draw that are read and joined together, and share a forward.

    Attributes:
        number: which of the draw's micro-batches; it fixes the random numbers.
        ids: record numbers, LongTensor [b].
        places: of the records among the rows of the forward, ascending, LongTensor [b].
    """

    number: int
    ids: Tensor
    places: Tensor

    def of(self, which: Tensor) -> _MicroBatch:
        """Some of the records, at their places."""
        return _MicroBatch(self.number, self.ids[which], self.places[which])


def _in_order(ids: Tensor, size: int) -> list[_MicroBatch]:
    """Micro-batches of `size` records in their order; a record that enters moves those behind it."""
    parts = torch.split(ids, size) if len(ids) else ()
    return [_MicroBatch(n, part, torch.arange(len(part))) for n, part in enumerate(parts)]


def _dealt(ids: Tensor, size: int, places: int, token: Draw, processes: Processes) -> list[_MicroBatch]:
    """Micro-batches in which the records stand at random places: one that enters takes a free one.

    Which places n records get follows the same law whether another record is there or not, so the proof may
    leave every record where it is. Then random numbers may be shared by all records of a micro-batch.

    Args:
        ids: of all processes' records.
        size: of a micro-batch.
        places: at least as many as records, in all but the rarest draws; public.
        token: its secret randomness deals them.
        processes: each takes equally many micro-batches.
    """
    each = math.ceil(max(places, len(ids)) / (size * processes.count))  # micro-batches of a process
    generator = secret_generator(token, "places")
    given = uniform_order(each * size * processes.count, generator)[: len(ids)]
    taken, order = given.sort()
    found = []
    for n in range(each):
        here = taken // size == processes.rank * each + n
        if bool(here.any()):
            found.append(_MicroBatch(n, ids[order[here]], taken[here] % size))
    return found


class TrainingDraw:
    """One draw of records, as methods see it.

    Args:
        token: the ledger's draw; the bounded sums carry it.
        ids: record numbers of all processes, LongTensor [b].
        places: how many places the records are dealt to where `rows` asks for it.
        rows: makes gradient rows of records.
        processes: whose sums are added.
        diagnostics: takes the draw's private numbers (records, losses, records left out).
    """

    def __init__(
        self,
        token: Draw,
        ids: Tensor,
        places: int,
        rows: RowSource,
        processes: Processes,
        diagnostics: StepDiagnostics,
    ) -> None:
        self.token, self._rows, self._processes, self._diagnostics = token, rows, processes, diagnostics
        # What a pass over the draw reads. A record that failed is left out of every later pass, and the
        # others keep their places and with them their random numbers.
        size = rows.micro_batch_size
        self._micro_batches = (
            _dealt(ids, size, places, token, processes)
            if rows.dealt
            else _in_order(processes.share(ids), size)
        )
        diagnostics.note_draw(token.name, sum(len(part.ids) for part in self._micro_batches))

    @property
    def name(self) -> str:
        """The draw's name in the plan."""
        return self.token.name

    def secret_number(self, purpose: str) -> int:
        """A secret number of this draw, to give every record random numbers of its own; never released."""
        return self.token.number("method", purpose)

    def query(
        self, fn: Query, at: Sequence[Parameters] | None = None, along: Tensor | None = None
    ) -> dict[str, Bounded]:
        """`fn(rows, ..., ids)` per micro-batch, united over the draw and over processes.

        Args:
            fn: gives the bounded sums of one micro-batch.
            at: the parameter points.
            along: numbers of the draw's records, as `rows` gave them; `fn(rows, ..., ids, part)` gets those
                of the micro-batch's records.
        """
        if along is None:
            sums = sums_of(fn(*rows, ids) for rows, ids, _ in self._pass(at))
        else:
            sums = sums_of(fn(*rows, ids, along[place]) for rows, ids, place in self._pass(at))
        if self._processes.count > 1:
            self._processes.all_well()
            # One order on every process: a collective pairs by position.
            sums = {name: sums[name].all_reduce() for name in sorted(sums)}
        self._diagnostics.note_sums(self.token.name, sums)
        return sums

    def rows(self, fn: Callable[..., Any], at: Sequence[Parameters] | None = None) -> Any:
        """Private numbers of the whole draw's records, in the draw's order.

        Args:
            fn: `fn(rows, ..., ids)` gives one private number per record of a micro-batch, [b], or a dict of
                such tensors.
            at: the parameter points.

        Returns:
            The same, [B].
        """
        if self._processes.count > 1:
            raise NotImplementedError(
                "statistics of the rows of a whole draw are not exchanged between processes yet: run this "
                "method in one process"
            )
        found = [fn(*rows, ids) for rows, ids, _ in self._pass(at)]
        if isinstance(found[0], Mapping):
            return {name: join([part[name] for part in found]) for name in found[0]}
        return join(found)

    def _pass(self, at: Sequence[Parameters] | None) -> Iterator[tuple[list[PrivateRows], Private, Tensor]]:
        """Rows at every point, record numbers and places in the draw, per micro-batch.

        Records that fail are left out of the passes that follow, too.
        """
        points: Sequence[Parameters | None] = [None] if at is None else list(at)
        following, start = [], 0
        for part in self._micro_batches:
            left = []
            found = self._rows_of(part, points)
            while found:
                which, rows = found.pop(0)
                left.append(which)
                self._diagnostics.note_losses(rows[0].losses)
                ids = Private(part.ids[which], self.token)
                yield [PrivateRows(r, self.token) for r in rows], ids, start + which
            if left:
                whole = torch.cat(left)
                following.append(part if len(whole) == len(part.ids) else part.of(whole))
            start += len(part.ids)
        if self._micro_batches and not following:
            self._rows.log_failed_draw(self.name)
        self._micro_batches = following
        if not following:
            nobody = torch.zeros(0, dtype=torch.long)
            rows = [PrivateRows(r, self.token) for r in self._rows.of_nobody(points)]
            yield rows, Private(nobody, self.token), nobody

    def _rows_of(
        self, part: _MicroBatch, points: Sequence[Parameters | None]
    ) -> list[tuple[Tensor, list[Any]]]:
        """Rows at every point of the records of a micro-batch that do not fail, and which these are.

        Where one fails, the others are joined and run as if it had not been drawn: whoever joins them may
        deal random numbers in turn.
        """
        which, number = torch.arange(len(part.ids)), part.number
        while True:
            found = self._together(part, which, points, number)
            if found is not None or len(which) == 1:
                return found or []
            working = self._working(part, which, points)
            if len(working) == len(which):  # such as texts of several lengths that nobody pads
                alone = [self._together(part, one, points, number, int(one)) for one in which[:, None]]
                return [one for found in alone for one in found or []]
            if not len(working):
                return []
            which = working

    def _working(self, part: _MicroBatch, which: Tensor, points: Sequence[Parameters | None]) -> Tensor:
        """Those of some records, several of which failed together, that do not fail."""
        found = [which[:0]]
        for half in (which[: len(which) // 2], which[len(which) // 2 :]):
            if self._together(part, half, points, part.number) is not None:
                found.append(half)
            elif len(half) > 1:
                found.append(self._working(part, half, points))
        return torch.cat(found)

    def _together(
        self, part: _MicroBatch, which: Tensor, points: Sequence[Parameters | None], *purpose: object
    ) -> list[tuple[Tensor, list[Any]]] | None:
        """Rows of records that are read and joined together; None if one fails.

        Records of which one runs what was not planned share no forward. They keep their places, and with them
        their random numbers.

        Args:
            part: the micro-batch.
            which: of its records, LongTensor [c].
            points: where the rows are taken.
            purpose: with another one, reading and joining them draw other random numbers.
        """
        rows, rank, device = self._rows, self._processes.rank, self._rows.prepare.device
        joining = secret_randomness(self.token, rank, *purpose)
        randomness = secret_randomness(self.token, rank, part.number)
        found, was_read = [], False
        try:
            # Reading, joining and augmenting may draw random numbers, each in its own way; taking rows of
            # tensors draws none.
            quiet = rows.source.is_scanned
            with nullcontext() if quiet else random_numbers_from(joining("records"), device):
                waiting = [(which, rows.source.take(part.ids[which], secret_randomness(self.token)))]
            was_read = True
            quiet = rows.prepare.augmentation is None
            while waiting:
                here, records = waiting.pop()
                with nullcontext() if quiet else random_numbers_from(randomness("augmented"), device):
                    try:
                        found.append((here, rows.of_records(records, points, randomness, part.places[here])))
                    except PlanMismatch:
                        half = len(here) // 2
                        for cut in (slice(half, None), slice(half)):
                            waiting.append((here[cut], take_records(records, cut)))
            return found
        except ForwardWritesError:
            raise  # no fault of a record: the model is spoilt
        except Exception as error:
            if out_of_memory(error):
                raise
            kind = type(error).__name__
        # Outside of the handler, so that an error raised here does not carry the record's with it.
        if not was_read:
            rows.check_source()
        if len(which) == 1:
            self._diagnostics.note_failure(self.name, kind)
        return None


class StepDiagnostics:
    """The private numbers of one step: they go into the diagnostics and nowhere else.

    The draws of the step write them while a method queries; its answers hold none. `MetricsLog` reads the
    row when the step is over.
    """

    def __init__(self) -> None:
        self._row: dict[str, Any] = {}
        self._losses: list[Tensor] = []
        self._counts: dict[str, Private] = {}

    def note_draw(self, name: str, records: int) -> None:
        """A draw of `records` records (this process' slice)."""
        self._row[f"{name}.records"] = self._row.get(f"{name}.records", 0) + records

    def note_losses(self, losses: Tensor | None) -> None:
        """Per-record losses of a micro-batch."""
        if losses is not None:
            self._losses.append(losses.detach())

    def note_failure(self, name: str, kind: str) -> None:
        """A record of draw `name` was left out because it fails with an error of this kind."""
        self._row[f"{name}.records_failed"] = self._row.get(f"{name}.records_failed", 0) + 1
        kinds = self._row.setdefault(f"{name}.failures", {})
        kinds[kind] = kinds.get(kind, 0) + 1

    def note_sums(self, name: str, sums: Mapping[str, Bounded]) -> None:
        """The sums of draw `name`; their counts alone are kept."""
        for key, bounded in sums.items():
            if bounded.counts is not None:
                self._counts[f"{name}.{key}"] = bounded.counts

    def row(self) -> dict[str, Any]:
        """The row of the diagnostics; `covered` says that no guarantee covers it."""
        row: dict[str, Any] = {"covered": False, **self._row}
        if self._losses:
            losses = torch.cat(self._losses).double()
            row["training_loss"] = losses[torch.isfinite(losses)].mean()
        for name, counts in self._counts.items():
            records, bad, *cut = unwrap(counts).tolist()
            row[f"{name}.records_not_finite"] = bad
            if cut:  # of a clipped sum: the share of the others whose row was made shorter
                row[f"{name}.clip_fraction"] = cut[0] / max(1, records - bad)
        return row


@dataclass(frozen=True)
class ReleaseNoise:
    """The noise of a release; public.

    Attributes:
        std: standard deviation on the first sum.
        bound: of the first sum.
    """

    std: float
    bound: float


class StepLedger:
    """The ledger in one step: takes the draws that methods hold, and remembers the noise of the last release.

    Args:
        ledger: of the run.

    Attributes:
        last_noise: of the step's last release, which sets it; None before the first.
    """

    def __init__(self, ledger: Ledger | SharedLedger) -> None:
        self._ledger = ledger
        self.last_noise: ReleaseNoise | None = None

    def release(self, draw: TrainingDraw, sums: Mapping[str, Bounded]) -> dict[str, dict[str, Tensor]]:
        """As `Ledger.release`."""
        released = self._ledger.release(draw.token, sums)
        name, first = next(iter(sums.items()))
        std = self._ledger.plan[name].mechanism.standard_deviation(name, first.add_remove)
        self.last_noise = ReleaseNoise(std, first.add_remove)
        return released

    def release_unproven(
        self, draw: TrainingDraw, name: str, value: Mapping[str, Private], std: float, **options: Any
    ) -> dict[str, Tensor]:
        """As `Ledger.release_unproven`."""
        released = self._ledger.release_unproven(draw.token, name, value, std, **options)
        # Nothing bounds it: the metrics show the bound of the release before, if there was one.
        bound = 0.0 if self.last_noise is None else self.last_noise.bound
        self.last_noise = ReleaseNoise(std, bound)
        return released

    def disclose(self, value: Any, hole: str) -> Any:
        """As `Ledger.disclose`."""
        return self._ledger.disclose(value, hole)


class StepContext:
    """What a method may use in one step (see `equipoise.methods.base.Context`).

    Args:
        params: the model's live trainable parameters.
        step: number of the step.
        sampling: the training's sampling.
        plan: of the method.
        ledger: of the run.
        depends_on: digest of what the step's releases depend on in addition to plan and records.
        rows: makes gradient rows of records.
        processes: the process group.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        step: int,
        sampling: Any,
        plan: Plan,
        ledger: Ledger | SharedLedger,
        depends_on: str,
        rows: RowSource,
        processes: Processes,
    ) -> None:
        self.params: Parameters = MappingProxyType({name: p.detach() for name, p in params.items()})
        self.step, self.sampling, self.plan, self.relation = step, sampling, plan, plan.releases.relation
        self.ledger = StepLedger(ledger)
        self.diagnostics = StepDiagnostics()
        self._run_ledger, self._depends_on = ledger, depends_on
        self._rows, self._processes = rows, processes

    def draw(self, name: str = "batch") -> TrainingDraw:
        """Take the next sample of records for the planned draw of this name."""
        token = self._run_ledger.open(name, self._depends_on)
        ids = self._run_ledger.sample(token, len(self._rows.source))
        # Only records that share random numbers are dealt to places; the bound takes a search.
        places = self.plan.releases.sampling_of(name).largest_size if self._rows.dealt else 0
        return TrainingDraw(token, ids, places, self._rows, self._processes, self.diagnostics)

    def public_gradients(self, batch: Any, at: Parameters | None = None, step: int | None = None) -> Any:
        """The gradient rows of public records, unguarded."""
        return self._rows.of_public(batch, at, self.step if step is None else step)

    def public_rng(self, step: int) -> torch.Generator:
        """Public randomness of a step."""
        return generator(self._rows.seed, "method", step)
