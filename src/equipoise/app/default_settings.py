"""What a training takes if neither the command line nor a file says: the recipes, TOML files beside this one.

Every number in them is a public constant that somebody chose; none is computed from the data that the command
trains on. Choosing them by trying on the private records would cost budget that no ledger sees: these were
chosen on public benchmark sets (see docs/measurements/accuracy.md for how).
"""

from __future__ import annotations

import math
import tomllib
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from equipoise.app.model_table import DEFAULT_FEATURES, ON_FEATURES, STATISTICS
from equipoise.app.option_checks import data_form

RECIPES = Path(__file__).with_name("recipes")
"""The folder of the recipes. `equipoise train --config NAME` takes one as it takes any file."""


@cache
def recipes() -> dict[str, dict[str, Any]]:
    """The settings of every recipe, by the name of its file.

    >>> recipes()["mnist"]["model"]
    'patches-linear'
    """
    return {
        path.stem: {
            name.replace("-", "_"): value for name, value in tomllib.loads(path.read_text("utf-8")).items()
        }
        for path in sorted(RECIPES.glob("*.toml"), key=lambda path: path.stem)
    }


def default_model_of(data: str) -> str | None:
    """The model of a data set when none is named. Of tables the number of rows decides, not the recipe."""
    model = recipes().get(data, {}).get("model")
    return None if model == "additive" else model


def default_delta(population: int) -> float:
    """Delta where none is given: 1e-5, and from 100,000 records on a power of ten at least ten times below
    1/population.

    >>> [default_delta(population) for population in (1437, 60_000, 100_000, 2_000_000)]
    [1e-05, 1e-05, 1e-06, 1e-08]
    """
    return 1e-5 if 1e-5 * population < 1 else 10.0 ** -(len(str(population - 1)) + 1)


def default_settings(data: str, model: str, epsilon: float | None = None) -> Any:
    """The settings for a pair of data set and model, for a model, of tables, or for all others, by name.

    Args:
        epsilon: the budget, if it is not the recipe's: of several recipes the nearest in ratio counts, and
            the one with the shortest name if no budget is given.

    >>> default_settings("mnist", "cnn-tanh").epsilon
    2.93
    >>> [default_settings("cifar10", "patches-linear", epsilon).learning_rate for epsilon in (1.5, 2, 8)]
    [100, 300, 400]
    """
    usual = "tables" if data_form(data) == "table" or model == "additive" else "other"
    usual = "statistics" if model in STATISTICS else model if model in recipes() else usual
    fitting = [one for one in recipes().values() if (one.get("data"), one.get("model")) == (data, model)]
    found = fitting[0] if fitting else recipes()[usual]
    if epsilon is not None and fitting:
        found = min(fitting, key=lambda one: abs(math.log(one["epsilon"] / epsilon)))
    features = DEFAULT_FEATURES if model == ON_FEATURES else None
    return SimpleNamespace(
        **{"ema": None, "features": features, "batch_size": None, "sampling": None, **found}
    )
