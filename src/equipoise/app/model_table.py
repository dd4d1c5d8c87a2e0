"""The table of the models that the command line offers. It loads neither torch nor any model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

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
    # Keeps what a picture shows and shrinks how it is seen; best where noise limits accuracy (CIFAR-10).
    "steady-things": {
        "dictionaries": ((256, 5, 4), (512, 7, 2)),
        "with_mirror_image": True,
        "network": "contrastive",
        "by_views": True,
        "ridge": 0.3,
    },
}
"""By what the pictures show: arguments of `DrawnFeatures`.

Run folders name them, so a line stays as it is: other features get another name.
"""


DEFAULT_FEATURES = "deep-things"
"""Of the model on drawn features, where no recipe for the data names others."""

ON_FEATURES = "patches-linear"
"""The model that is trained on drawn features instead of the inputs."""

BY_GROUPS = "statistics-by-groups"
STATISTICS = ("statistics", BY_GROUPS)
"""The models whose parameters are noised sums over all rows, released once."""
LINEAR = ("logistic", *STATISTICS)
"""The models whose coefficients can be written in units of a table's columns."""

MODELS: Final = (
    "mlp-tanh", "cnn-tanh", "cnn-cifar", "logistic", "additive", *STATISTICS, ON_FEATURES, "hashed-words",
)  # fmt: skip
"""Functions of `equipoise.app.models`, with underscores there: data set (as prepared) -> module."""
