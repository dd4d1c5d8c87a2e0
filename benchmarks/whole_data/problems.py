"""The data sets: fixed public features, a linear model, and which records train, tune and judge.

The training records are shuffled once, with a public seed. The last 100 are public: the methods that want
public records get them, and no method trains on them as private ones. Of the others 80% train and 20% judge
while settings are chosen; with the chosen settings all of them train and the test records judge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.app.data_loading import cache_folder
from equipoise.data import DataSet
from equipoise.data.features.extractors import ScatteringFeatures, features_of

Split = Literal["tuning", "test"]
Fields = dict[str, Tensor]

PUBLIC = 100
TUNING_SHARE = 0.8


@dataclass(frozen=True)
class PooledScattering:
    """Scattering with four angles, each map of coefficients averaged to 4 x 4."""

    shape: tuple[int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_scattering", ScatteringFeatures(self.shape, angles=4, num_groups=5))

    def __call__(self, inputs: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(self._scattering(inputs), 4)

    def config(self) -> dict[str, object]:
        return {**self._scattering.config(), "pooled": 4}


@dataclass(frozen=True)
class TokenBags:
    """A text's token vectors, random signs from a public seed, added up and scaled; token 0 is padding.

    Where all tokens differ, features have a norm of about 4.
    """

    vocabulary: int
    width: int = 512

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (self.vocabulary, self.width), generator=generator).float() * 2 - 1
        signs[0] = 0
        object.__setattr__(self, "_signs", signs)

    def __call__(self, tokens: Tensor) -> Tensor:
        present = (tokens != 0).sum(1, keepdim=True).clamp(min=1)
        return F.embedding(tokens, self._signs).sum(1) / present.sqrt() / self.width**0.5 * 4

    def config(self) -> dict[str, object]:
        return {"extractor": "token bags", "version": 1, "vocabulary": self.vocabulary, "width": self.width}


def _as_it_is(found: DataSet) -> DataSet:
    return found


def _scattered(found: DataSet) -> DataSet:
    height, width = found.input_shape[1:]
    return features_of(found, PooledScattering((height, width)), cache_folder())


def _bagged(found: DataSet) -> DataSet:
    assert found.vocabulary_size is not None
    return features_of(found, TokenBags(found.vocabulary_size), cache_folder())


@dataclass(frozen=True)
class Design:
    """How a data set is trained on: the same for every method.

    Attributes:
        features: from the data set as it is read.
        steps: of a training.
        draws: per pass over the records.
        model: what `equipoise train` calls this model on these features; None where it has none.
    """

    features: Callable[[DataSet], DataSet]
    steps: int = 100
    draws: int = 16
    model: str | None = None


DESIGNS: dict[str, Design] = {
    "mushroom": Design(_as_it_is, model="logistic"),
    "a9a": Design(_as_it_is, model="logistic"),
    "adult": Design(_as_it_is, model="logistic"),
    "pneumoniamnist": Design(_scattered),
    "mnist": Design(_scattered),
    "fashion-mnist": Design(_scattered),
    "cifar10": Design(_scattered),
    "sst2": Design(_bagged),
}
"""In the order in which they are worth knowing."""


class Problem:
    """A data set with its features, in parts.

    Args:
        found: with its features; its test records are read by `parts("test")` and by nothing else.
        design: steps and draws.
    """

    def __init__(self, found: DataSet, design: Design) -> None:
        self.name, self.steps, self.draws = found.name, design.steps, design.draws
        order = torch.randperm(found.population, generator=torch.Generator().manual_seed(0))
        private, public = order[:-PUBLIC], order[-PUBLIC:]
        self.public = _flat(found.train[public])
        self._private = _flat(found.train[private])
        self._found = found
        self._classes = found.num_classes

    @classmethod
    def load(cls, name: str, folder: Path) -> Problem:
        """Read it and compute its features, or take them from the cache."""
        return cls(DESIGNS[name].features(eq.data.load(name, folder)), DESIGNS[name])

    def parts(self, split: Split) -> tuple[Fields, Fields]:
        """The records that train, and those that judge."""
        if split == "test":
            everything = torch.arange(len(self._found.test))
            return self._private, _flat(self._found.test[everything])
        cut = round(TUNING_SHARE * len(self._private["label"]))
        train = {name: value[:cut] for name, value in self._private.items()}
        return train, {name: value[cut:] for name, value in self._private.items()}

    def model(self) -> nn.Module:
        """A linear model that starts at zero: the problem is convex, and the start needs no luck."""
        layer = nn.Linear(self.public["input"].shape[1], self._classes)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        return layer


def _flat(records: Fields) -> Fields:
    return {**records, "input": records["input"].flatten(1)}
