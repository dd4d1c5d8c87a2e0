"""The data set that settings name, whole or in part, its public records, and where its features are kept."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from equipoise import data
from equipoise.app.option_checks import SettingsError, data_form
from equipoise.app.settings import RunSettings
from equipoise.data import DataSet, Records
from equipoise.data.readers.custom import load_dataset
from equipoise.data.readers.image_folders import load_images
from equipoise.data.records import OWNER, WEIGHT
from equipoise.training.setup.private_copies import are_copies


def set_public_apart(settings: RunSettings, dataset: DataSet) -> tuple[DataSet, dict[str, Tensor] | None]:
    """The data set without the records declared public (the last ones), and these as a batch.

    A private record that equals a public one is left out, too: it follows from that record and the public
    ones alone, so that the guarantee of the others stays.
    """
    count = settings.public_records
    if count is None:
        return dataset, None
    private = len(dataset.train) - count
    if private < 1 or dataset.population <= count:
        raise SettingsError(
            f"--public-records is {count}, but {dataset.name!r} has {len(dataset.train)} training records "
            "and some must stay private. Give fewer."
        )
    public = dataset.train[slice(private, private + count)]
    public.pop(OWNER, None)  # nobody is protected there
    train = dataset.train.subset(torch.arange(private))
    train = train.subset(torch.nonzero(~are_copies(train.fields, public)).flatten())
    return replace(dataset, train=train, population=dataset.population - count), public


def load_data(settings: RunSettings) -> DataSet:
    """The data set that the settings name, or the first records of it.

    Raises:
        SettingsError: the population is missing, or contradicts the published one; a subset is too large; a
            task that the data are not made for.
        DataFileError: files are missing or broken.
    """
    dataset = _load_whole(settings)
    if settings.owner is not None and data_form(settings.data) != "table":
        dataset = _with_owner(dataset, settings.owner)
    if settings.task not in (None, dataset.task):
        raise SettingsError(
            f"--task is {settings.task}, but {settings.data_name!r} is made for {dataset.task}. A table's "
            "task follows from its target: a column of numbers is a regression, a category is a "
            "classification, several categories of two values each are multi-label."
        )
    unused = set(dataset.train.fields) - {"input", "label", "target", OWNER, WEIGHT}
    if unused:  # which a reader would take to be applied
        raise SettingsError(
            f"--data {settings.data_name!r} gives records with the fields {', '.join(sorted(unused))}, which "
            "no loss of the command line uses. Leave them out, or train from Python with a loss that uses "
            "them (equipoise.PrivateTraining)."
        )
    if settings.subset is None:
        return dataset
    if settings.subset > min(dataset.population, len(dataset.train)):
        raise SettingsError(
            f"--subset is {settings.subset}, but {settings.data!r} has a population of {dataset.population}. "
            "Give at most that many."
        )
    train = dataset.train.subset(torch.arange(settings.subset))
    return replace(dataset, train=train, population=settings.subset)


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _with_owner(dataset: DataSet, name: str) -> DataSet:
    """The data set of the user's own, where a field of its training records names users."""
    owner = dataset.train.fields.get(name)
    whole = owner is not None and owner.ndim == 1 and owner.dtype in _WHOLE
    if owner is None or not whole or name in ("input", "label", "target"):
        fields = ", ".join(sorted(set(dataset.train.fields) - {"input", "label", "target"})) or "none"
        raise SettingsError(
            f"--owner is {name!r}, but it must name a field of the training records that holds a whole "
            f"number for the user of each. Besides inputs and what is learnt they have: {fields}."
        )
    train = Records({**dataset.train.without(name).fields, OWNER: owner}, num_classes=dataset.num_classes)
    test = dataset.test.without(name) if name in dataset.test.fields else dataset.test
    return replace(dataset, train=train, test=test)


def _load_whole(settings: RunSettings) -> DataSet:
    form, share = data_form(settings.data), settings.test_share
    if settings.private_validation is not None and settings.test is None:
        share = share or 0.0
    if form == "table":
        from equipoise.data.readers.schema import load_table  # pydantic is imported where a table is read

        return load_table(
            settings.data,
            settings.schema,
            target=settings.target,
            test=settings.test,
            test_share=share,
            population=settings.population,
            owner=settings.owner,
        )
    if form == "images":
        assert settings.image_size is not None
        assert settings.population is not None
        return load_images(
            settings.data,
            settings.image_size,
            test=settings.test,
            test_share=share,
            population=settings.population,
        )
    if form == "named":
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
