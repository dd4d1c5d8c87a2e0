"""Forwards of private records: who shares one, and the gradient rows that come out of it.

**Fixed shape.** Kernels round a row by the number of rows in a batch, and a model may run other operations
where all records, or none, are of some kind. So every forward has the same number of rows, and public records
are always among them: a record that enters a draw changes no other row.

The records of a draw stand in micro-batches (`MicroBatch`), each at a place among the rows of a forward, and
with the place goes its share of the random numbers. `RowSource` makes the rows of one forward. `Forwards`
decides which records of a micro-batch share one.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise._host import host_waits
from equipoise._tree import map_leaves
from equipoise.gradients.capture.random_numbers import random_numbers_from
from equipoise.gradients.capture.recorder import PlanMismatch
from equipoise.gradients.engine_inputs import (
    Loss,
    WholeNumbers,
    made_up_records,
    map_records,
    record_leaves,
    repeat_to,
    signature,
    take_records,
)
from equipoise.gradients.numerics import lost_are_nan
from equipoise.methods.base import Parameters
from equipoise.privacy import Draw, Secrets, secret_generator
from equipoise.privacy.noise.uniform import uniform_order
from equipoise.training.distributed import Processes
from equipoise.training.model_sharing import ModelSharing, is_no_records_fault
from equipoise.training.owners import Owners, by_user, flattened, users_of_one_record
from equipoise.training.randomness import Randomness, public_randomness, secret_randomness
from equipoise.training.record_source import RecordSource

__all__ = [
    "PUBLIC_ROWS",
    "BatchPreparation",
    "Forwards",
    "MicroBatch",
    "RowSource",
    "averaged_over_views",
    "filled",
    "moved",
    "repeat_views",
]

_log = logging.getLogger("equipoise.training")

PUBLIC_ROWS = 2
"""How many made-up records every forward holds at least: one of each kind that there is."""


def moved(nest: Any, device: torch.device) -> Any:
    """The nest with all its tensors on the device."""
    # A copy to the host must be waited for, and `non_blocking` would not.
    to_gpu = device.type == "cuda"
    return map_leaves(
        lambda leaf: leaf.to(device, non_blocking=to_gpu) if isinstance(leaf, Tensor) else leaf, nest
    )


def filled(records: Any, public: Any, places: Tensor | None = None) -> Any:
    """The public records, with these in place of some.

    Args:
        records: at most as many.
        public: of the same form, one per row of a forward.
        places: of the records, ascending, LongTensor [b]; the first ones when None.

    Example:
        >>> filled({"label": torch.tensor([7])}, {"label": torch.tensor([1, 0, 1, 0])})["label"]
        tensor([7, 0, 1, 0])
    """
    others = iter(record_leaves(public))

    def fill(leaf: Tensor) -> Tensor:
        rest = next(others)
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
        return torch.searchsorted(self.places, few.places)

    @property
    def randomness(self) -> Randomness:
        """Of whatever is dealt by place."""
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
        draw: its secret randomness deals them.
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


class RowSource:
    """Makes gradient rows of the records of a forward.

    Args:
        engine: makes per-sample gradients.
        source: the records.
        prepare: brings batches into the engine's form.
        micro_batch_size: the most private records of a forward.
        example: a batch of a few records, from which the rows of an empty draw are cut.
        seed: public seed of the randomness of public records.
        whole_numbers: what stands in public records where only those go; None for copies of the first private
            record instead.
        probes: numbers of the records of `example`, which could be read at the start.
        dealt: records are dealt to random places of a draw, which a record more does not change; otherwise
            they take the first places in their order.
        owners: whose the records are, where the unit of privacy is the user.
        sharing: runs the forwards of private records as the processes share the model.
    """

    def __init__(
        self,
        engine: Any,
        source: RecordSource,
        prepare: BatchPreparation,
        micro_batch_size: int,
        example: Any,
        seed: int,
        whole_numbers: WholeNumbers | None = "mixed",
        probes: Tensor | None = None,
        dealt: bool = False,
        owners: Owners | None = None,
        sharing: ModelSharing | None = None,
    ) -> None:
        self.owners, self.sharing = owners, sharing or ModelSharing(Processes())
        self.whole_numbers, self.dealt = whole_numbers, dealt
        self.engine, self.source, self.prepare = engine, source, prepare
        self.probes = torch.zeros(0, dtype=torch.long) if probes is None else probes
        self.micro_batch_size, self.example, self.seed = micro_batch_size, example, seed
        self.ran_alone: set[int] = set()  # numbers of records, for `Forwards`; only its time follows them
        # Whether each forward is looked at for gradients that are not finite; else the sums of a whole draw.
        # Only time follows it: see `TrainingDraw.query`.
        self.looks_at_once = self.sharing.is_sharded or not host_waits(prepare.device)
        # Whether the step has released something: it is not taken again, since its sums may round otherwise
        # then, and a draw would be charged a second time.
        self.has_released = False
        self._failure_was_logged = False
        self._made_up: tuple[Any, Any] = (None, None)  # the public rows of the last form of records

    def fingerprint(self) -> str:
        """A digest of the records and of whose they are, which is private; see `RecordSource.fingerprint`."""
        records = self.source.fingerprint()
        return records if self.owners is None else self.owners.fingerprint(records)

    def keys(self, secrets: Secrets) -> Tensor | None:
        """What names each of those that are drawn for the whole run, int64 [n]; None for their numbers."""
        if self.owners is None:
            return self.source.keys(secrets)
        return self.owners.keys(secrets.stream_key(0, "keys of records"))

    def used(self, ids: Tensor) -> Tensor:
        """Those of the records drawn that are used: of each user no more than the cap."""
        return ids if self.owners is None or self.prepare.of_users else self.owners.used(ids)

    def micro_batches(self, draw: Draw, ids: Tensor, places: int, processes: Processes) -> list[MicroBatch]:
        """This process' micro-batches of a draw.

        Args:
            draw: its secret randomness deals the records to places.
            ids: record numbers of all processes, LongTensor [B].
            places: how many the records are dealt to, where they are.
            processes: who share the work.
        """
        size = self.micro_batch_size
        if self.dealt:
            return _dealt(ids, size, places, draw, processes)
        return _in_order(ids, size, draw, processes)

    def joined(self, part: MicroBatch, of_items: Randomness, purpose: Sequence[object]) -> Any:
        """The records of a micro-batch, read and joined.

        Args:
            part: the micro-batch.
            of_items: randomness of the items of the draw.
            purpose: with another one, joining draws other random numbers; not where records share them.
        """
        if self.source.is_scanned:
            return self.source.take(part.ids)  # no code runs
        joining = secret_randomness(part.draw, part.rank, part.number, *(() if self.dealt else purpose))

        def read() -> Any:
            with random_numbers_from(joining("records"), self.prepare.device):
                return self.source.take(part.ids, of_items)

        return self.sharing.reading(read)

    def of_records(
        self, records: Any, at: Sequence[Parameters | None], part: MicroBatch, *, looks: bool = True
    ) -> list[Any]:
        """Gradient rows of private records that share a forward, at every parameter point.

        Args:
            records: their batch.
            at: the parameter points.
            part: where they stand.
            looks: whether norms that lost digits are taken again at once; otherwise they are NaN.

        Raises:
            PlanMismatch: one of them runs what was not planned.
        """
        randomness, count = part.randomness, len(part.ids)
        batch = self._batch(records, self._public(records), part.places, randomness)

        def with_norms(batch: Any, params: Parameters | None) -> Any:
            with nullcontext() if looks else lost_are_nan():
                gradients = self.engine.by_plan(batch, params=params)
                if not self.engine.forward_only:
                    gradients.row_norms()  # in the fixed shape too; the cut below keeps them
            return gradients

        whole = self._of_private_batch(with_norms, batch, at, randomness)
        # The first places as a slice: nothing is copied.
        are_first = int(part.places[-1]) == count - 1
        kept = slice(count) if are_first else part.places
        return [
            gradients.rows(kept if isinstance(kept, slice) else kept.to(gradients.device))
            for gradients in whole
        ]

    def of_one(self, record: Any, at: Sequence[Parameters | None], part: MicroBatch) -> list[Any]:
        """Rows of a record that runs other operations than planned, or fails next to others.

        Args:
            record: its batch.
            at: the parameter points.
            part: where it stands.
        """
        try:
            return self._without_plan(record, self._public(record), at, part)
        except Exception as error:
            if is_no_records_fault(error):
                raise
        # Public records may fail where it does not; copies of it fail only where it does.
        return self._without_plan(record, self._repeated(record), at, part)

    def _without_plan(
        self, record: Any, public: Any, at: Sequence[Parameters | None], part: MicroBatch
    ) -> list[Any]:
        """Rows of a record among public ones.

        It has random numbers of its own, or those that all share, as by the plan: who runs by it follows from
        who else is there.
        """
        place, randomness = int(part.places), part.randomness
        batch = self._batch(record, public, part.places, randomness)
        if self.dealt:
            return self._of_private_batch(partial(self.engine.alone, place=place), batch, at, randomness)
        one = take_records(batch, slice(place, place + 1))
        return self._of_private_batch(
            self.engine.alone, one, at, lambda kind: randomness(f"{kind} of {place}")
        )

    def _batch(self, records: Any, public: Any, places: Tensor, randomness: Randomness) -> Any:
        """The rows of a forward, prepared: records at their places, public ones at all others."""
        batch = filled(records, public, places)
        if self.prepare.augmentation is None:
            return self.prepare(batch, randomness)
        # Augmenting may draw random numbers in its own way.
        with random_numbers_from(randomness("augmented"), self.prepare.device):
            return self.prepare(batch, randomness)

    def _public(self, records: Any) -> Any:
        """Public records of the form of these, one per row of a forward."""
        if self.whole_numbers is None:
            return self._repeated(take_records(records, slice(1)))
        form = signature(records)
        if form != self._made_up[0]:
            self._made_up = form, self._repeated(made_up_records(records, PUBLIC_ROWS, self.whole_numbers))
        return self._made_up[1]

    def _repeated(self, records: Any) -> Any:
        """These records in turn, one per row of a forward."""
        return repeat_to(records, self.micro_batch_size + PUBLIC_ROWS)

    def of_batch(
        self,
        rows_of: Callable[..., Any],
        batch: Any,
        at: Sequence[Parameters | None],
        randomness: Randomness,
    ) -> list[Any]:
        """Gradient rows of a prepared batch at every parameter point, under the same masks."""
        rows = []
        draws = self.engine.draws(batch)  # to set all generators takes as long as a small network
        for point in at:
            numbers = randomness("dropout") if draws else None
            with nullcontext() if numbers is None else random_numbers_from(numbers, self.prepare.device):
                # Values are asked for once, now, and go after it: a mapping may make them.
                rows.append(rows_of(batch, params=None if point is None else dict(point)))
        return rows

    def _of_private_batch(
        self,
        rows_of: Callable[..., Any],
        batch: Any,
        at: Sequence[Parameters | None],
        randomness: Randomness,
    ) -> list[Any]:
        """As `of_batch`, at the same time as the other processes of a sharded model."""
        return self.sharing.forwards(partial(self.of_batch, rows_of, batch, at, randomness), len(at))

    def of_public(self, batch: Any, at: Parameters | None, step: int) -> Any:
        """Gradient rows of public records, under the public randomness of a step."""
        batch = moved(batch, self.prepare.device)
        if self.owners is not None and self.prepare.of_users:
            batch = users_of_one_record(batch, self.owners.unit.records)
        return self.of_batch(self.engine, batch, [at], public_randomness(self.seed, step, "public"))[0]

    def of_public_alone(self, at: Sequence[Parameters | None], randomness: Randomness) -> list[Any]:
        """No rows, by a forward of public records, which a process runs while others need one."""
        public = self._public(self.example)
        # One takes a private record's place: the rows that are kept for later forwards are copied, as ever.
        batch = self._batch(take_records(public, slice(1)), public, torch.tensor([0]), randomness)
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


class Forwards:
    """Decides which private records share a forward.

    Those of a micro-batch that run what was planned share one. Each that does not, or that fails next to
    others, has one of its own. A record that cannot be read, joined or run is left out, and the others are
    joined again as if it had not been drawn: whoever joins them may deal random numbers in turn.

    Records that do not work together are halved until it is known whose fault it is; these rows are thrown
    away. Who ran alone before is tried by itself first, which spares the halving and changes no row.

    Args:
        rows: makes the rows of a forward.
        points: where the rows are taken.
        of_items: randomness of the items of the draw.
        note_failure: takes the kind of the error of each record that is left out.
        looks: as for `RowSource.of_records`.
    """

    def __init__(
        self,
        rows: RowSource,
        points: Sequence[Parameters | None],
        of_items: Randomness,
        note_failure: Callable[[str], None],
        looks: bool,
    ) -> None:
        self._rows, self._points, self._of_items = rows, points, of_items
        self._note_failure, self._looks = note_failure, looks

    def of(self, part: MicroBatch, purpose: Sequence[object] = ()) -> Iterator[tuple[MicroBatch, list[Any]]]:
        """The records of each forward, and their rows at every point.

        Args:
            part: the micro-batch.
            purpose: with another one, joining draws other random numbers.
        """

        def begin(part: MicroBatch) -> Iterator[tuple[MicroBatch, list[Any]]]:
            forwards = self._together(part, purpose)
            return itertools.chain([next(forwards)], forwards)

        while len(part.ids):
            forwards, failed = _attempt(begin, part, Exception)
            if forwards is not None:
                yield from forwards
                return
            if not failed:  # only together, such as texts of several lengths that nobody pads
                for place in part.places.tolist():
                    yield from self.of(part.at(place), (place,))
                return
            self._rows.check_source()
            for kind in failed.values():
                self._note_failure(kind)
            part = part.without(failed)

    def _together(
        self, part: MicroBatch, purpose: Sequence[object]
    ) -> Iterator[tuple[MicroBatch, list[Any]]]:
        """The records of each forward, and their rows, all joined together.

        Raises:
            What reading, joining or running one of them raises, before anything is given.
        """
        records, known = self._rows.joined(part, self._of_items, purpose), self._rows.ran_alone

        def run(rows_of: Callable[..., list[Any]], few: MicroBatch) -> list[Any]:
            mine = records if few is part else take_records(records, part.index(few))
            return rows_of(mine, self._points, few)

        by_plan = partial(run, partial(self._rows.of_records, looks=self._looks))
        alone = partial(run, self._rows.of_one)
        # A record next to public ones only may fail because of those.
        errors = PlanMismatch if len(part.ids) > 1 else Exception
        numbers = dict(zip(part.places.tolist(), part.ids.tolist(), strict=True))
        suspects = [place for place, number in numbers.items() if number in known]
        new = {place: alone for place in suspects if _attempt(by_plan, part.at(place), errors)[1]}
        known.difference_update(numbers[place] for place in suspects if place not in new)
        apart: dict[int, Callable[[MicroBatch], list[Any]]] = {}
        while True:
            for place, way in new.items():
                way(part.at(place))
            apart |= new
            sharing = part.without(apart) if apart else part
            rows, found = _attempt(by_plan, sharing, errors) if len(sharing.ids) else ([], {})
            if rows is not None:
                break
            known.update(numbers[place] for place in found)
            # Where none is at fault by itself, any two may be together.
            new = dict.fromkeys(found, alone) or dict.fromkeys(sharing.places.tolist(), by_plan)
        if rows:
            yield sharing, rows
        for place in sorted(apart):  # in one order, however they were found
            rows, failed = _attempt(apart[place], part.at(place), Exception)
            if failed:
                self._note_failure(failed[place])
            else:
                yield part.at(place), rows


def _attempt(
    run: Callable[[MicroBatch], Any], part: MicroBatch, errors: type[Exception]
) -> tuple[Any, dict[int, str]]:
    """What it gives for these records; or None and those at fault: by place the kind of the error.

    Args:
        run: it may fail.
        part: the records.
        errors: what a record may be at fault for.
    """
    try:
        return run(part), {}
    except errors as error:
        if is_no_records_fault(error):
            raise
        kind = type(error).__name__
    # Outside of the handler, so that no error holds what was computed, or carries a record's with it.
    if len(part.ids) == 1:
        return None, {int(part.places): kind}
    first, second = torch.arange(len(part.ids)).chunk(2)
    return None, _attempt(run, part.of(first), errors)[1] | _attempt(run, part.of(second), errors)[1]
