"""The table of the models that the command line offers. It loads neither torch nor any model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["DEFAULT_FEATURES", "DRAWN_FEATURES", "IN_BENCHMARKS", "MODELS", "ON_FEATURES"]


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


DEFAULT_FEATURES = "deep-things"
"""Of the model on drawn features, where no recipe for the data names others."""

ON_FEATURES = "patches-linear"
"""The model that is trained on drawn features instead of the inputs."""

MODELS: Final[dict[str, str]] = {
    "mlp-tanh": "equipoise.app.models:mlp_tanh",
    "cnn-tanh": "equipoise.app.models:cnn_tanh",
    "cnn-cifar": "equipoise.app.models:cnn_cifar",
    "logistic": "equipoise.app.models:logistic",
    "additive": "equipoise.app.models:additive",
    ON_FEATURES: "equipoise.app.models:patches_linear",
    "text-bag": "equipoise.app.models:text_bag",
}
"""By name, "module:function": data set (as prepared) -> module; ValueError if the inputs do not suit it."""


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
