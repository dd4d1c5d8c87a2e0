"""What a forward may leave behind on a model, and how it is kept from it.

*Buffers.* A buffer that a forward updates (`InstanceNorm2d(track_running_stats=True)` in training mode, a
counter, an observer) holds a function of the records that no noise covers, and it is saved with the model.
Private computations therefore run on copies of such buffers, and the model's own never move.

*Parameters.* What a forward writes into a parameter, frozen or not (a look-up that renormalises its table, a
running mean as a parameter), is a function of the records too, and part of the model that is published. A
parameter moves by the optimiser alone: a model that moves one itself is refused, by name.

*Attributes.* What a forward keeps in plain attributes (a counter, a list of earlier records) is forgotten
when it ends, so that every forward begins in the same state. Tensors changed in place are not put back.

*Random numbers.* Rows that are to be compared come from runs without dropout, under one seed.
"""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import NormalDist
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from equipoise.gradients.capture.compositions import opened
from equipoise.gradients.checks.errors import BufferWritesError, ForwardWritesError

__all__ = [
    "Buffers",
    "attributes_kept",
    "parameters_restored",
    "parameters_watched",
    "refuse_max_norm",
    "undisturbed",
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

    def all_kept(self) -> AbstractContextManager[None]:
        """Inside, every buffer is a copy; then the model has its own again, unmoved."""
        return self.kept(every=True)

    @contextmanager
    def kept(self, every: bool = False) -> Iterator[None]:
        """Inside, the buffers known to change are copies; then the model has its own again, unmoved.

        Raises:
            RuntimeError: another buffer was changed in place; its value is lost.
        """
        before = self._snapshot()
        self._exchange(before if every else self._changing)
        try:
            yield
        finally:
            self._put_back(before)
        moved = [place.path for place in before if _mark(place.value) != place.mark]
        if moved and not every:
            raise BufferWritesError(moved)

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
                if now is not copy.value or _mark(now) != copy.mark or not _same_values(now, own.value):
                    found.append(own)
        finally:
            self._put_back(before)
        self._changing += found
        return [place.path for place in found]

    def _snapshot(self) -> list[_Place[Tensor | None]]:
        return [
            _Place(f"{path}.{key}" if path else key, module, key, buffer, _mark(buffer))
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


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Inside, modules may keep things in attributes; then every attribute is what it was.

    Lists, dicts, sets and deques get their contents back.

    >>> model = nn.Module()
    >>> model.calls, model.seen = 0, []
    >>> with attributes_kept(model):
    ...     model.calls += 1
    ...     model.seen.append(torch.ones(3))
    >>> model.calls, model.seen
    (0, [])
    """
    before = []
    containers = []
    for attributes in map(vars, model.modules()):
        own = {key: attributes[key] for key in attributes.keys() - _TORCH_ATTRIBUTES}
        before.append((attributes, own))
        if own:
            containers += [(v, copy.copy(v)) for v in own.values() if type(v) in (list, dict, set, deque)]
    try:
        yield
    finally:
        for attributes, own in before:
            attributes.update(own)
            for key in attributes.keys() - own.keys() - _TORCH_ATTRIBUTES:
                del attributes[key]
        for container, content in containers:
            container.clear()
            container.extend(content) if isinstance(container, (list, deque)) else container.update(content)


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
                if changed or _mark(p) != mark:
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
    given = [(name, value, _mark(value)) for name, value in (others or {}).items()]
    yield
    moved = [
        path
        for path, module, key, p, mark in before
        if module._parameters.get(key) is not p or _mark(p) != mark
    ]
    moved += [name for name, value, mark in given if _mark(value) != mark and name not in moved]
    if moved:
        raise ForwardWritesError(moved, "it did not at attach; the values are lost")


def _parameters(model: nn.Module) -> list[_Place[nn.Parameter]]:
    return [
        _Place(f"{path}.{key}" if path else key, module, key, p, _mark(p))
        for path, module in model.named_modules()
        for key, p in module._parameters.items()
        if p is not None and not is_lazy(p)
    ]


def _mark(tensor: Tensor | None) -> tuple[int, int]:
    """Where the values are and how often they changed; inference tensors cannot change and have no count."""
    if tensor is None:
        return 0, 0
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _same_values(now: Tensor | None, before: Tensor | None) -> bool:
    """Bit for bit, NaN included: changes through `.data` do not show in the count."""
    if now is None or before is None:
        return now is before
    return now.shape == before.shape and bool(((now == before) | (now.isnan() & before.isnan())).all())


_GRADIENT = opened(torch.autograd.grad)


class _Controlled(TorchFunctionMode):
    """Dropout is the identity and random tensors are constant, so that records can be compared.

    Random numbers are dealt by place in the batch: those of a batch and of single records differ otherwise.

    Args:
        level: the quantile that random functions give, in (0, 1). A low and a high one take both sides of a
            branch such as ``if torch.rand(()) < 0.45``.
    """

    def __init__(self, level: float) -> None:
        super().__init__()
        self._level = level

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        value_of = _RANDOM.get(func)
        # A generator of the model's own stays: it is refused for what it is.
        if value_of is not None and kwargs.get("generator") is None:
            old = args[0].clone() if args and isinstance(args[0], Tensor) else None
            out = func(*args, **kwargs)
            with torch.no_grad():
                value = value_of(self._level, old, args, kwargs)
                return out.copy_(value) if isinstance(value, Tensor) else out.fill_(value)
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:  # (query, key, value, mask, dropout_p)
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        if func is torch.autograd.grad:
            with self:  # a mode is off in its own handler, and a checkpoint's forward runs in there
                return _GRADIENT(*args, **kwargs)
        return func(*args, **kwargs)


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _uniform(level: float, old: Any, args: Any, kwargs: Any) -> Any:
    return level


def _uniform_between(level: float, old: Any, args: Any, kwargs: Any) -> Any:
    low, high = _argument(args, kwargs, 1, "from", 0.0), _argument(args, kwargs, 2, "to", 1.0)
    return low + (high - low) * level


def _standard_normal(level: float, old: Any, args: Any, kwargs: Any) -> Any:
    return NormalDist().inv_cdf(level)


def _normal(level: float, old: Any, args: Any, kwargs: Any) -> Any:
    mean, std = _argument(args, kwargs, 0, "mean", 0.0), _argument(args, kwargs, 1, "std", 1.0)
    return mean + std * NormalDist().inv_cdf(level)


def _normal_in_place(level: float, old: Any, args: Any, kwargs: Any) -> Any:
    return _normal(level, old, args[1:], kwargs)


def _chance(level: float, old: Any, args: Any, kwargs: Any) -> Any:
    """1 where the probability is above the level."""
    return torch.as_tensor(_argument(args, kwargs, 1, "p", old)) > level


def _chance_in_place(level: float, old: Any, args: Any, kwargs: Any) -> Any:
    return torch.as_tensor(_argument(args, kwargs, 1, "p", 0.5)) > level


def _exponential(level: float, old: Any, args: Any, kwargs: Any) -> Any:
    return -math.log(1 - level) / _argument(args, kwargs, 1, "lambd", 1.0)


def _integer(level: float, old: Any, args: Any, kwargs: Any) -> Any:
    """For `randint(high, size)`, `randint(low, high, size)` and the forms that begin with a tensor."""
    ends = [end for end in args if isinstance(end, int)]
    low, high = ends[:2] if len(ends) > 1 else (kwargs.get("low", 0), ends[0] if ends else kwargs["high"])
    return low + int(level * (high - low))


#: What random functions give in place of random numbers: value(level, self as it was, args, kwargs).
_RANDOM: dict[Callable, Callable[..., Any]] = {
    torch.rand: _uniform,
    torch.rand_like: _uniform,
    Tensor.uniform_: _uniform_between,
    torch.randn: _standard_normal,
    torch.randn_like: _standard_normal,
    torch.normal: _normal,
    Tensor.normal_: _normal_in_place,
    torch.bernoulli: _chance,
    Tensor.bernoulli: _chance,
    Tensor.bernoulli_: _chance_in_place,
    Tensor.exponential_: _exponential,
    torch.randint: _integer,
    torch.randint_like: _integer,
}

_DROPOUTS = frozenset(
    getattr(module, kind + ending)
    for module in (F, torch)
    for kind in (
        "dropout",
        "alpha_dropout",
        "feature_dropout",
        "feature_alpha_dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
    )
    for ending in ("", "_")
    if hasattr(module, kind + ending)
)


@contextmanager
def _seeded(seed: int, model: nn.Module) -> Iterator[None]:
    """The global generators of torch, NumPy and Python start from the seed, and are afterwards as before."""
    # Not torch.manual_seed and fork_rng, which visit every kind of device at each call: 3 ms.
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    generators = [torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)]
    states = [generator.get_state() for generator in generators]
    python, arrays = random.getstate(), np.random.get_state(legacy=False)
    for generator in generators:
        generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(python)
        np.random.set_state(arrays)


@contextmanager
def _without_inner_dropout(model: nn.Module) -> Iterator[None]:
    """The dropout of attention and recurrent layers is off: it happens inside one function, out of sight."""
    inside = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention | nn.RNNBase)]
    before = [module.dropout for module in inside]
    for module in inside:
        module.dropout = 0.0
    try:
        yield
    finally:
        for module, dropout in zip(inside, before, strict=True):
            module.dropout = dropout


@contextmanager
def undisturbed(model: nn.Module, seed: int = 0, dropout: bool = False, level: float = 0.3) -> Iterator[None]:
    """Run something on the model and leave no trace: buffers and random states come back as they were.

    Args:
        model: the module.
        seed: of the random numbers inside.
        dropout: leave them random, dropout too; otherwise see `_Controlled`.
        level: the quantile that random functions give.
    """
    with (
        Buffers(model).all_kept(),
        _seeded(seed, model),
        nullcontext() if dropout else _without_inner_dropout(model),
        nullcontext() if dropout else _Controlled(level),
    ):
        yield


def draws_random_numbers(model: nn.Module, run: Callable[[], Any]) -> bool:
    """Whether `run` takes numbers from a global generator of torch (on the CPU), NumPy or Python, or lies on
    another device, whose generator is not looked at.
    """
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return True

    def states() -> tuple[bytes, Any, bytes]:
        arrays: Any = np.random.get_state(legacy=False)
        numpy_state = arrays["state"]["key"].tobytes() + bytes(str(arrays["state"]["pos"]), "ascii")
        return torch.default_generator.get_state().numpy().tobytes(), random.getstate(), numpy_state

    with undisturbed(model, dropout=True):
        before = states()
        run()
        return states() != before
