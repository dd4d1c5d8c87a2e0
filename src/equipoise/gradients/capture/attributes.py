"""What a forward keeps in attributes of model and loss, or wherever else they hold things, is forgotten.

A counter, a list of earlier records, a module that went into evaluation mode: the next forward would follow
from the records of this one. So every forward begins in the same state. Whatever is reached from model and
loss is put back, holds nothing, or is unseen; only values of exactly the types named here hold nothing.

Two things are not put back. A tensor that is neither parameter nor buffer must not change in place, which is
seen by its count of changes. What equipoise cannot look into (an iterator, a large array, fields outside of
``__dict__``) or leaves for its size is told of by `has_unseen_state`.
"""

from __future__ import annotations

import argparse
import datetime
import dis
import enum
import logging
import pathlib
import random
import re
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from functools import cache, cached_property, lru_cache, partial
from itertools import accumulate, chain, islice
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.gradients.checks.errors import TensorWritesError

__all__ = ["Change", "HeldState", "attributes_kept", "has_unseen_state", "is_own", "watch_writes"]

#: What PyTorch keeps on every module, in its order.
_IN_ORDER = tuple(vars(nn.Module()))
_OF_TORCH, _LAST = frozenset(_IN_ORDER), len(_IN_ORDER) - 1

#: Of that, the containers that a forward may add to; parameters and buffers are kept elsewhere.
_held_by_torch = itemgetter(
    *(
        name
        for name, value in vars(nn.Module()).items()
        if isinstance(value, (dict, set)) and name not in ("_parameters", "_buffers")
    )
)

#: Values of exactly these types hold nothing else, and stay what they are.
_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, object, types.EllipsisType, torch.dtype, torch.device}
)

#: So do these, and their kinds in Python, NumPy and PyTorch. A class of one's own adds what it holds.
_UNCHANGING = (
    *(_PLAIN - {object}),
    torch.layout,
    torch.memory_format,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    np.generic,
    np.dtype,
    np.ufunc,
    type(np.sum),
    type(getattr(np.random.rand, "__func__", None)),
    types.CodeType,
    types.GenericAlias,
    types.UnionType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.DynamicClassAttribute,
    type(vars(namedtuple("_Named", "field"))["field"]),
    range,
    enum.Enum,
    re.Pattern,
    pathlib.PurePath,
    datetime.date,
    datetime.timedelta,
)

#: Their random numbers begin alike in every forward, whoever asks for them.
_GENERATORS = frozenset(id(getattr(draw, "__self__", None)) for draw in (random.random, np.random.rand))

#: Fields of their objects are their own affair: other threads may be at work on them.
_PACKAGES = frozenset({"equipoise", "numpy", "torch", *sys.stdlib_module_names})

#: Objects of theirs hold code, and no records.
_OF_CODE = (
    "torch._dynamo",
    "torch.fx",
    "torch.utils.hooks",
    "torch.autograd.grad_mode",
    "torch.amp",
    "pybind11_builtins",
    "typing",
    "dataclasses",
)

#: Names in classes that lead to types alone, or to what makes a class.
_OF_CLASSES = ("_abc_", "__annotat", "__orig_", "__parameters__", "__dataclass_", "__attrs_", "__pydantic_")

#: What Python itself keeps on a logger (its tree of others, the handlers) and on a cached property.
_OF_PYTHON = {"manager", *vars(logging.Logger("")), *vars(cached_property(len))}

#: Bytes of the largest array, entries of the largest container, and objects in all, that are put back.
_LARGEST_ARRAY, _LARGEST_CONTAINER, _MOST_OBJECTS = 2**18, 5_000, 5_000

#: In the place of a value that is missing.
_EMPTY = object()

#: Whose changes `HeldState` tells, in addition to objects of the user's own classes.
_TOLD = (
    *(nn.Module, types.FunctionType, types.CellType, type, dict),
    *(types.SimpleNamespace, argparse.Namespace),
)

#: Marks of Lightning (which hook runs) and accelerate on the user's modules.
_OF_LOOPS = frozenset({"_current_fx_name", "_is_accelerate_prepared"})

#: The values that it tells of; code and modules by which one it is.
_CONSTANT = (*_UNCHANGING, types.FunctionType, types.MethodType, partial, type, nn.Module)


@contextmanager
def attributes_kept(model: nn.Module, loss: object = None) -> Iterator[None]:
    """Inside, model and loss may keep things in attributes; then every attribute is what it was.

    So are hooks, the fields of other objects that they hold, and what lists, dicts, sets, deques and small
    arrays contain; the variables that a function shares with those around it, and its defaults; the buffers
    of modules that are no part of the model; in the user's own code, attributes of classes that it holds or
    names, and the globals that classes and functions name, also in modules. Objects of PyTorch, NumPy and
    Python itself keep theirs, and so do large containers.

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


def has_unseen_state(model: nn.Module, loss: object) -> bool:
    """Whether model or loss hold objects that `attributes_kept` does not look into.

    >>> import itertools
    >>> model = nn.Linear(2, 1)
    >>> has_unseen_state(model, None)
    False
    >>> model.numbers = itertools.count()
    >>> has_unseen_state(model, None)
    True
    """
    return HeldState(model, loss).has_unseen


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


#: So many numbers at most has a tensor whose values are compared.
_SMALL_TENSOR = 256


def _same_numbers(tensor: Tensor, values: Tensor) -> bool:
    """Bit for bit; NaN is like itself."""
    return tensor.shape == values.shape and bool(((tensor == values) | (values != values)).all())


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
        self._model = model
        self._fields: list[tuple[Any, type, dict[str, Any], dict[str, Any]]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any, Any]] = []
        self._held: list[tuple[Any, ...]] = []
        self._arrays: list[tuple[np.ndarray, np.ndarray]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._cell_names: dict[int, str] = {}
        self._slots: list[tuple[Any, str, Any]] = []
        self._globals: list[tuple[dict[str, Any], Set[str], Set[str], dict[str, Any]]] = []
        self._namespaces: list[tuple[dict[str, Any], set[str]]] = []
        self._names: set[str] = set()
        self._tensors: list[tuple[Tensor, int]] = []
        self._waiting: list[Any] = [loss]
        self._others: list[nn.Module] = []
        self._known: set[int] = set(_GENERATORS)
        modules: list[nn.Module | None] = [model]
        for module in modules:
            if module is not None and id(module) not in self._known:
                self._known.add(id(module))
                self._note_module(module)
                modules += module._modules.values()
        most = len(self._known) + _MOST_OBJECTS
        while self._waiting:
            value = self._waiting.pop()
            if type(value) not in _PLAIN and id(value) not in self._known:
                self._known.add(id(value))
                kind: Any = type(value)
                for note in _notes_of(kind):
                    note(self, value)
            if len(self._known) > most:
                self.has_unseen = True
                break
            if not self._waiting:
                self._note_namespaces()
        # A write through `.data` or an array leaves no mark; Python reads small tensors alone.
        self._small = [
            (t, t.detach().clone())
            for t, _ in (() if live is None else self._tensors)
            if id(t) not in self._live and t.layout is torch.strided and t.numel() <= _SMALL_TENSOR
        ]

    def _note_tensor(self, value: Tensor) -> None:
        if not value.is_inference():  # those cannot change
            self._tensors.append((value, value._version))
            if value.is_leaf:
                self._note_slot(value, "grad")
        self._note_fields(value)

    def _note_container(self, value: Any) -> None:
        kind: Any = type(value)
        base = _base_of(kind)
        if base.__len__(value) > _LARGEST_CONTAINER:
            self.has_unseen = True
            return
        is_dict = issubclass(base, dict)
        if kind is base:
            self._contents.append((base, value, value.copy()))
        else:  # the methods of a class of the user's own may do something else
            entries = base.items(value) if is_dict else base.__iter__(value)
            self._contents.append((base, value, list(entries)))
        values = dict.values(value) if is_dict else value
        if not _PLAIN.issuperset(map(type, values)):
            self._waiting += values

    def _note_ordered(self, value: Any) -> None:
        self._note_container(value)
        self._note_fields(value)

    def _note_default(self, value: Any) -> None:
        self._note_container(value)
        self._note_slot(value, "default_factory")

    def _note_tuple(self, value: Any) -> None:
        if len(value) > _LARGEST_CONTAINER:
            self.has_unseen = self.has_unseen or not _PLAIN.issuperset(map(type, value))
        else:
            self._waiting += value

    def _note_slice(self, value: slice) -> None:
        self._waiting += (value.start, value.stop, value.step)

    def _note_array(self, value: np.ndarray) -> None:
        if value.nbytes > _LARGEST_ARRAY or value.dtype.hasobject:
            self.has_unseen = True
        elif value.flags.writeable or value.base is not None:  # a view of one that may be
            self._arrays.append((value, value.copy()))

    def _note_method(self, value: Any) -> None:
        self._waiting += (value.__self__, value.__func__)

    def _note_builtin(self, value: Any) -> None:
        self._waiting.append(value.__self__)

    def _note_wrapped(self, value: Any) -> None:
        self._waiting.append(value.__func__)
        self._note_fields(value)

    def _note_property(self, value: Any) -> None:
        self._waiting += (value.fget, value.fset, value.fdel)

    def _note_partial(self, value: Any) -> None:
        self._waiting += (value.func, value.args, value.keywords)
        self._note_fields(value)

    def _note_reference(self, value: Any) -> None:
        self._waiting.append(value())

    def _note_of_python(self, value: Any) -> None:
        """Put its fields back, and follow those that Python did not make."""
        attributes = vars(value)
        self._fields.append((value, type(value), attributes, attributes.copy()))
        self._waiting += [attributes[name] for name in attributes.keys() - _OF_PYTHON]
        self._waiting.append(attributes.get("func"))

    def _note_namespace(self, value: types.ModuleType) -> None:
        name = value.__name__
        if sys.modules.get(name) is not value or is_own(name):
            self._namespaces.append((vars(value), set()))

    def _note_namespaces(self) -> None:
        """Of modules, what they hold under the names that code of one's own says."""
        for scope, noted in self._namespaces:
            if new := self._names - noted:
                noted |= new
                self._note_globals(scope, new, new)

    def _note_other_module(self, value: nn.Module) -> None:
        self._note_module(value)
        self._note_entries(value._buffers)
        self._note_entries(value._parameters)
        self._others.append(value)

    def _note_entries(self, entries: dict[str, Any]) -> None:
        self._contents.append((dict, entries, entries.copy()))
        self._waiting += entries.values()

    def _note_unchanging(self, value: Any) -> None:
        pass

    def _note_unseen(self, value: Any) -> None:
        self.has_unseen = True

    def _note_module(self, module: nn.Module) -> None:
        attributes = vars(module)
        kind: Any = type(module)
        own = attributes.copy()
        self._fields.append((module, kind, attributes, own))
        # What PyTorch does not keep on it, quickly: there are many modules.
        if next(islice(own, _LAST, None), None) == _IN_ORDER[_LAST]:
            self._waiting += islice(own.values(), _LAST + 1, None)
        else:  # in another order
            self._waiting += [value for name, value in own.items() if name not in _OF_TORCH]
        self._held.append(_held_by_torch(attributes))
        for held in filter(None, self._held[-1]):
            self._contents.append((type(held), held, held.copy()))
            if type(held) is not set:
                self._waiting += held.values()
        if id(kind) not in self._known:
            self._note_class(kind)
            self.has_unseen |= _hides(kind, nn.Module)

    def _note_fields(self, value: Any) -> None:
        attributes = value.__dict__
        if type(attributes) is dict and id(attributes) not in self._known:  # a class answers with a proxy
            self._known.add(id(attributes))
            self._fields.append((value, type(value), attributes, attributes.copy()))
            self._waiting += attributes.values()

    def _note_slot(self, value: Any, name: str) -> None:
        content = getattr(value, name)
        self._slots.append((value, name, content))
        if content is not None:
            self._waiting.append(content)

    def _note_its_class(self, value: Any) -> None:
        self._note_class(type(value))

    def _note_class(self, kind: type) -> None:
        self._known.add(id(kind))
        for base in _classes(kind):
            if base is kind or id(base) not in self._known:
                self._known.add(id(base))
                own = dict(vars(base))
                self._classes.append((base, own))
                self._waiting += [value for name, value in own.items() if not name.startswith(_OF_CLASSES)]

    def _note_function(self, function: types.FunctionType) -> None:
        self._note_fields(function)
        for name in ("__defaults__", "__kwdefaults__", "__code__"):
            self._note_slot(function, name)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._cell_names[id(cell)] = name
            content = _content(cell)
            self._cells.append((cell, content))
            self._waiting.append(content)
        scope = function.__globals__
        if is_own(scope.get("__name__")):
            names, imports, used = _names(function.__code__, str(scope.get("__package__") or ""))
            self._names |= names
            self._note_globals(scope, names, used)
            self._waiting += [sys.modules[name] for name in imports if name in sys.modules]

    def _note_globals(self, scope: dict[str, Any], names: Set[str], used: Set[str]) -> None:
        named = {name: scope[name] for name in names if name in scope}
        self._globals.append((scope, names, used, named))
        self._waiting += named.values()

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
        for owner, kind, attributes, own in self._fields:
            if type(owner) is not kind:
                object.__setattr__(owner, "__class__", kind)
            if owner.__dict__ is not attributes:
                object.__setattr__(owner, "__dict__", attributes)
            attributes.update(own)
            if len(attributes) > len(own):
                for name in attributes.keys() - own.keys():
                    del attributes[name]
        for base, own in self._classes:
            now = vars(base)
            for name in [name for name, value in own.items() if now.get(name, base) is not value]:
                type.__setattr__(base, name, own[name])
            for name in now.keys() - own.keys():
                type.__delattr__(base, name)
        for held in filter(None, chain.from_iterable(self._held)):
            held.clear()  # what it held is put back below
        for kind, container, content in self._contents:
            kind.clear(container)
            (kind.update if kind not in (list, deque) else kind.extend)(container, content)
        for array, values in self._arrays:
            array[...] = values
        for cell, content in self._cells:
            if content is not _EMPTY:
                cell.cell_contents = content
            else:
                del cell.cell_contents
        for owner, name, value in self._slots:
            if getattr(owner, name) is not value:
                setattr(owner, name, value)
        for scope, names, _, named in self._globals:
            scope.update(named)
            for name in names - named.keys():
                if not isinstance(scope.get(name), types.ModuleType):  # those are imported once
                    scope.pop(name, None)
        moved = [tensor for tensor, version in self._tensors if tensor._version != version]
        if moved:
            raise TensorWritesError(sorted({self._name_of(tensor) for tensor in moved}))

    def _scopes(self) -> list[tuple[Any, Mapping[str, Any], Mapping[str, Any]]]:
        """Objects, classes, globals and variables: what each held, and what it holds."""
        found: list[tuple[Any, Mapping[str, Any], Mapping[str, Any]]] = []
        for owner, _, attributes, own in self._fields:
            found.append((owner, own, attributes))
        for base, own in self._classes:
            found.append((base, own, vars(base)))
        for scope, _, used, named in self._globals:
            then, now = ({n: place[n] for n in used if n in place} for place in (named, scope))
            found.append((scope, then, now))
        for cell, content in self._cells:
            name = self._cell_names[id(cell)]
            found.append((cell, {name: content}, {name: _content(cell)}))
        return found

    def _shown(self, owner: Any, name: str) -> str:
        if isinstance(owner, type):
            return f"{owner.__name__}.{name}"
        paths = (path for path, module in self._model.named_modules() if module is owner)
        return f"{next(paths, '')}.{name}".lstrip(".")

    def written(self) -> Iterator[str]:
        """The names of what has another value than was noted."""
        for owner, then, now in self._scopes():
            for name, value in then.items():
                if value is not _EMPTY and name in now and not _is_same(now[name], value):
                    yield self._shown(owner, name)
        for kind, container, content in self._contents:
            if issubclass(kind, dict):
                is_same = _is_same(dict(kind.items(container)), dict(content))
            else:
                as_one = set if kind is set else list
                is_same = _is_same(as_one(kind.__iter__(container)), as_one(content))
            if not is_same:
                yield self._name_of(container)
        for array, values in self._arrays:
            if not np.array_equal(array, values):
                yield self._name_of(array)
        # Copies of the buffers of modules outside of the model; of other tensors `put_back` raises.
        yield from (self._name_of(tensor) for tensor, version in self._tensors if tensor._version != version)

    def _name_of(self, value: Any, inside: tuple[Any, ...] = ()) -> str:
        """In code; of an entry of a container that of the container, since keys may be names of persons."""
        named = [own for *_, own in self._fields] + [named for *_, named in self._globals]
        named += [held for module in self._others for held in (module._parameters, module._buffers)]
        named += [{self._cell_names[id(cell)]: content} for cell, content in self._cells]
        found = (str(name) for own in named for name, one in own.items() if one is value)
        if (name := next(found, None)) is None:
            inside = (*inside, value)
            for _, container, entries in self._contents:
                held = entries.values() if isinstance(entries, dict) else entries
                if any(one is value for one in held) and not any(one is container for one in inside):
                    return self._name_of(container, inside)
        return name or "one in a container or a variable"

    def changes(self) -> list[Change]:
        """What has another plain value now; values in tensors, lists, sets and arrays are not looked at."""
        held = self._scopes()
        contents: dict[int, tuple[Any, Any]] = {  # empty then
            id(own): (own, {}) for own in chain.from_iterable(self._held) if own
        }
        contents |= {id(own): (own, content) for _, own, content in self._contents}
        for own, content in contents.values():
            if isinstance(own, dict) and isinstance(content, dict):
                held.append((own, content, own))
            elif isinstance(own, (list, deque)):
                self.differs |= [*map(id, own)] != [*map(id, content)]
        self.differs |= not all(np.array_equal(array, values) for array, values in self._arrays)
        self.differs |= any(t._version != version for t, version in self._tensors if id(t) not in self._live)
        self.differs |= not all(_same_numbers(tensor, values) for tensor, values in self._small)
        self.differs |= any(type(owner) is not kind for owner, kind, _, _ in self._fields)
        found: list[Change] = []
        for owner, then, now in held:
            if len(then) == len(now):
                for name, value in then.items():
                    if now.get(name, _EMPTY) is not value:
                        break
                else:
                    continue
            self.differs = True
            found += self._changed(owner, then, now)
        return found

    def _changed(self, owner: Any, then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
        held_by = (
            (holder, name)
            for holder, _, _, own in self._fields
            for name, value in own.items()
            if value is owner
        )
        is_content = isinstance(owner, dict) and "__builtins__" not in owner
        holder, attribute = next(held_by, (owner, self._name_of(owner))) if is_content else (owner, "")
        kind: Any = type(holder)
        if not (isinstance(holder, _TOLD) or _classes(kind)):  # an object of another package
            return
        for name in then.keys() | now.keys():
            if name in _OF_LOOPS:
                continue
            old, new = then.get(name, _EMPTY), now.get(name, _EMPTY)
            # of a tensor and other data only that it is some
            old, new = old if _is_constant(old) else _EMPTY, new if _is_constant(new) else _EMPTY
            if old is not new and not bool(old == new):
                shown = self._shown(holder, attribute or name)  # keys of a dict may be private
                yield Change((id(owner), str(name)), shown, old, new)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


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
def _names(code: types.CodeType, package: str) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Of a function and those inside it: names of globals and attributes, imported modules, and globals."""
    names, parents = set(code.co_names), list(accumulate(package.split("."), "{}.{}".format))
    imported = {one.argval for one in dis.get_instructions(code) if one.opname == "IMPORT_NAME"}
    used = {one.argval for one in dis.get_instructions(code) if one.opname.endswith("_GLOBAL")}
    imports = {f"{parent}.{name}".strip(".") for parent in ("", *parents) for name in imported}
    imports |= {part for name in imports for part in accumulate(name.split("."), "{}.{}".format)}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, more, others = _names(constant, package)
            names |= inner
            imports |= more
            used |= others
    return frozenset(names), frozenset(imports), frozenset(used)


@cache
def is_own(module: str | None) -> bool:
    """Whether this module is the user's: of no installed package."""
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return _package(module) not in _PACKAGES and not {"site-packages", "dist-packages"} & set(
        pathlib.Path(file).parts
    )


def _package(module: str | None) -> str:
    return str(module).partition(".")[0]


@cache
def _notes_of(kind: type) -> tuple[Callable[[HeldState, Any], None], ...]:
    """How a value of this type is noted."""
    base, is_python = _base_of(kind), _package(kind.__module__) in _PACKAGES
    known = _NOTES.get(base)
    if known is None:
        if kind.__module__.startswith(_OF_CODE):
            return ()
        if is_python:
            return (HeldState._note_unseen,)
        notes = []
    elif kind is base or known in (HeldState._note_unseen, HeldState._note_namespace):
        return (known,)
    elif known is HeldState._note_unchanging and is_python:
        return ()
    else:
        notes = [known]
    if kind.__dictoffset__:
        notes.append(HeldState._note_fields)
    if _hides(kind, base):
        notes.append(HeldState._note_unseen)
    if _classes(kind):
        notes.append(HeldState._note_its_class)
    return tuple(notes)


@cache
def _base_of(kind: type) -> Any:
    """The nearest class above this one that is known."""
    return next((base for base in kind.__mro__ if base in _NOTES), object)


@cache
def _hides(kind: type, base: type) -> bool:
    """Whether values of this type hold something that is neither their base's nor in their ``__dict__``."""
    own = [one for one in kind.__mro__ if not issubclass(base, one)]
    slots = any(type(one) is types.MemberDescriptorType for above in own for one in vars(above).values())
    bare = types.new_class("bare", (base,)) if kind.__dictoffset__ else base
    return slots or kind.__basicsize__ > bare.__basicsize__


_NOTES: dict[type, Callable[[HeldState, Any], None]] = {
    **dict.fromkeys(_UNCHANGING, HeldState._note_unchanging),
    **dict.fromkeys((dict, list, set, deque), HeldState._note_container),
    **dict.fromkeys((tuple, torch.Size, frozenset), HeldState._note_tuple),
    **dict.fromkeys((staticmethod, classmethod), HeldState._note_wrapped),
    **dict.fromkeys((logging.Logger, logging.RootLogger, cached_property), HeldState._note_of_python),
    **dict.fromkeys(
        (types.SimpleNamespace, argparse.Namespace, torch.nn.modules.module._WrappedHook),
        HeldState._note_fields,
    ),
    **dict.fromkeys(
        (torch.jit.ScriptModule, torch.utils.data.Dataset, threading.Thread, np.void), HeldState._note_unseen
    ),
    OrderedDict: HeldState._note_ordered,
    defaultdict: HeldState._note_default,
    Tensor: HeldState._note_tensor,
    nn.Module: HeldState._note_other_module,
    np.ndarray: HeldState._note_array,
    type: HeldState._note_class,
    types.ModuleType: HeldState._note_namespace,
    types.FunctionType: HeldState._note_function,
    types.MethodType: HeldState._note_method,
    types.BuiltinFunctionType: HeldState._note_builtin,
    property: HeldState._note_property,
    partial: HeldState._note_partial,
    weakref.ReferenceType: HeldState._note_reference,
    slice: HeldState._note_slice,
}


@cache
def _classes(kind: type) -> tuple[type, ...]:
    """The class and those that it is made of, where they are the user's own."""
    return tuple(base for base in kind.__mro__ if is_own(base.__module__))
