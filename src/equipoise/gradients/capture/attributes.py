"""What model and loss hold beside parameters and buffers: a trace reads it as constants, by name.

What a training loop changes between steps (a phase, a warm-up, another activation) is told by `changes`, so
that it is traced and proved anew. What a forward writes there is put back: the next one would follow from the
records of this one. A tensor that is neither parameter nor buffer must not change in place, which is seen by
its count of changes. Of what is not looked into (iterators, large arrays, fields outside of ``__dict__``)
`HeldState.has_unseen` tells, and such a model runs in every step.
"""

from __future__ import annotations

import argparse
import datetime
import dis
import enum
import logging
import pathlib
import re
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from itertools import chain, islice, starmap
from operator import is_, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.gradients.checks.errors import TensorWritesError

__all__ = ["Change", "HeldState", "attributes_kept", "is_own", "watch_writes"]

#: What PyTorch keeps on every module, and of that the containers that a forward may add to.
_OF_TORCH = tuple(vars(nn.Module()))
_CONTAINERS = [n for n, v in vars(nn.Module()).items() if isinstance(v, (dict, set))]
_CONTAINERS = [name for name in _CONTAINERS if name not in ("_parameters", "_buffers")]
_held_by_torch = itemgetter(*_CONTAINERS)

#: Values of exactly these types hold nothing else, and stay what they are; so do the kinds below.
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, object, torch.dtype, torch.device})
_UNCHANGING = (
    *(_PLAIN - {object}),
    *(np.generic, np.dtype, np.ufunc, range, slice, enum.Enum, re.Pattern, pathlib.PurePath),
    *(datetime.date, datetime.timedelta, torch.layout, torch.memory_format, torch._ops.OpOverload),
    *(torch._ops.OpOverloadPacket, logging.Logger, weakref.ReferenceType, types.BuiltinFunctionType),
    *(types.CodeType, types.GenericAlias, types.UnionType, types.EllipsisType),
)

#: Values that `HeldState` compares; of all others only that they are there. Of code and modules, which it is.
_CONSTANT = (*_UNCHANGING, types.FunctionType, types.MethodType, partial, type, nn.Module)

#: Their fields are their own affair: other threads may be at work on them.
_UNSEEN = (torch.jit.ScriptModule, torch.utils.data.Dataset, threading.Thread)
_PACKAGES = frozenset({"equipoise", "numpy", "torch", *sys.stdlib_module_names})

#: Objects of theirs hold code, and no records.
_OF_CODE = (
    *("torch._dynamo", "torch.fx", "torch.utils.hooks", "torch.autograd.grad_mode", "torch.amp"),
    *("pybind11_builtins", "typing", "dataclasses", "functools"),
)

#: What holds nothing but these.
_FOLLOWED = {
    types.MethodType: ("__self__", "__func__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
    partial: ("func", "args", "keywords"),
}

#: Marks of Lightning (which hook runs) and accelerate on the user's modules.
_OF_LOOPS = frozenset({"_current_fx_name", "_is_accelerate_prepared"})

#: Bytes of the largest array, entries of the largest container, and objects in all, that are looked into; and
#: numbers of the largest tensor whose values are compared.
_LARGEST_ARRAY, _LARGEST_CONTAINER, _MOST_OBJECTS, _SMALL_TENSOR = 2**18, 5_000, 5_000, 256

#: Containers whose entries are put back.
_CONTAINED = (OrderedDict, dict, list, set, deque)

_EMPTY = object()

UNNAMED = "one in a container or a variable"


@contextmanager
def attributes_kept(model: nn.Module, loss: object = None) -> Iterator[None]:
    """Inside, model and loss may keep things in attributes; then every attribute is what it was.

    So are hooks, the fields of other objects that they hold, what containers and small arrays contain, the
    variables that a function shares with those around it, buffers of modules that are no part of the model,
    and, of the user's own code, attributes of classes and the globals that functions name.

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
        live: tensors of which nobody reads a value by itself, so that it may change; None if `changes` is not
            asked for.

    Attributes:
        has_unseen: whether there is something that is not looked into.
        differs: whether `changes` found something else under some name: a module, a hook, an entry of a
            list or an array; or something else in a tensor that is not `live`.

    >>> model = nn.Module()
    >>> model.warm = True
    >>> held = HeldState(model, None)
    >>> held.changes()
    []
    >>> model.warm = False
    >>> [(change.name, change.before, change.now) for change in held.changes()]
    [('warm', True, False)]
    """

    def __init__(self, model: nn.Module, loss: object, live: Iterable[Tensor] | None = None) -> None:
        self.has_unseen = self.differs = False
        self._live = {id(tensor) for tensor in live or ()}
        self._places: list[_Place] = []
        self._of_torch: list[tuple[tuple[Any, ...], str]] = []
        self._arrays: list[tuple[np.ndarray, np.ndarray, str]] = []
        self._tensors: list[tuple[Tensor, int, str]] = []
        self._others: list[nn.Module] = []
        self._known: set[int] = set()
        self._waiting: list[tuple[Any, str, bool]] = [(loss, "", True)]
        modules: list[tuple[nn.Module | None, str]] = [(model, "")]
        for module, prefix in modules:
            if module is not None and id(module) not in self._known:
                self._known.add(id(module))
                self._module(module, prefix)
                if module._modules:
                    modules += [(inner, f"{prefix}{name}.") for name, inner in module._modules.items()]
        most = len(self._known) + _MOST_OBJECTS
        while self._waiting:
            value, name, is_told = self._waiting.pop()
            if type(value) not in _PLAIN and id(value) not in self._known:
                self._known.add(id(value))
                self._note(value, name, is_told)
                if len(self._known) > most:
                    self.has_unseen = True
                    break
        # A write through `.data` or an array leaves no mark; Python reads small tensors alone.
        self._small = [
            (t, t.detach().clone())
            for t, _, _ in (() if live is None else self._tensors)
            if id(t) not in self._live and t.layout is torch.strided and t.numel() <= _SMALL_TENSOR
        ]

    def _note(self, value: Any, name: str, is_told: bool) -> None:
        kind: Any = type(value)
        if isinstance(value, Tensor):
            if not value.is_inference():  # those cannot change
                self._tensors.append((value, value._version, name))
        elif isinstance(value, _UNSEEN):
            self.has_unseen = True
        elif isinstance(value, nn.Module):
            self._module(value, "")
            self._others.append(value)
            for held in (value._buffers, value._parameters):
                self._container(held, "", is_told, False)  # by the names in it
                self._waiting += [(tensor, name, is_told) for name, tensor in held.items()]
        elif isinstance(value, _CONTAINED):
            self._container(value, name, is_told)
        elif isinstance(value, (tuple, frozenset)):
            self._follow(value, name, is_told)
        elif isinstance(value, np.ndarray):
            if value.nbytes > _LARGEST_ARRAY or value.dtype.hasobject:
                self.has_unseen = True
            else:
                self._arrays.append((value, value.copy(), name))
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif followed := next((of for one, of in _FOLLOWED.items() if isinstance(value, one)), None):
            self._follow([getattr(value, held) for held in followed], name, is_told)
        elif isinstance(value, type):
            self._class(value)
        elif not (isinstance(value, _UNCHANGING) or kind.__module__.startswith(_OF_CODE)):
            is_bare = isinstance(value, (types.SimpleNamespace, argparse.Namespace))
            if not hasattr(value, "__dict__") or (_is_of_packages(kind.__module__) and not is_bare):
                self.has_unseen |= not isinstance(value, types.ModuleType)
            else:
                self._fields(value, "", is_bare or bool(_classes(kind)))
                self._class(kind)
                self.has_unseen |= not is_bare and _has_slots(kind)

    def _follow(self, values: Iterable[Any], name: str, is_told: bool) -> None:
        self._waiting += [(value, name, is_told) for value in values if type(value) not in _PLAIN]

    def _fields(self, value: Any, prefix: str, is_told: bool) -> dict[str, Any]:
        attributes = value.__dict__
        own = attributes.copy()

        def put(then: Mapping[str, Any]) -> None:
            attributes.update(then)
            if len(attributes) > len(then):
                for name in attributes.keys() - then.keys():
                    del attributes[name]

        self._places.append(_Place(value, lambda: attributes, own, put, prefix, is_told=is_told))
        if not isinstance(value, nn.Module):
            self._waiting += [(held, name, is_told) for name, held in own.items()]
        return own

    def _module(self, module: nn.Module, prefix: str) -> None:
        own = self._fields(module, prefix, True)
        if next(iter(own)) == _OF_TORCH[0]:  # which come first, quickly: there are many modules
            rest: Iterable[tuple[str, Any]] = islice(own.items(), len(_OF_TORCH), None)
        else:
            rest = [(name, value) for name, value in own.items() if name not in _OF_TORCH]
        self._waiting += [(v, prefix + name, True) for name, v in rest if type(v) not in _PLAIN]
        containers = _held_by_torch(own)
        self._of_torch.append((containers, prefix))
        for held, name in self._filled(containers, prefix) if any(containers) else ():
            self._known.add(id(held))
            self._container(held, name, True)
        if type(module).__module__.partition(".")[0] != "torch":
            self._class(type(module))

    def _filled(self, containers: tuple[Any, ...], prefix: str) -> Iterator[tuple[Any, str]]:
        for held, name in zip(containers, _CONTAINERS, strict=True):
            if held and id(held) not in self._known:
                yield held, prefix + name

    def _container(self, value: Any, name: str, is_told: bool, is_whole: bool = True) -> None:
        base: Any = next(b for b in _CONTAINED if isinstance(value, b))
        if base.__len__(value) > _LARGEST_CONTAINER:
            self.has_unseen = True
            return
        is_dict = isinstance(value, dict)

        def now() -> Mapping[Any, Any]:
            if is_dict:
                return dict(base.items(value))
            return dict.fromkeys(value) if base is set else dict(enumerate(base.__iter__(value)))

        def put(then: Mapping[Any, Any]) -> None:
            base.clear(value)
            if is_dict or base is set:
                base.update(value, then)
            else:
                base.extend(value, then.values())

        then = now()
        self._places.append(_Place(value, now, then, put, name, is_whole, is_told and is_dict))
        self._follow(then if base is set else then.values(), name, is_told)

    def _class(self, kind: type) -> None:
        for base in _classes(kind):
            if base is kind or id(base) not in self._known:
                self._known.add(id(base))
                own = dict(vars(base))
                put = partial(_set_class, base)
                self._places.append(_Place(base, partial(vars, base), own, put, f"{base.__name__}."))
                self._waiting += [
                    (value, name, True)
                    for name, value in own.items()
                    if isinstance(value, types.FunctionType if name.startswith("__") else _IN_CLASSES)
                ]

    def _function(self, function: types.FunctionType) -> None:
        self._follow((function.__defaults__, function.__kwdefaults__, vars(function)), "", True)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, cell in cells.items():
            then = {name: _content(cell)}
            put = partial(_set_cell, cell)
            self._places.append(
                _Place(cell, lambda n=name, c=cell: {n: _content(c)}, then, put, "")  # type: ignore[misc]
            )
            self._waiting.append((then[name], name, True))
        if is_own((scope := function.__globals__).get("__name__")):
            self._globals(scope, *_names(function.__code__))

    def _globals(self, scope: dict[str, Any], names: frozenset[str], inside: frozenset[str]) -> None:
        def now() -> Mapping[str, Any]:
            return {name: scope[name] for name in names if name in scope}

        def put(then: Mapping[str, Any]) -> None:
            scope.update(then)
            for name in names - then.keys():
                if not isinstance(scope.get(name), types.ModuleType):  # those are imported once
                    scope.pop(name, None)

        then = now()
        self._places.append(_Place(scope, now, then, put, ""))
        self._waiting += [(value, name, True) for name, value in then.items()]
        for held in then.values():  # of modules of the user's own, what has a name that the function says
            key = hash((id(held), inside))
            if isinstance(held, types.ModuleType) and is_own(held.__name__) and key not in self._known:
                self._known.add(key)
                self._globals(vars(held), inside, inside)

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
            place.put(place.then)
        for containers, prefix in self._of_torch:
            for held, _ in self._filled(containers, prefix) if any(containers) else ():
                held.clear()
        for array, values, _ in self._arrays:
            array[...] = values
        if moved := self._moved():
            raise TensorWritesError(sorted(set(moved)))

    def written(self) -> Iterator[str]:
        """The names of what has another value than was noted."""
        for place in self._places:
            now = place.now()
            then = place.then
            if place.is_container and not _is_same(dict(now), dict(then)):
                yield place.name or UNNAMED
            for name in () if place.is_container else then.keys() & now.keys():
                if not isinstance(then[name], _CONTAINED) and not _is_same(now[name], then[name]):
                    yield place.shown(name)
        yield from (name for array, values, name in self._arrays if not np.array_equal(array, values))
        # Copies of the buffers of modules outside of the model; of other tensors `put_back` raises.
        yield from self._moved()

    def _moved(self) -> list[str]:
        return [name or UNNAMED for tensor, version, name in self._tensors if tensor._version != version]

    def changes(self) -> list[Change]:
        """What has another plain value now; values in tensors, lists, sets and arrays are not looked at."""
        self.differs |= any(
            t._version != version for t, version, _ in self._tensors if id(t) not in self._live
        )
        self.differs |= not all(np.array_equal(array, values) for array, values, _ in self._arrays)
        self.differs |= not all(_is_same(tensor, values) for tensor, values in self._small)
        filled = [
            _Place(held, partial(dict, held), {}, held.update, name, True)
            for held, name in chain.from_iterable(starmap(self._filled, self._of_torch))
        ]
        found: list[Change] = []
        for place in (*self._places, *filled):
            then, now = place.then, place.now()
            is_alike = then.keys() == now.keys()
            if is_alike and all(map(is_, then.values(), now.values())):  # in the same order, quickly
                continue
            if is_alike and all(now[name] is then[name] for name in then):
                continue
            self.differs = True
            if place.is_told:
                found += _changed(place, then, now)
        return found


def _changed(place: _Place, then: Mapping[Any, Any], now: Mapping[Any, Any]) -> Iterator[Change]:
    for name in (then.keys() | now.keys()) - _OF_LOOPS:
        old, new = then.get(name, _EMPTY), now.get(name, _EMPTY)
        # of a tensor and other data only that it is some
        old, new = old if _is_constant(old) else _EMPTY, new if _is_constant(new) else _EMPTY
        if old is not new and not bool(old == new):
            yield Change((id(place.owner), str(name)), place.shown(name), old, new)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _set_cell(cell: types.CellType, then: Mapping[str, Any]) -> None:
    for content in then.values():
        if content is not _EMPTY:
            cell.cell_contents = content
        else:
            del cell.cell_contents


def _set_class(base: type, then: Mapping[str, Any]) -> None:
    now = vars(base)
    for name in [name for name, value in then.items() if now.get(name, base) is not value]:
        type.__setattr__(base, name, then[name])
    for name in now.keys() - then.keys():
        type.__delattr__(base, name)


def _is_constant(value: Any) -> bool:
    return all(map(_is_constant, value)) if type(value) is tuple else isinstance(value, _CONSTANT)


def _is_same(now: Any, before: Any) -> bool:
    """Whether two values are equal; of values that hold more than plain ones and tensors it is not known."""
    if now is before:
        return True
    if isinstance(now, Tensor) and isinstance(before, Tensor):
        # Nothing is known of sparse tensors, and of those of a vmap that is over.
        if any(t.is_sparse or torch._C._functorch.is_functorch_wrapped_tensor(t) for t in (now, before)):
            return True
        if now.shape != before.shape or now.device != before.device:
            return False
        return bool(((now == before) | ((now != now) & (before != before))).all())  # NaN is NaN
    if type(now) is not type(before):
        return False
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(_is_same(now[key], before[key]) for key in now)
    if isinstance(now, (list, tuple, deque)):
        return len(now) == len(before) and all(map(_is_same, now, before))
    if isinstance(now, np.ndarray):
        return np.array_equal(now, before)
    return not isinstance(now, (bool, int, float, complex, str, bytes, set)) or bool(now == before)


@lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Globals that a function and those inside it use; and all names in them, attributes too."""
    used = {one.argval for one in dis.get_instructions(code) if one.opname.endswith("_GLOBAL")}
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            more, others = _names(constant)
            used |= more
            names |= others
    return frozenset(used), frozenset(names)


@cache
def is_own(module: str | None) -> bool:
    """Whether this module is the user's: of no installed package."""
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    parts = pathlib.Path(file).parts
    return not _is_of_packages(str(module)) and not {"site-packages", "dist-packages"} & set(parts)


def _is_of_packages(module: str) -> bool:
    return module.partition(".")[0] in _PACKAGES


@cache
def _classes(kind: type) -> tuple[type, ...]:
    """The class and those that it is made of, where they are the user's own."""
    return tuple(base for base in kind.__mro__ if is_own(base.__module__))


@cache
def _has_slots(kind: type) -> bool:
    held = (one for base in kind.__mro__ for one in vars(base).values())
    return any(type(one) is types.MemberDescriptorType for one in held)


_IN_CLASSES = (
    *(types.FunctionType, staticmethod, classmethod, property, partial, dict, list, set, deque),
    *(Tensor, np.ndarray, nn.Module, types.SimpleNamespace),
)
