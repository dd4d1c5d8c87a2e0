"""What a forward may leave behind on a model, and how it is kept from it.

*Buffers.* A buffer that a forward updates (`InstanceNorm2d(track_running_stats=True)` in training mode, a
counter, an observer) holds a function of the records that no noise covers, and it is saved with the model.
Private computations therefore run on copies of all buffers, and the model's own never move.

*Parameters.* What a forward writes into a parameter, frozen or not (a look-up that renormalises its table, a
running mean as a parameter), is a function of the records too, and part of the model that is published. A
parameter moves by the optimiser alone: a model that moves one itself is refused, by name.

*Attributes.* What a forward keeps in plain attributes of model and loss, or of what these hold (a counter, a
list of earlier records), is forgotten when it ends, so that every forward begins in the same state. Tensors
changed in place are not put back, but for the buffers of a loss.

*Random numbers* are the subject of `random_numbers`.
"""

from __future__ import annotations

import sys
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from equipoise.gradients.capture.random_numbers import random_numbers_constant, random_numbers_from
from equipoise.gradients.checks.errors import BufferWritesError, ForwardWritesError

__all__ = [
    "Buffers",
    "attributes_kept",
    "parameters_restored",
    "parameters_watched",
    "refuse_max_norm",
    "undisturbed",
    "write_mark",
]


Held = TypeVar("Held", bound=Tensor | None)


class _Place(NamedTuple, Generic[Held]):
    """Where a parameter or a buffer stands, and what it was."""

    path: str
    module: nn.Module
    key: str
    value: Held
    mark: tuple[int, int]


class Buffers:
    """The buffers of a model, and which of them a forward changes.

    Args:
        model: its modules are listed now; nothing on it is changed.

    Example:
        >>> import torch
        >>> norm = nn.InstanceNorm1d(2, track_running_stats=True)
        >>> buffers = Buffers(norm)
        >>> buffers.find_changing(lambda: norm(torch.ones(1, 2, 3)))
        ['running_mean', 'running_var']
        >>> with buffers.kept():
        ...     _ = norm(torch.ones(1, 2, 3))
        >>> norm.running_mean
        tensor([0., 0.])
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.named_modules())
        self._changing: list[_Place[Tensor | None]] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, every buffer is a copy; then the model has its own again, unmoved.

        Raises:
            BufferWritesError: a name of the model's own led to one of them; it has its value again.
        """
        before = self._snapshot()
        self._exchange(before)
        copies = self._snapshot()
        try:
            yield
        finally:
            self._put_back(before)
            moved = []
            for own, copied in zip(before, copies, strict=True):
                if own.value is not None and copied.value is not None and write_mark(own.value) != own.mark:
                    own.value.detach().copy_(copied.value)
                    moved.append(own.path)
            if moved:  # whatever else failed inside
                raise BufferWritesError(moved, "by another name than the module's")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """As `kept`, and only the buffers known to change may be changed in place.

        Raises:
            BufferWritesError: another one was.
        """
        known = {(id(place.module), place.key) for place in self._changing}
        with self.kept():
            copies = self._snapshot()
            try:
                yield
            finally:
                moved = [
                    place.path
                    for place in copies
                    if write_mark(place.value) != place.mark and (id(place.module), place.key) not in known
                ]
                if moved:
                    raise BufferWritesError(moved, "it did not at attach")

    def find_changing(self, forward: Callable[[], Any]) -> list[str]:
        """Run `forward` once, undo what it did to buffers, and remember and name those it changed."""
        before = self._snapshot()
        self._exchange(before)
        copies = self._snapshot()
        found = []
        try:
            forward()
            for own, copy in zip(before, copies, strict=True):
                now = own.module._buffers.get(own.key)
                # Assigned anew, changed in place, or changed through `.data`, which no count shows.
                if now is not copy.value or write_mark(now) != copy.mark or not _same_values(now, own.value):
                    found.append(own)
        finally:
            self._put_back(before)
        self._changing += found
        return [place.path for place in found]

    def _snapshot(self) -> list[_Place[Tensor | None]]:
        return [
            _Place(f"{path}.{key}" if path else key, module, key, buffer, write_mark(buffer))
            for path, module in self._modules
            for key, buffer in module._buffers.items()
        ]

    def _exchange(self, places: list[_Place[Tensor | None]]) -> None:
        """Copies in the place of buffers; one that two modules share stays shared."""
        copies: dict[int, Tensor] = {}
        for place in places:
            buffer = place.module._buffers.get(place.key)
            if buffer is not None:
                if id(buffer) not in copies:
                    copies[id(buffer)] = buffer.detach().clone()
                place.module._buffers[place.key] = copies[id(buffer)]

    def _put_back(self, before: list[_Place[Tensor | None]]) -> None:
        known = {(id(place.module), place.key) for place in before}
        for _, module in self._modules:
            for key in list(module._buffers):
                if (id(module), key) not in known:  # made by the forward
                    del module._buffers[key]
                    module._non_persistent_buffers_set.discard(key)
        for place in before:
            place.module._buffers[place.key] = place.value


#: What PyTorch keeps on every module; it has its own ways.
_TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))

#: Values that hold nothing else, or that stay what they are.
_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, Tensor, nn.Parameter, torch.dtype, torch.device}
)

_CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})

#: Fields of their objects are their own affair: other threads may be at work on them.
_PACKAGES = frozenset({"equipoise", "numpy", "torch", *sys.stdlib_module_names})


@contextmanager
def attributes_kept(model: nn.Module, loss: object = None) -> Iterator[None]:
    """Inside, model and loss may keep things in attributes; then every attribute is what it was.

    So are the fields of other objects that they hold, what lists, dicts, sets and deques contain, the
    variables that a function shares with those around it, the globals that it names, and the buffers of
    modules that are no part of the model. Objects of PyTorch, NumPy and Python itself keep theirs.

    >>> model = nn.Module()
    >>> model.calls, model.seen = 0, []
    >>> with attributes_kept(model):
    ...     model.calls += 1
    ...     model.seen.append(torch.ones(3))
    >>> model.calls, model.seen
    (0, [])
    """
    state = _State(model, loss)
    try:
        yield
    finally:
        state.put_back()


class _State:
    """What a model and a loss hold, and whatever those hold, but for tensors.

    Buffers of modules that are no part of the model are exchanged for copies.
    """

    def __init__(self, model: nn.Module, loss: object) -> None:
        self._fields: list[tuple[dict[str, Any], dict[str, Any], int]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._waiting: list[Any] = [loss]
        others: list[nn.Module] = []
        known = set()
        for module in model.modules():
            known.add(id(module))
            self._note_module(module)
        while self._waiting:
            value = self._waiting.pop()
            kind: Any = type(value)
            if kind in _PLAIN or id(value) in known:
                continue
            known.add(id(value))
            if kind in _CONTAINERS:
                self._contents.append((value, value.copy()))
                self._waiting += value.values() if isinstance(value, dict) else value
            elif isinstance(value, tuple):
                self._waiting += value
            elif isinstance(value, nn.Module):
                self._note_module(value)
                self._note_fields(value._buffers)
                self._waiting += value._modules.values()
                others.append(value)
            elif kind is types.FunctionType:
                self._note_function(value)
            elif kind is types.MethodType:
                self._waiting += (value.__self__, value.__func__)
            elif kind is partial:
                self._waiting += (value.func, value.args, value.keywords)
            elif _has_fields(kind):
                self._note_fields(value.__dict__)
        for module in others:
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.detach().clone()

    def _note_module(self, module: nn.Module) -> None:
        attributes = vars(module)
        own = {name: value for name, value in attributes.items() if name not in _TORCH_ATTRIBUTES}
        self._fields.append((attributes, own, len(attributes)))
        self._waiting += [value for value in own.values() if type(value) not in _PLAIN]

    def _note_fields(self, attributes: Any) -> None:
        if type(attributes) is not dict:  # a proxy answers with another object's
            return
        self._fields.append((attributes, dict(attributes), len(attributes)))
        self._waiting += attributes.values()

    def _note_function(self, function: types.FunctionType) -> None:
        self._note_fields(vars(function))
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it is empty
                self._cells.append((cell, cell.cell_contents))
                self._waiting.append(cell.cell_contents)
        if _package(function) not in _PACKAGES:
            scope = function.__globals__
            named = {name: scope[name] for name in function.__code__.co_names if name in scope}
            self._globals.append((scope, named))
            self._waiting += named.values()

    def put_back(self) -> None:
        """Let all of it be what it was."""
        for attributes, own, size in self._fields:
            attributes.update(own)
            if len(attributes) > size:
                for name in attributes.keys() - own.keys() - _TORCH_ATTRIBUTES:
                    del attributes[name]
        for container, content in self._contents:
            container.clear()
            container.extend(content) if isinstance(container, (list, deque)) else container.update(content)
        for cell, content in self._cells:
            cell.cell_contents = content
        for scope, named in self._globals:
            scope.update(named)


def _package(value: Any) -> str:
    return str(value.__module__).partition(".")[0]


@cache
def _has_fields(kind: type) -> bool:
    """Whether objects of this type have fields that are looked at."""
    apart = (Tensor, type, types.ModuleType, torch.utils.data.Dataset, threading.Thread)
    if kind.__dictoffset__ == 0 or issubclass(kind, apart):
        return False
    return kind is types.SimpleNamespace or _package(kind) not in _PACKAGES


def refuse_max_norm(model: nn.Module) -> None:
    """Refuse look-ups that renormalise their table in place.

    Raises:
        ForwardWritesError: an embedding has ``max_norm``.

    >>> refuse_max_norm(nn.Embedding(3, 2))
    """
    found = [
        f"{path}.weight" if path else "weight"
        for path, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
    ]
    if found:
        raise ForwardWritesError(found, "max_norm renormalises the rows that are looked up, in place")


@contextmanager
def parameters_restored(model: nn.Module) -> Iterator[None]:
    """Inside, copies of all parameters are kept; then every parameter is what it was, bit for bit.

    Raises:
        ForwardWritesError: one had been changed.
    """
    before = _parameters(model)
    values = [
        (place.value.detach(), place.value.detach().clone()) for place in before
    ]  # as views, and copied
    moved = []
    try:
        yield
    finally:
        with torch.no_grad():
            for (path, module, key, p, mark), (view, copy) in zip(before, values, strict=True):
                changed = module._parameters.get(key) is not p or not _same_values(p.detach(), copy)
                if changed or write_mark(p) != mark:
                    moved.append(path)
                    module._parameters[key] = p
                    view.copy_(copy)
                    p.data = view  # the forward may have given it other memory
        if moved:  # whatever else failed inside
            raise ForwardWritesError(moved)


@contextmanager
def parameters_watched(model: nn.Module, others: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Inside, no parameter may be changed, nor any of ``others``; nothing is copied.

    Raises:
        ForwardWritesError: one was changed, in place or by another in its place; its value is lost.
    """
    before = _parameters(model)
    given = [(name, value, write_mark(value)) for name, value in (others or {}).items()]
    try:
        yield
    finally:
        moved = [
            path
            for path, module, key, p, mark in before
            if module._parameters.get(key) is not p or write_mark(p) != mark
        ]
        moved += [name for name, value, mark in given if write_mark(value) != mark and name not in moved]
        if moved:  # whatever else failed inside
            raise ForwardWritesError(moved, "it did not at attach; the values are lost")


def _parameters(model: nn.Module) -> list[_Place[nn.Parameter]]:
    return [
        _Place(f"{path}.{key}" if path else key, module, key, p, write_mark(p))
        for path, module in model.named_modules()
        for key, p in module._parameters.items()
        if p is not None and not is_lazy(p)
    ]


def write_mark(tensor: Tensor | None) -> tuple[int, int]:
    """Where the values are and how often they changed; inference tensors cannot change and have no count."""
    if tensor is None:
        return 0, 0
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _same_values(now: Tensor | None, before: Tensor | None) -> bool:
    """Bit for bit, NaN included: changes through `.data` do not show in the count."""
    if now is None or before is None:
        return now is before
    return now.shape == before.shape and bool(((now == before) | (now.isnan() & before.isnan())).all())


@contextmanager
def undisturbed(model: nn.Module, seed: int = 0, dropout: bool = False, level: float = 0.3) -> Iterator[None]:
    """Run something on the model and leave no trace: buffers and random states come back as they were.

    Args:
        model: the module.
        seed: of the random numbers inside.
        dropout: leave them random, dropout too; otherwise see `random_numbers_constant`.
        level: the quantile that random functions give.
    """
    with (
        Buffers(model).kept(),
        random_numbers_from(seed, *{p.device for p in model.parameters()}),
        nullcontext() if dropout else random_numbers_constant(model, level),
    ):
        yield
