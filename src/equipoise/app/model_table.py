"""The table of the models that the command line offers. It loads neither torch nor any model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["DRAWN_FEATURES", "IN_BENCHMARKS", "MODELS", "ModelEntry"]


@dataclass(frozen=True)
class ModelEntry:
    """A row of the table; functions are named as "module:function".

    Attributes:
        build: data set (as prepared) -> module; raises ValueError where the inputs do not suit it.
        extractor: raw data set -> the feature extractor that belongs to the model; None for raw inputs.
        features: those to choose from, by name: arguments of `extractor`. Empty where there is no choice.
        default_features: a name among them, for data whose default settings name none.
    """

    build: str
    extractor: str | None = None
    features: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    default_features: str | None = None


DRAWN_FEATURES: Final[Mapping[str, Mapping[str, Any]]] = {
    "strokes": {"dictionaries": ((512, 7, 2),)},
    "upright-strokes": {"dictionaries": ((512, 7, 2),), "upright": True},
    # Of things, smaller patches on finer cells say more, and they face either way.
    "things": {"dictionaries": ((256, 5, 4), (512, 7, 2)), "with_mirror_image": True},
    # The network's weights come with the package; others would get another name.
    "deep-things": {
        "dictionaries": ((256, 5, 4), (512, 7, 2)),
        "with_mirror_image": True,
        "network": "contrastive",
    },
}
"""By what the pictures show: arguments of `DrawnFeatures`.

Run folders name them, so a line stays as it is: other features get another name.
"""


MODELS: Final[dict[str, ModelEntry]] = {
    "mlp-tanh": ModelEntry("equipoise.app.models:mlp_tanh"),
    "cnn-tanh": ModelEntry("equipoise.app.models:cnn_tanh"),
    "cnn-cifar": ModelEntry("equipoise.app.models:cnn_cifar"),
    "logistic": ModelEntry("equipoise.app.models:logistic"),
    "additive": ModelEntry("equipoise.app.models:additive"),
    "patches-linear": ModelEntry(
        "equipoise.app.models:patches_linear",
        "equipoise.app.models:drawn_features",
        DRAWN_FEATURES,
        default_features="deep-things",
    ),
    "text-bag": ModelEntry("equipoise.app.models:text_bag"),
}


IN_BENCHMARKS: Final[Mapping[str, str]] = {
    "resnet20-gn": "--model benchmarks.models:resnet20",
    "linear": "--model benchmarks.models:linear (or --model logistic, which starts at zero)",
    "text-gru": "--model benchmarks.models:text_gru",
    "text-signs": "--model logistic --data benchmarks.data:sst2_signs --population 67349",
    "scatter-linear": "--data benchmarks.data:mnist_scattered --config "
    "benchmarks/recipes/mnist-scattered.toml",
    "scatter-pooled": "--model logistic --data benchmarks.data:cifar10_pooled --population 50000",
    "cifar100": "--data benchmarks.data:cifar100 --population 50000",
    "a9a": "--data benchmarks.data:a9a --population 32561",
    "mushroom": "--data benchmarks.data:mushroom --population 6499",
    "sst2": "--data benchmarks.data:sst2 --population 67349",
    "sst2-sentences": "--data benchmarks.data:sst2_sentences --population 6920",
    "pneumoniamnist": "--data benchmarks.data:pneumoniamnist --population 4708",
    "breastmnist": "--data benchmarks.data:breastmnist --population 546",
}
"""Models and data sets that stood in the package once: what names them from a checkout of the sources."""
