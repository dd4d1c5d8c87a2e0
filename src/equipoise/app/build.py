"""From settings to the pieces of a training: data, model, optimiser, loss, method and budget.

Put together in one place, so that training, resuming and predicting build the same things from the same
settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.app.data_loading import cache_folder, load_data, set_public_apart
from equipoise.app.method_settings import make_method, make_setting
from equipoise.app.models import build_model, default_model, prepare_data
from equipoise.app.option_checks import SettingsError
from equipoise.app.settings import RunSettings, steps_of
from equipoise.app.statistics import SufficientStatistics, statistics_loss
from equipoise.app.tasks import Task, loss_of, task_of
from equipoise.audit.canary_records import InsertedCanaries
from equipoise.audit.canary_scores import WithCanaryScores
from equipoise.data import DataSet, Records
from equipoise.data.augmentations import shift_and_flip
from equipoise.data.features.extractors import FeatureProgress
from equipoise.data.records import OWNER
from equipoise.gradients.engine_inputs import Loss
from equipoise.methods import Method
from equipoise.privacy import BudgetError, Sampling
from equipoise.privacy.sampling import SAMPLING_WORDS
from equipoise.training import Data, PrivateTraining, Record, Run, Score, Users
from equipoise.training.metrics import MetricWriter
from equipoise.training.population import population_told_elsewhere, population_warning
from equipoise.training.scores import Outputs, metric_of


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model, to be published.

    Attributes:
        scores: of the model.
        held_out: whether the records behind them are private ones that were set aside.
    """

    scores: Callable[[nn.Module], dict[str, float]]
    held_out: bool

    def __call__(self, model: nn.Module) -> dict[str, float]:
        return self.scores(model)


@dataclass(frozen=True)
class Experiment:
    """Everything `PrivateTraining` wants, and what evaluates it.

    Attributes:
        settings: resolved.
        dataset: with its features where the model asks for some.
        model: with initial weights from the seed.
        optimizer: of the model's parameters.
        scheduler: of the optimiser, or None for a constant learning rate.
        augmentation: of a batch, where several views were asked for.
        sampling: of the settings, from the public population.
        public: the records declared public, as a batch, or None.
        canaries: made-up records, for an audit, or None.
    """

    settings: RunSettings
    dataset: DataSet
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    augmentation: Callable[[dict[str, Tensor], torch.Generator], dict[str, Tensor]] | None
    sampling: Sampling
    public: dict[str, Tensor] | None = None
    canaries: InsertedCanaries | None = None

    @property
    def records(self) -> Records:
        """The training records, and the canaries that are present; without the names of users."""
        train = self.dataset.train
        train = train.without(OWNER) if OWNER in train.fields else train
        return train if self.canaries is None else self.canaries.insert(train)

    @property
    def owner(self) -> Tensor | None:
        """The user of each record, where users are protected: a number [n], or a digest of a name [n, 2]."""
        return self.dataset.train.fields.get(OWNER)

    @property
    def data(self) -> Data:
        """The records, and how they become batches."""
        size, views = self.settings.micro_batch_size, self.settings.views or 1
        own: dict[str, Any] = {"views": views, "microbatch_size": size, "score": self.score}
        return Data(self.records, augmentation=self.augmentation, **own)

    @cached_property
    def score(self) -> Score | None:
        """The private score that the settings ask for."""
        settings, field, steps = self.settings, self.task.field, self.sampling.steps
        if settings.private_validation is None:
            return None
        times = math.ceil(steps / (settings.evaluate_every or max(1, steps // 10)))
        outputs: Outputs = lambda model, batch: (model(batch["input"]), batch[field])  # noqa: E731
        of_classes = self.dataset.task != "regression"
        metric = settings.score or ("accuracy" if of_classes else "error:1")
        metric_of(metric)  # refuses a name or a bound that is none
        name, _, bound = metric.partition(":")
        if not of_classes and name not in ("loss", "error"):
            raise SettingsError(
                f"--score is {metric}, which is of one class per record, and the target is none. Give "
                "--score error:BOUND, at most 2 as targets are scaled to [-1, 1], or loss:BOUND."
            )
        if not of_classes and name == "error" and float(bound or 1) > 2:
            raise SettingsError(
                f"--score is {metric}, but targets are scaled to [-1, 1], where no error is above 2: noise "
                "would hide it. Give --score error:BOUND in that scale, such as error:0.5."
            )
        return Score(metric, share=settings.private_validation, times=times, outputs=outputs)

    @property
    def unit(self) -> Record | Users:
        """Whom the guarantee covers."""
        settings, relation = self.settings, self.settings.neighbours()
        if settings.unit != "user":
            return Record(relation=relation)
        assert settings.records_per_user is not None  # `check` asks for it
        rows: Any = settings.user_rows
        return Users(self.owner, records_per_user=settings.records_per_user, rows=rows, relation=relation)

    @property
    def population_warning(self) -> str | None:
        """Where the stated population is far from what the data hold: for the owner only, and in no file."""
        owner = self.owner if self.settings.user_rows is not None else None
        held = len(self.records) if owner is None else len(owner.unique(dim=0))  # type: ignore[no-untyped-call]
        drawn, sampling = "record" if owner is None else "user", self.sampling
        trained = round(held * (1 - (self.settings.private_validation or 0)))
        return population_warning(
            trained, sampling.population, sampling.expected_size, drawn, self.settings.test_share
        )

    def with_scores(self, method: Method) -> Method:
        """The method, which also adds up the scores of the canaries where there are some."""
        return method if self.canaries is None else WithCanaryScores(method, self.canaries.fields)

    @property
    def evaluate(self) -> Evaluation | Score:
        """The scores of the task on the test records, or the private one."""
        return self.score or self.scored_by(lambda model: self.task.evaluate(model, self.dataset))

    def scored_by(self, scores: Callable[[nn.Module], dict[str, float]]) -> Evaluation:
        """These scores of the test records, which --test-share takes out of the private ones."""
        return Evaluation(scores, held_out=self.settings.test_share is not None)

    @property
    def task(self) -> Task:
        """Of the data, with the loss of the settings."""
        return task_of(self.dataset, self.settings.loss)

    @property
    def loss(self) -> Loss:
        """Of the task, with the weights of the classes, per record."""
        if isinstance(self.model, SufficientStatistics):
            return statistics_loss
        return loss_of(self.dataset, self.settings.class_weights, self.settings.loss)

    @property
    def baseline(self) -> tuple[dict[str, float], str]:
        """What a model without inputs would reach on the test records, and what it answers, in words."""
        learnt = self.dataset.test.fields[self.task.field]
        return self.task.baseline(learnt, self.dataset) if len(learnt) else ({}, "")


def assemble(
    settings: RunSettings,
    progress: FeatureProgress | None = None,
    raw: DataSet | None = None,
    outline: bool = False,
) -> Experiment:
    """Load the data and build the pieces; nothing is spent.

    Args:
        settings: what the user gave; gaps are filled from the default settings.
        progress: called with (done, total) while fixed features are computed.
        raw: what `load_data` gave for these settings, where it was called already.
        outline: compute no features (see `prepare_data`), for what depends on no record.

    Raises:
        SettingsError: a setting that cannot be used.
        DataFileError: data that cannot be used.
    """
    settings.check()
    raw = raw or load_data(settings)
    settings = settings.resolved(default_model(raw), raw.population)
    assert settings.model is not None
    dataset = prepare_data(
        settings.model,
        raw,
        cache_folder(),
        features=settings.features,
        progress=progress,
        outline=outline,
    )
    dataset, public = set_public_apart(settings, dataset)
    trained = round(dataset.population * (1 - (settings.private_validation or 0)))
    model = build_model(settings.model, replace(dataset, population=trained), seed=settings.seed)
    sampling = make_sampling(settings, trained)
    optimizer = make_optimizer(settings, model)
    return Experiment(
        settings=settings,
        dataset=dataset,
        model=model,
        optimizer=optimizer,
        scheduler=make_scheduler(settings, optimizer, sampling.steps),
        augmentation=make_augmentation(settings, dataset),
        sampling=sampling,
        public=public,
    )


def build_training(
    experiment: Experiment,
    *,
    on_disk: bool = True,
    make_run: Callable[..., Run] = Run,
    writers: Sequence[MetricWriter] = (),
) -> PrivateTraining:
    """The training of an experiment, with its method calibrated and its gradients checked; nothing is spent.

    Args:
        experiment: what `assemble` gave.
        on_disk: use the run folder and the shared journal that the settings name; in memory otherwise.
        make_run: a kind of `Run`, which puts down something of its own in the folder.
        writers: as for `Run`.

    Raises:
        SettingsError: an unknown method, or an option that it does not have.
    """
    settings = experiment.settings
    method, budget = make_method(settings, experiment.sampling, experiment.public)
    if isinstance(experiment.model, SufficientStatistics):
        noise = method.plan(make_setting(settings, experiment.sampling, budget)).releases["gradient"]
        experiment.model.noise.fill_(noise.noise_multiplier / experiment.sampling.expected_size)
    try:
        with population_told_elsewhere():
            return PrivateTraining(
                experiment.model,
                experiment.optimizer,
                loss=experiment.loss,
                data=experiment.data,
                sampling=experiment.sampling,
                method=experiment.with_scores(method),
                budget=budget,
                unit=experiment.unit,
                run=make_run(
                    settings.run_dir if on_disk else None,
                    journal=settings.ledger if on_disk else None,
                    seed=settings.seed,
                    reproducible=settings.reproducible,
                    secret_seed=settings.secret_seed,
                    ema_decay=settings.ema or None,
                    scheduler=experiment.scheduler,
                    hardened=settings.hardened,
                    writers=writers,
                ),
                device=settings.device,
            )
    except BudgetError as error:
        if settings.ledger is None or settings.epsilon is None:
            raise
        raise SettingsError(
            f"--epsilon is {settings.epsilon:g}; it is the budget of all runs in the shared ledger, and the "
            f"earlier runs leave too little of it: {error}. Raise it, or stop training on these data."
        ) from error


def make_sampling(settings: RunSettings, population: int) -> Sampling:
    """The sampling that the settings name, with as many steps as the epochs ask for."""
    assert settings.epochs is not None
    size, kind = settings.batch_size or population, sampling_kind(settings)
    if size > population:
        raise SettingsError(
            f"--batch-size is {size:g}, but the population is {population}. Give --batch-size, at most that "
            "many."
        )
    if whole_draws(kind) and not float(size).is_integer():
        raise SettingsError(
            f"--batch-size is {size:g}, but --sampling {settings.sampling} takes a whole number of records. "
            "Give --batch-size."
        )
    one = kind.of_size(size, population, steps=1)
    return replace(one, steps=steps_of(settings.epochs, population, one.expected_size))  # type: ignore[type-var]


def sampling_kind(settings: RunSettings) -> type[Sampling]:
    """The class of the sampling that the settings name; Poisson where they name none."""
    return SAMPLING_WORDS[settings.sampling or "poisson"]


def whole_draws(kind: type[Sampling]) -> bool:
    """Whether the size that the scheme is given must be a whole number."""
    return any(item.name == "batch_size" for item in fields(kind))  # type: ignore[arg-type]


def make_optimizer(settings: RunSettings, model: nn.Module) -> torch.optim.Optimizer:
    """The torch optimiser that the settings name."""
    assert settings.learning_rate is not None
    rate, decay = settings.learning_rate, settings.weight_decay or 0.0
    parameters = [p for p in model.parameters() if p.requires_grad]
    if settings.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=rate, weight_decay=decay)
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay)
    return torch.optim.SGD(parameters, lr=rate, momentum=settings.momentum or 0.0, weight_decay=decay)


def make_scheduler(settings: RunSettings, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Linear or cosine decay to zero over the run; None for a constant rate."""
    if settings.schedule == "linear":
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    if settings.schedule == "cosine":
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps))
        )
    return None


def make_augmentation(
    settings: RunSettings, dataset: DataSet
) -> Callable[[dict[str, Tensor], torch.Generator], dict[str, Tensor]] | None:
    """Random shifts (and mirror images of colour pictures), where more than one view was asked for.

    Raises:
        SettingsError: the inputs are not images.
    """
    if settings.views is None or settings.views == 1:
        return None
    if len(dataset.input_shape) != 3 or dataset.input_shape[0] not in (1, 3):
        raise SettingsError(
            f"--views is {settings.views}, but views are shifted images, and the inputs of {dataset.name!r} "
            f"have shape {dataset.input_shape}. Leave --views out."
        )
    return lambda batch, generator: {**batch, "input": shift_and_flip(batch["input"], generator)}
