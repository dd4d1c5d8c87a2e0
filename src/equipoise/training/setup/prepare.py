"""The parts of a training, checked and connected to each other: nothing is written or spent here.

`prepare` makes a `TrainingSetup` of what the user gave; `rebuild` makes the arguments of one from the
`config.json` of a run that is resumed.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, TypedDict, get_args

import torch
from dp_accounting import DpEvent
from torch import Tensor, nn

from equipoise import _validate
from equipoise.gradients import GradientEngine
from equipoise.gradients.capture.attributes import has_unseen_state
from equipoise.gradients.capture.random_numbers import (
    RandomUse,
    use_of_random_numbers,
)
from equipoise.gradients.checks.record_trials import RecordTrials
from equipoise.gradients.engine_inputs import Loss, map_records, repeat_to
from equipoise.methods import DPSGD, Method, PublicRecords, find
from equipoise.methods.base import Plan, Setting
from equipoise.methods.configuration import NotInFileError
from equipoise.methods.registry import registered
from equipoise.privacy import (
    Budget,
    BudgetError,
    PrivacyPlan,
    Sampling,
    digest,
    sampling_from,
)
from equipoise.privacy.accounting.epsilon import check_relation
from equipoise.privacy.ledger.run_record import other_runs
from equipoise.training.assumptions import ALONE, Assumption
from equipoise.training.distributed import Processes
from equipoise.training.moving_average import MovingAverage
from equipoise.training.randomness import derive_seed, public_randomness
from equipoise.training.record_rows import DataError, Preparation, RowSource, Source
from equipoise.training.setup.deep_copies import deep_copy_but_data
from equipoise.training.setup.input_checks import (
    Pipeline,
    check_history,
    check_loss,
    check_optimizer,
    check_pipeline,
    check_public,
    check_repeatable,
    check_scheduler,
    choose_filler,
    copy_of,
    made_up,
    public_assumptions,
    trainable,
)
from equipoise.training.setup.memory_use import bytes_per_record, fitting, micro_batch_sizes

__all__ = [
    "Begun",
    "CommonSettings",
    "TrainingSettings",
    "TrainingSetup",
    "averaged_over_views",
    "check_kinds",
    "found_before",
    "move",
    "prepare",
    "rebuild",
    "rebuild_method",
    "refuse_unknown",
]


@dataclass(frozen=True)
class TrainingSettings:
    """The plain settings of a training; see `PrivateTraining` for their meaning."""

    seed: int = 0
    reproducible: bool = False
    micro_batch_size: int | None = None
    ema_decay: float | None = None
    views: int = 1
    relation: str = "add_or_remove_one"
    epsilon_every: int | None = None
    ledger_file: str | None = None
    hardened: bool = False
    allow_public_duplicates: bool = False

    def __post_init__(self) -> None:
        for name in ("reproducible", "hardened", "allow_public_duplicates"):
            _validate.instance(bool, "False", **{name: getattr(self, name)})
        if isinstance(self.seed, bool):
            raise TypeError(f"seed={self.seed!r} is a bool: give an int, such as 0")
        _validate.instance(int, "0", seed=self.seed)
        _validate.count("the number of augmented views of a record", views=self.views)
        if self.micro_batch_size is not None:
            _validate.count("the number of records held at once", micro_batch_size=self.micro_batch_size)
        if self.epsilon_every is not None:
            _validate.count("the steps between computations of epsilon", epsilon_every=self.epsilon_every)
        if self.ema_decay is not None:
            _validate.share(ema_decay=self.ema_decay)
        check_relation(self.relation)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `TrainingSettings(**values)` brings them back."""
        return dataclasses.asdict(self)


class CommonSettings(TypedDict, total=False):
    """The fields of `TrainingSettings` that clients and audits take, too, for the training that they make."""

    micro_batch_size: int | None
    relation: str
    hardened: bool
    allow_public_duplicates: bool


def refuse_unknown(function: str, given: Mapping[str, Any], known: type) -> None:
    """Refuse arguments by name that are none of a `TypedDict`.

    Raises:
        TypeError: naming the first of them.
    """
    unknown = given.keys() - known.__annotations__.keys()
    if unknown:
        raise TypeError(f"{function} takes no argument {min(unknown)!r}")


def check_kinds(
    sampling: Any, method: Any, budget: Any, augmentation: Any, settings: TrainingSettings
) -> None:
    """The objects have the kinds that the training needs.

    Raises:
        TypeError: naming the argument and what to give.
        ValueError: views without an augmentation.
    """
    if not isinstance(sampling, Sampling):
        hint = ". State the population yourself; it is never read from the data"
        raise TypeError(
            f"{_validate.given('sampling', sampling)} is {_validate.what_is(sampling)}; give for instance "
            f"Poisson(expected_batch_size=256, population=60_000, steps=2_000){hint}"
        )
    if not isinstance(method, Method):
        called = (
            ": call it, for instance DPSGD(clip_norm=1.0)"
            if inspect.isclass(method)
            else ", for instance DPSGD()"
        )
        raise TypeError(f"{_validate.given('method', method)} is no Method; give a method object{called}")
    if budget is not None and not isinstance(budget, Budget):
        raise TypeError(
            f"{_validate.given('budget', budget)} is {_validate.what_is(budget)}; give Budget(epsilon=3.0, "
            "delta=1e-5)"
        )
    if augmentation is not None and not callable(augmentation):
        raise TypeError(
            f"{_validate.given('augmentation', augmentation)} is {_validate.what_is(augmentation)}; give a "
            "function augmentation(batch, generator) -> batch"
        )
    if settings.views > 1 and augmentation is None:
        raise ValueError(
            f"views={settings.views} without an augmentation would repeat the same record; give "
            "augmentation=..."
        )


def rebuild(config: Mapping[str, Any]) -> tuple[str, Sampling, Budget | None, TrainingSettings]:
    """Fingerprint of the plan, sampling, budget and settings from a `config.json`.

    Raises:
        ValueError: it was damaged or edited.
    """
    with _whole("plan, sampling, budget or settings"):
        sampling = sampling_from(config["sampling"])
        budget = None if config["budget"] is None else Budget(**config["budget"])
        return config["plan"], sampling, budget, TrainingSettings(**config["settings"])


def rebuild_method(
    config: Mapping[str, Any], public: PublicRecords | None = None, kind: type[Method] | None = None
) -> Method:
    """The method from a `config.json`.

    Args:
        config: as the file holds it.
        public: the public records, which no file holds.
        kind: the class; by its registered name when None. A file does not say what to import.

    Raises:
        NotInFileError: it is a class of the user's own, or holds a function.
        ValueError: it was damaged or edited.
    """
    with _whole("method"):
        described = config["method"]
        if kind is None and described["name"] not in registered():
            raise NotInFileError(
                f"no method is registered under the name {described['name']!r}: the run had one of its own. "
                "Give it again, method=..."
            )
        # An inner method too is found by a registered name alone: the words of a command line may name any
        # module, a file may not.
        inner = described.get("inner")
        while inner is not None:
            name = inner["name"] if isinstance(inner, Mapping) else inner
            if name not in registered():
                raise NotInFileError(
                    f"no method is registered under the name {name!r}: the run had one of its own. Give it "
                    "again, method=..."
                )
            inner = inner.get("inner") if isinstance(inner, Mapping) else None
        kind = kind or find(described["name"], described.get("recipe", "library"))
        return kind.from_config(described, public)


@contextmanager
def _whole(what: str) -> Iterator[None]:
    """Turn whatever a damaged description makes constructors raise into one error that says so."""
    try:
        yield
    except NotInFileError:
        raise
    except Exception as error:
        raise ValueError(
            f"the {what} in config.json cannot be rebuilt ({type(error).__name__}: {error}): the file was "
            "damaged or edited, or another version wrote it. Restore it from a copy. Nothing was spent."
        ) from error


def move(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: str | torch.device | None
) -> torch.device:
    """Move the model, and what the optimiser remembers, to the device; the place of the parameters when None.

    Raises:
        ValueError: the parameters lie on several devices, or the device does not exist.
    """
    places = {p.device for p in model.parameters()}
    if device is None:
        if len(places) > 1:
            raise ValueError(
                f"the model's parameters lie on several devices, {sorted(map(str, places))}; give device=..."
            )
        return next(iter(places))
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"{_validate.given('device', device)} is no device; give 'cpu' or 'cuda'") from None
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device={device!r}: this machine has no CUDA device; give device='cpu' or leave it out"
        )
    model.to(target)
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                state[name] = value.to(target)
    return next(model.parameters()).device


def averaged_over_views(loss: Loss, views: int) -> Loss:
    """The loss of a batch [b, K, ...] of K views per record: the mean over a record's views, [b]."""

    def averaged(model: nn.Module, batch: Any) -> Tensor:
        flat = map_records(lambda leaf: leaf.flatten(0, 1), batch)
        return loss(model, flat).reshape(-1, views).mean(1)

    return averaged


def watch_modes(model: nn.Module) -> Callable[[], None]:
    """A function that puts every module back into the training or evaluation mode that it has now."""
    modes = [(module, module.training) for module in model.modules()]

    def restore() -> None:
        for module, training in modes:
            module.training = training

    return restore


@dataclass(frozen=True)
class TrainingSetup:
    """What a training is made of.

    Attributes:
        model, optimizer, scheduler: the user's.
        sampling, method, budget: as given, or the defaults.
        settings: with the micro-batch size that was chosen.
        parameters: the trainable ones by name, live.
        device: where the model is.
        processes: who shares the work.
        method_plan: what the method will release, and what else it fixed beforehand.
        rows: makes gradient rows of records.
        record_bytes: memory that one record takes in a step.
        found: what all processes of the run found out, those before this one too.
        average: the moving average of the parameters, or None.
        restore_modes: puts the modules back into the modes that they had.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    sampling: Sampling
    method: Method
    budget: Budget | None
    settings: TrainingSettings
    parameters: dict[str, nn.Parameter]
    device: torch.device
    processes: Processes
    method_plan: Plan
    rows: RowSource
    record_bytes: float
    found: Sequence[Assumption]
    average: MovingAverage | None
    restore_modes: Callable[[], None]

    @property
    def num_parameters(self) -> int:
        """P, the number of trainable values."""
        return sum(p.numel() for p in self.parameters.values())

    @property
    def delta(self) -> float:
        """The delta of the guarantee; below 1/population where no budget names one."""
        return self.budget.delta if self.budget is not None else 0.1 / self.sampling.population

    def config(self) -> dict[str, Any]:
        """The public settings, as `config.json` holds them."""
        return {
            "format": 1,
            "settings": self.settings.to_json(),
            "sampling": self.sampling.describe(),
            "budget": None if self.budget is None else asdict(self.budget),
            "method": self.method.config(),
            "plan": self.method_plan.releases.fingerprint(),
            "optimizer": type(self.optimizer).__name__,
            "model": {"class": type(self.model).__qualname__, "parameters": self.num_parameters},
            "assumptions": [str(one) for one in self.found],
        }

    @property
    def plan(self) -> PrivacyPlan:
        """The releases of the method's plan."""
        return self.method_plan.releases

    def assumptions(self) -> list[str]:
        """What the guarantee rests on besides population and sampling, in the words of the statement."""
        is_scanned = Assumption.SCANNED in self.found
        return [
            ALONE,
            *map(str, self.found),
            *self.method.assumptions(self.method_plan),
            *public_assumptions(is_scanned, self.method, self.settings.allow_public_duplicates),
        ]

    def kernels(self) -> str:
        """Digest of what the released numbers depend on besides parameters and records.

        With another value, no noise is used again.
        """
        return digest(
            {
                "engine": self.rows.engine.state_dict(),
                "micro_batch": self.settings.micro_batch_size,
                "dealt": self.rows.dealt,
                "views": self.settings.views,
                "method": self.method.config(),
                "processes": self.processes.count,
                "device": self.device.type,
            }
        )


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


def found_before(config: Mapping[str, Any]) -> list[Assumption]:
    """What the processes of a run found out, from its `config.json`.

    Raises:
        ValueError: it was damaged or edited.
    """
    with _whole("assumptions"):
        return Assumption.of_all(config["assumptions"])


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


def _sizes_to_try(
    given: int | None,
    most: int,
    sampling: Sampling,
    processes: Processes,
    begun: Begun | None,
    random_use: RandomUse,
) -> list[int]:
    """Micro-batch sizes, the best first.

    Args:
        given: the size in the settings.
        most: how many records fit into the memory.
        sampling: of the training.
        processes: who share the records of a draw.
        begun: of a run that goes on.
        random_use: whether places are kept for more records than are drawn.
    """
    if begun is not None and given is not None:
        return [given]  # a run that goes on has its size: another would be another question
    mean, deviation = sampling.expected_size / processes.count, sampling.size_deviation / processes.count
    if random_use == "shared":
        mean, deviation = sampling.largest_size / processes.count, 0.0
    if given is None:
        return micro_batch_sizes(most, mean, deviation)
    # As given, but no larger than any draw will be: the rest would be filler.
    most = min(given, max(1, math.ceil(mean + 6 * deviation)))
    return [most, *micro_batch_sizes(most, mean, deviation)]


#: How many micro-batch sizes are tried for one in which rows keep their bits.
TRIED_SIZES = 4


def _size_that_keeps_bits(
    engine: GradientEngine, batch: Any, sizes: Sequence[int]
) -> tuple[int, bool | None]:
    """The first size at which a row's bits do not follow its place, or the first; and whether they do not."""
    kept: bool | None = False
    for size in sizes[:TRIED_SIZES]:
        kept = engine.keeps_bits(batch, size)
        if kept is not False:
            return size, kept
    return sizes[0], kept


def _use_of_random_numbers(
    trials: RecordTrials, source: Source, probes: Tensor, prepare_batch: Preparation, seed: int
) -> RandomUse:
    """Whose random numbers collate, augmentation, model and loss take, by what they do on a few records.

    Args:
        trials: of model and loss.
        probes: numbers of records that can be read.
    """
    few, many = 3, 8

    def chosen(count: int) -> Any:
        return source.read(probes[torch.arange(count) % len(probes)], public_randomness(seed, "example"))

    # Beforehand: each item has random numbers of its own.
    read = {count: chosen(count) for count in (few, many)}

    def run(count: int) -> Tensor:
        return trials.evaluate(prepare_batch(source.join(read[count]), public_randomness(seed, "example")))

    try:
        return use_of_random_numbers(run, few, many, prepare_batch.device)
    except Exception:  # not understood; places that stay the same are right for all models
        return "shared"


def _check_population(source: Source, sampling: Sampling) -> None:
    """Refuse more records than the places are made for.

    Raises:
        DataError: the data hold more records than the population that the sampling states.
    """
    if len(source) > sampling.population:
        raise DataError(
            f"data hold more records than population={sampling.population}. The model (or its loss, "
            "augmentation or collate) shares a random number between records, such as one for a whole "
            "layer, and the places that keep records apart are made for at most the stated population. State "
            "a population that covers the records. Nothing was spent."
        )


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
        if settings.views > 1:
            loss = averaged_over_views(loss, settings.views)
            if untouched is not None:
                untouched = untouched[0], averaged_over_views(untouched[1], settings.views)
        prepared = prepare_batch(example, public_randomness(settings.seed, "example"))
        trials = RecordTrials(model, loss, prepared)
        keeps_nothing = check_repeatable(model, loss, untouched, prepared, trials.params)
        keeps_nothing = keeps_nothing and not has_unseen_state(model, loss)
        del untouched  # its memory counts as free in what follows
        engine = GradientEngine(model, loss, prepared)
        # What is measured on these is published: the micro-batch size, and how rows round.
        public = made_up(trials.losses, prepared)
        record_bytes = bytes_per_record(model, loss, public)
        # The worst of all processes': they deal the records of a draw in one way.
        uses = processes.all_of(_use_of_random_numbers(trials, source, probes, prepare_batch, settings.seed))
        random_use = max(uses, key=get_args(RandomUse).index)
        if random_use == "shared":
            _check_population(source, sampling)
        most = fitting(record_bytes, sum(p.numel() for p in parameters.values()), place)
        sizes = _sizes_to_try(settings.micro_batch_size, most, sampling, processes, begun, random_use)
        # Rank 0's on every process, and kept with the run: a resumed run must add in the same order.
        size, keeps_bits = processes.first(lambda: _size_that_keeps_bits(engine, public, sizes))
        # Once more at the very shape: a model may treat 16 records in another way than 8.
        full = repeat_to(prepared, max(2, size))
        trials.refuse_mixing(full, most=2)
        engine.refuse_mixed_rows(full, trials.params)
        pipeline_tried = True
        if runs_code:
            pipeline = Pipeline(trials, source, prepare_batch, settings.seed)
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
        restore_modes=watch_modes(model),
    )
