"""A training of canaries through the library's own code, and what an attacker makes of what it released.

Half of the canaries, chosen at random, take part in one training under a ledger that keeps what left. Then
the attacker replays it: the same method on *all* canaries, every one in every draw, forced to the same
releases. Its public state is then the same at every step (that is checked), and its raw sums are what each
canary would have contributed. With y the release and s the contribution in a canary's coordinates, both in
units of the noise, and q the rate of the draw,

    L = sum over draws log(1 - q + q exp(<y, s> - |s|^2 / 2))

is the log-likelihood ratio of presence, if noise and sampling are what the plan says; if they are not, it is
a statistic like any other.

Of neighbours by replacement all canaries are there, each at random as a record or as its opposite, of
gradient g or -g. The attacker replays both, and the ratio is that of the one against the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from equipoise.audit.canaries import CanaryLayout, canary_loss, directed_records
from equipoise.methods import Method
from equipoise.privacy import Bounded, Budget, Draw, Ledger, PrivacyPlan, Sampling
from equipoise.privacy.ledger.replay import RecordingLedger, ReplayLedger
from equipoise.privacy.mechanisms.base import NoiseHistory, Sums
from equipoise.training.run_ledger import open_ledger
from equipoise.training.setup.training_settings import CommonSettings, TrainingSettings
from equipoise.training.setup.training_setup import TrainingSetup, prepare
from equipoise.training.step import StepRunner

__all__ = ["CanaryTraining", "Rehearsal", "Stage", "Watching", "open_stage", "rehearse", "whitened"]


@dataclass(frozen=True)
class Noted:
    """A release: its draw, and the bounds that its noise follows."""

    draw: Draw
    bounds: dict[str, float]


class Watching(RecordingLedger):
    """A ledger that keeps what left and with how much noise."""

    def __init__(self, plan: PrivacyPlan, *args: Any, **kwargs: Any) -> None:
        super().__init__(plan, *args, **kwargs)
        self.noted: list[Noted] = []

    def release(self, draw: Draw, sums: Mapping[str, Bounded]) -> Sums:
        out = super().release(draw, sums)
        self.noted.append(Noted(draw, {name: bounded.add_remove for name, bounded in sums.items()}))
        return out


class Everyone(ReplayLedger):
    """The attacker's: every record in every draw, and the releases of the real training."""

    def sample(self, draw: Draw, num_records: int) -> Tensor:
        return torch.arange(num_records)


@dataclass
class Stage:
    """A training in memory that is taken step by step.

    Attributes:
        setup: model, method, plan and the rest.
        ledger: takes the releases.
        steps: takes the steps.
    """

    setup: TrainingSetup
    ledger: Ledger
    steps: StepRunner

    def run(self, steps: int | None = None) -> Stage:
        for _ in range(self.setup.sampling.steps - self.steps.done if steps is None else steps):
            self.steps.take()
        return self

    @property
    def parameters(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.setup.parameters.values()])


def open_stage(
    method: Method,
    model: torch.nn.Module,
    loss: Callable[..., Tensor],
    data: Mapping[str, Tensor],
    sampling: Sampling,
    budget: Budget | None,
    *,
    seed: int,
    learning_rate: float = 1.0,
    make_ledger: Callable[..., Any] = Watching,
    optimizer: torch.optim.Optimizer | None = None,
    **settings: Unpack[CommonSettings],
) -> Stage:
    """A training whose ledger can be looked through; noise and draws follow the seed."""
    # Canaries are cheap: one micro-batch per draw.
    settings = {"micro_batch_size": max(1, len(next(iter(data.values())))), **settings}
    setup = prepare(
        model,
        optimizer or torch.optim.SGD(model.parameters(), lr=learning_rate),
        loss=loss,
        data=dict(data),
        sampling=sampling,
        method=method,
        budget=budget,
        settings=TrainingSettings(seed=seed, reproducible=True, **settings),  # for the attacker's replays
    )
    ledger = open_ledger(setup, ledger_class=make_ledger)
    assert isinstance(ledger, Ledger)  # one process
    return Stage(setup, ledger, StepRunner(setup, ledger))


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
    """

    make_method: Callable[[], Method]
    sampling: Sampling
    budget: Budget | None
    canaries: int
    layout: CanaryLayout = CanaryLayout()
    seed: int
    relation: str = "add_or_remove_one"
    hardened: bool = False

    def open(self, data: Mapping[str, Tensor], make_ledger: Callable[..., Any] = Watching) -> Stage:
        """The training of these records, under this ledger; always with the same draws and noise."""
        return open_stage(
            self.make_method(),
            self.layout.model(self.canaries),
            canary_loss(self.layout.kind),
            data,
            self.sampling,
            self.budget,
            seed=self.seed,
            learning_rate=self.sampling.expected_size,  # a canary's part moves its own row by its length
            relation=self.relation,
            hardened=self.hardened,
            make_ledger=make_ledger,
        )

    @functools.cached_property
    def directions(self) -> Tensor | None:
        """Of the canaries' gradients, [M, P]; None where each has parameters of its own."""
        along = self.layout.along
        if along is None:
            return None
        # What is public at the first step does not depend on the records: any will do.
        anybody = directed_records(torch.eye(self.canaries, self.canaries * self.layout.width))
        return self.open(anybody).steps.ask(lambda context, state: along(context))

    def records(self, chosen: Tensor, signs: Tensor | None = None) -> dict[str, Tensor]:
        return self.layout.records(chosen, self.directions, signs)

    def replay(self, real: Stage, data: Mapping[str, Tensor]) -> Tensor:
        """L of these records, one per canary, against nobody in their places, [M]."""
        watched = real.ledger
        assert isinstance(watched, Watching)
        attacker = self.open(
            data, lambda *args, **kwargs: Everyone(watched.transcript, *args, **kwargs)
        ).run()
        if not torch.equal(attacker.parameters, real.parameters):
            raise RuntimeError(
                f"the attacker's replay of {real.setup.method.name!r} does not end at the parameters of the "
                "training: its state is not a function of what was released"
            )
        replayed, plan = attacker.ledger, watched.plan
        assert isinstance(replayed, Everyone)
        ratios = torch.zeros(self.canaries, dtype=torch.float64)
        releases, shifts = (
            whitened(plan, sums, watched.noted) for sums in (watched.transcript, replayed.sums)
        )
        for y, s, noted in zip(releases, shifts, watched.noted, strict=True):
            ratios += _log_ratio(y, s, plan.sampling_of(noted.draw.name).sampling_rate, self.canaries)
        return ratios

    def moved(self, real: Stage) -> Tensor:
        """Where each canary's own parameters ended, [M, numbers of a canary]."""
        if self.directions is not None:
            return (self.directions @ real.parameters)[:, None]
        ends = [value.detach().view(self.canaries, -1) for value in real.setup.parameters.values()]
        return torch.cat(ends, dim=1)


@dataclass(frozen=True)
class Rehearsal:
    """Canaries, and what is seen of them.

    Attributes:
        present: [M], who took part; of neighbours by replacement, the record (True) or its opposite.
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
    make_ledger: Callable[..., Any] = Watching,
) -> Rehearsal:
    """One training with about half of the canaries, and the attacker's log-likelihood ratios of all.

    Args:
        training: of the canaries.
        neighbours: the relation of the data sets that are told apart; the plan's when None.
        make_ledger: a kind of `Watching`; audits of planted bugs give their own.
    """
    canaries = training.canaries
    present = torch.rand(canaries, generator=torch.Generator().manual_seed(training.seed)) < 0.5
    everyone, replaced = torch.arange(canaries), (neighbours or training.relation) == "replace_one"
    chosen = (everyone, torch.where(present, 1.0, -1.0)) if replaced else (everyone[present],)
    real = training.open(training.records(*chosen), make_ledger).run()
    watched, ends = real.ledger, training.moved(real)
    assert isinstance(watched, Watching)
    # Descent: the record of gradient g goes to -g, its opposite to g.
    moved = -ends.sum(dim=1) if replaced else ends.abs().amax(dim=1)
    ratios = torch.zeros(canaries)
    if watched.transcript:
        ratios = training.replay(real, training.records(everyone))
        if replaced:  # L of the record against nobody, less that of its opposite against nobody
            ratios -= training.replay(real, training.records(everyone, -torch.ones(canaries)))
    return Rehearsal(present, ratios, moved, real.setup.plan)


def _log_ratio(y: Sums, s: Sums, rate: float, canaries: int) -> Tensor:
    """log(1 - q + q exp(<y, s> - |s|^2 / 2)) of one draw, [M]."""
    exponent = torch.zeros(canaries, dtype=torch.float64)  # sums of many steps would lose digits in float32
    for name, tensors in s.items():
        for tensor, shift in tensors.items():
            if shift.numel() and shift.numel() % canaries == 0:
                inner = y[name][tensor].flatten() * shift.flatten() - shift.flatten().square() / 2
                exponent += inner.view(canaries, -1).sum(dim=1)
            # Anything else is a number about all records together, which is left to the attacker.
    if rate >= 1:
        return exponent
    quiet = torch.full_like(exponent, 1 - rate).log()
    return torch.logaddexp(quiet, exponent + torch.tensor(rate, dtype=torch.float64).log())


def whitened(plan: PrivacyPlan, transcript: Sequence[Sums], noted: Sequence[Noted]) -> list[Sums]:
    """Releases, or raw sums, in units of their noise, which is then standard and independent."""
    out: list[Sums] = []
    past: NoiseHistory[Sums] = NoiseHistory()
    for sums, here in zip(transcript, noted, strict=True):
        white: Sums = {}
        for mechanism, members in plan.groups(sums):
            earlier = past.before(members[0], here.draw.ordinal, mechanism.memory)
            own = mechanism.whitened({name: sums[name] for name in members}, here.bounds, earlier)
            past.add(members[0], here.draw.ordinal, own, mechanism.memory)
            white |= own
        out.append(white)
    return out
