"""Forwards of private records: who shares one, and the gradient rows that come out of it.

**Fixed shape.** Kernels round a row by the number of rows in a batch. So every forward has the same number of
rows: a micro-batch that is not full is filled up by fillers of weight zero, whose rows are cut off. A record
that enters a draw changes no other row.

The records of a draw stand in micro-batches (`MicroBatch`), each at a place among the rows of a forward, and
with the place goes its share of the random numbers. `RowSource` makes the rows of one forward. `Forwards`
reads the records of a micro-batch, and decides which of them share one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise._foreign_errors import cause_of
from equipoise._tree import map_leaves
from equipoise.distributed.backend import Backend, is_no_records_fault, out_of_memory
from equipoise.distributed.processes import Processes
from equipoise.gradients.capture.random_numbers import random_numbers_from
from equipoise.gradients.capture.recorder import PlanMismatch
from equipoise.gradients.compare import ROW_TILE
from equipoise.gradients.engine_inputs import (
    Loss,
    fillers,
    map_records,
    num_records,
    record_leaves,
    repeat_to,
    signature,
    take_records,
)
from equipoise.gradients.numerics import lost_are_nan
from equipoise.methods.base import Parameters
from equipoise.privacy import Draw, Secrets, secret_generator
from equipoise.privacy.noise.uniform import uniform_order
from equipoise.training.owners import Owners, by_user, flattened, users_of_one_record
from equipoise.training.randomness import Randomness, public_randomness, secret_randomness
from equipoise.training.record_source import RecordSource
from equipoise.training.setup.memory_use import fitting

_log = logging.getLogger("equipoise.training")


def forward_rows(size: int) -> int:
    """How many rows a forward of microbatches of this size has: whole tiles, but two for a record alone.

    Many a model squeezes what has one row.
    """
    return 2 if size == 1 else -(-size // ROW_TILE) * ROW_TILE


def moved(nest: Any, device: torch.device) -> Any:
    """The nest with all its tensors on the device."""
    # A copy to the host must be waited for, and `non_blocking` would not.
    to_gpu = device.type == "cuda"
    return map_leaves(
        lambda leaf: leaf.to(device, non_blocking=to_gpu) if isinstance(leaf, Tensor) else leaf, nest
    )


def filled(records: Any, others: Any, places: Tensor | None = None) -> Any:
    """The fillers, with these records in place of some.

    Args:
        records: at most as many.
        others: the fillers, of the same form, one per row of a forward.
        places: of the records, ascending, LongTensor [b]; the first ones when None.

    Example:
        >>> filled({"label": torch.tensor([7])}, {"label": torch.tensor([1, 0, 1, 0])})["label"]
        tensor([7, 0, 1, 0])
    """
    following = iter(record_leaves(others))

    def fill(leaf: Tensor) -> Tensor:
        rest = next(following)
        if places is None or int(places[-1]) == len(places) - 1:
            return torch.cat([leaf, rest[len(leaf) :]])
        return rest.index_copy(0, places.to(rest.device), leaf)

    return map_records(fill, records)


def repeat_views(
    batch: Any, views: int, augmentation: Callable[[Any, torch.Generator], Any], rng: torch.Generator
) -> Any:
    """K augmented views of every record: tensors [b, ...] become [b, K, ...].

    Args:
        batch: b records.
        views: K >= 1.
        augmentation: (batch, generator) -> batch, record by record.
        rng: where the augmentation takes its randomness from.
    """
    augmented = [augmentation(batch, rng) for _ in range(views)]
    of_each = zip(*map(record_leaves, augmented), strict=True)
    return map_records(lambda _: torch.stack(next(of_each), 1), augmented[0])


def averaged_over_views(loss: Loss, views: int) -> Loss:
    """The loss of a batch [b, K, ...] of K > 1 views per record: the mean over a record's views, [b]."""
    if views == 1:
        return loss

    def averaged(model: nn.Module, batch: Any) -> Tensor:
        flat = map_records(lambda leaf: leaf.flatten(0, 1), batch)
        return loss(model, flat).reshape(-1, views).mean(1)

    return averaged


@dataclass(frozen=True)
class BatchPreparation:
    """Brings a batch of records into the form that the engine takes.

    Attributes:
        device: where batches are moved to.
        augmentation: (batch, generator) -> batch, or None.
        views: K; with more than one, K views per record, augmented if there is an augmentation.
        of_users: a batch holds users, whose records are augmented.
    """

    device: torch.device
    augmentation: Callable[[Any, torch.Generator], Any] | None = None
    views: int = 1
    of_users: bool = False

    def __call__(self, batch: Any, randomness: Randomness) -> Any:
        """The batch on the device, augmented."""
        batch = moved(batch, self.device)
        if self.augmentation is None and self.views == 1:
            return batch
        rng = randomness("augmentation")
        records = flattened(batch) if self.of_users else batch
        augmentation = self.augmentation or (lambda batch, rng: batch)
        if self.views == 1:
            augmented = augmentation(records, rng)
        else:
            augmented = repeat_views(records, self.views, augmentation, rng)
        if not self.of_users:
            return augmented
        return {**batch, "records": by_user(augmented, batch["present"])}


@dataclass(frozen=True)
class MicroBatch:
    """Records of a draw that are read and joined together.

    Attributes:
        draw: whose secret randomness they have.
        rank: of the process.
        number: which micro-batch of the draw it is, on this process.
        ids: record numbers, LongTensor [b].
        places: of the records among the rows of a forward, ascending, LongTensor [b].
    """

    draw: Draw
    rank: int
    number: int
    ids: Tensor
    places: Tensor

    def of(self, which: Tensor) -> MicroBatch:
        """Some of the records, at their places."""
        return replace(self, ids=self.ids[which], places=self.places[which])

    def at(self, place: int) -> MicroBatch:
        """The record at this place."""
        return self.of(self.places == place)

    def without(self, places: Collection[int]) -> MicroBatch:
        """The records at other places."""
        return self.of(torch.tensor([place not in places for place in self.places.tolist()]))

    def index(self, few: MicroBatch) -> Tensor:
        """Where some of the records stand among them, LongTensor."""
        if few is self:
            return torch.arange(len(self.ids))
        return torch.searchsorted(self.places, few.places)

    @property
    def randomness(self) -> Randomness:
        """Of whatever is assigned by place."""
        return secret_randomness(self.draw, self.rank, self.number)


def _in_order(ids: Tensor, size: int, draw: Draw, processes: Processes) -> list[MicroBatch]:
    """Micro-batches of `size` records in their order; a record that enters moves those behind it."""
    mine = processes.share(ids)
    parts = torch.split(mine, size) if len(mine) else ()
    return [
        MicroBatch(draw, processes.part, number, part, torch.arange(len(part)))
        for number, part in enumerate(parts)
    ]


def _dealt(ids: Tensor, size: int, places: int, draw: Draw, processes: Processes) -> list[MicroBatch]:
    """Micro-batches in which the records stand at random places: one that enters takes a free one.

    Which places n records get follows the same law whether another record is there or not, so the proof may
    leave every record where it is. Then random numbers may be shared by all records of a micro-batch.

    Args:
        ids: of all processes' records.
        size: of a micro-batch.
        places: at least as many as records, in all but the rarest draws; public.
        draw: its secret randomness assigns them.
        processes: each takes equally many micro-batches.
    """
    each = math.ceil(max(places, len(ids)) / (size * processes.parts))  # micro-batches of a process
    generator = secret_generator(draw, "places")
    given = uniform_order(each * size * processes.parts, generator)[: len(ids)]
    taken, order = given.sort()
    found = []
    for number in range(each):
        here = taken // size == processes.part * each + number
        if bool(here.any()):
            found.append(MicroBatch(draw, processes.part, number, ids[order[here]], taken[here] % size))
    return found


@dataclass(eq=False, repr=False)  # records are printed nowhere
class RowSource:
    """Makes gradient rows of the records of a forward.

    Args:
        engine: makes per-sample gradients.
        source: the records.
        prepare: brings batches into the engine's form.
        micro_batch_size: the most private records of a forward.
        example: a batch of a few records, from which the rows of an empty draw are cut.
        seed: public seed of the randomness of public records.
        fills_with: a few records that fill up a forward in place of zeros, if the model does not take those.
        record_bytes: memory that one record takes in a step.
        probes: numbers of the records of `example`, which could be read at the start.
        random_places: records are assigned to random places of a draw, which a record more does not change;
            otherwise they take the first places in their order.
        owners: whose the records are, where the unit of privacy is the user.
        backend: runs the forwards of private records as the processes share the model.
        members: numbers of those that draws may hold, where others are held apart; all when None.
    """

    engine: Any
    source: RecordSource
    prepare: BatchPreparation
    micro_batch_size: int
    example: Any
    seed: int
    fills_with: Any = None
    record_bytes: float = 0.0
    probes: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    random_places: bool = False
    owners: Owners | None = None
    backend: Backend = field(default_factory=lambda: Backend(Processes()))
    members: Tensor | None = None

    def __post_init__(self) -> None:
        self._rows = forward_rows(self.micro_batch_size)
        self._failure_was_logged = False
        self._fillers: tuple[Any, Any] = (None, None)  # those of the last form of records

    def fingerprint(self) -> str:
        """A digest of the records and of whose they are, which is private; see `RecordSource.fingerprint`."""
        records = self.source.fingerprint()
        return records if self.owners is None else self.owners.fingerprint(records)

    def keys(self, secrets: Secrets) -> Tensor | None:
        """What names each of those that are drawn for the whole run, int64 [n]; None for their numbers."""
        if self.owners is None:
            found = self.source.keys(secrets)
        else:
            found = self.owners.keys(secrets.stream_key(0, "keys of records"))
        return found if found is None or self.members is None else found[self.members]

    def used(self, ids: Tensor) -> Tensor:
        """The records drawn, of those that draws may hold, that are used: of a user no more than the cap."""
        ids = ids if self.members is None else self.members[ids]
        return ids if self.owners is None or self.prepare.of_users else self.owners.used(ids)

    def micro_batches(self, draw: Draw, ids: Tensor, places: int, processes: Processes) -> list[MicroBatch]:
        """This process' micro-batches of a draw.

        Args:
            draw: its secret randomness assigns the records to places.
            ids: record numbers of all processes, LongTensor [B].
            places: how many the records are assigned to, where they are.
            processes: who share the work.
        """
        size = self.micro_batch_size
        if self.random_places:
            return _dealt(ids, size, places, draw, processes)
        if self.source.widths is None:
            return _in_order(ids, size, draw, processes)
        widths = self.source.widths[ids]
        found: list[MicroBatch] = []
        for width in torch.unique(widths):
            parts = _in_order(ids[widths == width], size, draw, processes)
            found += [replace(part, number=len(found) + part.number) for part in parts]
        return found

    def joined(self, part: MicroBatch, of_items: Randomness, purpose: Sequence[object]) -> Any:
        """The records of a micro-batch, read and joined.

        Args:
            part: the micro-batch.
            of_items: randomness of the items of the draw.
            purpose: with another one, joining draws other random numbers; not where records share them.
        """
        if self.source.is_scanned:
            return self.source.take(part.ids)  # no code runs
        joining = secret_randomness(
            part.draw, part.rank, part.number, *(() if self.random_places else purpose)
        )

        def read() -> Any:
            with random_numbers_from(joining("records"), self.prepare.device):
                return self.source.take(part.ids, of_items)

        return self.backend.reading(read)

    def of_records(
        self,
        records: Any,
        at: Sequence[Parameters | None],
        part: MicroBatch,
        all_finite: list[Tensor] | None = None,
    ) -> list[Any]:
        """Gradient rows of private records that share a forward, at every parameter point.

        Args:
            records: their batch.
            at: the parameter points.
            part: where they stand.
            all_finite: takes whether all fillers were finite; norms that lost digits are NaN then. Without it
                norms are looked at, and those are taken again at once.

        Raises:
            PlanMismatch: one of them runs what was not planned.
        """
        randomness, count = part.randomness, len(part.ids)
        batch = self._batch(records, part.places, randomness)

        def with_norms() -> list[Any]:
            with nullcontext() if all_finite is None else lost_are_nan():
                found = self.of_batch(self.engine.by_plan, batch, at, randomness)
                for gradients in () if self.engine.forward_only else found:
                    gradients.row_norms()  # in the fixed shape too; the cut below keeps them
            return found

        whole = self.backend.forwards(with_norms, len(at))
        if all_finite is not None and not self.engine.forward_only:
            for rows in whole:  # of rows that are replayed it is known
                known = hasattr(rows, "all_finite")
                all_finite.append(rows.all_finite if known else rows.row_norms().isfinite().all())
        if count == self._rows:
            return whole
        # The first places as a slice: nothing is copied.
        if int(part.places[-1]) == count - 1:
            return [gradients.rows(slice(count)) for gradients in whole]
        return [gradients.rows(part.places.to(gradients.device)) for gradients in whole]

    def of_one(self, record: Any, at: Sequence[Parameters | None], part: MicroBatch) -> list[Any]:
        """Rows of a record that runs other operations than planned, or fails next to fillers: without a plan.

        It has random numbers of its own, or those that all share, as by the plan: who runs by it follows from
        who else is there.

        Args:
            record: its batch.
            at: the parameter points.
            part: where it stands.
        """
        place, randomness = int(part.places), part.randomness
        # Fillers may fail where it does not; copies of it fail only where it does.
        copies = repeat_to(record, self._rows)
        batch = self._batch(copies, torch.arange(num_records(copies)), randomness)
        alone, numbers = self.engine.alone, randomness
        if self.random_places:
            alone = partial(alone, place=place)
        else:
            batch = take_records(batch, slice(place, place + 1))
            numbers = lambda kind: randomness(f"{kind} of {place}")  # noqa: E731
        return self.backend.forwards(partial(self.of_batch, alone, batch, at, numbers), len(at))

    def _batch(self, records: Any, places: Tensor, randomness: Randomness) -> Any:
        """The rows of a forward, prepared: records at their places, fillers at all others."""
        if len(places) < self._rows:
            records = filled(records, self.fillers(records), places)
        if self.prepare.augmentation is None:
            return self.prepare(records, randomness)
        # Augmenting may draw random numbers in its own way.
        with random_numbers_from(randomness("augmented"), self.prepare.device):
            return self.prepare(records, randomness)

    def fillers(self, records: Any) -> Any:
        """Fillers of the form of these records, one per row of a forward.

        They are zeros. A model that does not take those gets copies of the example's records, or of the first
        of these, if they have another form.
        """
        if self._fillers[1] is not None and self.source.has_rows:  # all of one form
            return self._fillers[1]
        form, count = signature(records), self._rows
        if self.fills_with is not None and form != signature(self.fills_with):
            return repeat_to(take_records(records, slice(1)), count)
        if form != self._fillers[0]:
            new = fillers(records, count) if self.fills_with is None else repeat_to(self.fills_with, count)
            self._fillers = form, new
        return self._fillers[1]

    def of_batch(
        self,
        rows_of: Callable[..., Any],
        batch: Any,
        at: Sequence[Parameters | None],
        randomness: Randomness,
    ) -> list[Any]:
        """Gradient rows of a prepared batch at every parameter point, under the same masks."""
        numbers = partial(randomness, "dropout")
        # Values are asked for once, now, and go after it: a mapping may make them.
        return [rows_of(batch, None if point is None else dict(point), numbers) for point in at]

    def of_public(self, batch: Any, at: Parameters | None, step: int) -> Any:
        """Gradient rows of public records, under the public randomness of a step."""
        batch = moved(batch, self.prepare.device)
        if self.owners is not None and self.prepare.of_users:
            batch = users_of_one_record(batch, self.owners.unit.records)
        return self.of_batch(self.engine, batch, [at], public_randomness(self.seed, step, "public"))[0]

    def of_public_alone(self, at: Sequence[Parameters | None], randomness: Randomness) -> list[Any]:
        """No rows, by a forward of fillers, which a process runs while others need one."""
        # One takes a private record's place: those that are kept for later forwards are copied, as ever.
        one = take_records(self.fillers(self.example), slice(1))
        batch = self._batch(one, torch.tensor([0]), randomness)
        found = self.of_batch(self.engine.by_plan, batch, at, randomness)
        return [gradients.rows(slice(0)) for gradients in found]

    def of_nobody(self, at: Sequence[Parameters | None]) -> list[Any]:
        """Rows of no records; the engine makes them without running the model."""
        nobody = moved(take_records(self.example, slice(0)), self.prepare.device)
        return [self.engine(nobody, params=params) for params in at]

    def check_source(self) -> None:
        """See that some record of the example, all of which were read at the start, can still be read.

        Reading depends on no parameters. Model and loss are never tried again on chosen records: at
        parameters that a server sent, whether they fail would be an answer without noise.

        Raises:
            Whatever the last of them raises, where none can be read: the source is gone.
        """
        failed: Exception | None = None
        for number in self.probes:
            try:
                with random_numbers_from(0, self.prepare.device):  # no generator tells that a record failed
                    self.source.take(number[None])
                return
            except Exception as error:
                failed = error
        if failed is not None:
            raise failed

    def log_failed_draw(self, name: str) -> None:
        """Tell the data owner, once, that a draw came to nothing; it is no reason to stop."""
        if not self._failure_was_logged:
            _log.error(
                "every record of a draw %r failed: the step goes on with only noise. The kinds of the "
                "errors are in private/diagnostics.jsonl; this is said once",
                name,
            )
        self._failure_was_logged = True

    def memory_ran_out(self) -> MemoryError:
        """An error that names a smaller micro-batch."""
        count = sum(p.numel() for p in self.engine.model.parameters() if p.requires_grad)
        fits = fitting(self.record_bytes, count, self.prepare.device)
        size = self.micro_batch_size
        remedy = (
            f"Give Data(microbatch_size={max(1, min(size // 2, fits))}): so many records are held at once"
        )
        if size == 1:
            remedy = "A single record does not fit: free memory, or train fewer parameters"
        return MemoryError(
            f"memory ran out in a forward of {forward_rows(size)} rows. Nothing of this draw was released. "
            + remedy
        )


@dataclass(frozen=True, repr=False)
class Forwards:
    """Decides which private records share a forward.

    Those of a micro-batch share one, unless the model runs other operations than planned for one of them.
    Then each has a forward of its own, in the same shape: no record decides over the row of another. One that
    cannot be read, or that model or loss fail on, is left out, and the others are joined again as if it had
    not been drawn: a step that stopped would tell whoever chose the parameters that it was.

    Args:
        rows: makes the rows of a forward.
        points: where the rows are taken.
        of_items: randomness of the items of the draw.
        note_failure: takes the kind of the error of each record that is left out.
        all_finite: as for `RowSource.of_records`.
    """

    rows: RowSource
    points: Sequence[Parameters | None]
    of_items: Randomness
    note_failure: Callable[[str], None]
    all_finite: list[Tensor] | None

    def of(self, part: MicroBatch, purpose: Sequence[object] = ()) -> Iterator[tuple[MicroBatch, list[Any]]]:
        """The records of each forward, and their rows at every point.

        Args:
            part: the micro-batch.
            purpose: with another one, joining draws other random numbers.

        Raises:
            MemoryError: memory ran out; a micro-batch size that may fit is named.
        """
        while len(part.ids):
            together: list[Any] | None = None
            try:
                records = self.rows.joined(part, self.of_items, purpose)
                try:
                    together = self._by_plan(records, part)
                except PlanMismatch:
                    pass
                except Exception:
                    if len(part.ids) > 1:
                        raise
            except Exception as error:
                self._raise(error)
            else:
                if together is not None:
                    yield part, together
                else:
                    yield from self._one_by_one(records, part)
                return
            kinds = {place: self._fault(part.at(place), purpose) for place in part.places.tolist()}
            failed = {place: kind for place, kind in kinds.items() if kind}
            if not failed:  # only together, such as texts of several lengths that nobody pads
                for place in kinds:
                    yield from self.of(part.at(place), (place,))
                return
            self.rows.check_source()
            for kind in failed.values():
                self.note_failure(kind)
            part = part.without(failed)

    def _one_by_one(self, records: Any, part: MicroBatch) -> Iterator[tuple[MicroBatch, list[Any]]]:
        """The records of a micro-batch, which were joined, in forwards of their own."""
        for number, place in enumerate(part.places.tolist()):
            few = part.at(place)
            try:
                rows = self._alone(take_records(records, slice(number, number + 1)), few)
            except Exception as error:
                self._raise(error)
                self.note_failure(type(error).__name__)
            else:
                yield few, rows

    def _fault(self, one: MicroBatch, purpose: Sequence[object]) -> str:
        """The kind of the error of a record that fails by itself; else ""."""
        try:
            self._alone(self.rows.joined(one, self.of_items, purpose), one)
        except Exception as error:
            self._raise(error)
            return type(error).__name__
        return ""

    def _by_plan(self, records: Any, part: MicroBatch) -> list[Any]:
        return self.rows.of_records(records, self.points, part, self.all_finite)

    def _alone(self, record: Any, one: MicroBatch) -> list[Any]:
        try:
            return self._by_plan(record, one)
        except Exception as error:
            self._raise(error)
        return self.rows.of_one(record, self.points, one)

    def _raise(self, error: Exception) -> None:
        """Raise what is no record's fault."""
        if out_of_memory(error):
            raise self.rows.memory_ran_out() from cause_of(error)
        if is_no_records_fault(error):
            raise error
