"""A training of canaries through the library's own code, and what an attacker makes of what it released.

The training is run once with the canaries whose coin fell so, under a ledger that keeps what left. Then the
attacker replays it: the same method on *all* canaries, every one in every draw, forced to the same releases.
Its public state is then the same at every step (that is checked), and its raw sums are what each canary
would have contributed. With y the release and s the contribution in a canary's coordinates, both in units of
the noise, and q the rate of the draw,

    L = sum over draws log(1 - q + q exp(<y, s> - |s|^2 / 2))

is the log-likelihood ratio of presence, if noise and sampling are what the plan says; if they are not, it is
a statistic like any other.

Of neighbours by replacement all canaries are there, and a coin decides between a record and its opposite, of
gradient g or -g. The attacker replays both, and the ratio is that of the one against the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.audit.canaries import Row, Rows, canary_loss, canary_records, directed_records
from equipoise.methods import Context, Method
from equipoise.privacy import Bounded, Budget, Draw, Ledger, PrivacyPlan, Sampling
from equipoise.privacy.ledger.replay import RecordingLedger, ReplayLedger
from equipoise.privacy.mechanisms.base import NoiseHistory, Sums
from equipoise.training.run_ledger import open_ledger
from equipoise.training.setup import TrainingSettings, TrainingSetup, prepare
from equipoise.training.step import StepRunner

__all__ = ["Rehearsal", "Stage", "Watching", "open_stage", "rehearse"]

MakeMethod = Callable[[], Method]
Directions = Callable[[Context], Tensor]


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
        """As `Ledger.release`, kept."""
        out = super().release(draw, sums)
        self.noted.append(Noted(draw, {name: bounded.add_remove for name, bounded in sums.items()}))
        return out


class Everyone(ReplayLedger):
    """The attacker's: every record in every draw, and the releases of the real training."""

    def sample(self, draw: Draw, num_records: int) -> Tensor:
        """All positions."""
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
        """Take the remaining steps, or some of them."""
        for _ in range(self.setup.sampling.steps - self.steps.done if steps is None else steps):
            self.steps.take()
        return self

    @property
    def parameters(self) -> Tensor:
        """All trainable parameters, [P]."""
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
    relation: str = "add_or_remove_one",
    hardened: bool = False,
    allow_public_duplicates: bool = False,
    make_ledger: Callable[..., Any] = Watching,
    optimizer: torch.optim.Optimizer | None = None,
) -> Stage:
    """A training whose ledger can be looked through; noise and draws follow the seed."""
    records = len(next(iter(data.values())))
    settings = TrainingSettings(
        seed=seed,
        reproducible=True,
        micro_batch_size=max(1, records),
        relation=relation,
        epsilon_every=10**9,
        hardened=hardened,
        allow_public_duplicates=allow_public_duplicates,
    )
    setup = prepare(
        model,
        optimizer or torch.optim.SGD(model.parameters(), lr=learning_rate),
        loss=loss,
        data=dict(data),
        sampling=sampling,
        method=method,
        budget=budget,
        scheduler=None,
        settings=settings,
        augmentation=None,
        device=None,
        collate=None,
    )
    ledger = open_ledger(setup, ledger_class=make_ledger)
    assert isinstance(ledger, Ledger)  # one process
    return Stage(setup, ledger, StepRunner(setup, ledger))


@dataclass(frozen=True)
class Rehearsal:
    """Canaries, and what is seen of them.

    Attributes:
        present: [M], the coins: there or not; of neighbours by replacement, the record or its opposite.
        log_ratios: [M], L; zero where nothing was released with noise.
        moved: [M], how far each canary's parameters moved; of neighbours by replacement, which way.
        plan: what was released, for the claim.
    """

    present: Tensor
    log_ratios: Tensor
    moved: Tensor
    plan: PrivacyPlan


def rehearse(
    make_method: MakeMethod,
    sampling: Sampling,
    budget: Budget | None,
    *,
    canaries: int,
    seed: int,
    width: int = 1,
    kind: Row = "linear",
    tables: int = 1,
    along: Directions | None = None,
    relation: str = "add_or_remove_one",
    neighbours: str | None = None,
    hardened: bool = False,
    make_ledger: Callable[..., Any] = Watching,
) -> Rehearsal:
    """One training with about half of the canaries, and the attacker's log-likelihood ratios of all.

    Args:
        make_method: called for the training and for every replay of the attacker.
        sampling: its population is a public number; `canaries` or more is usual.
        budget: as for `PrivateTraining`; None where the method has multipliers of its own.
        canaries: M.
        seed: of coins, draws and noise.
        width, tables, kind: as for `Rows` and `canary_loss`.
        along: orthonormal directions of the canaries' gradients, [M, M * width], from what is public at the
            first step; instead of a row of parameters for each canary.
        relation: of the plan.
        neighbours: the relation of the data sets that are told apart; the plan's when None.
        hardened: noise on a grid of integers.
        make_ledger: a kind of `Watching`; audits of planted bugs give their own.
    """
    coins = torch.Generator().manual_seed(seed)
    present = torch.rand(canaries, generator=coins) < 0.5
    everyone, replaced = torch.arange(canaries), (neighbours or relation) == "replace_one"
    wide, parameters = width * tables, canaries * width

    def stage(data: dict[str, Tensor], ledger: Callable[..., Any]) -> Stage:
        return open_stage(
            make_method(),
            Rows(1, parameters) if along is not None else Rows(canaries, width, tables),
            canary_loss(kind),
            data,
            sampling,
            budget,
            seed=seed,
            learning_rate=sampling.expected_size,
            relation=relation,
            hardened=hardened,
            make_ledger=ledger,
        )

    directions: Tensor | None = None
    if along is not None:
        # nobody's records: what is public at the first step does not depend on them
        directions = stage(directed_records(torch.eye(canaries, parameters)), Watching).steps.ask(
            lambda context, state: along(context)
        )

    def records(chosen: Tensor, signs: Tensor | None = None) -> dict[str, Tensor]:
        if directions is None:
            return canary_records(chosen, wide, signs)
        return directed_records(directions[chosen], signs)

    signs = torch.where(present, 1.0, -1.0)
    real = stage(records(everyone, signs) if replaced else records(everyone[present]), make_ledger).run()
    watched = real.ledger
    assert isinstance(watched, Watching)
    if directions is None:
        tensors = (value.detach().view(canaries, -1) for value in real.setup.parameters.values())
        ends = torch.cat(list(tensors), dim=1)
    else:
        ends = (directions @ real.parameters)[:, None]
    moved = -ends.sum(dim=1) if replaced else ends.abs().amax(dim=1)
    if not watched.transcript:
        return Rehearsal(present, torch.zeros(canaries), moved, real.setup.plan)

    def replay(data: dict[str, Tensor]) -> Tensor:
        """L of these records against nobody in their places, [M]."""
        attacker = stage(data, lambda *args, **kwargs: Everyone(watched.transcript, *args, **kwargs)).run()
        if not torch.equal(attacker.parameters, real.parameters):
            raise RuntimeError(
                f"the attacker's replay of {real.setup.method.name!r} does not end at the parameters of the "
                "training: its state is not a function of what was released"
            )
        replayed = attacker.ledger
        assert isinstance(replayed, Everyone)
        ratios = torch.zeros(canaries, dtype=torch.float64)
        plan, left = watched.plan, whitened(watched.plan, watched.transcript, watched.noted)
        shifts = whitened(plan, replayed.sums, watched.noted)
        for y, s, noted in zip(left, shifts, watched.noted, strict=True):
            ratios += _log_ratio(y, s, plan.sampling_of(noted.draw.name).sampling_rate, canaries)
        return ratios

    ratios = replay(records(everyone))
    if replaced:
        ratios -= replay(records(everyone, -torch.ones(canaries)))
    return Rehearsal(present, ratios, moved, real.setup.plan)


def _log_ratio(y: Sums, s: Sums, rate: float, canaries: int) -> Tensor:
    """log(1 - q + q exp(<y, s> - |s|^2 / 2)) of one draw, [M]."""
    exponent = torch.zeros(canaries, dtype=torch.float64)
    for name, tensors in s.items():
        for tensor, shift in tensors.items():
            if shift.numel() and shift.numel() % canaries == 0:
                inner = y[name][tensor].flatten() * shift.flatten() - shift.flatten().square() / 2
                exponent += inner.view(canaries, -1).sum(dim=1)
            # anything else is a number about all records together, which is left to the attacker
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
