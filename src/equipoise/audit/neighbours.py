"""Does anything else move? Steps on neighbouring data sets, with a model and data of your own.

The guarantee says how far the released sum may move when one record enters, leaves or is replaced. Here it is
measured. A training is prepared, a step is taken on either data set, and the difference of the exact sums is
held against the bound that the noise follows. Several steps are compared under the same releases, so that
both stay at the same parameters.

One record of the data leaves, at each position another one. What enters in its place is a copy of a record
with other contents, and at every other position one whose floating-point numbers are far larger than those
of the data (`SCALES`). So records of large gradients are met, too.

What is compared must differ by one record only. Every other record keeps its number, which keys the random
numbers of its item; the draws hold the same others; and the record that is audited is in every draw. Where
collate, augmentation, model or loss draw random numbers (dropout, places dealt at random) that record comes
last in its draw, so that the others keep theirs: their law is the same with it and without, and the proof may
leave them where they are. Otherwise it stands at a position of the draw that is tried.

A record whose own gradient is left out (`"silent"`) shows what else moves: nothing may.

This compares what was tried, and proves nothing. A model that mixes records only under conditions that the
data do not meet passes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from equipoise import _validate
from equipoise._tree import leaves, map_leaves
from equipoise.gradients.engine_inputs import Loss, map_records
from equipoise.methods import DPSGD, Method
from equipoise.privacy import Bounded, Budget, Draw, FullBatch, Private, Sampling, WithoutReplacement
from equipoise.privacy.accounting.epsilon import gaussian_epsilon
from equipoise.privacy.ledger.replay import RecordingLedger, ReplayLedger
from equipoise.privacy.mechanisms.base import Sums
from equipoise.privacy.private import unwrap
from equipoise.training.assumptions import Assumption
from equipoise.training.record_rows import RecordSource
from equipoise.training.run_ledger import open_ledger
from equipoise.training.setup.training_settings import CommonSettings, TrainingSettings, refuse_unknown
from equipoise.training.setup.training_setup import TrainingSetup, prepare
from equipoise.training.step import StepRunner

__all__ = [
    "CHANGES",
    "MOVEMENT_SLACK",
    "SCALES",
    "NeighbourAudit",
    "NeighbourPair",
    "NeighbourSettings",
    "audit_neighbours",
]

CHANGES = ("add", "remove", "replace", "silent")
"""What is done to one record; a silent one enters without a gradient of its own."""

SCALES = (1.0, -10.0)
"""What the floating-point numbers of a record that enters are multiplied by, in turn over the positions."""

MOVEMENT_SLACK = 1e-5
"""What rounding may add, in units of the bound."""


@dataclass(frozen=True)
class NeighbourPair:
    """Two neighbouring data sets, and how far their sums were apart.

    Attributes:
        change: one of `CHANGES`.
        position: of the record in its first draw.
        scale: what the floating-point numbers of the record that enters were multiplied by; 1 if none does.
        threads: that the processor used.
        movement: the largest distance of two sums, in units of the bound of this change.
        epsilon: of these steps for this very pair, at the audit's delta.
        claimed: what the bounds allow the steps, for a record that is in all of their draws.
    """

    change: str
    position: int
    scale: float
    threads: int
    movement: float
    epsilon: float
    claimed: float

    @property
    def limit(self) -> float:
        """The largest movement that holds: the bound, and nothing beside a silent record."""
        return MOVEMENT_SLACK if self.change == "silent" else 1 + MOVEMENT_SLACK

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
        draws_numbers: whether collate, augmentation, model or loss draw random numbers.
        left_out: the changes that were not tried, and why.
        delta: that the epsilons are for.
        plan_epsilon: what the whole plan claims at delta.
    """

    pairs: tuple[NeighbourPair, ...]
    method: str
    steps: int
    records: int
    micro_batch_size: int
    draws_numbers: bool
    left_out: Mapping[str, str]
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
        return {**asdict(self), "holds": self.holds, "slack": MOVEMENT_SLACK}


class NeighbourSettings(CommonSettings, total=False):
    """Arguments that mean what they mean for `PrivateTraining`."""

    views: int
    budget: Budget | None
    augmentation: Callable[[Any, torch.Generator], Any] | None
    collate: Callable[[list[Any]], Any] | None
    device: str | torch.device | None


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
        changes: some of `CHANGES`; by default all that sampling and method have a place for.
        steps: to compare on each pair of data sets.
        threads: numbers of processor threads to try.
        seed: of the draws and of the places.
        optimizer: parameters -> optimiser; plain SGD at 0.1 by default. It matters after the first step.
        settings: as for `PrivateTraining`.

    Raises:
        ValueError: fewer than two records, no number of threads, a change that sampling or method have no
            place for, a method whose releases are not proved; and whatever refuses the training.

    Example:
        >>> records = {"x": torch.randn(50, 3), "y": torch.randn(50)}
        >>> def loss(model, batch):
        ...     return (model(batch["x"])[:, 0] - batch["y"]).square()
        >>> found = audit_neighbours(nn.Linear(3, 1), loss, records, positions=2)
        >>> found.holds, len(found.pairs)
        (True, 8)
    """
    _validate.count(positions=positions, steps=steps)
    if not threads:
        raise ValueError(
            f"threads={threads!r} holds no number, so that nothing would be compared; give for instance "
            "threads=(1, 2)"
        )
    for count in threads:
        _validate.count("the number of processor threads", threads=count)
    refuse_unknown("audit_neighbours", settings, NeighbourSettings)
    sampling, kinds = _checked(data, settings.get("collate"), sampling, changes, steps)
    left_out = {} if changes is not None else {kind: FIXED_SIZE for kind in CHANGES if kind not in kinds}
    pairs: list[NeighbourPair] = []
    for count in threads:
        with _threads(count):
            audited = _Audited(model, loss, data, sampling, method, positions, seed, optimizer, settings)
            for number in range(positions):
                for kind in kinds:
                    if kind in left_out:
                        continue
                    try:
                        pairs.append(audited.compare(kind, number, steps, count))
                    except _NotSilentError:
                        left_out[kind] = WHOLE_DRAW
                        if changes is not None:
                            raise ValueError(
                                f"changes={kind!r} is not for method {audited.setup.method.name!r}: "
                                f"{WHOLE_DRAW}; leave it out"
                            ) from None
    setup = audited.setup
    return NeighbourAudit(
        pairs=tuple(pairs),
        method=setup.method.name,
        steps=steps,
        records=audited.records,
        micro_batch_size=int(setup.settings.micro_batch_size or 0),
        draws_numbers=audited.draws_numbers,
        left_out=left_out,
        delta=setup.delta,
        plan_epsilon=setup.plan.epsilon(setup.delta).value,
    )


FIXED_SIZE = "subsets of a fixed size are accounted under replace-one alone"
WHOLE_DRAW = "the method looks at all rows of a draw at once"


def _checked(
    data: Any, collate: Any, sampling: Sampling | None, changes: Sequence[str] | None, steps: int
) -> tuple[Sampling, tuple[str, ...]]:
    records = len(RecordSource(data, collate))
    if records < 2:
        raise ValueError(f"data holds {records} record: neighbours need at least two")
    sampling = FullBatch(records, steps) if sampling is None else sampling
    if steps > sampling.steps:
        raise ValueError(f"steps={steps}, but sampling plans {sampling.steps}; give at most as many")
    fixed = isinstance(sampling, WithoutReplacement)
    kinds = tuple(changes or (("replace",) if fixed else CHANGES))
    unknown = [kind for kind in kinds if kind not in CHANGES]
    if unknown:
        raise ValueError(f"changes={unknown[0]!r} is unknown; give some of {', '.join(CHANGES)}")
    if fixed and kinds != ("replace",):
        raise ValueError(f"changes={changes!r}, but {FIXED_SIZE}; give changes=('replace',)")
    return sampling, kinds


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- records that enter


@dataclass(frozen=True)
class _Entering:
    """A record that may enter: a copy of one of the data, its floating-point numbers scaled."""

    number: int
    scale: float


class _Extended(torch.utils.data.Dataset):
    """The items of a dataset, and behind them those that may enter."""

    def __init__(self, data: Any, entering: Sequence[_Entering]) -> None:
        self._data, self._entering = data, entering

    def __len__(self) -> int:
        return len(self._data) + len(self._entering)

    def __getitem__(self, number: int) -> Any:
        count = len(self._data)
        if number < count:
            return self._data[number]
        one = self._entering[number - count]

        def scaled(leaf: Any) -> Any:
            is_real = isinstance(leaf, float) or getattr(getattr(leaf, "dtype", None), "kind", "") == "f"
            real_tensor = isinstance(leaf, Tensor) and leaf.is_floating_point()
            return leaf * one.scale if is_real or real_tensor else leaf

        return map_leaves(scaled, self._data[one.number])


def _extended(source: RecordSource, data: Any, entering: Sequence[_Entering], collate: Any) -> RecordSource:
    """The records, and behind them those that may enter."""
    if not source.is_scanned:
        return RecordSource(_Extended(data, entering), collate)
    scales = torch.tensor([one.scale for one in entering])

    def scaled(leaf: Tensor) -> Tensor:
        if leaf.is_floating_point():
            factors = scales.to(leaf).reshape(-1, *[1] * (leaf.ndim - 1))
            leaf[len(source) :] *= factors
        return leaf

    numbers = [*range(len(source)), *(one.number for one in entering)]
    return RecordSource(map_records(scaled, source.take(torch.tensor(numbers))), collate)


def _unlike(source: RecordSource, record: int) -> int:
    """The number of a record with other contents, from half-way round on; of any if all are alike."""

    def contents(number: int) -> list[Any] | None:
        try:
            return leaves(source.take(torch.tensor([number])))
        except Exception:  # it has weight zero in a training, and would show nothing
            return None

    def differ(one: Any, other: Any) -> bool:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return not torch.equal(one, other)
        return bool(one != other)

    own, count = contents(record), len(source)
    for step in range(count):
        number = (record + count // 2 + step) % count
        there = None if number == record else contents(number)
        if there is not None and (own is None or any(map(differ, own, there))):
            return number
    return (record + 1) % count


# ---- ledgers that decide who is drawn


@dataclass(frozen=True)
class _Drawn:
    """Who is in the draws of one side of a pair.

    Attributes:
        others: the records with numbers below this are drawn by the sampling.
        old: the one of them that is in no draw by itself.
        record: the one that is audited, in every draw; None on the side without it.
        place: where it stands among the others, as a share of their number; 1 for the end.
    """

    others: int
    old: int
    record: int | None = None
    place: float = 1.0


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
        ids = sampling.sample(self.secrets, draw, drawn.others).tolist()
        kept = [i for i in ids if i != drawn.old]
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


class _Audited:
    """A training, prepared as for a run, with records that may enter behind those of the data."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: Any,
        sampling: Sampling,
        method: Method | None,
        positions: int,
        seed: int,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None,
        settings: NeighbourSettings,
    ) -> None:
        collate = settings.get("collate")
        source = RecordSource(data, collate)
        given: dict[str, Any] = {**settings}
        own = {item.name for item in fields(TrainingSettings)} & given.keys()
        self.records, self._positions, self._seed = len(source), positions, seed
        self._optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        copied = copy.deepcopy(model)
        self.setup = setup = prepare(
            copied,
            self._optimizer([p for p in copied.parameters() if p.requires_grad]),
            loss=loss,
            data=data,
            sampling=sampling,
            method=method or DPSGD(noise_multiplier=1.0),
            # Reproducible: both sides draw alike. Nothing leaves.
            settings=TrainingSettings(
                seed=seed, reproducible=True, **{name: given.pop(name) for name in own}
            ),
            **given,
        )
        if setup.plan.unproven or not setup.plan.releases:
            raise ValueError(
                f"method {setup.method.name!r} has releases without a proof, or none at all: there is no "
                "bound to hold a movement against"
            )
        self.draws_numbers = setup.rows.dealt or Assumption.OWN_NUMBERS in setup.found
        self._entering = [
            _Entering(_unlike(source, self._old(number)), SCALES[number % len(SCALES)])
            for number in range(positions)
        ]
        self._rows = copy.copy(setup.rows)
        self._rows.source = _extended(source, data, self._entering, collate)
        self._start = {name: p.detach().clone() for name, p in setup.parameters.items()}

    def _old(self, number: int) -> int:
        """The record of the data that leaves or is replaced."""
        return number * self.records // self._positions

    def compare(self, change: str, number: int, steps: int, threads: int) -> NeighbourPair:
        """The number-th of several pairs of this change."""
        old, new = self._old(number), self.records + number
        place = 1.0 if self.draws_numbers else number / max(1, self._positions - 1)
        # The population that the user states need not hold a record more than the data.
        without = _Drawn(self.records, old)
        before, after = (replace(without, record=one, place=place) for one in (old, new))
        one, other = {"remove": (before, without), "replace": (before, after)}.get(change, (without, after))
        left = self._step(one, number, steps)
        right = self._step(other, number, steps, left.transcript, new if change == "silent" else None)
        movement, square, allowed = _distance(self.setup, left, right, change == "replace")
        return NeighbourPair(
            change=change,
            position=max(left.stood_at, right.stood_at),
            scale=1.0 if change == "remove" else self._entering[number].scale,
            threads=threads,
            movement=movement,
            epsilon=gaussian_epsilon(math.sqrt(square), self.setup.delta),
            claimed=gaussian_epsilon(math.sqrt(allowed), self.setup.delta),
        )

    def _step(
        self,
        drawn: _Drawn,
        number: int,
        steps: int,
        transcript: Sequence[Sums] | None = None,
        silent: int | None = None,
    ) -> _Drawing:
        """The ledger after these steps from the start, with draws and randomness of this number."""
        setup = self.setup
        with torch.no_grad():
            for name, parameter in setup.parameters.items():
                parameter.copy_(self._start[name])
        optimizer = self._optimizer(list(setup.parameters.values()))
        seeded = replace(setup.settings, seed=1000 * self._seed + number)
        here = replace(setup, optimizer=optimizer, settings=seeded, rows=self._rows)
        if silent is not None:
            method: Any = _SilentMethod(setup.method, silent)
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
