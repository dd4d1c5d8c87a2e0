"""The models that `model_table` names: small networks of plain PyTorch layers.

Every model takes ``batch["input"]`` and returns logits ``[B, num_classes]``. Initial weights follow the given
seed and nothing else: they are public. Some models are trained on fixed features instead of the raw inputs;
`prepare_data` applies the extraction that belongs to a model and leaves the data alone for all others.

Sources: "cnn-tanh" and "cnn-cifar" are the networks of N. Papernot, A. Thakurta, S. Song, S. Chien, U.
Erlingsson, "Tempered sigmoid activations for deep learning with differential privacy", AAAI 2021;
"patches-linear" has the patch dictionaries of A. Coates, A. Y. Ng, "The importance of encoding versus
training with sparse coding and vector quantization", ICML 2011, the network of
`equipoise.data.features.contrastive`, and whitening, all fitted on drawn pictures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise._files import PathLike
from equipoise.app.default_settings import default_settings
from equipoise.app.model_table import BY_GROUPS, DRAWN_FEATURES, MODELS, ON_FEATURES
from equipoise.app.statistics import GROUP, GROUPS, SufficientStatistics
from equipoise.data.features.drawn import DrawnFeatures
from equipoise.data.features.extractors import FeatureProgress, features_of
from equipoise.data.readers.custom import load_function
from equipoise.data.records import OWNER, DataSet, Records
from equipoise.gradients.capture.random_numbers import random_numbers_from

RECORDS_FOR_ADDITIVE = 4_000
"""From so many on a table has `additive` by default; with fewer the noise can outweigh what it gains."""


class PiecewiseLinear(nn.Module):
    """Rows, followed by hat functions of some of their numbers: what is linear in them bends at the knots.

    The knots lie evenly in [-1, 1]. A number's hats are between 0 and 1, at most two of them are above 0, and
    they sum to 1. There are no parameters.

    Args:
        columns: places of the numbers, which are taken to lie within [-1, 1].
        knots: for each number, the ends included.

    >>> PiecewiseLinear((1,), knots=3)(torch.tensor([[7.0, 0.5]])).tolist()
    [[7.0, 0.5, 0.0, 0.5, 0.5]]
    """

    def __init__(self, columns: Sequence[int], knots: int = 8) -> None:
        super().__init__()
        self.columns, self.knots = list(columns), knots

    def width(self, of_rows: int) -> int:
        """Of what comes out, for rows that wide."""
        return of_rows + len(self.columns) * self.knots

    def forward(self, rows: Tensor) -> Tensor:
        """``[B, d]`` -> ``[B, d + columns * knots]``."""
        places = (rows[:, self.columns].clamp(-1.0, 1.0) + 1.0) * ((self.knots - 1) / 2)
        knots = torch.arange(self.knots, dtype=rows.dtype, device=rows.device)
        hats = (1.0 - (places.unsqueeze(2) - knots).abs()).clamp(min=0.0)
        return torch.cat([rows, hats.flatten(1)], 1)


class HashedWords(nn.Module):
    """A linear model, started at zero and without bias, of which words a text has.

    The row ``x`` has a 1 for each distinct token of the text over the root of their number, so that its norm
    is 1 (0 without tokens), and the logits are ``W x``. It is never made: a text's tokens look up their
    columns of ``W``. Token 0 is padding, wherever it stands.

    >>> model = HashedWords(8, 1)
    >>> _ = nn.init.ones_(model.words.weight)
    >>> model(torch.tensor([[3, 5, 3, 7, 6], [0, 0, 0, 0, 0]])).tolist()
    [[2.0], [0.0]]
    """

    def __init__(self, vocabulary_size: int, num_classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary_size, num_classes)
        nn.init.zeros_(self.words.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids ``[B, S]`` -> logits ``[B, num_classes]``."""
        ordered = tokens.sort(1).values
        # the first of its kind counts, and padding, which comes first, is of the kind before it
        first = ordered != F.pad(ordered[:, :-1], (1, 0))
        present = first.unsqueeze(2).to(self.words.weight.dtype)
        return (self.words(ordered) * present).sum(1) / present.sum(1).clamp(min=1.0).sqrt()


def _unsuitable(name: str, dataset: DataSet, wanted: str) -> ValueError:
    return ValueError(
        f"model={name!r} takes {wanted}, but the inputs of {dataset.name!r} have shape {dataset.input_shape} "
        f"and type {dataset.train.fields['input'].dtype}. Known models: {', '.join(MODELS)}."
    )


def _images(name: str, dataset: DataSet, least: int) -> tuple[int, int, int]:
    shape = dataset.input_shape
    if len(shape) != 3 or min(shape[1:]) < least:
        raise _unsuitable(name, dataset, f"images [c, h, w] of at least {least} x {least} pixels")
    return shape[0], shape[1], shape[2]


def _flat(name: str, dataset: DataSet) -> int:
    if not dataset.train.fields["input"].is_floating_point():
        raise _unsuitable(name, dataset, "numbers")
    return prod(dataset.input_shape)


def _finished(body: nn.Sequential, shape: tuple[int, ...], *widths: int) -> nn.Sequential:
    """The body, flattened and followed by linear layers with tanh between them."""
    with torch.no_grad():
        features = body(torch.zeros(1, *shape)).numel()
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in zip((features, *widths[:-1]), widths, strict=True):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*body, *layers[:-1])


def mlp_tanh(dataset: DataSet) -> nn.Module:
    """One hidden layer of 64 tanh units."""
    flat = _flat("mlp-tanh", dataset)
    return nn.Sequential(nn.Flatten(), nn.Linear(flat, 64), nn.Tanh(), nn.Linear(64, dataset.num_classes))


class _ShortMaxPool(nn.Module):
    """``nn.MaxPool2d(2, stride=1)`` with channels last, which takes a fifth of its time on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x.contiguous(memory_format=torch.channels_last), 2, stride=1)


def cnn_tanh(dataset: DataSet) -> nn.Module:
    """The small tanh CNN of the DP literature (26,010 parameters on 28 x 28)."""
    channels, *size = _images("cnn-tanh", dataset, 14)
    body = nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=2, padding=3),
        nn.Tanh(),
        _ShortMaxPool(),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        _ShortMaxPool(),
    )
    return _finished(body, (channels, *size), 32, dataset.num_classes)


def cnn_cifar(dataset: DataSet) -> nn.Module:
    """Six tanh convolutions (550,570 parameters on 3 x 32 x 32)."""
    channels, *size = _images("cnn-cifar", dataset, 8)
    layers: list[nn.Module] = []
    before = channels
    for width in (32, 64, 128):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.Tanh()]
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
        before = width
    return _finished(nn.Sequential(*layers), (channels, *size), 128, dataset.num_classes)


def logistic(dataset: DataSet) -> nn.Module:
    """One linear layer, started at zero."""
    return nn.Sequential(nn.Flatten(), _from_zero(_flat("logistic", dataset), dataset.num_classes))


def _from_zero(width: int, num_classes: int) -> nn.Linear:
    """The problem is convex: zero is the natural start, and it needs no luck."""
    layer = nn.Linear(width, num_classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def additive(dataset: DataSet) -> nn.Module:
    """One linear layer, started at zero, on the inputs and on bends of the declared numbers."""
    if not dataset.numeric_columns:
        raise _unsuitable("additive", dataset, "columns that a schema declares as numbers")
    bends = PiecewiseLinear(dataset.numeric_columns)
    return nn.Sequential(bends, _from_zero(bends.width(prod(dataset.input_shape)), dataset.num_classes))


def statistics(dataset: DataSet, groups: int = 1) -> nn.Module:
    """Noised sufficient statistics of a linear model (see `equipoise.app.statistics`)."""
    declared = dataset.schema or {}
    if dataset.num_classes > 2 or dataset.task == "multi-label" or "columns" not in declared:
        raise _unsuitable("statistics", dataset, "a table with a schema, and learns a number or two classes")
    from equipoise.app.coefficients import design_of
    from equipoise.data.readers.schema import table_of  # imports pydantic

    table = table_of(declared)
    # a column's numbers have a length of at most 1, and so has the 1 before them
    bound = math.sqrt(1 + len(table.inputs))
    return SufficientStatistics(design_of(table)[0], bound, dataset.population, dataset.num_classes, groups)


def statistics_by_groups(dataset: DataSet) -> nn.Module:
    """The same of disjoint groups of rows, for intervals that assume nothing of the errors."""
    return statistics(dataset, GROUPS)


def patches_linear(dataset: DataSet) -> nn.Module:
    """One linear layer, started at zero, on drawn features."""
    if len(dataset.input_shape) != 1 or dataset.vocabulary_size is not None:
        raise _unsuitable("patches-linear", dataset, "what prepare_data('patches-linear', dataset) returns")
    return logistic(dataset)


def hashed_words(dataset: DataSet) -> nn.Module:
    """One linear layer, started at zero, on which words a text has."""
    if dataset.vocabulary_size is None or len(dataset.input_shape) != 1:
        raise _unsuitable("hashed-words", dataset, "token ids [n, s] and a vocabulary_size")
    return HashedWords(dataset.vocabulary_size, dataset.num_classes)


def build_model(name: str, dataset: DataSet, *, seed: int = 0) -> nn.Module:
    """The model called ``name`` for a data set's shapes, with initial weights that follow ``seed``.

    Args:
        name: a name of the table, or ``package.module:function`` with a function of the data set.
        dataset: the data as trained on, that is after :func:`prepare_data`.
        seed: public; the global generators of torch, NumPy and Python start from it, and are then as before.

    Raises:
        ValueError: an unknown name, or inputs that do not suit the model.
        TypeError: a custom function that does not take the data set, or returns no module.

    >>> from equipoise import data
    >>> model = build_model("mlp-tanh", data.load("digits"))
    >>> sum(p.numel() for p in model.parameters())
    4810
    """
    if ":" not in name and name not in MODELS:
        raise ValueError(
            f"model={name!r} is not a known model. Known: {', '.join(MODELS)}. For a model of your own pass "
            "package.module:function, a function from the data set to a module."
        )
    build = load_function(name) if ":" in name else globals()[name.replace("-", "_")]
    try:
        signature(build).bind(dataset)
    except TypeError as error:
        raise TypeError(
            f"model={name!r} cannot be called with the data set ({error}). Give the function one parameter: "
            "`def net(dataset): ...` returns a torch.nn.Module for dataset.input_shape and "
            "dataset.num_classes."
        ) from None
    with random_numbers_from(seed):
        model = build(dataset)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={name!r} returned a {type(model).__name__}, not a torch.nn.Module.")
    return model


def extractor_of(name: str, dataset: DataSet, features: str | None = None) -> DrawnFeatures | None:
    """The feature extractor that belongs to the model, or None if it takes the raw inputs.

    Args:
        name: the model's name.
        dataset: the raw data.
        features: which ones, for a model that has several; those of the data set's default settings if None.

    >>> from equipoise import data
    >>> extractor_of("patches-linear", data.load("digits")).config()["extractor"]
    'drawn'
    """
    if name != ON_FEATURES:
        return None
    chosen = features or default_settings(dataset.name, name).features
    constants: Any = DRAWN_FEATURES[chosen]
    return DrawnFeatures(_images(name, dataset, 8), **constants)


def prepare_data(
    name: str,
    dataset: DataSet,
    cache: PathLike | None = None,
    *,
    features: str | None = None,
    progress: FeatureProgress | None = None,
    outline: bool = False,
) -> DataSet:
    """The data set as the model takes it: fixed features or groups where it is made for them, else unchanged.

    Args:
        name: the model's name.
        dataset: the raw data.
        cache: a folder where features are kept from run to run; private, like the data. None keeps nothing.
        features: as for `extractor_of`; those of the run that a model belongs to.
        progress: called with (done, total) while features are computed.
        outline: put zeros of the features' shape in their place, for what depends on the shape alone.
    """
    extractor = extractor_of(name, dataset, features)
    if name == BY_GROUPS and GROUP not in dataset.train.fields:
        of_rows = dataset.train.groups(GROUPS, by=OWNER if OWNER in dataset.train.fields else None)
        train = Records({**dataset.train.fields, GROUP: of_rows}, num_classes=dataset.train.num_classes)
        return replace(dataset, train=train)
    if extractor is None:
        return dataset
    if outline:
        # the shape does not depend on how many pictures they are fitted on
        shape = replace(extractor, pictures=100)(torch.zeros_like(dataset.train.fields["input"][:1])).shape[
            1:
        ]

        def zeros(records: Records) -> Records:
            inputs = torch.zeros(1, *shape).expand(len(records), *shape)  # one row in memory
            return Records({**records.fields, "input": inputs}, num_classes=records.num_classes)

        return replace(dataset, train=zeros(dataset.train), test=zeros(dataset.test), numeric_columns=())
    return features_of(dataset, extractor, cache, progress=progress)


def default_model(dataset: DataSet) -> str:
    """The name of a model that suits the inputs: tokens, large images, small images, tables, plain numbers.

    >>> from equipoise import data
    >>> default_model(data.load("digits"))
    'mlp-tanh'
    """
    if dataset.vocabulary_size is not None:
        return "hashed-words"
    shape = dataset.input_shape
    if len(shape) == 3 and min(shape[1:]) >= 14:
        return "cnn-cifar" if shape[0] == 3 else "cnn-tanh"
    if len(shape) == 3:
        return "mlp-tanh"
    many = dataset.population >= RECORDS_FOR_ADDITIVE
    return "additive" if dataset.numeric_columns and many else "logistic"
