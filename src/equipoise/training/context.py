"""What a method may use in a step: draws of private records, the ledger, public gradients.

A draw holds record numbers. A query runs over it forward by forward: it takes the gradient rows of some
records at every parameter point (`Forwards`), guards them (`PrivateRows`), calls the method's function, and
unites the bounded sums. With several processes each one runs its slice, and the sums are added.

A record that cannot be read, or that the model or the loss fails on, has weight zero. Nothing of it shows but
a count in the diagnostics. Where all of them fail the step is noise alone, and booked: a step that stopped
for a failing record would tell whoever chose the parameters (a server, say) that it was drawn. Whether model
and loss work is checked when the training is prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from equipoise._host import Unread
from equipoise._launched import Kept
from equipoise.distributed.backend import Turns, is_no_records_fault
from equipoise.distributed.processes import Processes
from equipoise.distributed.shared_ledger import SharedLedger
from equipoise.methods.base import Parameters, Plan, Query
from equipoise.privacy import Bounded, Draw, Ledger, Private, PrivateRows, sums_of
from equipoise.privacy.ledger.ledger import Check, run_checks
from equipoise.privacy.private import join, unwrap
from equipoise.training.forwards import Forwards, RowSource
from equipoise.training.randomness import generator, public_randomness, secret_randomness


class NotFiniteError(Exception):
    """A record was not finite, or its norm lost digits, and nobody looked yet.

    Nothing of its draw may be used, and nothing was.
    """


class Attempt:
    """One try at a step.

    On a device each look at a value is a wait. So the first try looks at no forward: it collects whether all
    were finite, and that is looked at together with the sums, before anything leaves. Where a record was not
    finite, nothing of the try is used; the next one looks at each forward, as a processor always does. What
    follows a release is looked at in each forward, too: the step is not taken again then, since its first
    sums may round otherwise, and a draw would be charged a second time.

    Args:
        rows: makes gradient rows of records.
        ledger: of the run.
        processes: who share the work.
        looks: at each forward.
        unmoved: what must hold of the parameters before anything leaves.
        others: what makes rows for the draws of these names, in the place of `rows`.

    Attributes:
        all_finite: takes whether forwards and norms were finite, as tensors; None where each is looked at.
    """

    def __init__(
        self,
        rows: RowSource,
        ledger: Ledger | SharedLedger,
        processes: Processes,
        looks: bool = True,
        unmoved: Callable[[], Sequence[Check]] = tuple,
        others: Mapping[str, RowSource] | None = None,
    ) -> None:
        self.rows, self.ledger, self.processes, self._unmoved = rows, ledger, processes, unmoved
        self.others = others or {}
        self.all_finite: Kept | None = None if looks else Kept()

    def checks(self) -> list[Check]:
        """What must hold before anything leaves; no sum is used where a record was not finite.

        Raises:
            NotFiniteError: by a check; all processes take the step again, or none.
        """
        if self.all_finite is None:
            return [*self._unmoved()]
        return [(self.rows.backend.all_of(self.all_finite), _refuse_not_finite), *self._unmoved()]

    def end(self) -> None:
        """See that no number of the try is used where a record was not finite, if nothing was released."""
        if self.all_finite is not None:
            _refuse_not_finite(self.rows.backend.all_of(self.all_finite).value())
            self.all_finite = Kept()


def _refuse_not_finite(are_finite: bool) -> None:
    if not are_finite:
        raise NotFiniteError


class TrainingDraw:
    """One draw of records, as methods see it.

    Args:
        attempt: at the step.
        token: the ledger's draw; the bounded sums carry it.
        ids: record numbers of all processes, LongTensor [b].
        places: how many places the records are assigned to where `rows` asks for it.
        diagnostics: takes the draw's private numbers (records, losses, records left out).
        params: the model's parameters.
    """

    def __init__(
        self,
        attempt: Attempt,
        token: Draw,
        ids: Tensor,
        places: int,
        diagnostics: StepDiagnostics,
        params: Mapping[str, Tensor],
    ) -> None:
        self.token, self._attempt, self._diagnostics, self._params = token, attempt, diagnostics, params
        self._rows, self._processes = attempt.others.get(token.name, attempt.rows), attempt.processes
        self._of_items = secret_randomness(token)
        # What a pass over the draw reads. A record that failed is left out of every later pass, and the
        # others keep their places and with them their random numbers.
        self._micro_batches = self._rows.micro_batches(token, ids, places, self._processes)
        diagnostics.note_draw(token.name, sum(map(len, map(attrgetter("ids"), self._micro_batches))))

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
            fn: gives the bounded sums of one micro-batch, and keeps nothing: on a device the step is taken
                again where a record was not finite, unless it has released something.
            at: the parameter points.
            along: numbers of the draw's records, as `rows` gave them; `fn(rows, ..., ids, part)` gets those
                of the micro-batch's records.
        """
        fn = self._rows.backend.query(fn)

        def asked(rows: list[PrivateRows], ids: Private, place: Tensor) -> Mapping[str, Bounded]:
            return fn(*rows, ids) if along is None else fn(*rows, ids, along[place])

        sums = self._rows.backend.total(sums_of(starmap(asked, self._pass(at))))
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
        if self._processes.parts > 1:
            raise NotImplementedError(
                "statistics of the rows of a whole draw are not exchanged between processes yet: run this "
                "method in one process"
            )
        found, places = zip(*[(fn(*rows, ids), place) for rows, ids, place in self._pass(at)], strict=True)
        order = torch.cat(places).argsort()  # records that share no forward come after the others
        if isinstance(found[0], Mapping):
            return {name: join([part[name] for part in found], order) for name in found[0]}
        return join(found, order)

    def _pass(self, at: Sequence[Parameters] | None) -> Iterator[tuple[list[PrivateRows], Private, Tensor]]:
        """Rows at every point, record numbers and places in the draw, per forward.

        Records that fail are left out of the passes that follow, too. The processes of a fully sharded model
        come here together as often as any of them has rows.
        """
        points: Sequence[Parameters | None] = [None] if at is None else list(at)
        turns = self._turns(points)
        note_failure = partial(self._diagnostics.note_failure, self.token.name)
        forwards = Forwards(self._rows, points, self._of_items, note_failure, self._attempt.all_finite)
        following, start = [], 0
        # Workers, where there are any, read the following micro-batch meanwhile.
        ahead = self._rows.source.ahead([part.ids for part in self._micro_batches], self._of_items)
        for _, part in zip(ahead, self._micro_batches, strict=True):
            left = []
            self._diagnostics.losses.let_go()
            if self._attempt.all_finite is not None:
                self._attempt.all_finite.let_go()
            for few, rows in forwards.of(part):
                left.append(part.index(few))
                self._diagnostics.note_losses(rows[0].losses)
                if self._diagnostics.looks_at_rows and self._rows is self._attempt.rows:  # not a score's
                    self._diagnostics.note_rows(rows[0])
                turns.wait_to_sum()
                yield self._guarded(rows, few.ids, start + left[-1])
                del rows  # a device writes the next ones where they lie
            if left:
                is_whole = sum(map(len, left)) == len(part.ids)
                following.append(part if is_whole else part.of(torch.cat(left).sort().values))
            start += len(part.ids)
        if self._micro_batches and not following:
            self._rows.log_failed_draw(self.name)
        self._micro_batches = following
        if not following:
            turns.wait_to_sum()
            yield self._of_nobody(points)
        for _ in turns.until_all_are_done():
            yield self._of_nobody(points)

    def _turns(self, points: Sequence[Parameters | None]) -> Turns:
        """Of the processes of a fully sharded model."""
        rows = self._rows

        def idle() -> None:
            try:
                rows.of_public_alone(points, public_randomness(rows.seed, 0, "while others run"))
            except Exception as error:  # nobody takes its rows
                if is_no_records_fault(error):
                    raise

        return rows.backend.turns(idle, len(points))

    def _of_nobody(self, points: Sequence[Parameters | None]) -> tuple[list[PrivateRows], Private, Tensor]:
        nobody = torch.zeros(0, dtype=torch.long)
        return self._guarded(self._rows.of_nobody(points), nobody, nobody)

    def _guarded(
        self, rows: Sequence[Any], ids: Tensor, places: Tensor
    ) -> tuple[list[PrivateRows], Private, Tensor]:
        """What a query gets of one forward."""
        seen = [self._rows.backend.rows(one, self._params) for one in rows]
        if len(self._params) < len(seen[0].shapes):
            seen = [one.select([*self._params]) for one in seen]
        weights = self._rows.source.weights
        weights = None if weights is None else weights[ids].to(seen[0].device)
        guarded = [PrivateRows(one, self.token, weights, (), self._attempt.all_finite) for one in seen]
        return guarded, Private(ids, self.token), places


class StepDiagnostics:
    """The private numbers of one step: they go into the diagnostics and nowhere else.

    The draws of the step write them while a method queries; its answers hold none. `MetricsLog` asks for the
    row when the step is over.

    Args:
        looks_at_rows: take note of the gradients, too (see `Run`).

    Attributes:
        losses: per record, of the forwards so far.
    """

    def __init__(self, looks_at_rows: bool = False) -> None:
        self.losses = Kept()
        self.looks_at_rows, self._norms, self._true = looks_at_rows, list[Tensor](), dict[str, Tensor]()
        self._row: dict[str, Any] = {}
        self._counts: dict[str, Private] = {}

    def note_draw(self, name: str, records: int) -> None:
        """A draw of `records` records (this process' slice)."""
        self._row[f"{name}.records"] = self._row.get(f"{name}.records", 0) + records

    def note_losses(self, losses: Tensor | None) -> None:
        """Per-record losses of a micro-batch."""
        if losses is not None:
            self.losses.append(losses.detach())

    def note_rows(self, rows: Any) -> None:
        """The gradients of a micro-batch, where they are looked at."""
        norms = rows.row_norms()
        self._norms.append(norms[norms.isfinite()].clone())
        for name, found in rows.weighted_sums(norms.isfinite().to(norms.dtype)).items():
            self._true[name] = self._true.get(name, 0.0) + found.double()

    def beside(self, estimate: Mapping[str, Tensor], size: float) -> dict[str, float]:
        """What noise and clipping hide of the gradients that an estimate is of."""
        norms = torch.cat(self._norms) if self._norms else torch.zeros(1)
        true, released = (
            torch.cat([of[name].flatten().double() for name in self._true]) for of in (self._true, estimate)
        )
        return {
            "median_norm": float(norms.median()),
            "largest_norm": float(norms.max()),
            "true_norm": float(true.norm()) / size,
            "cosine": float(torch.nn.functional.cosine_similarity(true, released, dim=0)),
        }

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

    def row(self) -> Unread[dict[str, Any]]:
        """The row of the diagnostics; `covered` says that no guarantee covers it."""
        row: dict[str, Any] = {"covered": False, **self._row}
        parts, names = len(self.losses), list(self._counts)

        def filled(*found: Tensor) -> dict[str, Any]:
            if parts:
                losses = torch.cat(found[:parts]).double()
                row["training_loss"] = losses[torch.isfinite(losses)].mean()
            for name, counts in zip(names, found[parts:], strict=True):
                usable, bad, *cut = counts.tolist()
                row[f"{name}.records_not_finite"] = bad
                if cut:  # of a clipped sum: the share of the others whose row was made shorter
                    row[f"{name}.clip_fraction"] = cut[0] / max(1, usable)
            return row

        return Unread([*self.losses, *map(unwrap, self._counts.values())], filled)


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
        attempt: at the step.

    Attributes:
        last_noise: of the step's last release, which sets it; None before the first.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self.last_noise: ReleaseNoise | None = None

    def release(self, draw: TrainingDraw, sums: Mapping[str, Bounded]) -> dict[str, dict[str, Tensor]]:
        """As `Ledger.release`."""
        ledger = self._attempt.ledger
        released = ledger.release(draw.token, sums, self._checks())
        self._attempt.all_finite = None
        name, first = next(iter(sums.items()))
        std = ledger.plan[name].at(draw.token.ordinal).standard_deviation(name, first.add_remove)
        self.last_noise = ReleaseNoise(std, first.add_remove)
        return released

    def call(self, operation: str, *arguments: Any, std: float | None = None, **options: Any) -> Any:
        """An operation that the method's own `ledger_class` has, on the process that keeps the ledger.

        Args:
            std: of the noise that the operation adds; handed on with the other arguments, if given.
        """
        run_checks(self._checks())
        given = [one.token if isinstance(one, TrainingDraw) else one for one in arguments]
        if std is not None:
            options["std"] = std
            # Nothing bounds it: the metrics show the bound of the release before, if there was one.
            self.last_noise = ReleaseNoise(std, 0.0 if self.last_noise is None else self.last_noise.bound)
        found = self._attempt.ledger.call(operation, *given, **options)
        self._attempt.all_finite = None
        return found

    def _checks(self) -> list[Check]:
        items = self._attempt.rows.source.items
        if items is not None:  # written before anything leaves: a run may be killed after that
            items.write()
        return self._attempt.checks()


class StepContext:
    """What a method may use in one step (see `equipoise.methods.base.Context`).

    Args:
        attempt: at the step.
        params: the model's live trainable parameters.
        step: number of the step.
        sampling: the training's sampling.
        plan: of the method.
        depends_on: digest of what the step's releases depend on in addition to plan and records.
        looks_at_rows: for the diagnostics.
    """

    def __init__(
        self,
        attempt: Attempt,
        params: Mapping[str, nn.Parameter],
        step: int,
        sampling: Any,
        plan: Plan,
        depends_on: str,
        looks_at_rows: bool = False,
    ) -> None:
        self.params: Parameters = MappingProxyType({name: p.detach() for name, p in params.items()})
        self.step, self.sampling, self.plan, self.relation = step, sampling, plan, plan.releases.relation
        self.ledger, self.diagnostics = StepLedger(attempt), StepDiagnostics(looks_at_rows)
        self._attempt, self._depends_on = attempt, depends_on

    def draw(self, name: str = "batch") -> TrainingDraw:
        """Take the next sample of records for the planned draw of this name."""
        attempt = self._attempt
        rows = attempt.others.get(name, attempt.rows)
        drawn_from = rows.source if rows.members is None else rows.members
        token, ids = attempt.ledger.open_and_sample(name, self._depends_on, len(drawn_from))
        ids = rows.used(ids)
        # Only records that share random numbers are assigned to places; the bound takes a search.
        places = self.plan.releases.sampling_of(name).largest_size if rows.random_places else 0
        return TrainingDraw(attempt, token, ids, places, self.diagnostics, self.params)

    def public_gradients(self, batch: Any, at: Parameters | None = None, step: int | None = None) -> Any:
        """The gradient rows of public records, unguarded."""
        found = self._attempt.rows.of_public(batch, at, self.step if step is None else step)
        return found.select([*self.params]) if len(self.params) < len(found.names) else found

    def public_rng(self, step: int) -> torch.Generator:
        """Public randomness of a step."""
        return generator(self._attempt.rows.seed, "method", step)
