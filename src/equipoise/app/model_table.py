"""The table of the models that the command line offers. It loads neither torch nor any model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["DRAWN_FEATURES", "MODELS", "ModelEntry"]


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
    "resnet20-gn": ModelEntry("equipoise.app.models:resnet20_gn"),
    "linear": ModelEntry("equipoise.app.models:linear_model"),
    "logistic": ModelEntry("equipoise.app.models:logistic"),
    "additive": ModelEntry("equipoise.app.models:additive"),
    "scatter-linear": ModelEntry("equipoise.app.models:scatter_linear", "equipoise.app.models:scattering"),
    "scatter-pooled": ModelEntry("equipoise.app.models:logistic", "equipoise.app.models:pooled_scattering"),
    "patches-linear": ModelEntry(
        "equipoise.app.models:patches_linear",
        "equipoise.app.models:drawn_features",
        DRAWN_FEATURES,
        default_features="deep-things",
    ),
    "text-bag": ModelEntry("equipoise.app.models:text_bag"),
    "text-gru": ModelEntry("equipoise.app.models:text_gru"),
    "text-signs": ModelEntry("equipoise.app.models:logistic", "equipoise.app.models:token_bags"),
}
