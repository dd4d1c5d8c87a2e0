"""The parts of a training, checked and connected to each other: nothing is written or spent here."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from dp_accounting import DpEvent
from torch import Tensor, nn

from equipoise import _validate
from equipoise._dtensor import is_a_copy, local_part
from equipoise._rounding import plain, rounded_up
from equipoise._say import say
from equipoise._tree import leaves
from equipoise.data.padding import PadTo
from equipoise.data.records import Records
from equipoise.distributed.backend import backend_of
from equipoise.distributed.processes import Processes
from equipoise.gradients import CrossRecordError, GradientEngine, parameters_restored
from equipoise.gradients.capture.random_numbers import random_numbers_from
from equipoise.gradients.capture.sharded import tensor_parallel_mesh
from equipoise.gradients.compare import away_from_zero
from equipoise.gradients.engine_inputs import fillers, repeat_to
from equipoise.gradients.forward_only import LossEngine
from equipoise.gradients.trials import MOST_TRACED
from equipoise.methods.base import Plan, Setting, by_author
from equipoise.privacy import Budget, BudgetError, PrivacyPlan, WithoutReplacement, digest, epsilon
from equipoise.privacy.ledger.journal_records import other_runs
from equipoise.privacy.ledger.run_record import compose_events
from equipoise.statements.assumptions import (
    COMPARED_DATA,
    DATA,
    HELD,
    NOT_COMPARED,
    THROWN_AWAY,
    Assumption,
    always,
)
from equipoise.training.arguments import TrainingInputs
from equipoise.training.folder.config_file import Began, settings_of
from equipoise.training.forwards import BatchPreparation, RowSource, averaged_over_views, forward_rows
from equipoise.training.moving_average import MovingAverage
from equipoise.training.owners import Owners, UserSource, joined_over_users, keys_of_ids, weights_of
from equipoise.training.randomness import derive_seed, public_randomness
from equipoise.training.read_items import are_fixed
from equipoise.training.record_source import DataError, RecordPlaces, RecordSource
from equipoise.training.setup.argument_checks import (
    check_optimizer,
    check_scheduler,
    check_sharding,
    check_stages,
    check_trust,
    move,
    trainable,
)
from equipoise.training.setup.loss_trials import (
    check_gradient,
    check_loss,
    check_repeatable,
    refuse_followed,
    settings_kept,
    warn_of_writes,
)
from equipoise.training.setup.micro_batches import choose_micro_batches
from equipoise.training.setup.pipeline_trials import Pipeline, check_items, check_pipeline, runs_code
from equipoise.training.setup.private_copies import check_held, check_public
from equipoise.training.setup.private_scores import (
    PreparedScore,
    prepare_score,
    setting_beside,
    with_score,
    without_score,
)
from equipoise.training.setup.repeated_records import warn_of_repeats
from equipoise.training.setup.start import check_start
from equipoise.training.setup.step_number import check_number

COMPARED = 4
"""Of how many records processes compare what they read, and a start whether they read alike twice.

A choice: each is read once more at the start; the fewer, the more likely data that differ elsewhere pass.
"""


@dataclass(frozen=True, kw_only=True)
class TrainingSetup(TrainingInputs):
    """What a training is made of: what the user gave, with the micro-batch size and device that were chosen.

    Attributes:
        parameters: the trainable ones by name, live.
        processes: who shares the work.
        method_plan: what the method will release, and what else it fixed beforehand.
        rows: makes gradient rows of records.
        found: what all processes of the run found out before the first step, those before this one too.
        held: tensors of model and loss that are as long as the data, or allowed copies.
        written: what a forward gives other values, which is thrown away.
        average: the moving average of the parameters, or None.
        modes: training or evaluation, of every module of the model.
        score: the private score, or None.
    """

    device: torch.device
    parameters: dict[str, nn.Parameter]
    processes: Processes
    method_plan: Plan
    rows: RowSource
    found: Sequence[str]
    held: list[str]
    written: list[str]
    average: MovingAverage | None
    modes: Sequence[tuple[nn.Module, bool]]
    score: PreparedScore | None = None

    def __post_init__(self) -> None:
        """What the user gave was checked; an audit puts objects of its own in the place of some."""

    def restore_modes(self) -> None:
        """Put every module back into the training or evaluation mode that it had."""
        for module, is_training in self.modes:
            if module.training is not is_training:  # setting an attribute of a module takes longer
                module.training = is_training

    def try_again(self) -> list[Assumption]:
        """Try model, loss, augmentation and collate, as they are now, for mixing of records.

        Returns:
            What else is assumed now.

        Raises:
            CrossRecordError, DataError: records are mixed.
            ForwardWritesError: the model writes to itself.
        """
        rows, engine = self.rows, self.rows.engine
        randomness = public_randomness(self.run.seed, "example")
        with random_numbers_from(0, self.device), parameters_restored(self.model):
            # Or each record that runs other operations now would run alone.
            if rows.fills_with is None:
                with suppress(Exception):  # they are now others than it takes
                    engine.plan_publicly(rows.prepare(fillers(rows.example, 4), randomness))
            engine.trace_anew()
            prepared = rows.prepare(rows.example, randomness)
            _check_rows(engine, rows.source, prepared, rows.micro_batch_size)
            if self.score is not None:
                self.score.check()
            if not runs_code(rows.source, rows.prepare):
                return []
            params = away_from_zero(self.model, engine.loss, prepared)  # anew: it is a copy
            pipeline = Pipeline(engine, params, rows.source, rows.prepare, self.run.seed)
            was_tried = check_pipeline(pipeline, rows.micro_batch_size)
        return [] if was_tried else [Assumption.RANDOM_PIPELINE]

    @property
    def engines(self) -> list[GradientEngine]:
        """What runs private records: for the training, and for its score."""
        return [self.rows.engine, *([] if self.score is None else [self.score.rows.engine])]

    def trace_anew(self) -> None:
        """Forget what was traced: what model and loss hold has changed."""
        for engine in self.engines:
            engine.trace_anew()

    @property
    def is_sharded(self) -> bool:
        """Whether processes hold a part of the parameters each."""
        return self.rows.backend.is_sharded

    @property
    def num_parameters(self) -> int:
        """P, the number of trainable values."""
        return sum(p.numel() for p in self.parameters.values())

    @property
    def delta(self) -> float:
        """The delta of the guarantee; below 1/population where no budget names one."""
        return self.budget.delta if self.budget is not None else 0.1 / self.sampling.population

    def config(self, found: Sequence[str]) -> dict[str, Any]:
        """The public settings, as `config.json` holds them with what was found out by now."""
        return {
            "format": 1,
            "settings": settings_of(self),
            "sampling": self.sampling.describe(),
            "budget": None if self.budget is None else asdict(self.budget),
            "method": self.method.config(),
            "plan": self.plan.fingerprint(),
            "optimizer": type(self.optimizer).__name__,
            "model": {"class": type(self.model).__qualname__, "parameters": self.num_parameters},
            "assumptions": [str(one) for one in found],
            "conditions": self.conditions,
        }

    @property
    def conditions(self) -> list[str]:
        """What the method assumes."""
        return [*dict.fromkeys(by_author(self.method)), *self.method.assumptions(self.method_plan)]

    @property
    def partition(self) -> str:
        """Which records have one owner, where users are protected; "" otherwise. Private."""
        owners = self.rows.owners
        return "" if owners is None else owners.partition()

    @property
    def plan(self) -> PrivacyPlan:
        """The releases of the method's plan."""
        return self.method_plan.releases

    def assumptions(self, found: Sequence[str]) -> list[str]:
        """The assumptions other than population and sampling, in the words of the statement.

        Args:
            found: what was found out by now.
        """
        is_uncompared = self.method.public_batches() and Assumption.SCANNED not in found
        return [
            *always(self.unit.protected.name),
            *map(str, found),
            *self.conditions,
            *(_validate.by_author(self.data.records) if isinstance(self.data.records, Records) else ()),
            *([NOT_COMPARED] if is_uncompared else []),
        ]

    def kernels(self) -> str:
        """Digest of what the released numbers depend on in addition to parameters and records.

        With another value, no noise is used again.
        """
        return digest(
            {
                "micro_batch": self.data.microbatch_size,
                "dealt": self.rows.random_places,
                "views": self.data.views,
                "method": self.method.config(),
                "processes": self.processes.count,
                **({"compile": True} if self.compile else {}),
                # Which functions make noise: PyTorch's, or the library's own on devices other than the CPU.
                "device": self.device.type + ("" if self.device.type == "cpu" else ", polynomials"),
            }
        )


BookedPlan = tuple[PrivacyPlan, tuple[DpEvent, ...]]
"""The plan that a run's journal holds, and what the runs before it cost."""


def prepare(
    given: TrainingInputs, began: Began | None = None, booked: BookedPlan | None = None
) -> TrainingSetup:
    """Check everything, by what it does on a few records, and prepare it.

    Args:
        given: by the user.
        began: with what a run began that goes on.
        booked: the plan that its journal holds, and what the runs before it cost.

    Raises:
        TypeError, ValueError, DataError: what cannot work, named.
    """
    model, run, unit = given.model, given.run, given.unit.protected
    parameters = trainable(model)
    check_trust(run.trust, model)
    check_optimizer(given.optimizer, parameters, given.method)
    check_scheduler(run.scheduler, given.optimizer, given.sampling.steps)
    place = move(model, given.optimizer, given.device)
    given.move_step(place)
    processes = Processes(same_records=tensor_parallel_mesh(model) is not None)
    check_sharding(parameters, given.method, run.hardened, processes)
    _check_elsewhere(given, processes)
    # The user's random numbers go on afterwards as if nothing had been tried.
    settings_stay = settings_kept(given.optimizer, run.scheduler)
    with processes.together(), random_numbers_from(0, place), settings_stay:
        found: list[str] = check_start(given, processes) if began is None else []
        source, owners = _records_of(given)
        if began is None and processes.is_first:
            warn_of_repeats(
                source, given.data.records, None if owners is None else owners.users, stacklevel=3
            )
        check_public(source, given.method)
        if not (source.is_scanned or source.is_elsewhere):
            check_items(source, given.data.records)
        _check_same_records(processes, source, owners)
        of_loss = joined_over_users(given.loss, unit.joined) if callable(given.loss) else given.loss
        example, probes = check_loss(model, of_loss, source, place)
        held = check_held(model, given.loss, source, example, given.sampling.population)
        method_plan = _plan_of(given, began, booked, processes)
        if method_plan.releases.takes_turns:
            found.append(_assigned_by(source, owners is not None or source.ids is not None, began))
        plan, steps = without_score(method_plan.releases), given.sampling.steps
        check_stages(given.stages, given.method, plan, steps, parameters)
        is_resumed = began is not None
        rows, written, of_trials = _try(given, place, processes, source, owners, example, probes, is_resumed)
        score = prepare_score(given, rows, processes)
        named = {THROWN_AWAY: written, HELD: held}
        found += [*of_trials, *(start + ", ".join(names) for start, names in named.items() if names)]
        before = [] if began is None else began.found
        found = Assumption.of_all(itertools.chain(before, *processes.all_of(found)))
        # Of sharded parameters every process has another part.
        copies = {name: local_part(p) for name, p in parameters.items() if is_a_copy(p)}
        processes.same("the model's parameters", digest(copies))
        processes.same("the privacy plan", method_plan.releases.fingerprint())
    data = replace(given.data, microbatch_size=rows.micro_batch_size)
    return TrainingSetup(
        **vars(given) | {"data": data, "device": place},
        parameters=parameters,
        processes=processes,
        method_plan=method_plan,
        rows=rows,
        found=found,
        held=held,
        written=written,
        average=None if run.ema_decay is None else MovingAverage(parameters, run.ema_decay),
        modes=[(module, module.training) for module in model.modules()],
        score=score,
    )


def _try(
    given: TrainingInputs,
    place: torch.device,
    processes: Processes,
    source: RecordSource,
    owners: Owners | None,
    example: Any,
    probes: Tensor,
    is_resumed: bool,
) -> tuple[RowSource, list[str], list[str]]:
    """Try the rows of records in micro-batches of the size that is chosen here.

    Args:
        given: by the user.
        place: the device.
        processes: share the work.
        source, owners: the records, or users, and whose they are.
        example, probes: a batch of a few records, and their numbers.
        is_resumed: the run goes on.

    Returns:
        What makes rows; names of what a forward writes, which is thrown away; and what a statement says.

    Raises:
        CrossRecordError, CoverageError, ValueError, DataError: what cannot work, named.
    """
    model, data, seed = given.model, given.data, given.run.seed
    joined = given.unit.protected.joined
    prepare_batch = BatchPreparation(place, data.augmentation, data.views, joined is not None)
    loss = joined_over_users(averaged_over_views(given.loss, data.views), joined)
    prepared = prepare_batch(example, public_randomness(seed, "example"))
    params = away_from_zero(model, loss, prepared)
    written = check_repeatable(model, loss, prepared, params)
    make_engine = LossEngine if given.method.forward_only else GradientEngine
    engine = make_engine(model, loss, prepared, check=False, trust=given.run.trust, publicly=True)
    engine.compiles = given.compile
    check_number(given.loss, model, example)
    pipeline = Pipeline(engine, params, source, prepare_batch, seed)
    micro_batches = choose_micro_batches(
        engine, pipeline, example, prepared, probes, given, processes, is_resumed
    )
    _check_rows(engine, source, prepared, micro_batches.size)
    if source.widths is not None and isinstance(data.collate, PadTo):
        # Now, so that what is known of the model follows no draw. Of more than are traced, those that are
        # drawn come first.
        are_few = len(data.collate.lengths) <= MOST_TRACED - engine.traces
        for width in data.collate.lengths if are_few else ():
            try:
                batch = data.collate.resized(example, width)
                batch = prepare_batch(batch, public_randomness(seed, "example"))
                engine.prepare(repeat_to(batch, forward_rows(micro_batches.size)))
            except CrossRecordError:
                raise
            except Exception:  # a length that the model does not take, as perhaps no record has it
                continue
    written = [*engine.written_buffers, *written]
    if written and processes.is_first:
        warn_of_writes(written)
    check_gradient(engine, prepared)
    backend = backend_of(model, processes)
    rows = RowSource(
        engine,
        source,
        prepare_batch,
        micro_batches.size,
        example,
        seed,
        fills_with=None if micro_batches.takes_zeros else example,
        record_bytes=micro_batches.record_bytes,
        probes=probes,
        random_places=micro_batches.random_use == "shared",
        owners=owners,
        backend=backend,
    )
    backend.note(lambda: rows.of_public_alone([None], public_randomness(seed, "order")))
    is_seen, shapes_follow = source.is_scanned, pipeline.shapes_follow or source.widths is not None
    holds = {
        Assumption.SCANNED: is_seen,
        Assumption.TRUSTED: not is_seen,
        Assumption.ELSEWHERE: source.is_elsewhere,
        Assumption.WEIGHTED: source.weights is not None,
        Assumption.ROUNDING: True,
        Assumption.PLANNED_ON_RECORDS: not (engine.is_planned_publicly and micro_batches.takes_zeros),
        Assumption.OWN_NUMBERS: micro_batches.random_use == "own",
        Assumption.SHARED_NUMBERS: rows.random_places,
        Assumption.RANDOM_PIPELINE: not check_pipeline(pipeline, micro_batches.size),
        Assumption.KEEPS_NOTHING: engine.runs_model,
        Assumption.SHAPES_ALIKE: not (is_seen or shapes_follow),
        Assumption.SHAPES_FOLLOW: not is_seen and shapes_follow,
        Assumption.PADDED_WITH_COPIES: not micro_batches.takes_zeros,
        Assumption.SCHEDULED: given.run.scheduler is not None,
        Assumption.SECRET_SEED: given.run.secret_seed is not None,
        Assumption.COMPILED: engine.compile_seconds > 0,
        Assumption.FOUND: True,
    }
    of_data = "proved: no code of the owner runs there"
    if source.is_elsewhere:
        of_data = "unchecked: other machines do"
    elif runs_code(source, prepare_batch):
        of_data = COMPARED_DATA
    return rows, written, [*(one for one, is_so in holds.items() if is_so), DATA + of_data]


def _records_of(given: TrainingInputs) -> tuple[RecordSource, Owners | None]:
    """The records that are drawn, or the users; and whose they are."""
    data, unit = given.data, given.unit.protected
    owners = None if given.unit.owner is None else Owners(given.unit.owner, unit)
    source = RecordSource(data.records, data.collate, data.workers)
    if data.ids is not None:
        source.ids = keys_of_ids(data.ids, len(source))
    if data.weights is not None:
        if not given.method.takes_weights:
            raise ValueError(
                f"weights: method={given.method.said()!r} releases other sums than of clipped gradients, or "
                "does not say takes_weights = True, so that its estimate may be wrong with them: take DPSGD, "
                "DPC4, DiceSGD or AdaptiveRMS, for example, or weigh the loss"
            )
        source.weights = weights_of(data.weights, len(source))
    if data.widths is not None:
        source.widths = torch.as_tensor(data.widths)
        is_whole = not (source.widths.is_floating_point() or source.widths.is_complex())
        if source.widths.shape != (len(source),) or not is_whole or unit.joined is not None:
            raise DataError(
                "widths must hold one whole number per record, in the order of data, and no users may be "
                "sampled (rows=...), whose records share a forward"
            )
    if owners is None:
        return source, None
    if len(owners) != len(source):
        raise DataError("owner has another length than data: give the user of each record, in their order")
    if unit.rows == "update" and owners.count < len(owners):
        raise DataError(
            "owner names some users twice, and with rows='update' each item of data is a whole user: "
            "put all records of a user into one item, and number the items"
        )
    if unit.joined is not None:
        return UserSource(source, owners), owners
    is_drawn_whole = isinstance(given.sampling, WithoutReplacement)
    if is_drawn_whole and owners.unit.records == 1 and owners.count < len(source):  # of more see the plan
        raise DataError(
            "sampling=WithoutReplacement(...) needs as many records as its population, and some users own "
            "several, so that how many there are would follow which user is there: take Poisson, or draw "
            "users (rows='mean')"
        )
    return source, owners


def _check_same_records(processes: Processes, source: RecordSource, owners: Owners | None) -> None:
    """Refuse processes that look different records up under the same numbers.

    A draw is a list of numbers, which every process looks up in its own data. Tensors in memory are compared
    as a whole, records that are read on demand by a few of them.

    Args:
        processes: each with its own data.
        source: the records here.
        owners: whose they are, or None.

    Raises:
        RuntimeError: they differ.
    """
    if processes.count == 1:
        return
    try:
        read: Any = leaves(source.take(source.spread(COMPARED)))
    except Exception:  # in all processes, or they differ
        read = []
    few = {"records": [leaf for leaf in read if isinstance(leaf, Tensor)], "count": len(source)}
    found = processes.all_of((digest(few), source.fingerprint()))
    if owners is not None:
        processes.same("owner", owners.partition())
    wholes = {whole for _, whole in found if whole}
    if len({first for first, _ in found}) > 1 or len(wholes) > 1:
        raise RuntimeError(
            "the processes do not agree on the records of data, so that one could be drawn twice: give every "
            "process the same data in the same order (shuffle it by a fixed seed). Nothing was spent."
        )


def _check_rows(engine: GradientEngine, source: RecordSource, prepared: Any, size: int) -> None:
    """See that micro-batches of this size keep records apart, and that no buffer follows them."""
    if source.is_elsewhere:  # no trial asks for private rows there
        engine.never_replay("other machines hold the records and compute their gradients")
        return
    full = repeat_to(prepared, forward_rows(size))
    engine.check(full)
    refuse_followed(engine.trials.followed_buffers(full))


def _check_elsewhere(given: TrainingInputs, processes: Processes) -> None:
    """Refuse what asks other machines for more than the rows of a draw, or in another way.

    Raises:
        DataError: loss and data are not of one another.
        ValueError: several processes, or an augmentation.
    """
    of_loss = getattr(given.loss, "records_elsewhere", None)
    if not (isinstance(of_loss, RecordPlaces) or isinstance(given.data.records, RecordPlaces)):
        return
    if given.data.records is not of_loss:
        raise DataError(
            "other machines hold the records, and loss and data do not belong together: for "
            "loss=FlowerUpdates(...) give data=updates.users, no wrapper and no part of either"
        )
    # Which process asks for a record follows from who else is drawn.
    if processes.count > 1 or given.data.augmentation is not None:
        raise ValueError(
            f"other machines hold the records, and {processes.count} processes train or augmentation is "
            "given: train in one process, and augment in the loss there"
        )


def run_of_budget(budget: Budget | None, others: Collection[DpEvent]) -> str:
    """Which run it is of those that share the budget; "" if it has the rest to itself."""
    if budget is None or budget.runs == 1:
        return ""
    number = budget.begun(others) + 1
    return f"run {number} of the {budget.runs} that the budget of epsilon {budget.epsilon:g} is for"


def _check_left(given: TrainingInputs, others: tuple[DpEvent, ...]) -> None:
    """Say what a journal's other runs leave of the budget, and refuse a run that gets hardly any of it.

    A run of a budget that is for no other ones plans for all that is left. So the second one with the same
    budget would get next to nothing: its noise grows twentyfold and more, and its model learns nothing.

    Raises:
        BudgetError: less than a tenth is left, and the budget is for no more runs than have begun.
    """
    budget = given.budget
    if budget is None or getattr(given.method, "noise_multiplier", None) is not None:
        return
    if not others:
        return
    spent = epsilon(compose_events(others), budget.delta, given.unit.relation, cross_check=False).value
    left = (
        f"the other runs in the journal cost epsilon {rounded_up(spent)} of {budget.epsilon:g} at "
        f"{plain(budget.delta)}, their whole plans included"
    )
    if budget.begun(others) < budget.runs:
        say(f"{run_of_budget(budget, others)}: {left}")
        return
    if spent > 0.9 * budget.epsilon:
        raise BudgetError(
            f"{left}, so that noise would drown this run. A budget is that of all runs of the journal: say "
            "from the first run on how many there will be, Budget(epsilon, delta, runs=52), or state a "
            "larger budget from run to run"
        )
    say(f"{left}; this run may use the rest")


def _plan_of(
    given: TrainingInputs, began: Began | None, booked: BookedPlan | None, processes: Processes
) -> Plan:
    """The method's plan, given what the other runs in its journal cost; a run that goes on keeps its own.

    Raises:
        BudgetError: no plan is within the budget.
        ValueError: the settings are not those that a run which goes on began with.
    """
    run, unit = given.run, given.unit
    mine: PrivacyPlan | None = None
    if booked is None:
        others = processes.first(lambda: other_runs(run.journal, unit.relation, unit.protected.name))
    else:
        mine, others = booked
    setting = Setting(
        sampling=given.sampling,
        budget=given.budget,
        relation=unit.relation,
        other_runs=others,
        booked=mine,
        public_seed=derive_seed(run.seed, "plan"),
        unit=unit.protected,
    )
    plan = _planned(given, setting)
    for one in plan.releases.by_author:
        one.check()
    if mine is None or began is None:
        _check_left(given, others)
        return plan
    if plan.releases.fingerprint() != mine.fingerprint():
        # It is made of noise that was found, which is found again beside the same runs.
        plan = _planned(given, replace(setting, booked=None))
    if not (began.plan == mine.fingerprint() == plan.releases.fingerprint()):
        raise ValueError(
            "the privacy plan differs from the one that the run was started with: give the same method and "
            "settings. Nothing was spent."
        )
    return plan


def _planned(given: TrainingInputs, setting: Setting) -> Plan:
    """The plan as it is booked: the method's, for the unit whatever it did with that, and a score's."""
    score = given.data.score
    plan = given.method.plan(setting_beside(score, setting))
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan() of method {given.method.name!r} gave a {type(plan).__name__}; let it return "
            "Plan(releases), with a PrivacyPlan inside"
        )
    releases = with_score(plan.releases.protecting(setting.unit), score, setting)
    return replace(plan, releases=releases.hardened() if given.run.hardened else releases)


def _assigned_by(source: RecordSource, is_named: bool, began: Began | None) -> Assumption:
    """By what records are assigned to draws.

    Args:
        source: the records.
        is_named: the user names records, or users.
        began: with what a run began that goes on.

    Raises:
        ValueError: by something else than when the run began: a record could be in two draws of an epoch.
    """
    by_number = (Assumption.BY_NUMBER, Assumption.BY_NUMBER_UNCOMPARED)
    now = (Assumption.BY_NAME,) if is_named else (Assumption.BY_CONTENT,) if source.has_rows else by_number
    if began is None:
        if now is not by_number:
            return now[0]
        return by_number[not are_fixed(source, source.spread(COMPARED).tolist())]
    if same := [one for one in now if one in began.found]:
        return same[0]
    ways = (Assumption.BY_NAME, Assumption.BY_CONTENT, *by_number)
    others = [str(one) for one in ways if one in began.found]
    before, anew = (re.split("[,:]", one)[0] for one in (others[0], str(now[0])))
    raise ValueError(
        f"when the run began {before}; now {anew}, so that a record could be in two draws of an epoch: "
        "give ids, owner and data in the form that they had, or begin a new run with the same journal"
    )
