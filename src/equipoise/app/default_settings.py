"""The default settings of a training, one line per pair of data set and model.

Every number is a public constant that somebody chose; none is computed from the data that the command trains
on. Choosing them by trying on the private records would cost budget that no ledger sees: these were chosen on
public benchmark sets (see docs/measurements/accuracy.md for how).

Sources: the small tanh convolutional nets and their settings follow N. Papernot et al., "Tempered sigmoid
activations for deep learning with differential privacy", AAAI 2021; the linear model on scattering features
follows F. Tramer and D. Boneh, "Differentially private learning needs better features (or much more data)",
ICLR 2021.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from equipoise.app.model_table import MODELS
from equipoise.app.option_checks import data_form

__all__ = [
    "AT_OTHER_BUDGETS",
    "DEFAULT_MODEL",
    "DEFAULT_SETTINGS",
    "FALLBACK",
    "FALLBACK_OF_TABLES",
    "DefaultSettings",
    "default_delta",
    "default_settings",
]


@dataclass(frozen=True)
class DefaultSettings:
    """What `equipoise train` uses where the command line says nothing.

    Attributes:
        batch_size: expected number of records per step.
        epochs: steps times batch size over population.
        epsilon: budget at the delta.
        clip_norm: bound on one record's gradient.
        clip_rule: how gradients are brought under the bound.
        optimizer: ``sgd``, ``adam`` or ``adamw``.
        learning_rate: its step size.
        momentum: of sgd.
        weight_decay: of the optimiser.
        schedule: learning rate over the run: ``constant``, ``linear`` or ``cosine`` (both down to zero).
        ema: decay of the averaged weights, or None.
        views: random views of a record that are averaged before clipping.
        features: for a model that has features to choose from.
    """

    batch_size: float = 256
    epochs: float = 20
    epsilon: float = 3.0
    clip_norm: float = 1.0
    clip_rule: str = "abadi"
    optimizer: str = "sgd"
    learning_rate: float = 0.5
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: str = "constant"
    ema: float | None = None
    views: int = 1
    features: str | None = None


FALLBACK = DefaultSettings()
"""For data and models that have no line of their own."""


FALLBACK_OF_TABLES = DefaultSettings(schedule="linear")
"""For tables: noise of the last steps weighs less than under a constant rate."""


DEFAULT_SETTINGS: dict[tuple[str, str], DefaultSettings] = {
    ("digits", "mlp-tanh"): DefaultSettings(batch_size=718.5, epochs=40, clip_norm=0.1, learning_rate=3.0),
    ("mnist", "cnn-tanh"): DefaultSettings(
        batch_size=2048, epochs=40, epsilon=2.93, clip_norm=0.1, learning_rate=3.0, ema=0.98
    ),
    ("mnist", "scatter-linear"): DefaultSettings(
        batch_size=4096, epochs=40, epsilon=2.93, clip_norm=1.0, learning_rate=0.4, ema=0.95
    ),
    ("fashion-mnist", "cnn-tanh"): DefaultSettings(
        batch_size=2048, epochs=40, epsilon=2.7, clip_norm=0.1, learning_rate=4.0, ema=0.98
    ),
    ("fashion-mnist", "scatter-linear"): DefaultSettings(
        batch_size=4096, epochs=40, epsilon=2.7, clip_norm=0.1, learning_rate=8.0, ema=0.98
    ),
    # the features have length 4, so the weights must become long
    ("mnist", "patches-linear"): DefaultSettings(
        batch_size=8192,
        epochs=60,
        epsilon=2.93,
        clip_norm=0.5,
        learning_rate=5.0,
        ema=0.9,
        features="upright-strokes",
    ),
    ("fashion-mnist", "patches-linear"): DefaultSettings(
        batch_size=8192,
        epochs=40,
        epsilon=2.7,
        clip_norm=0.1,
        learning_rate=50.0,
        ema=0.9,
    ),
    ("cifar10", "patches-linear"): DefaultSettings(
        batch_size=16_384,
        epochs=20,
        epsilon=3.0,
        clip_norm=0.1,
        learning_rate=200.0,
        ema=0.95,
    ),
    ("adult", "additive"): FALLBACK_OF_TABLES,  # measured there, so that advice takes them as they are
    ("digits", "patches-linear"): DefaultSettings(features="strokes"),
    ("cifar10", "cnn-cifar"): DefaultSettings(batch_size=4096, epochs=40, clip_norm=0.1, learning_rate=2.0),
}
"""By data set and model."""


AT_OTHER_BUDGETS: dict[tuple[str, str], dict[float, dict[str, Any]]] = {
    ("cifar10", "patches-linear"): {
        1.0: {"learning_rate": 100.0},
        7.53: {"learning_rate": 400.0, "ema": 0.9},
    },
}
"""What was chosen anew at another epsilon; the nearest in ratio counts."""


DEFAULT_MODEL: dict[str, str] = {
    "digits": "mlp-tanh",
    "mnist": "patches-linear",
    "fashion-mnist": "patches-linear",
    "cifar10": "patches-linear",
}
"""The model that a data set gets when none is named; federations take the one that suits its inputs."""


def default_delta(population: int) -> float:
    """Delta where none is given: 1e-5, and from 100,000 records on a power of ten at least ten times below
    1/population.

    >>> [default_delta(population) for population in (1437, 60_000, 100_000, 2_000_000)]
    [1e-05, 1e-05, 1e-06, 1e-08]
    """
    return 1e-5 if 1e-5 * population < 1 else 10.0 ** -(len(str(population - 1)) + 1)


def default_settings(data: str, model: str, epsilon: float | None = None) -> DefaultSettings:
    """Those of a pair of data set and model, of tables, or the fallback.

    Args:
        epsilon: the budget, where the default one is not taken.

    >>> default_settings("mnist", "cnn-tanh").epsilon
    2.93
    >>> [default_settings("cifar10", "patches-linear", epsilon).learning_rate for epsilon in (1.5, 2, 8)]
    [100.0, 200.0, 400.0]
    >>> default_settings("my.module:records", "my.module:net") == FALLBACK
    True
    """
    usual = FALLBACK_OF_TABLES if data_form(data) == "table" or model == "additive" else FALLBACK
    found = DEFAULT_SETTINGS.get((data, model), usual)
    others = AT_OTHER_BUDGETS.get((data, model), {})
    if epsilon is not None and others:
        nearest = min([found.epsilon, *others], key=lambda other: abs(math.log(other / epsilon)))
        found = replace(found, **others.get(nearest, {}))
    if found.features is None and model in MODELS:
        return replace(found, features=MODELS[model].default_features)
    return found
