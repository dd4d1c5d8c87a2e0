"""A training of canaries through the library's own code, and what an attacker makes of what it released.

Half of the canaries, chosen at random, take part in one training under a ledger that keeps what left. Then
the attacker replays it: the same method on *all* canaries, every one in every draw, forced to the same
releases. Its public state is then the same at every step (that is checked), and its raw sums are what each
canary would have contributed. With y the release and s the contribution in a canary's coordinates, both in
units of the noise, and q the rate of the draw,

    L = sum over draws log(1 - q + q exp(<y, s> - |s|^2 / 2))

is the log-likelihood ratio of presence, if noise and sampling are what the plan says; if they are not, it is
a statistic like any other. With noise over steps s has parts in later releases too, and y there counts with
them. Where records take turns in one of m groups, L is log(1/m sum over groups exp L_group), of the draws of
each group at their own rate. An attacker who knows the assignment takes the term of the right group: those
of the first one are looked at, of whose parts the end of the run cuts off nothing.

A user is a canary whose G records have one gradient. Where they are drawn by themselves, k of them are in a
draw with the binomial probability, and a draw's term is

    log sum_k Binomial(G, q)(k) exp(k/G <y, s> - (k/G)^2 |s|^2 / 2),

of the contribution s of all G.

Of neighbours by replacement all canaries are there, each at random as a record or as its opposite, of
gradient g or -g. The attacker replays both, and the ratio is that of the one against the other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equipoise._tree import map_leaves
from equipoise.audit.replay import RecordingLedger
from equipoise.methods import Method, Setting
from equipoise.privacy import RECORD, Budget, Draw, PrivacyPlan, Sampling, Unit
from equipoise.privacy.mechanisms.base import NoiseHistory, Past, Sums
from equipoise.testing.canaries import CanaryLayout, canary_loss
from equipoise.training.arguments import Data, Record, Run, TrainingInputs, Users
from equipoise.training.run_ledger import open_ledger
from equipoise.training.setup.training_setup import TrainingSetup, prepare
from equipoise.training.step import StepRunner


class FullBatchLedger(RecordingLedger):
    """The attacker's: every record in every draw, and the releases of the real training."""

    def sample(self, draw: Draw, num_records: int) -> Tensor:
        return torch.arange(num_records)


@dataclass
class InMemoryTraining:
    """A training that is taken step by step, under a ledger that can be looked through.

    Attributes:
        setup: model, method, plan and the rest.
        ledger: takes the releases.
        steps: takes the steps.
    """

    setup: TrainingSetup
    ledger: RecordingLedger
    steps: StepRunner

    @classmethod
    def open(
        cls,
        method: Method,
        model: torch.nn.Module,
        loss: Callable[..., Tensor],
        data: Mapping[str, Tensor],
        sampling: Sampling,
        budget: Budget | None,
        *,
        seed: int,
        learning_rate: float = 1.0,
        make_ledger: Callable[..., RecordingLedger] = RecordingLedger,
        unit: Record | Users | str = "record",
        hardened: bool = False,
    ) -> InMemoryTraining:
        """A training at its start; noise and draws follow the seed."""
        given = TrainingInputs.of(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=learning_rate),
            loss=loss,
            # Canaries are cheap: one microbatch per draw.
            data=Data(data, microbatch_size=max(1, len(next(iter(data.values()))))),
            sampling=sampling,
            method=method,
            budget=budget,
            unit=unit,
            run=Run(seed=seed, reproducible=True, hardened=hardened),  # for the attacker's replays
        )
        setup = prepare(given)
        ledger = open_ledger(setup, ledger_class=make_ledger)
        assert isinstance(ledger, RecordingLedger)  # one process
        return cls(setup, ledger, StepRunner(setup, ledger))

    def run(self, steps: int | None = None) -> InMemoryTraining:
        """These steps, or all that are left."""
        for _ in range(self.setup.sampling.steps - self.steps.done if steps is None else steps):
            self.steps.take()
        return self

    @property
    def parameters(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.setup.parameters.values()])


@dataclass(frozen=True, kw_only=True)
class CanaryTraining:
    """What a training of canaries and the attacker's replays of it have alike.

    Attributes:
        make_method: called for the training and for every replay.
        sampling: its population is a public number; `canaries` or more is usual.
        budget: as for `PrivateTraining`; None where the method has multipliers of its own.
        canaries: M.
        layout: of the canaries.
        seed: of the choice of canaries, of draws and of noise.
        relation: of the plan.
        hardened: noise on a grid of integers.
        unit: of privacy; a canary is one user with as many records as the unit has.
        knows_deal: the attacker knows who is assigned to the first slot of an epoch, and looks at these.
    """

    make_method: Callable[[], Method]
    sampling: Sampling
    budget: Budget | None
    canaries: int
    layout: CanaryLayout = CanaryLayout()
    seed: int
    relation: str = "add_or_remove_one"
    hardened: bool = False
    unit: Unit = RECORD
    knows_deal: bool = False

    def __post_init__(self) -> None:
        if self.knows_deal and self.unit.group > 1:
            records = self.unit.records
            raise ValueError(
                f"unit={self.unit!r} assigns each record to a slot by itself, and an attacker who knows the "
                f"slots looks at units of one slot. Audit users that are drawn, Unit('user', "
                f"{records}, rows='mean'), or a design of one slot. Nothing was trained"
            )

    def open(
        self, data: Mapping[str, Tensor], make_ledger: Callable[..., RecordingLedger] = RecordingLedger
    ) -> InMemoryTraining:
        """The training of these canaries, under this ledger; always with the same draws and noise."""
        unit: Record | Users = Record(relation=self.relation)
        if self.unit != RECORD:
            count = self.unit.records
            data = {name: value.repeat_interleave(count, 0) for name, value in data.items()}
            owner = torch.arange(len(data["index"])) // count
            unit = Users(owner, records_per_user=count, rows=self.unit.rows, relation=self.relation)
        return InMemoryTraining.open(
            self.make_method(),
            self.layout.model(self.canaries),
            canary_loss(self.layout.kind),
            data,
            self.sampling,
            self.budget,
            seed=self.seed,
            learning_rate=self.sampling.expected_size,  # a canary's part moves its own row by its length
            hardened=self.hardened,
            make_ledger=make_ledger,
            unit=unit,
        )

    @functools.cached_property
    def directions(self) -> Tensor | None:
        """Of the canaries' gradients, [M, P]; None where each has parameters of its own."""
        along = self.layout.along
        if along is None:
            return None
        # What is public at the first step does not depend on the records: any will do.
        some = torch.eye(self.canaries, self.canaries * self.layout.width)
        anybody = self.layout.records(torch.arange(self.canaries), some)
        return self.open(anybody).steps.ask(lambda context, state: along(context))

    def records(self, chosen: Tensor, signs: Tensor | None = None) -> dict[str, Tensor]:
        return self.layout.records(chosen, self.directions, signs)

    def replay(self, real: InMemoryTraining, data: Mapping[str, Tensor]) -> Tensor:
        """L of these records, one per canary, against nobody in their places, [M]."""
        by_turn: dict[str, Tensor] = {}
        for draw, ratios in self.replayed_draws(real, data):
            sampling = real.ledger.plan.sampling_of(draw.name)
            turns = torch.zeros(sampling.draws_per_epoch, self.canaries, dtype=torch.float64)
            by_turn.setdefault(draw.name, turns)[draw.ordinal % sampling.draws_per_epoch] += ratios
        found = torch.zeros(self.canaries, dtype=torch.float64)
        for turns in by_turn.values():
            found += turns[0] if self.knows_deal else turns.logsumexp(dim=0) - math.log(len(turns))
        return found

    def replayed_draws(self, real: InMemoryTraining, data: Mapping[str, Tensor]) -> list[tuple[Draw, Tensor]]:
        """Every draw that was released, and its part of L, [M]."""
        released = real.ledger
        attacker = self.open(data, functools.partial(FullBatchLedger, replayed=released.transcript)).run()
        if not torch.equal(attacker.parameters, real.parameters):
            raise RuntimeError(
                f"the attacker's replay of {real.setup.method.name!r} does not end at the parameters of the "
                "training: its state is not a function of what was released"
            )
        white = whitened(released, released.transcript)
        found = []
        for number, draw in enumerate(released.draws):
            rate = released.plan.sampling_of(draw.name).turn_rate
            inner, half = _exponent(released, number, attacker.ledger.sums[number], white, self.canaries)
            found.append((draw, _log_ratio(inner, half, rate, self.unit.group)))
        return found

    def moved(self, real: InMemoryTraining) -> Tensor:
        """Where each canary's own parameters ended, [M, numbers of a canary]."""
        if self.directions is not None:
            return (self.directions @ real.parameters)[:, None]
        ends = [value.detach().view(self.canaries, -1) for value in real.setup.parameters.values()]
        return torch.cat(ends, dim=1)

    def dealt_elsewhere(self, real: InMemoryTraining, present: Tensor) -> Tensor:
        """Which of the canaries with these numbers are known not to be in the first slot of an epoch."""
        if not self.knows_deal:
            return present[:0]
        first, ledger = real.ledger.draws[0], real.ledger
        records = len(present) if ledger.keys is None else ledger.keys
        assigned = ledger.plan.sampling_of(first.name).sample(ledger.secrets, first, records)
        elsewhere = torch.ones(len(present), dtype=torch.bool)
        elsewhere[assigned] = False
        return present[elsewhere]


@dataclass(frozen=True)
class Rehearsal:
    """Canaries, and what is seen of them.

    Attributes:
        present: [M], who took part; of neighbours by replacement, the record (True) or its opposite. Without
            those who were assigned elsewhere (`CanaryTraining.knows_deal`).
        log_ratios: [M], L; zero where nothing was released with noise.
        moved: [M], how far each canary's parameters moved; of neighbours by replacement, which way.
        plan: what was released, for the claim.
    """

    present: Tensor
    log_ratios: Tensor
    moved: Tensor
    plan: PrivacyPlan


def rehearse(
    training: CanaryTraining,
    *,
    neighbours: str | None = None,
    make_ledger: Callable[..., RecordingLedger] = RecordingLedger,
) -> Rehearsal:
    """One training with about half of the canaries, and the attacker's log-likelihood ratios of all.

    Args:
        training: of the canaries.
        neighbours: the relation of the data sets that are told apart; the plan's when None.
        make_ledger: a kind of `RecordingLedger`; audits of planted bugs give their own.
    """
    canaries = training.canaries
    present = torch.rand(canaries, generator=torch.Generator().manual_seed(training.seed)) < 0.5
    everyone, replaced = torch.arange(canaries), (neighbours or training.relation) == "replace_one"
    chosen = (everyone, torch.where(present, 1.0, -1.0)) if replaced else (everyone[present],)
    real = training.open(training.records(*chosen), make_ledger).run()
    ends = training.moved(real)
    # Descent: the record of gradient g goes to -g, its opposite to g.
    moved = -ends.sum(dim=1) if replaced else ends.abs().amax(dim=1)
    ratios = torch.zeros(canaries)
    if real.ledger.transcript:
        ratios = training.replay(real, training.records(everyone))
        if replaced:  # L of the record against nobody, less that of its opposite against nobody
            ratios -= training.replay(real, training.records(everyone, -torch.ones(canaries)))
    seen = torch.ones(canaries, dtype=torch.bool)
    seen[training.dealt_elsewhere(real, chosen[0])] = False
    return Rehearsal(present[seen], ratios[seen], moved[seen], real.setup.plan)


def rehearse_in_turn(
    training: CanaryTraining,
    times: int,
    *,
    make_ledger: Callable[..., RecordingLedger] = RecordingLedger,
) -> Rehearsal:
    """As `rehearse`, of one canary, many times over in one long training.

    For methods that release few numbers about all records together, which canaries would share. After every
    T steps of the plan it is chosen anew whether the canary takes part: what was released before is public,
    so each of these stretches is an experiment of its own, with the noise of a training of T steps.

    Args:
        training: of one canary; the method takes a `noise_multiplier`.
        times: how many experiments.
        make_ledger: as for `rehearse`.
    """
    steps, replaced = training.sampling.steps, training.relation == "replace_one"
    setting = Setting(
        sampling=training.sampling, budget=training.budget, relation=training.relation, unit=training.unit
    )
    plan = training.make_method().plan(setting).releases
    noise = {"noise_multiplier": plan["gradient"].noise_multiplier}
    long = replace(
        training,
        make_method=lambda: replace(training.make_method(), **noise),  # type: ignore[type-var]
        sampling=replace(training.sampling, steps=steps * times),  # type: ignore[type-var]
        budget=None,
    )
    present = torch.rand(times, generator=torch.Generator().manual_seed(training.seed)) < 0.5

    class Taking(make_ledger):  # type: ignore[misc, valid-type]
        """Of the canary, and behind it its opposite, the one whose turn it is."""

        def sample(self, draw: Draw, num_records: int) -> Tensor:
            ids: Tensor = super().sample(draw, num_records)
            own = num_records // 2 if replaced else num_records
            return ids[(ids < own) == present[draw.ordinal // steps]]

    both = torch.tensor([0, 0]), torch.tensor([1.0, -1.0])
    canary = torch.zeros(1, dtype=torch.long)
    real = long.open(long.records(*both) if replaced else long.records(canary), Taking).run()

    def ratios(sign: float) -> Tensor:
        draws = long.replayed_draws(real, long.records(canary, torch.tensor([sign])))
        return torch.stack([ratio for _, ratio in draws]).view(times, steps).sum(1)

    found = ratios(1.0) - ratios(-1.0) if replaced else ratios(1.0)
    return Rehearsal(present, found, torch.zeros(times), plan)


def _exponent(
    ledger: RecordingLedger, number: int, sums: Sums, white: Sequence[Sums], canaries: int
) -> tuple[Tensor, Tensor]:
    """<y, s> and |s|^2 / 2 of the canaries' part in one draw, in all releases that it reaches, [M] each.

    Args:
        ledger: of the training.
        number: of the draw among those released.
        sums: the canaries' part.
        white: what left, whitened.
        canaries: M.
    """
    # Sums of many steps would lose digits in float32.
    inner, half = torch.zeros(2, canaries, dtype=torch.float64)
    name, ordinal = ledger.draws[number].name, ledger.draws[number].ordinal
    reach = 1 + max(mechanism.reach for mechanism, _ in ledger.plan.groups(sums, ordinal))
    reached = [i for i in range(number, len(white)) if ledger.draws[i].name == name]
    reached = reached[: int(min(reach, len(reached)))]
    # This part and nothing after it: whitened, what is left of it in the later releases.
    rest = [map_leaves(torch.zeros_like, ledger.sums[i]) for i in reached[1:]]
    parts = whitened(ledger, [sums, *rest], reached)
    for i, s in zip(reached, parts, strict=True):
        for release, tensors in s.items():
            for tensor, shift in tensors.items():
                if shift.numel() and shift.numel() % canaries == 0:
                    y = white[i][release][tensor].flatten()
                    inner += (y * shift.flatten()).view(canaries, -1).sum(dim=1)
                    half += (shift.flatten().square() / 2).view(canaries, -1).sum(dim=1)
                # Anything else is a number about all records together, which is left to the attacker.
    return inner, half


def _log_ratio(inner: Tensor, half: Tensor, rate: float, group: int = 1) -> Tensor:
    """log(1 - q + q exp(<y, s> - |s|^2 / 2)) of one draw, or the same of a group drawn by itself."""
    if rate >= 1:
        return inner - half
    terms = []
    for k in range(group + 1):
        chance = math.log(math.comb(group, k)) + k * math.log(rate) + (group - k) * math.log1p(-rate)
        terms.append(k / group * inner - (k / group) ** 2 * half + chance)
    return torch.stack(terms).logsumexp(dim=0)


def whitened(
    ledger: RecordingLedger, transcript: Sequence[Sums], numbers: Sequence[int] | None = None
) -> list[Sums]:
    """What left a ledger, or sums of its draws, in units of the noise: it is standard and independent then.

    Args:
        ledger: of the draws and their bounds.
        transcript: releases or raw sums.
        numbers: of the draws that they are of; all when None.
    """
    out: list[Sums] = []
    past: NoiseHistory[Past] = NoiseHistory()
    for number, sums in zip(
        range(len(ledger.draws)) if numbers is None else numbers, transcript, strict=True
    ):
        draw, bounds = ledger.draws[number], ledger.bounds[number]
        white: Sums = {}
        for mechanism, members in ledger.plan.groups(sums, draw.ordinal):
            earlier = past.before(members[0], draw.ordinal, mechanism.reach)
            own = {name: sums[name] for name in members}
            past.add(members[0], draw.ordinal, (own, bounds), mechanism.reach)
            white |= mechanism.whitened(own, bounds, earlier)
        out.append(white)
    return out
