"""Nests of mappings, tuples and lists: batches of records, arguments of calls, saved states.

Whatever is no container is a leaf. Containers keep their types, mappings their order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

__all__ = ["leaves", "map_leaves", "named_leaves"]

#: A nest deeper than this holds itself.
DEEPEST = 500


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
    # No call of Python's per container: every operation of a captured forward pass asks for its tensors.
    found: list[Any] = []
    open_ones = [iter((tree,))]
    while open_ones:
        for part in open_ones[-1]:
            kind: Any = type(part)
            if isinstance(part, (tuple, list)):
                open_ones.append(iter(part))
            elif _is_mapping(kind):
                open_ones.append(iter(part.values()))
            else:
                found.append(part)
                continue
            break
        else:
            open_ones.pop()
        if len(open_ones) > DEEPEST:
            raise ValueError(
                f"a {type(tree).__name__} does not end: a container in it holds itself. Take it out of "
                "itself."
            )
    return found


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
        new = {}
        for key, value in tree.items():
            inner: Any = type(value)
            is_leaf = not (isinstance(value, (tuple, list)) or _is_mapping(inner))
            new[key] = function(value) if is_leaf else map_leaves(function, value)
        return new
    if _is_mapping(kind):
        # An ordered dict or a tokenizer's keeps its type and extra attributes.
        changed: Any = copy.copy(tree)
        for key, value in tree.items():
            changed[key] = map_leaves(function, value)
        return changed
    return function(tree)
