"""What a forward keeps in attributes of model and loss, or wherever else they hold things, is forgotten.

A counter, a list of earlier records, a module that went into evaluation mode: the next forward would follow
from the records of this one. So every forward begins in the same state. Two things are not put back. A tensor
that is neither parameter nor buffer must not change in place, which is seen by its count of changes. What
equipoise cannot look into (an iterator, a large array, an object of a compiled package) is told of by
`unseen_state`.
"""

from __future__ import annotations

import argparse
import datetime
import enum
import logging
import pathlib
import re
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property, partial
from itertools import islice
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.gradients.checks.errors import TensorWritesError

__all__ = ["attributes_kept", "has_unseen_state"]

#: What PyTorch keeps on every module, in its order; it has its own ways.
_IN_ORDER = tuple(vars(nn.Module()))
_OF_TORCH, _LAST = frozenset(_IN_ORDER) - {"training"}, len(_IN_ORDER) - 1

#: Of that, the dicts that a forward may add to.
_held_by_torch = itemgetter(
    "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)

#: Values that hold nothing else, and stay what they are.
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})

#: The same, also of other classes.
_UNCHANGING = (
    *_PLAIN,
    torch.layout,
    torch.memory_format,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    np.generic,
    np.dtype,
    np.ufunc,
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    range,
    slice,
    enum.Enum,
    re.Pattern,
    logging.Logger,
    pathlib.PurePath,
    weakref.ReferenceType,
    datetime.date,
    datetime.timedelta,
)

#: Containers; one that is another's kind stands before it.
_CONTAINERS = (OrderedDict, dict, list, set, deque)

#: Fields of their objects are their own affair: other threads may be at work on them.
_PACKAGES = frozenset({"equipoise", "numpy", "torch", *sys.stdlib_module_names})

#: Objects of theirs hold code, and no records.
_OF_CODE = ("torch._dynamo", "torch.fx", "torch.utils.hooks")

#: Bytes of the largest array that is put back.
_LARGEST_ARRAY = 2**18


@contextmanager
def attributes_kept(model: nn.Module, loss: object = None) -> Iterator[None]:
    """Inside, model and loss may keep things in attributes; then every attribute is what it was.

    So are hooks, the fields of other objects that they hold, and what lists, dicts, sets, deques and small
    arrays contain; the variables that a function shares with those around it, and its defaults; the buffers
    of modules that are no part of the model; in the user's own code, attributes of classes, and the globals
    that classes and functions name. Objects of PyTorch, NumPy and Python itself keep theirs.

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
    state = _State(model, loss)
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
    return _State(model, loss).has_unseen


class _State:
    """What a model and a loss hold, and whatever those hold.

    Attributes:
        has_unseen: whether there is something that is not looked into.
    """

    def __init__(self, model: nn.Module, loss: object) -> None:
        self.has_unseen = False
        self._fields: list[tuple[dict[str, Any], dict[str, Any], int]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any, Any]] = []
        self._held: list[dict[str, Any]] = []
        self._arrays: list[tuple[np.ndarray, np.ndarray]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], set[str], dict[str, Any]]] = []
        self._tensors: list[tuple[Tensor, int]] = []
        self._waiting: list[Any] = [loss]
        self._others: list[nn.Module] = []
        self._known: set[int] = set()
        modules: list[nn.Module | None] = [model]
        for module in modules:
            if module is not None and id(module) not in self._known:
                self._known.add(id(module))
                self._note_module(module)
                modules += module._modules.values()
        while self._waiting:
            value = self._waiting.pop()
            if type(value) not in _PLAIN and id(value) not in self._known:
                self._known.add(id(value))
                kind: Any = type(value)
                _note_of(kind)(self, value)

    def _note_tensor(self, value: Tensor) -> None:
        if not value.is_inference():  # those cannot change
            self._tensors.append((value, value._version))

    def _note_container(self, value: Any) -> None:
        base: Any = next(base for base in _CONTAINERS if isinstance(value, base))
        is_dict = issubclass(base, dict)
        if type(value) is base:
            self._contents.append((base, value, value.copy()))
        else:  # the methods of a class of the user's own may do something else
            entries = base.items(value) if is_dict else base.__iter__(value)
            self._contents.append((base, value, list(entries)))
            self._note_fields(getattr(value, "__dict__", None))
        values = dict.values(value) if is_dict else value
        if not _PLAIN.issuperset(map(type, values)):
            self._waiting += values

    def _note_tuple(self, value: Any) -> None:
        self._waiting += value

    def _note_array(self, value: np.ndarray) -> None:
        if value.nbytes > _LARGEST_ARRAY or value.dtype.hasobject:
            self.has_unseen = True
        elif value.flags.writeable:
            self._arrays.append((value, value.copy()))

    def _note_method(self, value: Any) -> None:
        self._waiting += (value.__self__, value.__func__)

    def _note_wrapped(self, value: Any) -> None:
        self._waiting.append(value.__func__)

    def _note_property(self, value: Any) -> None:
        self._waiting += (value.fget, value.fset)

    def _note_cached_property(self, value: Any) -> None:
        self._waiting.append(value.func)

    def _note_partial(self, value: Any) -> None:
        self._waiting += (value.func, value.args, value.keywords)

    def _note_other_module(self, value: nn.Module) -> None:
        self._note_module(value)
        self._note_fields(value._buffers)
        self._note_fields(value._parameters)
        self._others.append(value)

    def _note_object(self, value: Any) -> None:
        self._note_fields(value.__dict__)
        self._note_classes(type(value))

    def _note_unchanging(self, value: Any) -> None:
        pass

    def _note_unseen(self, value: Any) -> None:
        self.has_unseen = True

    def _note_module(self, module: nn.Module) -> None:
        attributes = vars(module)
        own = _own(attributes)
        self._fields.append((attributes, own, len(attributes)))
        self._waiting += [value for value in own.values() if type(value) not in _PLAIN]
        for held in filter(None, _held_by_torch(attributes)):
            self._contents.append((type(held), held, held.copy()))
            self._waiting += held.values()
        self._held.append(attributes)
        self._note_classes(type(module))

    def _note_fields(self, attributes: Any) -> None:
        if type(attributes) is dict:  # a proxy answers with another object's
            self._fields.append((attributes, attributes.copy(), len(attributes)))
            self._waiting += attributes.values()

    def _note_classes(self, kind: type) -> None:
        for base in _classes(kind):
            if id(base) not in self._known:
                self._known.add(id(base))
                own = dict(vars(base))
                self._classes.append((base, own))
                self._waiting += [
                    value for name, value in own.items() if not name.startswith(("__", "_abc_"))
                ]

    def _note_function(self, function: types.FunctionType) -> None:
        self._note_fields(vars(function))
        self._waiting += (function.__defaults__, function.__kwdefaults__)
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it is empty
                self._cells.append((cell, cell.cell_contents))
                self._waiting.append(cell.cell_contents)
        scope = function.__globals__
        if _is_own(scope.get("__name__")):
            names = set(_names(function.__code__))
            self._note_globals(scope, names)
            for module in [scope[name] for name in names if isinstance(scope.get(name), types.ModuleType)]:
                if _is_own(module.__name__):
                    self._note_globals(vars(module), names)

    def _note_globals(self, scope: dict[str, Any], names: set[str]) -> None:
        named = {name: scope[name] for name in names if name in scope}
        self._globals.append((scope, names, named))
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
        for attributes, own, size in self._fields:
            attributes.update(own)
            if len(attributes) > size:
                for name in attributes.keys() - own.keys() - _OF_TORCH:
                    del attributes[name]
        for base, own in self._classes:
            now = vars(base)
            for name in [name for name, value in own.items() if now.get(name, base) is not value]:
                setattr(base, name, own[name])
            for name in now.keys() - own.keys():
                if not name.startswith("__"):
                    delattr(base, name)
        for attributes in self._held:
            for held in filter(None, _held_by_torch(attributes)):
                held.clear()  # what it held is put back below
        for kind, container, content in self._contents:
            kind.clear(container)
            (kind.update if kind not in (list, deque) else kind.extend)(container, content)
        for array, values in self._arrays:
            array[...] = values
        for cell, content in self._cells:
            cell.cell_contents = content
        for scope, names, named in self._globals:
            scope.update(named)
            for name in names - named.keys():
                scope.pop(name, None)
        moved = [tensor for tensor, version in self._tensors if tensor._version != version]
        if moved:
            raise TensorWritesError(sorted({self._name_of(tensor) for tensor in moved}))

    def _name_of(self, tensor: Tensor) -> str:
        named = [own for _, own, _ in self._fields] + [named for _, _, named in self._globals]
        found = (name for own in named for name, value in own.items() if value is tensor)
        return next(found, "one in a container or a variable")


def _own(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module that are not PyTorch's, quickly: there are many modules."""
    own = dict(islice(attributes.items(), _LAST, None))
    training = attributes.get("training")
    if own.pop(_IN_ORDER[_LAST], None) is None or training is None:  # in another order, or elsewhere
        return {name: value for name, value in attributes.items() if name not in _OF_TORCH}
    own["training"] = training
    return own


def _names(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in a function and those inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


@cache
def _is_own(module: str | None) -> bool:
    """Whether this module is the user's: of no installed package."""
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return _package(module) not in _PACKAGES and not {"site-packages", "dist-packages"} & set(
        pathlib.Path(file).parts
    )


def _package(module: str | None) -> str:
    return str(module).partition(".")[0]


@cache
def _note_of(kind: type) -> Callable[[_State, Any], None]:
    """How a value of this type is noted."""
    for kinds, note in _NOTES:
        if issubclass(kind, kinds):
            return note
    if kind.__module__.startswith(_OF_CODE):
        return _State._note_unchanging
    if kind.__dictoffset__ == 0 or _package(kind.__module__) in _PACKAGES:
        return _State._note_unseen
    return _State._note_object


_NOTES: tuple[tuple[Any, Callable[[_State, Any], None]], ...] = (
    (Tensor, _State._note_tensor),
    (_CONTAINERS, _State._note_container),
    ((tuple, frozenset), _State._note_tuple),
    (_UNCHANGING, _State._note_unchanging),
    (torch.jit.ScriptModule, _State._note_unseen),
    (nn.Module, _State._note_other_module),
    (types.FunctionType, _State._note_function),
    (types.MethodType, _State._note_method),
    ((staticmethod, classmethod), _State._note_wrapped),
    (property, _State._note_property),
    (cached_property, _State._note_cached_property),
    (partial, _State._note_partial),
    (np.ndarray, _State._note_array),
    ((types.SimpleNamespace, argparse.Namespace), _State._note_object),
    ((torch.utils.data.Dataset, threading.Thread), _State._note_unseen),
)


@cache
def _classes(kind: type) -> tuple[type, ...]:
    """The class and those that it is made of, where they are the user's own."""
    return tuple(base for base in kind.__mro__ if _is_own(base.__module__))
