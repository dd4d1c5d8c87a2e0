"""The step's side of the private data: draws cut into micro-batches, and the context that methods see.

A draw holds record numbers. A query runs over it micro-batch by micro-batch: take the records, make their
gradient rows at every asked parameter point with the same dropout masks, guard them (`PrivateRows`), call
the method's function, unite the bounded sums. With several processes each runs its slice and the sums are
added.

A record that cannot be read, or that the model or the loss fails on, has weight zero: a micro-batch that
fails is halved until the record is alone, and left out. Nothing of it shows but a count in the diagnostics.
Where all of them fail the step is noise alone, and booked: a step that stopped for a failing record would
tell who chose the parameters (a server, say) that it was drawn. Whether model and loss work is checked at
attach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.gradients import ForwardWritesError
from equipoise.methods.base import Parameters, Plan, Query
from equipoise.privacy import Bounded, Draw, Private, PrivateRows, sums_of
from equipoise.privacy.private import join
from equipoise.training.data_source import map_batch
from equipoise.training.distributed import Processes
from equipoise.training.randomness import generator, secret_coins
from equipoise.training.row_source import RowSource

__all__ = ["StepContext", "StepDiagnostics", "TrainingDraw"]


class TrainingDraw:
    """One draw of records, as methods see it.

    Args:
        token: the ledger's draw; the bounded sums carry it.
        ids: record numbers of this process' slice, LongTensor [b].
        maker: makes rows.
        step: for the dropout masks.
        processes: whose slices are added.
        tally: takes the draw's private numbers (records, losses, records left out) for the diagnostics.
    """

    def __init__(
        self,
        token: Draw,
        ids: Tensor,
        maker: RowSource,
        step: int,
        processes: Processes,
        tally: StepDiagnostics,
    ) -> None:
        self.token, self._maker = token, maker
        self._step, self._processes, self._tally = step, processes, tally
        # Micro-batches: where each lies in the draw, which fixes its dropout masks, and its record numbers.
        cut = torch.split(ids, maker.micro_batch_size) if len(ids) else ()
        self._parts: list[tuple[tuple[int, ...], Tensor]] = [((n,), part) for n, part in enumerate(cut)]
        tally.note_draw(token.name, len(ids))

    @property
    def name(self) -> str:
        """The draw's name in the plan."""
        return self.token.name

    def secret_number(self, purpose: str) -> int:
        """A secret number of this draw, to deal every record a lot of its own; never to be released."""
        return self.token.number("method", purpose)

    def query(self, fn: Query, at: Sequence[Parameters] | None = None) -> dict[str, Bounded]:
        """`fn(rows, ..., ids)` once a micro-batch, united over the draw and over processes."""
        sums = sums_of(fn(*rows, ids) for rows, ids in self._micro_batches(at))
        if self._processes.count > 1:
            self._processes.all_well()
            # One order on every process: a collective pairs by position.
            sums = {name: sums[name].all_reduce() for name in sorted(sums)}
        for name, bounded in sums.items():
            self._tally.note_sum(f"{self.name}.{name}", bounded)
        return sums

    def rows(self, fn: Callable[..., Tensor], at: Sequence[Parameters] | None = None) -> Tensor:
        """`fn` answers one private number a record, [b] a micro-batch; the whole draw's come back, [B]."""
        if self._processes.count > 1:
            raise NotImplementedError(
                "statistics of the rows of a whole draw are not exchanged between processes yet: run this "
                "method in one process"
            )
        return join([fn(*rows, ids) for rows, ids in self._micro_batches(at)])

    def _micro_batches(self, at: Sequence[Parameters] | None) -> Iterator[tuple[list[PrivateRows], Tensor]]:
        points: Sequence[Parameters | None] = [None] if at is None else list(at)
        waiting, whole = self._parts[::-1], []
        while waiting:
            place, ids = waiting.pop()
            rows = self._rows_of(place, ids, points)
            if rows is not None:
                whole.append((place, ids))
                self._tally.note_losses(rows[0].losses)
                yield [PrivateRows(r, self.token) for r in rows], Private(ids, self.token)
            elif len(ids) > 1:
                half = len(ids) // 2
                waiting += [((*place, 1), ids[half:]), ((*place, 0), ids[:half])]
        if self._parts and not whole:
            self._maker.note_failed_draw(self.name)
        # A record left out is left out of every later pass, and the rest keeps its places: the same masks.
        self._parts = whole
        if not whole:
            nobody = torch.zeros(0, dtype=torch.long)
            yield (
                [PrivateRows(r, self.token) for r in self._maker.no_rows(points)],
                Private(nobody, self.token),
            )

    def _rows_of(
        self, place: tuple[int, ...], ids: Tensor, points: Sequence[Parameters | None]
    ) -> list[Any] | None:
        """Rows of these records at every point; None if they fail."""
        maker, coins = self._maker, secret_coins(self.token, self._processes.rank, *place)
        was_read = False
        try:
            taken = maker.source.take(ids)
            was_read = True
            return maker.rows(maker.prepare(taken, coins), points, coins)
        except ForwardWritesError:
            raise  # no fault of a record: the model is spoilt
        except Exception as error:
            if _out_of_memory(error):
                raise
            kind = type(error).__name__
        # Outside of the handler, so that an error raised here does not carry the record's with it.
        if not was_read:
            maker.check_source()
        if len(ids) == 1:
            self._tally.note_failure(self.name, kind)
        return None


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


class StepDiagnostics:
    """The private numbers of one step: they go into the diagnostics and nowhere else."""

    def __init__(self) -> None:
        self.row: dict[str, Any] = {}
        self._losses: list[Tensor] = []
        self._sums: dict[str, Tensor] = {}

    def note_draw(self, name: str, records: int) -> None:
        """A draw of `records` records (this process' slice)."""
        self.row[f"{name}.records"] = self.row.get(f"{name}.records", 0) + records

    def note_losses(self, losses: Tensor | None) -> None:
        """Per-record losses of a micro-batch."""
        if losses is not None:
            self._losses.append(losses.detach())

    def note_failure(self, name: str, kind: str) -> None:
        """A record of draw `name` was left out because it fails with an error of this kind."""
        self.row[f"{name}.records_failed"] = self.row.get(f"{name}.records_failed", 0) + 1
        kinds = self.row.setdefault(f"{name}.failures", {})
        kinds[kind] = kinds.get(kind, 0) + 1

    def note_sum(self, name: str, bounded: Bounded) -> None:
        """How many records of a sum had no finite gradient, and what share of the others was cut."""
        if bounded.bad_records is not None:
            self._sums[f"{name}.records_not_finite"] = bounded.bad_records
        if bounded.clip_fraction is not None:
            self._sums[f"{name}.clip_fraction"] = bounded.clip_fraction

    def finish(self) -> dict[str, Any]:
        """The row of the diagnostics; `covered` says that no guarantee covers it."""
        row: dict[str, Any] = {"covered": False, **self.row}
        if self._losses:
            losses = torch.cat(self._losses).double()
            row["training_loss"] = losses[torch.isfinite(losses)].mean()
        return row | self._sums


class StepContext:
    """What a method may use in one step (see `equipoise.methods.base.Context`).

    Args:
        params: the model's live trainable parameters.
        step: number of the step.
        sampling: the training's sampling.
        plan: of the method.
        ledger: takes releases.
        take_draw: draw name -> (token, record numbers of this process).
        maker: makes rows.
        processes: the process group.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        step: int,
        sampling: Any,
        plan: Plan,
        ledger: Any,
        take_draw: Callable[[str], tuple[Draw, Tensor]],
        maker: RowSource,
        processes: Processes,
    ) -> None:
        self.params: Parameters = MappingProxyType({name: p.detach() for name, p in params.items()})
        self.step, self.sampling, self.plan, self.ledger = step, sampling, plan, ledger
        self.relation = plan.releases.relation
        self._take_draw, self._maker, self._processes = take_draw, maker, processes
        self.tally = StepDiagnostics()

    def draw(self, name: str = "batch") -> TrainingDraw:
        """Take the next sample of records for the planned draw of this name."""
        token, ids = self._take_draw(name)
        return TrainingDraw(token, ids, self._maker, self.step, self._processes, self.tally)

    def public_gradients(self, batch: Any, at: Parameters | None = None, step: int | None = None) -> Any:
        """The gradient rows of public records, unguarded."""
        maker = self._maker
        moved = map_batch(lambda leaf: leaf.to(maker.device), batch)
        return maker.rows(moved, [at], maker.public(self.step if step is None else step, "public"))[0]

    def public_rng(self, step: int) -> torch.Generator:
        """Public randomness of a step."""
        return generator(self._maker.seed, "method", step)
