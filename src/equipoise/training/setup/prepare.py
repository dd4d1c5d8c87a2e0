"""`prepare` checks what the user gave and makes a `TrainingSetup` of it; nothing is written or spent here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from dp_accounting import DpEvent
from torch import nn

from equipoise.gradients import GradientEngine
from equipoise.gradients.capture.attributes import has_unseen_state
from equipoise.gradients.capture.random_numbers import RandomUse
from equipoise.gradients.checks.record_trials import RecordTrials
from equipoise.gradients.engine_inputs import Loss, repeat_to
from equipoise.methods import DPSGD, Method
from equipoise.methods.base import Plan, Setting
from equipoise.privacy import Budget, BudgetError, Sampling, digest
from equipoise.privacy.ledger.run_record import other_runs
from equipoise.training.assumptions import Assumption
from equipoise.training.distributed import Processes
from equipoise.training.moving_average import MovingAverage
from equipoise.training.randomness import derive_seed, public_randomness
from equipoise.training.record_rows import Preparation, RowSource, Source, averaged_over_views
from equipoise.training.setup.argument_checks import (
    check_kinds,
    check_optimizer,
    check_scheduler,
    move,
    trainable,
)
from equipoise.training.setup.deep_copies import deep_copy_but_data
from equipoise.training.setup.loss_trials import check_loss, check_repeatable, copy_of
from equipoise.training.setup.made_up_records import choose_filler, made_up
from equipoise.training.setup.memory_use import bytes_per_record, fitting
from equipoise.training.setup.micro_batch_size import size_that_keeps_bits, sizes_to_try
from equipoise.training.setup.pipeline_trials import (
    Pipeline,
    check_history,
    check_pipeline,
    check_population,
)
from equipoise.training.setup.public_copies import check_public
from equipoise.training.setup.training_settings import TrainingSettings
from equipoise.training.setup.training_setup import TrainingSetup

__all__ = ["Begun", "prepare"]


@dataclass(frozen=True)
class Begun:
    """A run that goes on.

    Attributes:
        plan: fingerprint of its plan.
        other_runs: gives what the other runs in its journal may have cost when it was planned, the likeliest
            first. Called on rank 0.
        found: what its processes found out so far.
    """

    plan: str
    other_runs: Callable[[], Sequence[tuple[DpEvent, ...]]]
    found: Sequence[Assumption]


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss: Loss,
    data: Any,
    sampling: Sampling,
    method: Method | None,
    settings: TrainingSettings,
    budget: Budget | None = None,
    scheduler: Any = None,
    augmentation: Callable[[Any, torch.Generator], Any] | None = None,
    device: str | torch.device | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    begun: Begun | None = None,
) -> TrainingSetup:
    """Check everything, by what it does on a few records, and prepare it; see `PrivateTraining`.

    Args:
        begun: of a run that goes on; its plan is made as it was when it began.

    Raises:
        TypeError, ValueError, DataError: what cannot work, named.
    """
    method = DPSGD() if method is None else method
    check_kinds(sampling, method, budget, augmentation, settings)
    parameters = trainable(model)
    check_optimizer(optimizer, parameters)
    check_scheduler(scheduler, optimizer)
    place = move(model, optimizer, device)
    processes = Processes()
    with processes.together():
        source = Source(data, collate)
        check_public(source, method, settings.allow_public_duplicates)
        prepare_batch = Preparation(place, augmentation, settings.views)
        # Before anything is read or run: it may keep something of the first records that it meets.
        untouched = copy_of(model, loss, place)
        runs_code = not source.is_scanned or augmentation is not None
        other_source = deep_copy_but_data((source, prepare_batch)) if runs_code else None
        example, probes = check_loss(model, loss, source, place)
        method_plan = _plan_of(method, sampling, budget, settings, begun, processes)
        loss = averaged_over_views(loss, settings.views)
        untouched = untouched and (untouched[0], averaged_over_views(untouched[1], settings.views))
        prepared = prepare_batch(example, public_randomness(settings.seed, "example"))
        trials = RecordTrials(model, loss, prepared)
        keeps_nothing = check_repeatable(model, loss, untouched, prepared, trials.params)
        keeps_nothing = keeps_nothing and not has_unseen_state(model, loss)
        del untouched  # its memory counts as free in what follows
        engine = GradientEngine(model, loss, prepared)
        pipeline = Pipeline(trials, source, prepare_batch, settings.seed)
        # What is measured on these is published: the micro-batch size, and how rows round.
        public = made_up(trials.losses, prepared)
        record_bytes = bytes_per_record(model, loss, public)
        # The worst of all processes': they deal the records of a draw in one way.
        uses = processes.all_of(pipeline.random_use(probes))
        random_use = max(uses, key=get_args(RandomUse).index)
        if random_use == "shared":
            check_population(source, sampling)
        most = fitting(record_bytes, sum(p.numel() for p in parameters.values()), place)
        sizes = sizes_to_try(
            settings.micro_batch_size, most, sampling, processes, begun is not None, random_use
        )
        # Rank 0's on every process, and kept with the run: a resumed run must add in the same order.
        size, keeps_bits = processes.first(lambda: size_that_keeps_bits(engine, public, sizes))
        # Once more at the very shape: a model may treat 16 records in another way than 8.
        full = repeat_to(prepared, max(2, size))
        trials.refuse_mixing(full, most=2)
        engine.refuse_mixed_rows(full, trials.params)
        pipeline_tried = True
        if runs_code:
            readable = pipeline.readable()
            pipeline_tried = check_pipeline(pipeline, readable, size)
            others = other_source and Pipeline(trials, *other_source, settings.seed)
            keeps_nothing = check_history(pipeline, others, readable) and keeps_nothing
        settings = replace(settings, micro_batch_size=size)
        randomness = public_randomness(settings.seed, "example")
        filler = choose_filler(lambda batch: engine(prepare_batch(batch, randomness)), example, size)
        rows = RowSource(
            engine,
            source,
            prepare_batch,
            size,
            example,
            settings.seed,
            filler,
            probes,
            dealt=random_use == "shared",
        )
        mine = _found(source, keeps_bits, random_use, pipeline_tried, keeps_nothing, filler, scheduler)
        before = [] if begun is None else begun.found
        found = Assumption.of_all(itertools.chain(before, *processes.all_of(mine)))
        processes.same("the model's parameters", digest(parameters))
        processes.same("the privacy plan", method_plan.releases.fingerprint())
    return TrainingSetup(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        sampling=sampling,
        method=method,
        budget=budget,
        settings=settings,
        parameters=parameters,
        device=place,
        processes=processes,
        method_plan=method_plan,
        rows=rows,
        record_bytes=record_bytes,
        found=found,
        average=MovingAverage(parameters, settings.ema_decay) if settings.ema_decay is not None else None,
        restore_modes=_watch_modes(model),
    )


def _watch_modes(model: nn.Module) -> Callable[[], None]:
    """A function that puts every module back into the training or evaluation mode that it has now."""
    modes = [(module, module.training) for module in model.modules()]

    def restore() -> None:
        for module, training in modes:
            module.training = training

    return restore


def _plan_of(
    method: Method,
    sampling: Sampling,
    budget: Budget | None,
    settings: TrainingSettings,
    begun: Begun | None,
    processes: Processes,
) -> Plan:
    """The method's plan, beside what the other runs in its journal cost.

    A run that goes on has the plan that it had when it began, beside one of the states of the other runs.

    Raises:
        BudgetError, ValueError: there is none within the budget, or no state gives the plan of a run that
            goes on.
    """

    def beside(others: tuple[DpEvent, ...]) -> Plan:
        setting = Setting(
            sampling=sampling,
            budget=budget,
            relation=settings.relation,
            other_runs=others,
            public_seed=derive_seed(settings.seed, "plan"),
        )
        plan = method.plan(setting)
        return replace(plan, releases=plan.releases.hardened()) if settings.hardened else plan

    if begun is None:
        return beside(processes.first(lambda: other_runs(settings.ledger_file, settings.relation)))
    states = processes.first(begun.other_runs)
    for others in states:
        try:
            plan = beside(others)
        except (BudgetError, ValueError):
            continue  # another state may leave the budget that this one does not
        if plan.releases.fingerprint() == begun.plan:
            return plan
    beside(states[0])  # its own error says more, if it has one
    raise ValueError(
        "the privacy plan differs from the one that the run was started with: give the same method and "
        "settings. Nothing was spent."
    )


def _found(
    source: Source,
    keeps_bits: bool | None,
    random_use: RandomUse,
    pipeline_tried: bool,
    keeps_nothing: bool,
    filler: float | None,
    scheduler: Any,
) -> list[Assumption]:
    """What this process found out.

    Args:
        source: the records.
        keeps_bits: whether a record's row has the same bits wherever it stands in a micro-batch; None where
            that could not be measured.
        random_use: whose random numbers are drawn while records are joined, augmented and run.
        pipeline_tried: whether reading, collating and augmenting could be tried in all ways.
        keeps_nothing: whether copies that met other records first gave the same losses, and a forward is
            forgotten in all that model and loss hold.
        filler: what fills up a micro-batch; None for copies of a record.
        scheduler: the user's, or None.
    """
    holds = {
        Assumption.SCANNED: source.is_scanned,
        Assumption.TRUSTED: not source.is_scanned,
        Assumption.of_rounding(keeps_bits): True,
        Assumption.OWN_NUMBERS: random_use == "own",
        Assumption.RANDOM_PIPELINE: not pipeline_tried,
        Assumption.KEEPS_NOTHING: not keeps_nothing,
        Assumption.SHAPES: not source.is_scanned,
        Assumption.FILLED_BY_A_RECORD: filler is None,
        Assumption.SCHEDULED: scheduler is not None,
        Assumption.FOUND: True,
    }
    return [one for one, is_so in holds.items() if is_so]
