"""The data sets: fixed public features, a model, and which records train, tune and judge.

The training records are shuffled once, with a public seed. The last 100 are public: the methods that want
public records get them, and no method trains on them as private ones. Of the others 80% train and 20% judge
while settings are chosen; with the chosen settings all of them train and the test records judge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import equipoise as eq
from benchmarks import data
from benchmarks.whole_data.next_character import LENGTH, NextCharacter, read_shakespeare, shifted
from equipoise.app.models import build_model
from equipoise.data import DataSet

Split = Literal["tuning", "test"]
Fields = dict[str, Tensor]

PUBLIC = 100
TUNING_SHARE = 0.8


def flat(records: Fields) -> Fields:
    return {**records, "input": records["input"].flatten(1)}


def linear(found: DataSet) -> nn.Module:
    """A linear model that starts at zero: the problem is convex, and the start needs no luck."""
    layer = nn.Linear(prod(found.input_shape), found.num_classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


@dataclass(frozen=True)
class Design:
    """How a data set is trained on: the same for every method.

    Attributes:
        read: folder -> the data set, with the features that the model is trained on.
        options: of `equipoise train`, for this data set and model; None where it has none.
        steps: of a training.
        draws: per pass over the records.
        fields: of records, as the model and its loss take them.
        network: for the data set with its features.
        labels: of a record, each of which counts in the accuracy.
    """

    read: Callable[[Path], DataSet]
    options: str | None = None
    steps: int = 100
    draws: int = 16
    fields: Callable[[Fields], Fields] = flat
    network: Callable[[DataSet], nn.Module] = linear
    labels: int = 1


def _of_bench(name: str, population: int, **more: Any) -> Design:
    """Of a function of `benchmarks.data`, with a linear model."""
    options = f"--data benchmarks.data:{name} --population {population} --model logistic"
    return Design(getattr(data, name), options, **more)


DESIGNS: dict[str, Design] = {
    "mushroom": _of_bench("mushroom", 6_499),
    "a9a": _of_bench("a9a", 32_561),
    "adult": Design(partial(eq.data.load, "adult"), "--data adult --model logistic"),
    "pneumoniamnist": _of_bench("pneumoniamnist_pooled", 4_708),
    "mnist": _of_bench("mnist_pooled", 60_000),
    "fashion-mnist": _of_bench("fashion_mnist_pooled", 60_000),
    "cifar10": _of_bench("cifar10_pooled", 50_000),
    "sst2": _of_bench("sst2_signs", 67_349),
    "sst2-gru": Design(
        data.sst2,
        "--data benchmarks.data:sst2 --population 67349 --model benchmarks.models:text_gru",
        draws=128,
        network=partial(build_model, "benchmarks.models:text_gru"),
    ),
    "shakespeare": Design(
        partial(read_shakespeare, "shakespeare"),
        draws=128,
        fields=shifted,
        network=lambda found: NextCharacter(found.num_classes),
        labels=LENGTH - 1,
    ),
}
"""In the order in which they are worth knowing."""

LINEAR = [name for name, design in DESIGNS.items() if design.network is linear]
"""Those with a linear model."""


class Problem:
    """A data set with its features, in parts.

    Args:
        found: with its features; its test records are read by `parts("test")` and by nothing else.
        design: steps, draws and the model.
    """

    def __init__(self, found: DataSet, design: Design) -> None:
        self.steps, self.draws = design.steps, design.draws
        order = torch.randperm(found.population, generator=torch.Generator().manual_seed(0))
        private, public = order[:-PUBLIC], order[-PUBLIC:]
        self.public = design.fields(found.train[public])
        self._private = design.fields(found.train[private])
        self._found, self._design = found, design

    @classmethod
    def load(cls, name: str, folder: Path) -> Problem:
        """Read it and compute its features, or take them from the cache."""
        design = DESIGNS[name]
        return cls(design.read(folder), design)

    def parts(self, split: Split) -> tuple[Fields, Fields]:
        """The records that train, and those that judge."""
        if split == "test":
            everything = torch.arange(len(self._found.test))
            return self._private, self._design.fields(self._found.test[everything])
        cut = round(TUNING_SHARE * len(self._private["label"]))
        train = {name: value[:cut] for name, value in self._private.items()}
        return train, {name: value[cut:] for name, value in self._private.items()}

    def model(self) -> nn.Module:
        """The same start for every training."""
        return self._design.network(self._found)
