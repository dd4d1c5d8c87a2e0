"""Copies of what runs on records, made before it met any: they meet other records first.

Whatever keeps something of the first records that it meets then answers otherwise than its copy.
"""

from __future__ import annotations

import copy
import functools
import gc
from collections import deque
from contextlib import suppress
from types import CellType, FunctionType, ModuleType
from typing import Any, TypeVar

import numpy as np
from torch import Tensor, nn

from equipoise._dtensor import local_part

__all__ = ["deep_copy"]

Thing = TypeVar("Thing")

#: What is larger holds records: bytes of an array, entries of a container.
LARGE_ARRAY, LARGE_CONTAINER = 2**20, 1000
#: Where there are more objects than these, nothing is copied.
MOST_OBJECTS = 100_000


def deep_copy(thing: Thing, shares_data: bool = False) -> Thing | None:
    """A deep copy, in which functions have closure variables and defaults of their own.

    None if it fails or, without `shares_data`, holds a module or the memory of a tensor that the thing holds:
    an object may answer itself for a copy.

    Args:
        thing: what is copied.
        shares_data: large arrays and containers, which hold records, are shared with the copy.

    >>> def counter():
    ...     count = 0
    ...     def called():
    ...         nonlocal count
    ...         count += 1
    ...         return count
    ...     return called
    >>> first = counter()
    >>> second = deep_copy(first)
    >>> first(), first(), second()
    (1, 2, 1)
    """
    found = _Found(shares_data)
    found.look_through(thing)
    if shares_data and len(found.seen) > MOST_OBJECTS:
        return None
    known = found.shared
    cells: dict[int, CellType] = {}
    try:
        # First the functions, then what they hold, which may be these functions.
        for function in found.functions:
            closure = tuple(cells.setdefault(id(cell), CellType()) for cell in function.__closure__ or ())
            own = FunctionType(function.__code__, function.__globals__, function.__name__, closure=closure)
            own.__qualname__ = function.__qualname__
            known[id(function)] = own
            if copy.deepcopy(function, known) is not own:  # a Python that leaves every function as it is
                return None
        calls = {id(cached): _empty_cache(cached) for cached in found.caches}
        known.update({key: cached for key, (cached, _) in calls.items()})
        for cached in found.caches:
            calls[id(cached)][1].append(copy.deepcopy(cached.__wrapped__, known))
        for function in found.functions:
            own = known[id(function)]
            own.__defaults__ = copy.deepcopy(function.__defaults__, known)
            own.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, known)
            vars(own).update(copy.deepcopy(vars(function), known))
            for cell in function.__closure__ or ():
                with suppress(ValueError):  # it is empty
                    cells[id(cell)].cell_contents = copy.deepcopy(cell.cell_contents, known)
        copied = copy.deepcopy(thing, known)
    except Exception:  # a lock, an open file
        return None
    if not shares_data:
        again = _Found(shares_data)
        again.look_through(copied)
        if not found.places().isdisjoint(again.places()):
            return None
    return copied


class _Found:
    """What a thing holds, and all that is in there, but for classes and the globals of functions.

    Attributes:
        seen: every object, by its id.
        shared: those that stay what they are.
        functions: those that have variables of their own.
        caches: functions with `functools.lru_cache`.
    """

    def __init__(self, shares_data: bool) -> None:
        self._shares_data = shares_data
        self.seen: dict[int, Any] = {}
        self.shared: dict[int, Any] = {}
        self.functions: list[FunctionType] = []
        self.caches: list[Any] = []

    def look_through(self, thing: Any) -> None:
        """Find them all."""
        waiting: list[Any] = [thing]
        while waiting:
            value = waiting.pop()
            if id(value) in self.seen:
                continue
            self.seen[id(value)] = value
            if isinstance(value, ModuleType) or (self._shares_data and _is_large(value)):
                self.shared[id(value)] = value
            elif isinstance(value, FunctionType):
                held = (value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value))
                if any(held):
                    self.functions.append(value)
                    waiting += held
            elif not isinstance(value, (type, Tensor)):
                if isinstance(value, functools._lru_cache_wrapper):
                    self.caches.append(value)
                waiting += gc.get_referents(value)

    def places(self) -> set[int]:
        """Where the modules and tensors are, and the memory of these."""
        held = [value for value in self.seen.values() if isinstance(value, (nn.Module, Tensor))]
        places = {id(value) for value in held}
        for value in held:
            if isinstance(value, Tensor):
                with suppress(Exception):  # a sparse one, or a lazy parameter
                    places.add(local_part(value).untyped_storage().data_ptr())
        return places - {0}


def _is_large(value: Any) -> bool:
    if isinstance(value, (Tensor, np.ndarray)):
        return value.nbytes > LARGE_ARRAY
    return isinstance(value, (list, tuple, dict, set, deque)) and len(value) > LARGE_CONTAINER


def _empty_cache(cached: Any) -> tuple[Any, list[Any]]:
    """A cache of the same size, which has kept nothing yet, and the list whose one function it calls."""
    called: list[Any] = []
    return functools.lru_cache(**cached.cache_parameters())(
        lambda *args, **named: called[0](*args, **named)
    ), called
