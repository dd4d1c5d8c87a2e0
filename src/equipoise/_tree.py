"""Nests of mappings, tuples and lists: batches of records, arguments of calls, saved states.

Whatever is no container is a leaf. Containers keep their types, mappings their order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any


def leaves(tree: Any) -> list[Any]:
    """The leaves, in a fixed order.

    Raises:
        ValueError: a container holds itself.

    >>> leaves({"x": (1, [2]), "y": 3})
    [1, 2, 3]
    >>> endless = []
    >>> endless.append(endless)
    >>> leaves(endless)
    Traceback (most recent call last):
    ValueError: a list does not end: a container in it holds itself. Take it out of itself.
    """
    found: list[Any] = []
    try:
        _add_leaves((tree,), found)
    except RecursionError:
        raise ValueError(
            f"a {type(tree).__name__} does not end: a container in it holds itself. Take it out of itself."
        ) from None
    return found


def _add_leaves(parts: Iterable[Any], found: list[Any]) -> None:
    # No call of Python's per leaf: every operation of a captured forward pass asks for its tensors.
    for part in parts:
        kind: Any = type(part)
        if isinstance(part, (tuple, list)):
            _add_leaves(part, found)
        elif _is_mapping(kind):
            _add_leaves(part.values(), found)
        else:
            found.append(part)


@cache
def _is_mapping(kind: Any) -> bool:
    return issubclass(kind, Mapping)


def named_leaves(tree: Any, name: str = "") -> dict[str, Any]:
    """The leaves by their place in the nest, in the order of `leaves`.

    >>> named_leaves({"x": (1, [2]), "y": 3})
    {"['x'][0]": 1, "['x'][1][0]": 2, "['y']": 3}
    """
    if isinstance(tree, (tuple, list)):
        parts: Any = enumerate(tree)
    elif isinstance(tree, Mapping):
        parts = tree.items()
    else:
        return {name: tree}
    return {
        place: leaf for key, part in parts for place, leaf in named_leaves(part, f"{name}[{key!r}]").items()
    }


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The nest with ``function`` applied to every leaf, in the order of `leaves`.

    >>> map_leaves(lambda leaf: leaf + 1, {"x": (1, [2]), "y": 3})
    {'x': (2, [3]), 'y': 4}
    """
    if isinstance(tree, (tuple, list)):
        parts = [map_leaves(function, value) for value in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    kind: Any = type(tree)
    if kind is dict:
        return {key: map_leaves(function, value) for key, value in tree.items()}
    if _is_mapping(kind):
        new: Any = copy.copy(tree)  # an ordered dict or a tokenizer's keeps its type and extra attributes
        for key, value in tree.items():
            new[key] = map_leaves(function, value)
        return new
    return function(tree)
