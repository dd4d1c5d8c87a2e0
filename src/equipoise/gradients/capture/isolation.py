"""Buffers that a forward changes: running statistics and their like.

A buffer that a forward updates (`InstanceNorm2d(track_running_stats=True)` in training mode, a counter, an
observer) holds a function of the records that no noise covers, and it is saved with the model. Private
computations therefore run on copies of such buffers, and the model's own never move.

Parameters that a forward changes: a look-up that renormalises its table, a running mean as a parameter.

What a forward writes into a parameter, frozen or not, is a function of the records that no noise covers, and
it is part of the model that is published. A parameter moves by the optimiser alone: a model that moves one
itself is refused, by name.

Running something on a model without a trace, and without dropout where rows are to be compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from equipoise.gradients.checks.errors import BufferWritesError, ForwardWritesError

__all__ = ["Buffers", "parameters_restored", "parameters_watched", "refuse_max_norm", "undisturbed"]


Place = tuple[nn.Module, str]


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
        self._changing: list[Place] = []

    @contextmanager
    def all_kept(self) -> Iterator[None]:
        """Inside, every buffer is a copy; then the model has its own again, unmoved."""
        before = self._snapshot()
        self._exchange([(module, name) for _, module, name, _, _ in before])
        try:
            yield
        finally:
            self._put_back(before)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, the buffers known to change are copies; then the model has its own again, unmoved.

        Raises:
            RuntimeError: another buffer was changed in place; its value is lost.
        """
        before = self._snapshot()
        self._exchange(self._changing)
        try:
            yield
        finally:
            self._put_back(before)
        moved = [
            name for _, _, name, buffer, version in _named_buffers(before) if _version(buffer) != version
        ]
        if moved:
            raise BufferWritesError(moved)

    def find_changing(self, forward: Callable[[], Any]) -> list[str]:
        """Run `forward` once, undo what it did to buffers, and remember and name those it changed."""
        before = self._snapshot()
        self._exchange([(module, name) for _, module, name, _, _ in before])
        copies = {(id(module), name): (t, _version(t)) for _, module, name, t, _ in self._snapshot()}
        try:
            forward()
            found = []
            for path, module, name, buffer, _ in before:
                copy, version = copies[id(module), name]
                now = module._buffers.get(name)
                if now is not copy or _version(now) != version or not _same_buffer(now, buffer):
                    self._changing.append((module, name))
                    found.append(f"{path}.{name}" if path else name)
        finally:
            self._put_back(before)
        return found

    def _snapshot(self) -> list[tuple[str, nn.Module, str, Tensor | None, int]]:
        return [
            (path, module, name, buffer, _version(buffer))
            for path, module in self._modules
            for name, buffer in module._buffers.items()
        ]

    def _exchange(self, places: list[Place]) -> None:
        """Copies in the place of buffers; one that two modules share stays shared."""
        copies: dict[int, Tensor] = {}
        for module, name in places:
            buffer = module._buffers.get(name)
            if buffer is not None:
                if id(buffer) not in copies:
                    copies[id(buffer)] = buffer.detach().clone()
                module._buffers[name] = copies[id(buffer)]

    def _put_back(self, before: list[tuple[str, nn.Module, str, Tensor | None, int]]) -> None:
        known = {(id(module), name) for _, module, name, _, _ in before}
        for _, module in self._modules:
            for name in [name for name in module._buffers if (id(module), name) not in known]:
                del module._buffers[name]  # made by the forward
                module._non_persistent_buffers_set.discard(name)
        for _, module, name, buffer, _ in before:
            module._buffers[name] = buffer


def _named_buffers(before: list[Any]) -> Iterator[tuple[str, nn.Module, str, Tensor | None, int]]:
    for path, module, name, buffer, version in before:
        yield path, module, f"{path}.{name}" if path else name, buffer, version


def _version(buffer: Tensor | None) -> int:
    """Counts changes in place; inference tensors cannot be changed and have no count."""
    return 0 if buffer is None or buffer.is_inference() else buffer._version


def _same_buffer(now: Tensor | None, before: Tensor | None) -> bool:
    """Bit for bit, NaN included: changes through `.data` do not show in the count."""
    if now is None or before is None:
        return now is before
    if now.shape != before.shape:
        return False
    equal = now == before
    if now.is_floating_point() or now.is_complex():
        equal |= now.isnan() & before.isnan()
    return bool(equal.all())


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
    before = [
        (path, module, name, p, p.detach(), p.detach().clone(), _mark(p))
        for path, module, name, p in _places(model)
    ]
    moved = []
    try:
        yield
    finally:
        with torch.no_grad():
            for path, module, name, p, values, copy, mark in before:
                changed = module._parameters.get(name) is not p or not _same_values(p.detach(), copy)
                if changed or _mark(p) != mark:
                    moved.append(f"{path}.{name}" if path else name)
                    module._parameters[name] = p
                    values.copy_(copy)
                    p.data = values
        if moved:  # whatever else failed inside
            raise ForwardWritesError(moved)


@contextmanager
def parameters_watched(model: nn.Module, others: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Inside, no parameter may be changed, nor any of ``others``; nothing is copied.

    Raises:
        ForwardWritesError: one was changed, in place or by another in its place; its value is lost.
    """
    before = [(path, module, name, p, _mark(p)) for path, module, name, p in _places(model)]
    given = [(name, value, _mark(value)) for name, value in (others or {}).items()]
    yield
    moved = [
        f"{path}.{name}" if path else name
        for path, module, name, p, mark in before
        if module._parameters.get(name) is not p or _mark(p) != mark
    ]
    moved += [name for name, value, mark in given if _mark(value) != mark and name not in moved]
    if moved:
        raise ForwardWritesError(moved, "it did not at attach; the values are lost")


def _places(model: nn.Module) -> list[tuple[str, nn.Module, str, nn.Parameter]]:
    return [
        (path, module, name, p)
        for path, module in model.named_modules()
        for name, p in module._parameters.items()
        if p is not None and not is_lazy(p)
    ]


def _mark(tensor: Tensor) -> tuple[int, int]:
    """Where the values are and how often they changed; inference tensors cannot change and have no count."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _same_values(now: Tensor, before: Tensor) -> bool:
    """Bit for bit, NaN included: changes through `.data` do not show in the count."""
    return now.shape == before.shape and bool(((now == before) | (now.isnan() & before.isnan())).all())


class _WithoutDropout(TorchFunctionMode):
    """Dropout is the identity: masks of a batch and of single records cannot be compared."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


_DROPOUTS = frozenset(
    getattr(module, name)
    for module in (F, torch)
    for name in [
        "dropout",
        "dropout_",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "alpha_dropout_",
        "feature_dropout",
        "feature_dropout_",
        "feature_alpha_dropout",
        "feature_alpha_dropout_",
    ]
    if hasattr(module, name)
)


@contextmanager
def _replayed(seed: int) -> Iterator[None]:
    """The global generators of Python and NumPy start from the seed, and are afterwards as before."""
    python, arrays = random.getstate(), np.random.get_state(legacy=False)
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


@contextmanager
def undisturbed(model: nn.Module, seed: int = 0, dropout: bool = False) -> Iterator[None]:
    """Run something on the model and leave no trace: buffers and random states come back as they were."""
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng([d.index for d in devices if d.index is not None]), _replayed(seed):
            torch.manual_seed(seed)
            if dropout:
                yield
            else:
                with _WithoutDropout():
                    yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer  # it may have been assigned anew
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
