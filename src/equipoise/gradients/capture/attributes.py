"""What model and loss hold beside parameters and buffers: a trace reads it as constants, by name.

What a training loop changes between steps (a phase, a warm-up, another activation) is told by `changes`, so
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
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.gradients.capture.isolation import same_values
from equipoise.gradients.checks.errors import TensorWritesError

__all__ = ["Change", "HeldState", "attributes_kept", "is_own", "watch_writes"]

#: Values that `HeldState.changes` tells; of all others only that they are there.
_TOLD = (
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
_SETTINGS = (types.SimpleNamespace, argparse.Namespace)

#: Parameters and buffers are other modules' affair.
_OF_BUFFERS = frozenset({"_parameters", "_buffers"})

#: Marks of Lightning (which hook runs) and accelerate on the user's modules.
_OF_LOOPS = frozenset({"_current_fx_name", "_is_accelerate_prepared"})

#: Entries of the largest container or array, and objects in all, that are looked into.
_MOST = 5_000

_EMPTY = object()

UNNAMED = "one in a container or a variable"


@contextmanager
def attributes_kept(model: nn.Module, loss: object = None) -> Iterator[None]:
    """Inside, model and loss may keep things in attributes; then every attribute is what it was.

    So are hooks, the fields of other objects that they hold, what containers hold, variables that functions
    share with those around them, attributes of classes, globals that functions name, and buffers of modules
    that are no part of the model.

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
    state.exchange_buffers()
    try:
        yield
    finally:
        state.put_back()


@contextmanager
def watch_writes(model: nn.Module, loss: object) -> Iterator[list[str]]:
    """Name what a forward inside gives another value: attributes, entries and variables, by value.

    Run one forward before: what is filled once, or holds the same value after each forward of the same batch,
    such as a cache or the latest output, is not named. Call it inside `attributes_kept`.

    Yields:
        The names, once the forward is over.

    >>> model = nn.Module()
    >>> model.calls, model.latest = 0, None
    >>> with watch_writes(model, None) as names:
    ...     model.calls += 1
    >>> names
    ['calls']
    """
    names: list[str] = []
    state = HeldState(model, loss)
    yield names
    names += dict.fromkeys(state.written())


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
    """Something that holds values under names or numbers.

    Attributes:
        owner: itself.
        now: what it holds now.
        then: what it held.
        put: puts that back.
        name: of a container, whose keys may be names of persons; else what stands before a name.
        is_container: whether `name` is for all of it.
        is_told: whether plain values are told, and not only that something differs.
    """

    owner: Any
    now: Callable[[], Mapping[Any, Any]]
    then: Mapping[Any, Any]
    put: Callable[[Mapping[Any, Any]], None]
    name: str
    is_container: bool = False
    is_told: bool = True

    def shown(self, name: Any) -> str:
        return self.name or UNNAMED if self.is_container else f"{self.name}{name}"


class HeldState:
    """What a model and a loss hold, and whatever those hold, when this is made.

    Args:
        model, loss: that hold it.
        live: tensors of which nobody reads a value by itself, so that it may change.

    Attributes:
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
        self._others: list[nn.Module] = []
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

    def _note(self, value: Any, name: str) -> None:
        if isinstance(value, Tensor):
            if not value.is_inference():  # those cannot change
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
            self._others.append(value)
            for held in (value._parameters, value._buffers):
                self._waiting += [(tensor, name) for name, tensor in held.items()]  # before those of no name
                self._container(held, "", is_named=False)
        elif hasattr(value, "__dict__") and not isinstance(value, (types.ModuleType, threading.Thread)):
            module = type(value).__module__
            if isinstance(value, _SETTINGS) or not _is_of_packages(module):
                self._fields(value, "", isinstance(value, _SETTINGS) or is_own(module))
        elif is_own(type(value).__module__):  # a dataclass with slots, say
            slots = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
            names = [n for one in slots for n in ((one,) if isinstance(one, str) else one)]
            self._named(value, [n for n in names if not n.startswith("__")])  # nobody sets __weakref__

    def _fields(self, value: Any, prefix: str, is_own: bool) -> None:
        held = vars(value)
        then, put = held.copy(), partial(_fill, held)
        self._places.append(_Place(value, lambda: held, then, put, prefix, is_told=is_own))
        if is_own:
            self._class(type(value))
        for name, one in then.items():
            if is_own or isinstance(one, _CONTAINERS):  # of a package's object the containers alone
                if type(one) in _PLAIN or name in _OF_BUFFERS:
                    continue
                if type(one) in _OF_TORCH and not one:  # of most modules nearly all
                    self._empty.append((one, prefix + name))
                else:
                    self._waiting.append((one, prefix + name))

    def _container(self, held: Any, name: str, is_named: bool = True) -> None:
        if not held:
            self._empty.append((held, name))
        elif len(held) <= _MOST:
            now, put, then = partial(_entries, held), partial(_fill, held), dict(_entries(held))
            self._places.append(_Place(held, now, then, put, name, is_named, isinstance(held, dict)))
            self._waiting += [(one, name) for one in (held if isinstance(held, set) else then.values())]

    def _class(self, kind: type) -> None:
        for base in filter(_is_own_class, kind.__mro__):
            if base is kind or id(base) not in self._known:
                self._known.add(id(base))
                now, then, put = partial(vars, base), dict(vars(base)), partial(_set_class, base)
                self._places.append(_Place(base, now, then, put, f"{base.__name__}."))
                self._waiting += [(value, name) for name, value in then.items()]

    def _function(self, function: types.FunctionType) -> None:
        self._waiting += [(function.__defaults__, ""), (function.__kwdefaults__, ""), (vars(function), "")]
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        filled = {name: cell for name, cell in cells if cell != types.CellType()}
        scope = function.__globals__
        named = _globals(function.__code__) if is_own(function.__module__) else frozenset[str]()

        def now() -> Mapping[str, Any]:
            of_around = {name: cell.cell_contents for name, cell in filled.items()}
            return {name: scope[name] for name in named if name in scope} | of_around

        def put(then: Mapping[str, Any]) -> None:
            scope.update((name, then[name]) for name in named & then.keys() - filled.keys())
            for name in named - then.keys():  # bound since; modules are imported once
                if not isinstance(scope.get(name), types.ModuleType):
                    scope.pop(name, None)
            for name, cell in filled.items():
                cell.cell_contents = then[name]

        then = now()
        self._places.append(_Place(function, now, then, put, ""))
        self._waiting += [(value, name) for name, value in then.items()]
        for held in then.values():  # of other modules of the user's own, what the function may name
            if isinstance(held, types.ModuleType) and is_own(held.__name__):
                self._named(held, _names(function.__code__) & vars(held).keys())

    def _named(self, value: Any, names: Iterable[str]) -> None:
        """Attributes of an object that is not looked into otherwise."""

        def now() -> Mapping[str, Any]:
            return {name: getattr(value, name) for name in names if hasattr(value, name)}

        def put(then: Mapping[str, Any]) -> None:
            for name, one in then.items():
                setattr(value, name, one)

        then = now()
        self._places.append(_Place(value, now, then, put, ""))
        self._waiting += [(one, name) for name, one in then.items()]

    def exchange_buffers(self) -> None:
        """Copies in the place of the buffers of modules that are no part of the model."""
        for module in self._others:
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.detach().clone()

    def put_back(self) -> None:
        """Let all of it be what it was.

        Raises:
            TensorWritesError: a tensor is not.
        """
        for place in self._places:
            if not _is_alike(place.now(), place.then):
                place.put(place.then)
        for held, _ in self._empty:
            if held:
                held.clear()
        for array, values, _ in self._arrays:
            array[...] = values
        if moved := self._moved():
            raise TensorWritesError(sorted(set(moved)))

    def written(self) -> Iterator[str]:
        """The names of what has another value than was noted."""
        for place in self._places:
            now, then = place.now(), place.then
            if place.is_container:
                if not _is_same(dict(now), dict(then)):
                    yield place.shown("")
            else:
                for name in then.keys() & now.keys():
                    if not isinstance(then[name], _CONTAINERS) and not _is_same(now[name], then[name]):
                        yield place.shown(name)
        yield from (name for array, values, name in self._arrays if not np.array_equal(array, values))
        yield from self._moved()

    def _moved(self) -> list[str]:
        return [name or UNNAMED for tensor, version, name in self._tensors if tensor._version != version]

    def changes(self) -> list[Change]:
        """What has another plain value now; values in tensors, lists and sets are not looked at."""
        self.differs |= any(
            t._version != version for t, version, _ in self._tensors if id(t) not in self._live
        )
        self.differs |= not all(np.array_equal(array, values) for array, values, _ in self._arrays)
        filled = [
            _Place(held, partial(_entries, held), {}, held.clear, name, True, isinstance(held, dict))
            for held, name in self._empty
            if held
        ]
        found: list[Change] = []
        for place in (*self._places, *filled):
            if not _is_alike(now := place.now(), place.then):
                self.differs = True
                if place.is_told:
                    found += _changed(place, now)
        return found


def _changed(place: _Place, now: Mapping[Any, Any]) -> Iterator[Change]:
    for name in (place.then.keys() | now.keys()) - _OF_LOOPS:
        # Of a tensor and other data only that it is some.
        old, new = (one if _is_told(one := held.get(name, _EMPTY)) else _EMPTY for held in (place.then, now))
        if old is not new and not bool(old == new):
            yield Change((id(place.owner), str(name)), place.shown(name), old, new)


def _is_told(value: Any) -> bool:
    return all(map(_is_told, value)) if type(value) is tuple else isinstance(value, _TOLD)


def _is_alike(now: Mapping[Any, Any], then: Mapping[Any, Any]) -> bool:
    return now.keys() == then.keys() and all(map(is_, now.values(), then.values()))


def _entries(held: Any) -> Mapping[Any, Any]:
    if isinstance(held, dict):
        return held
    return dict.fromkeys(held) if isinstance(held, set) else dict(enumerate(held))


def _fill(held: Any, then: Mapping[Any, Any]) -> None:
    base: Any = next(kind for kind in _CONTAINERS if isinstance(held, kind))  # its own methods may do more
    base.clear(held)
    if base in (list, deque):
        base.extend(held, then.values())
    else:
        base.update(held, then)


def _set_class(base: type, then: Mapping[str, Any]) -> None:
    for name, value in then.items():
        if vars(base).get(name, base) is not value:
            type.__setattr__(base, name, value)
    for name in vars(base).keys() - then.keys():
        type.__delattr__(base, name)


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
def _globals(code: types.CodeType) -> frozenset[str]:
    """The globals that a function and those inside it read or bind; attributes may be called the same."""
    used = {one.argval for one in dis.get_instructions(code) if one.opname.endswith("_GLOBAL")}
    inside = (_globals(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(used).union(*inside)


@cache
def _names(code: types.CodeType) -> frozenset[str]:
    """All names in a function and in those inside it: globals, and attributes too."""
    inside = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*inside)


@cache
def is_own(module: str | None) -> bool:
    """Whether this module is the user's: of no installed package."""
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    parts = pathlib.Path(file).parts
    return not _is_of_packages(str(module)) and not {"site-packages", "dist-packages"} & set(parts)


def _is_of_packages(module: str) -> bool:
    return module.partition(".")[0] in _PACKAGES


def _is_own_class(kind: type) -> bool:
    return is_own(kind.__module__)
