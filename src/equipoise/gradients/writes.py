"""Parameters that a forward changes: a look-up that renormalises its table, a running mean as a parameter.

What a forward writes into a parameter, frozen or not, is a function of the records that no noise covers, and
it is part of the model that is published. A parameter moves by the optimiser alone: a model that moves one
itself is refused, by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from equipoise.gradients.errors import ForwardWritesError

__all__ = ["parameters_restored", "parameters_watched", "refuse_max_norm"]


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
                changed = module._parameters.get(name) is not p or not _same(p.detach(), copy)
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


def _same(now: Tensor, before: Tensor) -> bool:
    """Bit for bit, NaN included: changes through `.data` do not show in the count."""
    return now.shape == before.shape and bool(((now == before) | (now.isnan() & before.isnan())).all())
