"""Values that lie on a device, brought to the host together.

The host runs ahead of a device. Where it copies a value from there, it waits until the device has come so
far. So what is needed at one place of a step is computed there first, and then copied in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain, islice
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from equipoise._launched import launched

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
        compute: makes a tensor of them before, when they are read; then all lie on one device.

    Example:
        >>> is_finite = Unread([torch.isfinite(torch.ones(3)).all()], bool)
        >>> total = Unread([torch.ones(3)], float, torch.sum)
        >>> read(is_finite, total)
        >>> is_finite.value(), total.value()
        (True, 3.0)
    """

    def __init__(
        self, tensors: Sequence[Tensor], make: Callable[..., _T], compute: Callable[..., Tensor] | None = None
    ) -> None:
        self._tensors, self._make, self._compute = list(tensors), make, compute
        self._is_read = False
        self._made: list[_T] = []  # the value, once it was asked for

    def begin(self) -> Self:
        """Compute now what is to be read: the tensors may move later."""
        if self._compute is not None:
            found = self._compute(*self._tensors)
            self._tensors, self._compute = [found], None  # no call between them, so no interrupt comes there
        return self

    def value(self) -> _T:
        """The value; the host waits for it unless `read` has brought it."""
        if not self._made:
            if self._tensors and not self._is_read:
                read(self)
            if self._compute is not None:
                self.begin()
            self._made.append(self._make(*self._tensors))
            self._tensors = []
        return self._made[0]


def read(*values: Unread[Any], launches: dict[Any, Any] | None = None) -> None:
    """Bring to the host what these values follow from: one copy from each device, for all of them.

    Args:
        values: what to read.
        launches: holds what a device launches as one where the same is read in each step.
    """
    far: dict[torch.device, list[Unread[Any]]] = {}
    for value in values:
        for tensor in value._tensors[:1] if value._compute else value._tensors:
            if host_waits(tensor.device) and value not in (there := far.setdefault(tensor.device, [])):
                there.append(value)
    for device, there in far.items():
        _read_from(device, there, {} if launches is None else launches)
    # Last: after an interrupt in a copy they are copied again.
    for value in values:
        value._is_read = True


def _read_from(device: torch.device, values: Sequence[Unread[Any]], launches: dict[Any, Any]) -> None:
    places = [
        [at for at, one in enumerate(value._tensors) if value._compute or one.device == device]
        for value in values
    ]
    given = [[value._tensors[at] for at in some] for value, some in zip(values, places, strict=True)]
    computes = [(value._compute, len(some)) for value, some in zip(values, places, strict=True)]
    tensors = [*chain.from_iterable(given)]
    key = device, *computes, *((one.dtype, one.shape) for one in tensors)
    if key not in launches:
        if len(launches) == MOST_READ:
            del launches[next(iter(launches))]

        def gathered(*tensors: Tensor) -> list[Tensor]:
            rest, made, found = iter(tensors), list[Tensor](), list[Tensor]()
            for compute, count in computes:
                mine = [*islice(rest, count)]
                if compute is not None:
                    made += (mine := [compute(*mine)])
                found += mine
            # Not what was given, which would be held as long as a graph.
            return [torch.cat([one.reshape(-1).view(torch.uint8) for one in found]), *made]

        launches[key] = launched(gathered, [False] * len(tensors), device)
    raw, *made = launches[key](*tensors)
    following = iter(made)
    found = [[next(following)] if value._compute else some for value, some in zip(values, given, strict=True)]
    parts = iter(torch.split(raw.cpu(), [one.nbytes for one in chain.from_iterable(found)]))
    for value, some, likes in zip(values, places, found, strict=True):
        # Cloned, since a part may begin where numbers of its type may not.
        here = [next(parts).clone().view(like.dtype).view(like.shape) for like in likes]
        if value._compute:
            value._tensors, value._compute = here, None  # as in `begin`
            continue
        for at, one in zip(some, here, strict=True):
            value._tensors[at] = one


MOST_READ = 4
"""Kinds of reading of which a graph is held. A choice: a step has one or two, and each takes memory."""
