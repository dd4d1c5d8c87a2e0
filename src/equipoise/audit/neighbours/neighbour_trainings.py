"""Trainings on two neighbouring data sets, and how far what they release is apart."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.audit.neighbours.neighbour_findings import NeighbourPair
from equipoise.audit.neighbours.scaled_copies import (
    SCALES,
    ScaledCopy,
    other_record,
    smallest_and_largest,
    with_copies,
)
from equipoise.audit.neighbours.silent_record import SilentMethod
from equipoise.audit.replay import RecordingLedger
from equipoise.privacy import Draw, WithoutReplacement
from equipoise.privacy.accounting.epsilon import gaussian_epsilon
from equipoise.privacy.mechanisms.base import Sums
from equipoise.statements.assumptions import Assumption
from equipoise.training.arguments import Run, TrainingInputs
from equipoise.training.owners import UserSource
from equipoise.training.record_source import RecordSource
from equipoise.training.run_ledger import open_ledger
from equipoise.training.setup.training_setup import TrainingSetup, prepare
from equipoise.training.step import StepRunner


@dataclass(frozen=True)
class ChosenDraws:
    """Who is in the draws of one side of a pair.

    Attributes:
        others: the records with numbers below this are drawn by the sampling.
        old: those of them that are in no draw by themselves: one, or all of a user.
        audited: those that are audited, in every draw: one, or all of a user; none on the side without.
        place: where they stand among the others, as a share of their number; 1 for the end.
    """

    others: int
    old: tuple[int, ...]
    audited: tuple[int, ...] = ()
    place: float = 1.0


class ChosenDrawsLedger(RecordingLedger):
    """A ledger that draws these records.

    Attributes:
        stood_at: position of the first audited record in the first draw.
    """

    def __init__(self, drawn: ChosenDraws, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._drawn, self.stood_at = drawn, 0

    def sample(self, draw: Draw, num_records: int) -> Tensor:
        drawn, sampling = self._drawn, self.plan.sampling_of(draw.name)
        # From the number of others, which is the same on either side.
        ids = sampling.sample(self.secrets, draw, drawn.others).tolist()
        kept = [i for i in ids if i not in drawn.old]
        if drawn.audited:
            if isinstance(sampling, WithoutReplacement):
                kept = kept[: sampling.batch_size - len(drawn.audited)]
            place = round(drawn.place * len(kept))
            if not self.transcript:
                self.stood_at = place
            kept[place:place] = drawn.audited
        return torch.tensor(kept, dtype=torch.long)


class NeighbourTrainings:
    """A training, prepared as for a run, with records or users that may enter behind those of the data."""

    def __init__(
        self,
        positions: int,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None,
        model: nn.Module,
        run: Run,
        **given: Any,
    ) -> None:
        """`run` and `given` as for `PrivateTraining`; the model is copied."""
        self._positions, self._seed = positions, run.seed
        self._optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        model = copy.deepcopy(model)
        start = self._optimizer([p for p in model.parameters() if p.requires_grad])
        inputs = TrainingInputs.of(model=model, optimizer=start, run=run, **given)
        records, collate = inputs.data.records, inputs.data.collate  # without a column that names users
        source = RecordSource(records, collate)
        self.records = len(source)
        self.setup = setup = prepare(inputs)
        self._owners = setup.rows.owners
        self._units = self.records if self._owners is None else self._owners.count
        self._users_drawn = self._owners is not None and self._owners.unit.joined is not None
        if setup.plan.guarantee != "proven" or not setup.plan.releases:
            raise ValueError(
                f"method {setup.method.name!r} has releases without a proof, or none at all: there is no "
                "bound to hold a movement against"
            )
        self.draws_numbers = setup.rows.random_places or Assumption.OWN_NUMBERS in setup.found
        # A single position is the first record's. Where a longer record changes the shape in which random
        # numbers are drawn the others get other ones: of the same law, but the sums are no longer comparable.
        tries_extremes = positions > 1 and not (
            self.draws_numbers and Assumption.SHAPES_FOLLOW in setup.found
        )
        extremes = (smallest_and_largest(source) if tries_extremes else None) or ()
        self._extremes = tuple(dict.fromkeys(map(self._unit_of, extremes)))
        if len(self._extremes) < 2:  # one user owns both
            self._extremes = ()
        entering = [*self._extremes, *(self._other(source, n) for n in range(len(self._extremes), positions))]
        self._scales = [SCALES[number % len(SCALES)] for number in range(len(entering))]
        copies = [
            [ScaledCopy(record, scale) for record in self._records_of(unit)]
            for unit, scale in zip(entering, self._scales, strict=True)
        ]
        self._rows = copy.copy(setup.rows)
        self._rows.source = with_copies(source, records, list(itertools.chain(*copies)), collate)
        if (weights := setup.rows.source.of_records.weights) is not None:
            copied = [one.number for group in copies for one in group]
            self._rows.source.weights = torch.cat([weights, weights[copied]])
        if self._owners is not None:
            self._rows.owners = self._owners.with_newcomers([len(one) for one in copies])
            if self._users_drawn:
                self._rows.source = UserSource(self._rows.source, self._rows.owners)
        starts = itertools.pairwise(itertools.accumulate(map(len, copies), initial=self.records))
        self._new = [tuple(range(start, stop)) for start, stop in starts]
        self._start = {name: p.detach().clone() for name, p in setup.parameters.items()}

    def _unit_of(self, record: int) -> int:
        """The record itself, or the user who owns it."""
        return record if self._owners is None else int(self._owners.users_of(torch.tensor([record])))

    def _records_of(self, unit: int) -> tuple[int, ...]:
        """The record itself, or all records of the user."""
        return (unit,) if self._owners is None else self._owners.all_of(unit)

    def _numbers(self, unit: int) -> tuple[int, ...]:
        """What draws hold of a record or user of the data."""
        return (unit,) if self._users_drawn else self._records_of(unit)

    def _old(self, number: int) -> int:
        """The record or user of the data that leaves or is replaced."""
        if number < len(self._extremes):
            return self._extremes[number]
        return number * self._units // self._positions

    def _other(self, source: RecordSource, number: int) -> int:
        """A record with other contents than the old one, or the user who owns such a record."""
        old = self._old(number)
        found = self._unit_of(other_record(source, self._records_of(old)[0]))
        return found if found != old else (old + self._units // 2) % self._units

    def _copy(self, change: str, number: int) -> int:
        """Which copy enters. The smallest and the largest enter themselves, or replace each other."""
        return 1 - number if change == "replace" and number < len(self._extremes) else number

    def compare(self, change: str, number: int, steps: int, threads: int) -> NeighbourPair:
        """The number-th of several pairs of this change."""
        old, copied = self._numbers(self._old(number)), self._copy(change, number)
        new = (self._units + copied,) if self._users_drawn else self._new[copied]
        place = 1.0 if self.draws_numbers else number / max(1, self._positions - 1)
        # The population that the user states need not hold a record more than the data.
        without = ChosenDraws(self._units if self._users_drawn else self.records, old)
        before, after = (replace(without, audited=those, place=place) for those in (old, new))
        one, other = {"remove": (before, without), "replace": (before, after)}.get(change, (without, after))
        left = self._step(one, number, steps)
        right = self._step(other, number, steps, left.transcript, new if change == "silent" else None)
        movement, square, allowed = _distance(self.setup, left, right, change == "replace")
        return NeighbourPair(
            change=change,
            position=max(left.stood_at, right.stood_at),
            scale=1.0 if change == "remove" else self._scales[copied],
            threads=threads,
            movement=movement,
            epsilon=gaussian_epsilon(math.sqrt(square), self.setup.delta),
            claimed=gaussian_epsilon(math.sqrt(allowed), self.setup.delta),
        )

    def _step(
        self,
        drawn: ChosenDraws,
        number: int,
        steps: int,
        transcript: Sequence[Sums] | None = None,
        silent: tuple[int, ...] | None = None,
    ) -> ChosenDrawsLedger:
        """The ledger after these steps from the start, with draws and randomness of this number."""
        setup = self.setup
        with torch.no_grad():
            for name, parameter in setup.parameters.items():
                parameter.copy_(self._start[name])
        optimizer = self._optimizer(list(setup.parameters.values()))
        seeded = replace(setup.run, seed=1000 * self._seed + number)
        here = replace(setup, optimizer=optimizer, run=seeded, rows=self._rows)
        if silent is not None:
            method: Any = SilentMethod(setup.method, silent)
            here = replace(here, method=method)
        ledger = open_ledger(here, ledger_class=partial(ChosenDrawsLedger, drawn, replayed=transcript))
        assert isinstance(ledger, ChosenDrawsLedger)  # one process
        runner = StepRunner(here, ledger)
        for _ in range(steps):
            runner.take()
        return ledger


def _distance(
    side: TrainingSetup, left: ChosenDrawsLedger, right: ChosenDrawsLedger, replaced: bool = False
) -> tuple[float, float, float]:
    """How far the raw sums are apart.

    Returns:
        The largest distance of a release in units of its bound, the sum of squared distances in units of the
        noise, and what the bounds allow that sum to be.
    """
    if left.bounds != right.bounds:
        return math.inf, math.inf, 0.0  # a public threshold that follows from the records
    plan, furthest, square, allowed = side.plan, 0.0, 0.0, 0.0
    for draw, ours, theirs, bounds in zip(left.draws, left.sums, right.sums, left.bounds, strict=True):
        for mechanism, members in plan.groups(ours, draw.ordinal):
            apart = {
                name: {key: value.double() - theirs[name][key].double() for key, value in ours[name].items()}
                for name in members
            }
            white = mechanism.whitened(apart, bounds)
            length = sum(float(v.square().sum()) for tensors in white.values() for v in tensors.values())
            if not math.isfinite(length):  # NaN would be no movement: it exceeds nothing
                return math.inf, math.inf, 0.0
            ratio = max(plan[name].replace_ratio for name in members) if replaced else 1.0
            # a user's records that are drawn by themselves each move a sum by its bound
            limit = (ratio * plan.unit.group) ** 2 * mechanism.whitened_square()
            furthest = max(furthest, math.sqrt(length / limit))
            square, allowed = square + length, allowed + limit
    return furthest, square, allowed
