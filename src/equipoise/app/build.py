"""From settings to the pieces of a training: data, model, optimiser, loss, method and budget.

Put together in one place, so that training, resuming and predicting build the same things from the same
settings.

Random views of images: shifts by a few pixels, and mirror images where left and right mean nothing.

Every record is changed on its own, from the secret randomness of its draw. The views of a record are averaged
before its gradient is clipped, so they cost no privacy (S. De et al., "Unlocking high-accuracy differentially
private image classification through scale", 2022).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise import data
from equipoise.app.method_settings import make_method
from equipoise.app.models import build_model, default_model, prepare_data
from equipoise.app.option_checks import SettingsError, check_choice
from equipoise.app.settings import RunSettings, steps_of
from equipoise.audit.canary_records import InsertedCanaries
from equipoise.audit.canary_scores import Watched
from equipoise.data import DataSet, Records
from equipoise.data.features.extractors import FeatureProgress
from equipoise.data.readers.custom import load_dataset
from equipoise.methods import Method
from equipoise.privacy import BudgetError, Sampling
from equipoise.privacy.sampling import SAMPLING_WORDS
from equipoise.training import PrivateTraining
from equipoise.training.metrics import MetricWriter

__all__ = [
    "Experiment",
    "accuracy",
    "assemble",
    "build_training",
    "cache_folder",
    "cross_entropy",
    "load_data",
    "predictions",
    "shift_and_flip",
]


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
        """The training records, and the canaries that are present."""
        train = self.dataset.train
        return train if self.canaries is None else self.canaries.insert(train)

    def watched(self, method: Method) -> Watched:
        """The method with the scores of the canaries beside it."""
        assert self.canaries is not None
        return Watched(method, self.canaries.fields)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Accuracy on the test records."""
        return {"accuracy": accuracy(model, self.dataset.test)}


def assemble(
    settings: RunSettings, progress: FeatureProgress | None = None, raw: DataSet | None = None
) -> Experiment:
    """Load the data and build the pieces; nothing is spent.

    Args:
        settings: what the user gave; gaps are filled from the default settings.
        progress: called with (done, total) while fixed features are computed.
        raw: what `load_data` gave for these settings, where it was called already.

    Raises:
        SettingsError: a setting that cannot be used.
        DataFileError: data that cannot be used.
    """
    settings.check()
    raw = raw or load_data(settings)
    settings = settings.resolved(default_model(raw))
    assert settings.model is not None
    dataset = prepare_data(settings.model, raw, cache_folder(), progress=progress)
    dataset, public = set_public_apart(settings, dataset)
    model = build_model(settings.model, dataset, seed=settings.seed)
    sampling = make_sampling(settings, dataset.population)
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
    epsilon_every: int | None = None,
    writers: Sequence[MetricWriter] = (),
    on_create: Callable[[Path], None] | None = None,
) -> PrivateTraining:
    """The training of an experiment, with its method calibrated and its gradients checked; nothing is spent.

    Args:
        experiment: what `assemble` gave.
        on_disk: use the run folder and the shared journal that the settings name; in memory otherwise.
        epsilon_every, writers, on_create: as for `PrivateTraining`.

    Raises:
        SettingsError: an unknown method, or an option that it does not have.
    """
    settings = experiment.settings
    method, budget = make_method(settings, experiment.sampling, experiment.public)
    if experiment.canaries is not None:
        method = experiment.watched(method)
    try:
        return PrivateTraining(
            experiment.model,
            experiment.optimizer,
            loss=cross_entropy,
            data=experiment.records,
            sampling=experiment.sampling,
            method=method,
            budget=budget,
            scheduler=experiment.scheduler,
            augmentation=experiment.augmentation,
            run_dir=settings.run_dir if on_disk else None,
            ledger_file=settings.ledger if on_disk else None,
            relation=settings.neighbours(),
            hardened=settings.hardened,
            # they were set apart by number, so that equal ones are different records
            allow_public_duplicates=settings.public_records is not None,
            seed=settings.seed,
            reproducible=settings.reproducible,
            micro_batch_size=settings.micro_batch_size,
            ema_decay=settings.ema or None,
            views=settings.views or 1,
            device=settings.device,
            epsilon_every=epsilon_every,
            writers=writers,
            on_create=on_create,
        )
    except BudgetError as error:
        if settings.ledger is None or settings.epsilon is None:
            raise
        raise SettingsError(
            f"{settings.said('epsilon')}; it is the budget of all runs in the shared ledger, and the earlier "
            f"runs leave too little of it: {error}. Raise it, or stop training on these data."
        ) from error


def set_public_apart(settings: RunSettings, dataset: DataSet) -> tuple[DataSet, dict[str, Tensor] | None]:
    """The data set without the records declared public (the last ones), and these as a batch."""
    count = settings.public_records
    if count is None:
        return dataset, None
    private = len(dataset.train) - count
    if private < 1 or dataset.population <= count:
        raise SettingsError(
            f"--public-records is {count}, but {dataset.name!r} has {len(dataset.train)} training records "
            "and some must stay private. Give fewer."
        )
    train = dataset.train.subset(torch.arange(private))
    public = dataset.train[slice(private, private + count)]
    return replace(dataset, train=train, population=dataset.population - count), public


def load_data(settings: RunSettings) -> DataSet:
    """The data set that the settings name, or the first records of it.

    Raises:
        SettingsError: the population is missing, or contradicts the published one; a subset is too large.
        DataFileError: files are missing or broken.
    """
    dataset = _load_whole(settings)
    if settings.subset is None:
        return dataset
    if settings.subset > min(dataset.population, len(dataset.train)):
        raise SettingsError(
            f"--subset is {settings.subset}, but {settings.data!r} has a population of {dataset.population}. "
            "Give at most that many."
        )
    train = dataset.train.subset(torch.arange(settings.subset))
    return replace(dataset, train=train, population=settings.subset)


def _load_whole(settings: RunSettings) -> DataSet:
    if ":" not in settings.data:
        dataset = data.load(settings.data, settings.data_dir)
        if settings.population is not None and settings.population != dataset.population:
            raise SettingsError(
                f"--population is {settings.population}, but {settings.data!r} is published with "
                f"{dataset.population} training records. Leave --population out; --subset takes the first "
                "records."
            )
        return dataset
    return load_dataset(settings.data, folder=settings.data_dir, population=settings.population)


def cache_folder() -> Path:
    """Where fixed features are kept from run to run.

    Private like the data, so in the user's own cache folder.
    """
    base = os.environ.get("EQUIPOISE_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "equipoise"


def make_sampling(settings: RunSettings, population: int) -> Sampling:
    """The sampling that the settings name, with as many steps as the epochs ask for."""
    assert settings.batch_size is not None
    assert settings.epochs is not None
    if settings.batch_size > population:
        raise SettingsError(
            f"{settings.said('batch_size')}, but the population is {population}. Give --batch-size, at most "
            "that many."
        )
    kind = sampling_kind(settings)
    if whole_draws(kind) and not settings.batch_size.is_integer():
        raise SettingsError(
            f"{settings.said('batch_size')}, but --sampling {settings.sampling} takes a whole number of "
            "records. Give --batch-size."
        )
    one = kind.of_size(settings.batch_size, population, steps=1)
    return replace(one, steps=steps_of(settings.epochs, population, one.expected_size))  # type: ignore[type-var]


def sampling_kind(settings: RunSettings) -> type[Sampling]:
    """The class of the sampling that the settings name; Poisson where they name none."""
    check_choice("sampling", settings.sampling, tuple(SAMPLING_WORDS))
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


def cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of every record, ``[B]``."""
    return F.cross_entropy(model(batch["input"]), batch["label"], reduction="none")


def accuracy(model: nn.Module, records: Records, chunk: int = 2048) -> float:
    """The share of records whose label the model gives the highest score."""
    return float((predictions(model, records, chunk) == records.fields["label"]).double().mean())


@torch.no_grad()
def predictions(model: nn.Module, records: Records, chunk: int = 2048) -> Tensor:
    """The class with the highest score for every record, int64 ``[n]``."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    inputs = records.fields["input"]
    parts = [
        model(inputs[start : start + chunk].to(device)).argmax(1).cpu()
        for start in range(0, len(records), chunk)
    ]
    model.train(was_training)
    return torch.cat(parts)


def shift_and_flip(
    images: Tensor, generator: torch.Generator, *, pixels: int | None = None, flip: bool | None = None
) -> Tensor:
    """Images ``[B, c, h, w]``, each shifted by its own random offset and perhaps mirrored.

    Args:
        images: floating point.
        generator: on the CPU; a training gives one that follows the draw's secret.
        pixels: largest shift; an eighth of the shorter side by default.
        flip: mirror half of them; for colour images by default, since digits and letters have a right way
            round.

    >>> x = torch.arange(16.0).reshape(1, 1, 4, 4)
    >>> shift_and_flip(x, torch.Generator().manual_seed(0), pixels=0, flip=False).equal(x)
    True
    """
    count, channels, height, width = images.shape
    most = min(height, width) // 8 if pixels is None else pixels
    device = images.device
    if most:
        offsets = torch.randint(0, 2 * most + 1, (2, count), generator=generator).to(device)
        padded = F.pad(images, (most,) * 4, mode="replicate")
        rows = (offsets[0, :, None] + torch.arange(height, device=device))[:, None, :, None]
        columns = (offsets[1, :, None] + torch.arange(width, device=device))[:, None, None, :]
        records = torch.arange(count, device=device)[:, None, None, None]
        images = padded[records, torch.arange(channels, device=device)[None, :, None, None], rows, columns]
    if channels == 3 if flip is None else flip:
        mirrored = (torch.rand(count, generator=generator) < 0.5).to(device)
        images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
    return images
