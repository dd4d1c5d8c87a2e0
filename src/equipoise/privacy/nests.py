"""Walks through the arguments of tensor operations: tuples, lists and dicts of tensors and plain values.

torch's own tree functions know many more containers and cost several times as much; these run at every
operation on a private tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["leaves_of", "mapped"]


def leaves_of(nest: Any) -> Iterator[Any]:
    """The values of a nest, in order.

    Example:
        >>> list(leaves_of(((1, [2, 3]), {"a": 4})))
        [1, 2, 3, 4]
    """
    if isinstance(nest, (tuple, list)):
        for item in nest:
            yield from leaves_of(item)
    elif isinstance(nest, dict):
        for item in nest.values():
            yield from leaves_of(item)
    else:
        yield nest


def mapped(fn: Callable[[Any], Any], nest: Any) -> Any:
    """The nest with `fn` applied to each of its values; a subclass of tuple or list becomes a plain one.

    Example:
        >>> mapped(lambda x: x + 1, ((1, [2]), {"a": 3}))
        ((2, [3]), {'a': 4})
    """
    if isinstance(nest, tuple):
        return tuple([mapped(fn, item) for item in nest])
    if isinstance(nest, list):
        return [mapped(fn, item) for item in nest]
    if isinstance(nest, dict):
        return {key: mapped(fn, item) for key, item in nest.items()}
    return fn(nest)
