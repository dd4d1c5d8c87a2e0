"""What a forward may leave behind on a model, and how it is kept from it.

*Buffers.* A buffer that a forward updates (`InstanceNorm2d(track_running_stats=True)` in training mode, a
counter, an observer) holds a function of the records that no noise covers, and it is saved with the model.
Private computations therefore run on copies of all buffers, and the model's own never move.

*Parameters.* What a forward writes into a parameter, frozen or not (a look-up that renormalises its table, a
running mean as a parameter), is a function of the records too, and part of the model that is published. Only
the optimiser moves a parameter: a model that moves one itself is refused, by name.

*Attributes* are the subject of `attributes`.

*Random numbers* are the subject of `random_numbers`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from equipoise._dtensor import local_part
from equipoise.gradients.capture.random_numbers import random_numbers_constant, random_numbers_from
from equipoise.gradients.capture.sharded import SHARDED, resharded
from equipoise.gradients.checks.errors import ForwardWritesError


@contextmanager
def buffers_kept(modules: Iterable[nn.Module], others: Collection[Tensor] = ()) -> Iterator[None]:
    """Inside, every buffer of these modules is a copy, but for some; then they have their own again.

    >>> norm = nn.InstanceNorm1d(2, track_running_stats=True)
    >>> with buffers_kept([norm]):
    ...     _ = norm(torch.ones(1, 2, 3))
    >>> norm.running_mean
    tensor([0., 0.])
    """
    copies: dict[int, Tensor | None] = {id(buffer): buffer for buffer in others}
    memory: dict[int, Tensor] = {}
    before = [(module, {**module._buffers}, {*module._non_persistent_buffers_set}) for module in modules]
    for module, own, _ in before:
        for key, buffer in own.items():
            if id(buffer) not in copies:  # one that two modules share stays shared
                copies[id(buffer)] = None if buffer is None else _copied(buffer, memory)
            module._buffers[key] = copies[id(buffer)]
    try:
        yield
    finally:
        for module, own, temporary in before:
            module._buffers.clear()
            module._buffers.update(own)
            module._non_persistent_buffers_set.intersection_update(temporary)


def _copied(buffer: Tensor, memory: dict[int, Tensor]) -> Tensor:
    """A copy of a buffer; a view of the memory of one before is a view of that one's copy."""
    if type(buffer) is not Tensor or buffer.layout is not torch.strided or not buffer.numel():
        return buffer.detach().clone()
    place = buffer.untyped_storage().data_ptr()
    if place in memory:
        return memory[place].as_strided(buffer.shape, buffer.stride(), buffer.storage_offset())
    own = buffer.untyped_storage().nbytes() // buffer.element_size()
    if own == buffer.numel():
        memory[place] = copy = buffer.detach().clone(memory_format=torch.preserve_format)
        return copy
    memory[place] = whole = buffer.detach().as_strided((own,), (1,), 0).clone()
    return whole.as_strided(buffer.shape, buffer.stride(), buffer.storage_offset())


class _Place(NamedTuple):
    """Where a parameter stands, and what it was."""

    path: str
    module: nn.Module
    key: str
    value: nn.Parameter
    mark: tuple[int, int]


def parameters_restored(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, copies of all parameters are kept; then every parameter is what it was, bit for bit.

    Raises:
        ForwardWritesError: one had been changed.
    """
    return parameters_watched(model, is_restored=True)


@contextmanager
def parameters_watched(
    model: nn.Module, others: Mapping[str, Tensor] | None = None, is_restored: bool = False
) -> Iterator[None]:
    """Inside, no parameter of the model may be changed, nor any of ``others``.

    Args:
        model, others: whose they are.
        is_restored: put back what was changed in the model, of which copies are kept.

    Raises:
        ForwardWritesError: one was changed, in place or by another in its place.
    """
    if model in SHARDED:
        resharded(model)
    before = _parameters(model)
    given = [(name, value, write_mark(value)) for name, value in (others or {}).items()]
    # Of a sharded one the part that is here; a shared one once.
    own = {id(place.value): local_part(place.value) for place in before} if is_restored else {}
    copies = {number: part.detach().clone() for number, part in own.items()}
    try:
        yield
    finally:
        moved = []
        for path, module, key, p, mark in before:
            is_moved = module._parameters.get(key) is not p or write_mark(p) != mark
            if is_moved or (is_restored and not same_values(own[id(p)].detach(), copies[id(p)])):
                moved.append(path)
                if is_restored:
                    module._parameters[key] = p
                    own[id(p)].data = copies[id(p)]
        moved += [name for name, value, mark in given if write_mark(value) != mark and name not in moved]
        if moved:  # whatever else failed inside
            raise ForwardWritesError(
                moved, "" if is_restored else "it did not at the start; the values are lost"
            )


def _parameters(model: nn.Module) -> list[_Place]:
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
    tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor the part that is here
    place = tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)  # sparse ones have none
    return place, 0 if tensor.is_inference() else tensor._version


def same_values(now: Tensor | None, before: Tensor | None) -> bool:
    """Bit for bit, NaN included: changes through `.data` do not show in the count."""
    if now is None or before is None:
        return now is before
    if torch._C._functorch.is_functorch_wrapped_tensor(now):  # of a vmap or grad that is over
        return False
    is_sparse = now.layout is not torch.strided  # torch compares none; their marks show most changes
    if now.shape != before.shape or is_sparse or torch.equal(now, before):
        return now.shape == before.shape
    return bool(((now == before) | (now.isnan() & before.isnan())).all())


@contextmanager
def undisturbed(model: nn.Module, seed: int = 0, dropout: bool = False) -> Iterator[None]:
    """Run something on the model and leave no trace: buffers and random states come back as they were.

    Args:
        model: the module.
        seed: of the random numbers inside.
        dropout: leave them random, dropout too; otherwise see `random_numbers_constant`.
    """
    with (
        buffers_kept(model.modules()),
        random_numbers_from(seed, *{p.device for p in model.parameters()}),
        nullcontext() if dropout else random_numbers_constant(),
    ):
        yield
