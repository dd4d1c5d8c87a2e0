"""Values that lie on a device, brought to the host together.

The host runs ahead of a device. Where it copies a value from there, it waits until the device has come so
far. So what is needed at one place of a step is computed there first, and then copied in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


_NOTHING_READ: ContextVar[bool] = ContextVar("nothing_read", default=False)


@contextmanager
def nothing_read() -> Iterator[None]:
    """Inside, no value is read: a computation is traced over tensors that have none."""
    before = _NOTHING_READ.set(True)
    try:
        yield
    finally:
        _NOTHING_READ.reset(before)


def host_waits(device: torch.device) -> bool:
    """Whether a value costs a wait, since the host runs ahead of all but the processor, or is not there."""
    return device.type != "cpu" or _NOTHING_READ.get()


class Unread(Generic[_T]):
    """A value that follows from tensors, some of which may lie on a device.

    Args:
        tensors: that it follows from.
        make: the value, from the same tensors on the host; called once, where the value is asked for.

    Example:
        >>> is_finite = Unread([torch.isfinite(torch.ones(3)).all()], bool)
        >>> total = Unread([torch.ones(3).sum()], float)
        >>> read(is_finite, total)
        >>> is_finite.value(), total.value()
        (True, 3.0)
    """

    def __init__(self, tensors: Sequence[Tensor], make: Callable[..., _T]) -> None:
        self._tensors, self._make = list(tensors), make
        self._is_read = False
        self._made: list[_T] = []  # the value, once it was asked for

    def value(self) -> _T:
        """The value; the host waits for it unless `read` has brought it."""
        if not self._made:
            if self._tensors and not self._is_read:
                read(self)
            self._made.append(self._make(*self._tensors))
            self._tensors = []
        return self._made[0]


def read(*values: Unread[Any]) -> None:
    """Bring to the host what these values follow from: one copy from each device, for all of them."""
    far: dict[torch.device, list[tuple[list[Tensor], int]]] = {}
    for value in values:
        for at, tensor in enumerate(value._tensors):
            if host_waits(tensor.device):
                far.setdefault(tensor.device, []).append((value._tensors, at))
    for places in far.values():
        raw = [tensors[at].reshape(-1).view(torch.uint8) for tensors, at in places]
        parts = torch.split(torch.cat(raw).cpu(), [len(part) for part in raw])
        for (tensors, at), part in zip(places, parts, strict=True):
            like = tensors[at]
            # Cloned, since a part may begin where numbers of its type may not.
            tensors[at] = part.clone().view(like.dtype).view(like.shape)
    # Last: after an interrupt in a copy they are copied again.
    for value in values:
        value._is_read = True
