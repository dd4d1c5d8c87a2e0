"""Buffers that a forward changes: running statistics and their like.

A buffer that a forward updates (`InstanceNorm2d(track_running_stats=True)` in training mode, a counter, an
observer) holds a function of the records that no noise covers, and it is saved with the model. Private
computations therefore run on copies of such buffers, and the model's own never move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from equipoise.gradients.errors import BufferWritesError

__all__ = ["Buffers"]

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
        moved = [name for _, _, name, buffer, version in _named(before) if _version(buffer) != version]
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
                if now is not copy or _version(now) != version or not _same(now, buffer):
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


def _named(before: list[Any]) -> Iterator[tuple[str, nn.Module, str, Tensor | None, int]]:
    for path, module, name, buffer, version in before:
        yield path, module, f"{path}.{name}" if path else name, buffer, version


def _version(buffer: Tensor | None) -> int:
    """Counts changes in place; inference tensors cannot be changed and have no count."""
    return 0 if buffer is None or buffer.is_inference() else buffer._version


def _same(now: Tensor | None, before: Tensor | None) -> bool:
    """Bit for bit, NaN included: changes through `.data` do not show in the count."""
    if now is None or before is None:
        return now is before
    if now.shape != before.shape:
        return False
    equal = now == before
    if now.is_floating_point() or now.is_complex():
        equal |= now.isnan() & before.isnan()
    return bool(equal.all())
