"""What model and loss hold beside parameters and buffers: a trace reads it as constants, by name.

What a training loop changes between steps (a phase, a warm-up, another activation) is found by `changes`, so
that it is traced and proved anew. What a forward writes there is put back: the next one would follow from the
records of this one. A tensor that is neither parameter nor buffer must not change in place, which is seen by
its count of changes.

Looked into are modules, functions, classes and objects of the user's own, and lists, dicts and sets in them;
of objects of packages the fields alone.
"""

from __future__ import annotations

import argparse
import dis
import enum
import pathlib
import sys
import threading
import types
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain, repeat
from operator import attrgetter, call, is_, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.gradients.capture.isolation import buffers_kept, same_values
from equipoise.gradients.checks.errors import TensorWritesError

#: Values that `HeldState.changes` tells; of all others only that they are there.
_PLAIN_KINDS = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, np.generic),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, partial, type, nn.Module),
)

#: What holds nothing else, and containers of modules.
_PLAIN, _OF_TORCH = frozenset({type(None), bool, int, float, str}), (dict, OrderedDict)

#: Containers whose entries are put back.
_CONTAINERS = (OrderedDict, dict, list, set, deque)

#: What holds a function or an object, and little else.
_AROUND_OTHERS = (types.MethodType, staticmethod, classmethod, property, partial)

#: Objects of these are not looked into, but for those that hold settings.
_PACKAGES = frozenset({"equipoise", "numpy", "torch", *sys.stdlib_module_names})
_SETTINGS = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList, ChainMap)

#: Parameters and buffers are other modules' affair.
_OF_BUFFERS = frozenset({"_parameters", "_buffers"})

#: Marks of Lightning (which hook runs) and accelerate on the user's modules.
_OF_LOOPS = frozenset({"_current_fx_name", "_is_accelerate_prepared"})

#: Entries of the largest container or array, and objects in all, that are looked into. A choice: more of them
#: cost time at every look, fewer leave what a forward writes into large containers unseen.
_MOST = 5_000

_EMPTY = object()

UNNAMED = "one in a container or a variable"


@contextmanager
def attributes_kept(model: nn.Module, loss: object = None, others: Collection[Tensor] = ()) -> Iterator[None]:
    """Inside, model and loss may keep things in attributes and buffers; then all of it is what it was.

    So are hooks, the fields of other objects that they hold, what containers hold, variables that functions
    share with those around them, attributes of classes, and globals that functions name.

    Args:
        model, loss: that hold it.
        others: buffers of which no copies are made.

    Raises:
        TensorWritesError: another tensor was changed in place; its value is lost.

    >>> model = nn.Module()
    >>> model.calls, model.seen = 0, []
    >>> with attributes_kept(model):
    ...     model.calls += 1
    ...     model.seen.append(torch.ones(3))
    >>> model.calls, model.seen
    (0, [])
    """
    state = HeldState(model, loss)
    try:
        with buffers_kept([*model.modules(), *state.others], others):
            yield
    finally:
        state.put_back()


class Change(NamedTuple):
    """A plain value that is another one now.

    Attributes:
        key: of the place, the same for all its changes.
        name: to be published, without keys of a dict.
        before, now: the values; the same object for none and for all that is not plain.
    """

    key: tuple[int, str]
    name: str
    before: Any
    now: Any


class _Place(NamedTuple):
    """Something that holds values, under names or in an order.

    Attributes:
        owner: its number.
        size, names, values: read what it holds now, without a call of Python: every step asks.
        put: puts back what it held.
        then: names and values that it held.
        name: of a container, whose keys may be names of persons; else what stands before a name.
        is_container: whether `name` is for all of it.
        is_named: whether a change of a plain value is named, and not only that something differs.
    """

    owner: int
    size: Callable[[], int]
    names: Callable[[], Iterable[Any]]
    values: Callable[[], Iterable[Any]]
    put: Callable[[_Place], None]
    then: _Held
    name: str
    is_container: bool
    is_named: bool

    def shown(self, name: Any) -> str:
        return self.name or UNNAMED if self.is_container else f"{self.name}{name}"

    def now(self) -> _Held:
        return [*self.names()], [*self.values()]

    def differs(self) -> bool:
        (names, values), (old_names, old_values) = self.now(), self.then
        if len(values) != len(old_values) or not all(map(is_, values, old_values)):
            return True
        try:
            return names != old_names
        except Exception:  # keys that are tensors, and others than before
            return True

    def named(self) -> Iterator[tuple[Any, Any, Any]]:
        """Name, value then and value now of what is there by name."""
        now, then = (dict(zip(*held, strict=True)) if held[0] else {} for held in (self.now(), self.then))
        return ((name, then.get(name, _EMPTY), now.get(name, _EMPTY)) for name in then.keys() | now.keys())


_Held = tuple[list[Any], list[Any]]
_Reads = tuple[Callable[[], int], Callable[[], Iterable[Any]], Callable[[], Iterable[Any]]]


class HeldState:
    """What a model and a loss hold, and whatever those hold, when this is made.

    Args:
        model, loss: that hold it.
        live: tensors of which nobody reads a value by itself, so that it may change.

    Attributes:
        others: modules that are no part of the model.
        differs: whether `changes` found something else under some name: a module, a hook, an entry of a
            list; or something else in a tensor that is not `live`.

    >>> model = nn.Module()
    >>> model.warm = True
    >>> held = HeldState(model, None)
    >>> held.changes()
    []
    >>> model.warm = False
    >>> [(change.name, change.before, change.now) for change in held.changes()]
    [('warm', True, False)]
    """

    def __init__(self, model: nn.Module, loss: object, live: Iterable[Tensor] = ()) -> None:
        self.differs = False
        self._live = {id(tensor) for tensor in live}
        self._places: list[_Place] = []
        self._empty: list[tuple[Any, str]] = []  # nearly all containers of modules, looked at quickly
        self._tensors: list[tuple[Tensor, int, str]] = []
        self._arrays: list[tuple[np.ndarray, np.ndarray, str]] = []
        self.others: list[nn.Module] = []
        self._known: set[int] = set()
        self._waiting: deque[tuple[Any, str]] = deque([(loss, "")])
        for name, module in model.named_modules():
            self._known.add(id(module))
            self._fields(module, f"{name}." if name else "", is_own=True)
        most = len(self._known) + _MOST
        while self._waiting and len(self._known) < most:
            value, name = self._waiting.popleft()
            if type(value) not in _PLAIN and id(value) not in self._known:
                self._known.add(id(value))
                self._note(value, name)
        self._sizes = [place.size for place in self._places]
        self._reads = [read for place in self._places for read in (place.names, place.values)]
        self._held = [held for place in self._places for held in place.then]
        self._then = self._counts()

    def _note(self, value: Any, name: str) -> None:
        if isinstance(value, Tensor):
            if id(value) not in self._live and not value.is_inference():  # those cannot change
                self._tensors.append((value, value._version, name))
        elif isinstance(value, _CONTAINERS):
            self._container(value, name)
        elif isinstance(value, np.ndarray) and value.size <= _MOST:
            self._arrays.append((value, value.copy(), name))
        elif isinstance(value, (tuple, frozenset)):
            self._waiting += [(one, name) for one in value]
        elif isinstance(value, _AROUND_OTHERS):
            parts = ("__self__", "__func__", "fget", "func", "args", "keywords")
            self._waiting += [(getattr(value, part, None), name) for part in parts]
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, nn.Module):
            self._fields(value, "", is_own=True)
            self.others.append(value)
            for held in (value._parameters, value._buffers):
                self._waiting += [(tensor, name) for name, tensor in held.items()]  # before those of no name
                self._container(held, "", is_container=False)
        elif hasattr(value, "__dict__") and not isinstance(value, (types.ModuleType, threading.Thread)):
            module = type(value).__module__
            if isinstance(value, _SETTINGS) or not _is_of_packages(module):
                self._fields(value, "", isinstance(value, _SETTINGS) or is_own(module))
        elif is_own(type(value).__module__):  # a dataclass with slots, say
            slots = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
            names = [n for one in slots for n in ((one,) if isinstance(one, str) else one)]
            self._attributes(value, [n for n in names if not n.startswith("__")])  # nobody sets __weakref__

    def _hold(
        self,
        owner: Any,
        reads: _Reads,
        put: Any,
        name: str,
        is_container: bool = False,
        is_named: bool = True,
    ) -> Iterator[tuple[Any, str]]:
        """Note a place; gives what it holds, and by what names."""
        place = _Place(id(owner), *reads, put, ([*reads[1]()], [*reads[2]()]), name, is_container, is_named)
        self._places.append(place)
        names, values = place.then
        return zip(values, repeat(name) if is_container else names, strict=False)

    def _fields(self, value: Any, prefix: str, is_own: bool) -> None:
        held = vars(value)
        if is_own:
            self._class(type(value))
        for one, name in self._hold(held, _reads(held), partial(_fill, held), prefix, is_named=is_own):
            if is_own or isinstance(one, _CONTAINERS):  # of a package's object the containers alone
                if type(one) in _PLAIN or name in _OF_BUFFERS:
                    continue
                if type(one) in _OF_TORCH and not one:  # of most modules nearly all
                    self._empty.append((one, prefix + name))
                else:
                    self._waiting.append((one, prefix + name))

    def _container(self, held: Any, name: str, is_container: bool = True) -> None:
        if not held:
            self._empty.append((held, name))
        elif len(held) <= _MOST:
            self._waiting += self._hold(held, _reads(held), partial(_fill, held), name, is_container)

    def _class(self, kind: type) -> None:
        for base in kind.__mro__:
            if is_own(base.__module__) and (base is kind or id(base) not in self._known):
                self._known.add(id(base))
                put = partial(_assign, partial(type.__setattr__, base), partial(type.__delattr__, base))
                self._waiting += self._hold(base, _reads(vars(base)), put, f"{base.__name__}.")

    def _function(self, function: types.FunctionType) -> None:
        self._attributes(function, ["__code__", "__defaults__", "__kwdefaults__"])
        self._waiting.append((vars(function), ""))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if cell != types.CellType():
                self._attributes(cell, ["cell_contents"], name)
        if is_own(function.__module__):
            scope, names = function.__globals__, names_in(function.__code__, ("_GLOBAL",))
            self._variables(scope, names)
            for held in map(scope.get, names):  # of other modules of the user's own, what it may name
                if isinstance(held, types.ModuleType) and is_own(held.__name__):
                    inside = names_in(function.__code__, ("_ATTR", "_METHOD", "IMPORT_FROM"))
                    self._variables(vars(held), inside & vars(held).keys())

    def _attributes(self, value: Any, names: list[str], of_all: str = "") -> None:
        """Attributes of an object that is not looked into otherwise, under one name if there is one."""
        values = partial(map, getattr, repeat(value), names, repeat(_EMPTY))
        put = partial(_assign, partial(setattr, value), partial(delattr, value))
        self._waiting += self._hold(value, (names.__len__, names.__iter__, values), put, of_all, bool(of_all))

    def _variables(self, scope: dict[str, Any], names: frozenset[str]) -> None:
        """Some of the variables of a module."""
        values = partial(map, scope.get, names, repeat(_EMPTY))
        put = partial(_assign, scope.__setitem__, scope.__delitem__)
        self._waiting += self._hold(scope, (names.__len__, names.__iter__, values), put, "")

    def put_back(self) -> None:
        """Let all of it be what it was.

        Raises:
            TensorWritesError: a tensor is not.
        """
        if self._is_as_it_was():
            return
        for place in self._differing():
            place.put(place)
        for array, values, _ in self._other_arrays():
            array[...] = values
        if moved := self._moved():
            raise TensorWritesError(sorted(set(moved)))

    def written(self) -> Iterator[str]:
        """The names of what has another value than was noted: attributes, entries and variables.

        >>> model = nn.Module()
        >>> model.calls, model.latest = 0, None
        >>> held = HeldState(model, None)
        >>> model.calls += 1
        >>> [*held.written()]
        ['calls']
        """
        for place in self._differing():
            held = [("", place.then, place.now())] if place.is_container else place.named()
            for name, then, now in held:
                if not (isinstance(then, _CONTAINERS) or _is_same(now, then)):
                    yield place.shown(name)
        yield from (name for _, _, name in self._other_arrays())
        yield from self._moved()

    def changes(self) -> list[Change]:
        """What has another plain value now; values in tensors, lists and sets are not looked at."""
        if self._is_as_it_was():
            return []
        self.differs = True
        return [change for place in self._differing() if place.is_named for change in _changed(place)]

    def _is_as_it_was(self) -> bool:
        """Whether the same objects are held, by operations of C alone: every step asks."""
        now, then = chain.from_iterable(map(call, self._reads)), chain.from_iterable(self._held)
        return self._counts() == self._then and all(map(is_, now, then))

    def _counts(self) -> tuple[Any, ...]:
        """How much is held, how often tensors changed, and the bytes of arrays."""
        first = itemgetter(0)
        return (
            [*map(call, self._sizes)],
            [*map(attrgetter("_version"), map(first, self._tensors))],
            [*map(np.ndarray.tobytes, map(first, self._arrays))],
            any(map(first, self._empty)),
        )

    def _differing(self) -> list[_Place]:
        filled = [
            _Place(id(held), *_reads(held), partial(_fill, held), ([], []), name, True, True)
            for held, name in self._empty
            if held
        ]
        return [place for place in (*self._places, *filled) if place.differs()]

    def _moved(self) -> list[str]:
        return [name or UNNAMED for tensor, version, name in self._tensors if tensor._version != version]

    def _other_arrays(self) -> list[tuple[np.ndarray, np.ndarray, str]]:
        return [one for one in self._arrays if one[0].tobytes() != one[1].tobytes()]  # NaN included


def _reads(held: Any) -> _Reads:
    """How size, names and values of a container are read."""
    is_named = isinstance(held, (dict, types.MappingProxyType))
    reads = (held.__iter__, held.values) if is_named else (().__iter__, held.__iter__)
    return held.__len__, *reads


def _changed(place: _Place) -> Iterator[Change]:
    for name, *both in place.named():
        # Of a tensor and other data only that it is some.
        then, now = (one if _is_plain(one) else _EMPTY for one in both)
        if name not in _OF_LOOPS and then is not now and not bool(then == now):
            yield Change((place.owner, str(name)), place.shown(name), then, now)


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else isinstance(value, _PLAIN_KINDS)


def _fill(held: Any, place: _Place) -> None:
    base: Any = next(kind for kind in _CONTAINERS if isinstance(held, kind))  # its own methods may do more
    base.clear(held)
    names, values = place.then
    if base in (list, deque):
        base.extend(held, values)
    else:
        base.update(held, values if base is set else zip(names, values, strict=True))


def _assign(write: Callable[[Any, Any], None], delete: Callable[[Any], None], place: _Place) -> None:
    for name, then, now in place.named():
        if then is _EMPTY and now is not _EMPTY:
            delete(name)
        elif then is not now:
            write(name, then)


def _is_same(now: Any, before: Any) -> bool:
    """Whether two values are equal; of values that hold more than plain ones and tensors it is not known."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, Tensor):
        return same_values(now, before)
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(_is_same(now[key], before[key]) for key in now)
    if isinstance(now, (list, tuple, deque)):
        return len(now) == len(before) and all(map(_is_same, now, before))
    return not isinstance(now, (bool, int, float, complex, str, bytes, set)) or bool(now == before)


@cache
def names_in(code: types.CodeType, ends: tuple[str, ...]) -> frozenset[str]:
    """The names with which a function and those inside it do operations with these ends."""
    used = {one.argval for one in dis.get_instructions(code) if one.opname.endswith(ends)}
    inside = (names_in(constant, ends) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(used).union(*inside)


@cache
def is_own(module: str | None) -> bool:
    """Whether this module is the user's: of no installed package."""
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    parts = pathlib.Path(file).parts
    return not _is_of_packages(str(module)) and not {"site-packages", "dist-packages"} & set(parts)


def _is_of_packages(module: str) -> bool:
    return module.partition(".")[0] in _PACKAGES
