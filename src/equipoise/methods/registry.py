"""The table of methods: a name and where its class is. It loads neither torch nor any method.

`methods.toml` has a table for each method of the library. Installed packages add names through the
entry-point group `equipoise.methods`; an entry point `NAME.as_published` names what a paper printed. A method
that is not installed under a name is found as ``package.module:Class``.
"""

from __future__ import annotations

import functools
import os
import sys
import tomllib
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

RECIPES: Final = ("library", "as_published")


METHODS: Final[Mapping[str, Mapping[str, Any]]] = tomllib.loads(
    Path(__file__).with_name("methods.toml").read_text(encoding="utf-8")
)
"""`methods.toml`: of each method of the library where its classes are, as "module:Class", and its card.

`class` is the library's own recipe, `published` what the paper printed, `no_use` what settings of a training
mean nothing to it, `usual` what it takes in place of the data set's.
"""

BY_CLASS: Final[Mapping[str, tuple[str, str, Mapping[str, Any]]]] = {
    path: (name, recipe, found.get(recipe, found))
    for name, found in METHODS.items()
    for recipe, path in zip(RECIPES, (found["class"], found.get("published")), strict=True)
    if path is not None
}
"""By "module:Class" the name and the recipe of a method of the library, and its row with the card."""


@functools.cache
def registered() -> Mapping[str, Mapping[str, Any]]:
    """`METHODS`, and the methods of installed packages."""
    found = {point.name: point.value for point in entry_points(group="equipoise.methods")}
    names = {name.removesuffix(".as_published") for name in found}
    others = {
        name: {"class": found[name], "published": found.get(f"{name}.as_published")}
        for name in names
        if name in found
    }
    # Ours last: no package takes a name of the library, whose statements would then speak of another method.
    return {**others, **METHODS}


def find(name: str, recipe: str = "library") -> type[Any]:
    """The class of a method, a subclass of `Method`.

    Args:
        name: as in `registered`, or "package.module:Class".
        recipe: "library", or "as_published" for what the paper printed; "as-published" is the same.

    Raises:
        ValueError: there is no such method, it has no such recipe, or it is registered without a card of its
            own.

    Example:
        >>> find("dp-sgd").card.guarantee
        'proven'
    """
    recipe = str(recipe).replace("-", "_")  # of a file, where it may be anything
    if recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r} is unknown; give one of {', '.join(RECIPES)}")
    if ":" in name:
        found = _load(name)
        if recipe == "as_published" != found.recipe:
            raise ValueError(
                f"recipe={recipe!r}: method={name!r} names the class itself, whose recipe is "
                f"{found.recipe!r}. Give the path of the class that the paper printed"
            )
        if getattr(found, "name", None) in registered() and found not in classes_of(found.name):
            raise ValueError(
                f"method={name!r} has name={found.name!r}, which is another method's: statements and "
                "configurations would speak of that one. Give the class a name of its own"
            )
        return found
    if name not in registered():
        raise ValueError(
            f"method={name!r} is unknown; there are {', '.join(registered())}. A class of your own goes by "
            "package.module:Class."
        )
    path = registered()[name].get("class" if recipe == "library" else "published")
    if path is None:
        raise ValueError(f"recipe={recipe!r}: the method {name!r} has only the library's recipe")
    found = _load(path)
    if "card" not in vars(found):
        # An inherited card would tell users what another method proves and costs.
        raise ValueError(f"method={name!r}: {path} has no card of its own; give the class card = Card(...)")
    return found


def classes_of(name: str) -> list[type[Any]]:
    """The classes that are registered under a name."""
    entry = registered()[name]
    return [_load(entry[key]) for key in ("class", "published") if entry.get(key)]


def _load(path: str) -> type[Any]:
    from equipoise.methods.base import Method

    module, _, name = path.partition(":")
    here = os.getcwd()  # a console script does not look there by itself
    sys.path.insert(0, here)
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"method={path!r} cannot be imported: {error}") from error
    finally:
        sys.path.remove(here)
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ValueError(f"method={path!r} is no subclass of equipoise.Method")
    return found
