"""Data and models of the user's own, named on the command line as ``package.module:function``.

The function is ordinary Python and runs with the user's rights: name only code that you trust.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from equipoise._files import PathLike
from equipoise.data.records import DataSet


def load_function(spec: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` names; modules in the current folder are found too.

    Raises:
        ValueError: the text does not have that form, there is no such module or no such function.
        TypeError: what is found cannot be called.

    >>> load_function("math:hypot")(3, 4)
    5.0
    """
    found = load_named(spec)
    if not callable(found):
        raise TypeError(
            f"{spec!r} is a {type(found).__name__}, not a function. Name a function that returns the object."
        )
    function: Callable[..., Any] = found
    return function


def load_named(spec: str) -> Any:
    """What ``package.module:name`` names; raises ValueError as `load_function`."""
    module_name, colon, attribute = spec.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module_name.split("."), *attribute.split(".")]):
        raise ValueError(f"{spec!r} does not have the form package.module:function.")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise  # the module exists and lacks something that it imports itself
        raise ValueError(
            f"{spec!r}: there is no module {error.name!r}, neither installed nor in the current folder. "
            "Check the spelling, or start from the folder that holds it."
        ) from None
    finally:
        sys.path.remove(here)
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise ValueError(
                f"{spec!r}: the module {module_name!r} has no {attribute!r}. Check the spelling."
            )
        found = getattr(found, name)
    return found


def load_dataset(spec: str, *, folder: PathLike | None = None, population: int | None = None) -> DataSet:
    """The data set that a user's function returns.

    Args:
        spec: ``package.module:function``; the function is called without arguments, or with the folder if one
            is given.
        folder: passed on as the only argument.
        population: the public number of training records; it replaces the one the function stated. State it
            wherever the function would have to count the private records.

    Raises:
        ValueError: as :func:`load_function`.
        TypeError: the function returned no DataSet.
    """
    function = load_function(spec)
    dataset = function() if folder is None else function(folder)
    if not isinstance(dataset, DataSet):
        raise TypeError(
            f"{spec!r} returned a {type(dataset).__name__}; it must return an equipoise.data.DataSet (name, "
            "train, test, population, num_classes)."
        )
    return dataset if population is None else replace(dataset, population=population)
