"""Does anything else move? Steps on neighbouring data sets, with a model and data of your own.

The guarantee says how far the released sum may move when one record enters, leaves or is replaced. Here it is
measured. A training is prepared twice, once with one record more. Then a step is taken on either data set,
and the difference of the exact sums is held against the bound that the noise follows. Several steps are
compared under the same releases, so that both trainings stay at the same parameters.

What is compared must differ by one record only. Every other record keeps its number, which keys its random
numbers; the draws hold the same others; and the record that is audited is in every draw. Where the step draws
random numbers (dropout, augmentation, places dealt at random) that record comes last in its draw, so that the
others keep theirs: their law is the same with it and without, and the proof may leave them where they are.
Otherwise it stands at a position of the draw that is tried.

A record whose own gradient is left out (`"silent"`) shows what else moves: nothing may.

This compares what was tried, and proves nothing. A model that mixes records only under conditions that the
data do not meet passes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from equipoise import _validate
from equipoise.methods import DPSGD, Method
from equipoise.privacy import Bounded, Budget, Draw, FullBatch, Private, Sampling, Secrets, WithoutReplacement
from equipoise.privacy.accounting.epsilon import gaussian_epsilon
from equipoise.privacy.ledger.replay import RecordingLedger, ReplayLedger
from equipoise.privacy.mechanisms.base import Sums
from equipoise.privacy.private import unwrap
from equipoise.training.input_checks import Loss
from equipoise.training.record_rows import Source
from equipoise.training.run_ledger import open_ledger
from equipoise.training.setup import TrainingSettings, TrainingSetup, prepare
from equipoise.training.step import StepRunner

__all__ = ["CHANGES", "SLACK", "NeighbourAudit", "NeighbourPair", "NeighbourSettings", "audit_neighbours"]

CHANGES = ("add", "remove", "replace", "silent")
"""What is done to one record; a silent one enters without a gradient of its own."""

SLACK = 1e-5
"""What rounding may add, in units of the bound."""


@dataclass(frozen=True)
class NeighbourPair:
    """Two neighbouring data sets, and how far their sums were apart.

    Attributes:
        change: one of `CHANGES`.
        position: of the record in its first draw.
        threads: that the processor used.
        movement: the largest distance of two sums, in units of the bound of this change.
        epsilon: of these steps for this very pair, at the audit's delta.
        claimed: what the bounds allow the steps, for a record that is in all of their draws.
    """

    change: str
    position: int
    threads: int
    movement: float
    epsilon: float
    claimed: float

    @property
    def limit(self) -> float:
        """The largest movement that holds: the bound, and nothing beside a silent record."""
        return SLACK if self.change == "silent" else 1 + SLACK

    @property
    def holds(self) -> bool:
        return self.movement <= self.limit


@dataclass(frozen=True)
class NeighbourAudit:
    """What was measured.

    Attributes:
        pairs: every pair of data sets.
        method: by its name.
        steps: that were taken on each.
        records: of the data set.
        micro_batch_size: as the training chose it.
        draws_numbers: whether the steps draw random numbers about records.
        delta: that the epsilons are for.
        plan_epsilon: what the whole plan claims at delta.
    """

    pairs: tuple[NeighbourPair, ...]
    method: str
    steps: int
    records: int
    micro_batch_size: int
    draws_numbers: bool
    delta: float
    plan_epsilon: float

    @property
    def holds(self) -> bool:
        """Whether no sum moved farther than it may."""
        return all(pair.holds for pair in self.pairs)

    @property
    def worst(self) -> NeighbourPair:
        """The pair that came closest to its limit, or went beyond it the farthest."""
        return max(self.pairs, key=lambda pair: pair.movement / pair.limit)

    def worst_of(self, change: str) -> NeighbourPair | None:
        """The pair of this change that moved the most; None if it was not tried."""
        return max((p for p in self.pairs if p.change == change), key=lambda p: p.movement, default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "holds": self.holds, "slack": SLACK}


class NeighbourSettings(TypedDict, total=False):
    """Arguments that mean what they mean for `PrivateTraining`."""

    budget: Budget | None
    augmentation: Callable[[Any, torch.Generator], Any] | None
    views: int
    collate: Callable[[list[Any]], Any] | None
    micro_batch_size: int | None
    relation: str
    hardened: bool
    device: str | torch.device | None
    allow_public_duplicates: bool


def audit_neighbours(
    model: nn.Module,
    loss: Loss,
    data: Any,
    *,
    sampling: Sampling | None = None,
    method: Method | None = None,
    positions: int = 10,
    changes: Sequence[str] | None = None,
    steps: int = 1,
    threads: Sequence[int] = (1,),
    seed: int = 0,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    **settings: Unpack[NeighbourSettings],
) -> NeighbourAudit:
    """Measure how far the released sums move when one record enters, leaves or is replaced.

    Nothing is released or spent, and the model is not moved: copies are trained.

    Args:
        model, loss, data: as for `PrivateTraining`.
        sampling: of the training; all records in every step by default.
        method: `DPSGD(noise_multiplier=1.0)` by default. One without a multiplier needs a `budget`.
        positions: how many records, spread over the draw, are added, removed and replaced.
        changes: some of `CHANGES`; all that the sampling is accounted for by default.
        steps: to compare on each pair of data sets.
        threads: numbers of processor threads to try.
        seed: of the draws and of the places.
        optimizer: parameters -> optimiser; plain SGD at 0.1 by default. It matters after the first step.
        settings: as for `PrivateTraining`.

    Raises:
        ValueError: fewer than two records, a change that the sampling is not accounted for, a method whose
            releases are not proved; and whatever refuses the training.

    Example:
        >>> records = {"x": torch.randn(50, 3), "y": torch.randn(50)}
        >>> def loss(model, batch):
        ...     return (model(batch["x"])[:, 0] - batch["y"]).square()
        >>> found = audit_neighbours(nn.Linear(3, 1), loss, records, positions=2)
        >>> found.holds, len(found.pairs)
        (True, 8)
    """
    _validate.count(positions=positions, steps=steps)
    sampling, kinds = _checked(data, settings.get("collate"), sampling, changes, steps)
    unknown = settings.keys() - NeighbourSettings.__annotations__.keys()
    if unknown:
        raise TypeError(f"audit_neighbours takes no argument {min(unknown)!r}")
    pairs: list[NeighbourPair] = []
    for count in threads:
        with _threads(count):
            sides = _Sides(model, loss, data, sampling, method, seed, optimizer, settings)
            for number in range(positions):
                for kind in kinds:
                    try:
                        pairs.append(sides.compare(kind, number, positions, steps, count))
                    except _NotSilentError:
                        if changes is not None:
                            raise ValueError(
                                f"changes={kind!r} is not for method {sides.without.method.name!r}, which "
                                "looks at all rows of a draw at once; leave it out"
                            ) from None
    plan, delta = sides.without.plan, sides.without.delta
    return NeighbourAudit(
        pairs=tuple(pairs),
        method=sides.without.method.name,
        steps=steps,
        records=sides.records,
        micro_batch_size=int(sides.without.settings.micro_batch_size or 0),
        draws_numbers=sides.draws_numbers,
        delta=delta,
        plan_epsilon=plan.epsilon(delta).value,
    )


def _checked(
    data: Any, collate: Any, sampling: Sampling | None, changes: Sequence[str] | None, steps: int
) -> tuple[Sampling, tuple[str, ...]]:
    records = len(Source(data, collate))
    if records < 2:
        raise ValueError(f"data holds {records} record: neighbours need at least two")
    sampling = FullBatch(records, steps) if sampling is None else sampling
    if steps > sampling.steps:
        raise ValueError(f"steps={steps}, but sampling plans {sampling.steps}; give at most as many")
    fixed = isinstance(sampling, WithoutReplacement)  # accounted under replace-one, at one number of records
    kinds = tuple(changes or (("replace",) if fixed else CHANGES))
    unknown = [kind for kind in kinds if kind not in CHANGES]
    if unknown:
        raise ValueError(f"changes={unknown[0]!r} is unknown; give some of {', '.join(CHANGES)}")
    if fixed and kinds != ("replace",):
        raise ValueError("WithoutReplacement is accounted under replace-one alone: give changes=('replace',)")
    return sampling, kinds


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- data sets that differ by one record


class _OneMore(torch.utils.data.Dataset):
    """The items of a dataset, and one of them once more at the end."""

    def __init__(self, data: Any, again: int) -> None:
        self._data, self._again = data, again

    def __len__(self) -> int:
        return len(self._data) + 1

    def __getitem__(self, number: int) -> Any:
        return self._data[self._again if number == len(self._data) else number]


def _with_one_more(data: Any, collate: Any, again: int) -> Any:
    """The data with a copy of one record as its last."""
    source = Source(data, collate)
    if not source.is_scanned:
        return _OneMore(data, again)
    return source.take(torch.tensor([*range(len(source)), again]))


# ---- ledgers that decide who is drawn


@dataclass(frozen=True)
class _Drawn:
    """Who is in the draws of one side of a pair.

    Attributes:
        others: the records with numbers below this are drawn by the sampling.
        left_out: numbers of records that are in no draw.
        record: the one that is audited, in every draw; None on the side without it.
        place: where it stands among the others, as a share of their number; 1 for the end.
        everybody: the others are in every draw, whatever the sampling.
    """

    others: int
    left_out: tuple[int, ...] = ()
    record: int | None = None
    place: float = 1.0
    everybody: bool = False


class _Drawing(RecordingLedger):
    """Draws the records that it is told, and keeps the bounds that the noise follows.

    Attributes:
        stood_at: position of the audited record in the first draw.
    """

    def __init__(self, drawn: _Drawn, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._drawn, self.bounds, self.stood_at = drawn, list[dict[str, float]](), 0

    def sample(self, draw: Draw, num_records: int) -> Tensor:
        drawn, sampling = self._drawn, self.plan.sampling_of(draw.name)
        # From the number of others, which is the same on either side.
        ids = range(drawn.others) if drawn.everybody else _draw(sampling, self.secrets, draw, drawn.others)
        kept = [i for i in ids if i not in drawn.left_out and i != drawn.record]
        if drawn.record is not None:
            if isinstance(sampling, WithoutReplacement):
                kept = kept[: sampling.batch_size - 1]
            place = round(drawn.place * len(kept))
            if not self.transcript:
                self.stood_at = place
            kept.insert(place, drawn.record)
        return torch.tensor(kept, dtype=torch.long)

    def release(self, draw: Draw, sums: Mapping[str, Bounded]) -> Sums:
        self.bounds.append({name: float(bounded.add_remove) for name, bounded in sums.items()})
        return super().release(draw, sums)


def _draw(sampling: Sampling, secrets: Secrets, draw: Draw, others: int) -> list[int]:
    return [int(i) for i in sampling.sample(secrets, draw, others)]


class _Replaying(_Drawing, ReplayLedger):
    """The same, with the releases of the other side."""

    def __init__(self, drawn: _Drawn, transcript: Sequence[Sums], *args: Any, **options: Any) -> None:
        # `_Drawing` hands on what it does not know, so the transcript comes first there.
        super().__init__(drawn, transcript, *args, **options)


# ---- a record whose row nobody sees


class _Proxy:
    """Another object, but for what a subclass does differently."""

    def __init__(self, inner: Any, record: int) -> None:
        self._inner, self._record = inner, record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _SilentMethod(_Proxy):
    """A method that does not see the row of one record, which is in the forward nevertheless."""

    def init(self, context: Any) -> Any:
        return self._inner.init(_SilentContext(context, self._record))

    def step(self, context: Any, state: Any) -> Any:
        return self._inner.step(_SilentContext(context, self._record), state)


class _SilentContext(_Proxy):
    def draw(self, name: str = "batch") -> Any:
        return _SilentDraw(self._inner.draw(name), self._record)


class _SilentDraw(_Proxy):
    """A draw whose micro-batches come without one record's row.

    What a method makes of all rows (`rows`) and asks with (`along`) has no place for the record either.
    """

    def query(self, fn: Callable[..., Any], at: Any = None, along: Any = None) -> Any:
        if along is None:
            return self._inner.query(self._hiding(fn), at)
        raise _NotSilentError

    def rows(self, fn: Callable[..., Any], at: Any = None) -> Any:
        raise _NotSilentError

    def _hiding(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def seen(*given: Any) -> Any:
            *rows, ids = given
            keep = (unwrap(ids) != self._record).nonzero().flatten()
            if len(keep) == len(unwrap(ids)):
                return fn(*given)
            kept = Private(unwrap(ids)[keep], ids.draw)
            return fn(*(one.rows(keep) for one in rows), kept)

        return seen


class _NotSilentError(Exception):
    """The method looks at numbers of a whole draw."""


# ---- the comparison


class _Sides:
    """A training with and without one record more, both prepared as for a run."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: Any,
        sampling: Sampling,
        method: Method | None,
        seed: int,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None,
        settings: NeighbourSettings,
    ) -> None:
        collate = settings.get("collate")
        self.records, self._seed = len(Source(data, collate)), seed
        self._optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        own = TrainingSettings(
            seed=seed,
            reproducible=True,  # both sides draw alike; nothing leaves
            micro_batch_size=settings.get("micro_batch_size"),
            views=settings.get("views", 1),
            relation=settings.get("relation", "add_or_remove_one"),
            hardened=settings.get("hardened", False),
            allow_public_duplicates=settings.get("allow_public_duplicates", False),
        )

        def prepared(records: Any) -> TrainingSetup:
            copied = copy.deepcopy(model)
            return prepare(
                copied,
                self._optimizer([p for p in copied.parameters() if p.requires_grad]),
                loss=loss,
                data=records,
                sampling=sampling,
                method=method or DPSGD(noise_multiplier=1.0),
                budget=settings.get("budget"),
                scheduler=None,
                settings=own,
                augmentation=settings.get("augmentation"),
                device=settings.get("device"),
                collate=collate,
            )

        self.without = prepared(data)
        if self.without.plan.unproven or not self.without.plan.releases:
            raise ValueError(
                f"method {self.without.method.name!r} has releases without a proof, or none at all: there is "
                "no bound to hold a movement against"
            )
        # What enters is a copy of the middle record, which the model surely takes.
        self.more = prepared(_with_one_more(data, collate, self.records // 2))
        self._starts = {
            id(side): {name: p.detach().clone() for name, p in side.parameters.items()}
            for side in (self.without, self.more)
        }
        few = _Drawn(min(self.records, math.ceil(sampling.expected_size)), everybody=True)
        first, second = (self._step(self.without, few, number, 1) for number in (0, 1))
        # The records are the same, so what differs is what the key deals them.
        self.draws_numbers = _distance(self.without, first, second)[0] > 0

    def compare(self, change: str, number: int, positions: int, steps: int, threads: int) -> NeighbourPair:
        """The number-th of several pairs of this change."""
        n, new = self.records, self.records  # the copy has the last number
        old = number * n // positions
        place = 1.0 if self.draws_numbers else number / max(1, positions - 1)
        if change == "remove":
            one, other = _Drawn(n, record=old, place=place), _Drawn(n, left_out=(old,))
        elif change == "replace":
            one = _Drawn(n, record=old, place=place)
            other = _Drawn(n, left_out=(old,), record=new, place=place)
        else:
            one, other = _Drawn(n), _Drawn(n, record=new, place=place)
        left = self._step(self.without, one, number, steps)
        right = self._step(
            self.more, other, number, steps, left.transcript, new if change == "silent" else None
        )
        movement, square, allowed = _distance(self.without, left, right, change == "replace")
        delta = self.without.delta
        return NeighbourPair(
            change=change,
            position=max(left.stood_at, right.stood_at),
            threads=threads,
            movement=movement,
            epsilon=gaussian_epsilon(math.sqrt(square), delta),
            claimed=gaussian_epsilon(math.sqrt(allowed), delta),
        )

    def _step(
        self,
        side: TrainingSetup,
        drawn: _Drawn,
        number: int,
        steps: int,
        transcript: Sequence[Sums] | None = None,
        silent: int | None = None,
    ) -> _Drawing:
        """The ledger after these steps from the start, with draws and randomness of this number."""
        start = self._starts[id(side)]
        with torch.no_grad():
            for name, parameter in side.parameters.items():
                parameter.copy_(start[name])
        optimizer = self._optimizer(list(side.parameters.values()))
        seeded = replace(side.settings, seed=1000 * self._seed + number)
        here = replace(side, optimizer=optimizer, settings=seeded)
        if silent is not None:
            method: Any = _SilentMethod(side.method, silent)
            here = replace(here, method=method)
        made = partial(_Drawing, drawn) if transcript is None else partial(_Replaying, drawn, transcript)
        ledger = open_ledger(here, ledger_class=made)
        assert isinstance(ledger, _Drawing)  # one process
        runner = StepRunner(here, ledger)
        for _ in range(steps):
            runner.take()
        return ledger


def _distance(
    side: TrainingSetup, left: _Drawing, right: _Drawing, replaced: bool = False
) -> tuple[float, float, float]:
    """How far the raw sums are apart.

    Returns:
        The largest distance of a release in units of its bound, the sum of squared distances in units of the
        noise, and what the bounds allow that sum to be.
    """
    if left.bounds != right.bounds:
        return math.inf, math.inf, 0.0  # a public threshold that follows from the records
    plan, furthest, square, allowed = side.plan, 0.0, 0.0, 0.0
    for ours, theirs, bounds in zip(left.sums, right.sums, left.bounds, strict=True):
        for mechanism, members in plan.groups(ours):
            apart = {
                name: {key: value.double() - theirs[name][key].double() for key, value in ours[name].items()}
                for name in members
            }
            white = mechanism.whitened(apart, bounds)
            length = sum(float(v.square().sum()) for tensors in white.values() for v in tensors.values())
            ratio = max(plan[name].replace_ratio for name in members) if replaced else 1.0
            limit = ratio**2 * mechanism.whitened_square()
            furthest = max(furthest, math.sqrt(length / limit))
            square, allowed = square + length, allowed + limit
    return furthest, square, allowed
