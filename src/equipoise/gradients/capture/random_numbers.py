"""Random numbers that a model, a loss or a data pipeline asks for: started, held constant, watched.

Torch's operations carry a tag that says whether they draw random numbers, so that a dispatch mode sees all of
them, inside dropout, attention, recurrent layers and `torch.distributions` too. NumPy and Python have one
global state each, of which one sees that it moved.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.gradients.capture.recorder import INCONSISTENT, learn_layout

aten = torch.ops.aten


class GlobalState:
    """Where the global generators of torch (CPU and these devices), NumPy and Python stand.

    >>> before = GlobalState()
    >>> _ = random.random()
    >>> before.moved(), before.restore(), before.moved()
    (['Python'], None, [])
    """

    def __init__(self, *devices: torch.device) -> None:
        # Not torch.manual_seed and fork_rng, which visit every kind of device at each call: 3 ms.
        self._generators = [torch.default_generator]
        for index in {device.index or 0 for device in devices if device.type == "cuda"}:
            self._generators.append(torch.cuda.default_generators[index])
        self._torch = [generator.get_state() for generator in self._generators]
        self._numpy: Any = np.random.get_state(legacy=False)
        self._python = random.getstate()

    def restore(self) -> None:
        """Put them back there."""
        for generator, state in zip(self._generators, self._torch, strict=True):
            generator.set_state(state)
        np.random.set_state(self._numpy)
        random.setstate(self._python)

    def start(self, source: torch.Generator) -> None:
        """Let them begin from `source`, a CPU generator, which moves on."""
        start = source.get_state()
        number, *words = torch.randint(2**32, (17,), generator=source).tolist()
        self._generators[0].set_state(start)
        for generator in self._generators[1:]:
            generator.manual_seed(number)
        random.seed(repr(words[:8]))
        np.random.seed(words[8:])

    def moved(self) -> list[str]:
        """Whose numbers were asked for since."""
        pairs = zip(self._generators, self._torch, strict=True)
        numpy: Any = np.random.get_state(legacy=False)["state"]
        known = self._numpy["state"]
        found = {
            "torch": any(not generator.get_state().equal(state) for generator, state in pairs),
            "NumPy": numpy["pos"] != known["pos"] or not np.array_equal(numpy["key"], known["key"]),
            "Python": random.getstate() != self._python,
        }
        return [name for name, has_moved in found.items() if has_moved]


@contextmanager
def random_numbers_from(source: torch.Generator | int, *devices: torch.device) -> Iterator[None]:
    """Inside, the global generators of torch (CPU and `devices`), NumPy and Python start from `source`.

    Afterwards they are as before. Two entries with generators of the same state see the same numbers.

    Args:
        source: a CPU generator, or a seed.
        devices: whose generators start too.
    """
    if isinstance(source, int):
        source = torch.Generator().manual_seed(source)
    before = GlobalState(*devices)
    try:
        before.start(source)
        yield
    finally:
        before.restore()


# ---- held constant, so that records can be compared


#: Random operations that are held. A loop that draws until a number fits would never end. A choice: with
#: fewer, a forward with many draws gets other numbers in the end; with more, such a loop takes longer to end.
MOST_HELD = 10_000


_CONSTANT: ContextVar[bool] = ContextVar("random_numbers_constant", default=False)


def are_constant() -> bool:
    """Whether `random_numbers_constant` is in force."""
    return _CONSTANT.get()


@contextmanager
def random_numbers_constant() -> Iterator[None]:
    """Inside, torch's random numbers are constant, and dropout drops nothing; NumPy's and Python's are not.

    Random numbers are assigned by place in the batch: those of a batch and of single records differ
    otherwise.
    """
    token = _CONSTANT.set(True)
    try:
        with _ConstantNumbers():
            yield
    finally:
        _CONSTANT.reset(token)


class SeenOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that sees every operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch's compiler is loaded when a mode sees its first operation: seconds.
        return False


class _ConstantNumbers(SeenOperations):  # type: ignore[no-untyped-call]
    """Random tensors hold one number that their distribution may give."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = _dropout_place(func)
        if place is not None and len(args) > place:  # of a backward, too
            args = (*args[:place], 0.0, *args[place + 1 :])
        # A generator of the model's own stays: it is refused for what it is.
        if (
            not is_random(func, args, kwargs)
            or self._calls == MOST_HELD
            or _generator_of(func, args, kwargs) is not None
        ):
            return func(*args, **kwargs)
        value = _held_value(func, args, kwargs)  # first: the operation may write over its argument
        out = func(*args, **kwargs)
        if value is None:
            return out
        self._calls += 1
        if func.overloadpacket is aten.native_dropout:  # the scale of its backward is that of what is left
            return value, out[1].fill_(True)
        return out.copy_(value) if isinstance(value, Tensor) else out.fill_(value)


def is_random(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Whether this operation takes random numbers; attention without dropout takes none."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    place = _dropout_place(func)
    return place is None or _argument(args, kwargs, place, "dropout_p", 0.0) != 0


@cache
def _dropout_place(func: Any) -> int | None:
    """Which argument of an attention is its share of dropout; None for other operations."""
    if func.namespace != "aten" or "attention" not in func._schema.name:
        return None
    names = [argument.name for argument in func._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


def _generator_of(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> torch.Generator | None:
    """The generator that an operation was given."""
    given = (*args, *kwargs.values())
    return next((value for value in given if isinstance(value, torch.Generator)), None)


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _held_value(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """What an operation gives in place of random numbers; None for operations that are left as they are."""
    of = partial(_argument, args, kwargs)
    match func.overloadpacket:
        case aten.rand | aten.rand_like:
            return 0.3
        case aten.randn | aten.randn_like:
            return -0.5
        case aten.uniform_:
            low, high = of(1, "from", 0.0), of(2, "to", 1.0)
            return low + 0.3 * (high - low)
        case aten.normal:
            return of(0, "mean", 0.0) - 0.5 * of(1, "std", 1.0)
        case aten.normal_:
            return of(1, "mean", 0.0) - 0.5 * of(2, "std", 1.0)
        case aten.bernoulli:  # without `p` the tensor holds the probabilities
            return torch.as_tensor(of(1, "p", args[0])) > 0  # else a dropout of many would hide all
        case aten.bernoulli_:
            return torch.as_tensor(of(1, "p", 0.5)) > 0
        case aten.native_dropout:
            return args[0] / (1 - args[1]) if args[2] and args[1] < 1 else None
        case aten.exponential_:
            return 0.4 / of(1, "lambd", 1.0)
        case aten.randint | aten.randint_like:
            low, high = _ends(args, kwargs)
            return low + int(0.3 * (high - low))
    return None


def _ends(args: Any, kwargs: Any) -> tuple[int, int]:
    """The first whole number that may be drawn, and the one beyond the last.

    Of `randint(high, size)`, `randint(low, high, size)` and the forms that begin with a tensor.
    """
    ends = [end for end in args if isinstance(end, int)]
    if len(ends) > 1:
        return ends[0], ends[1]
    return kwargs.get("low", 0), ends[0] if ends else kwargs.get("high", 0)


# ---- which whole numbers are asked for


class _Ranges(SeenOperations):  # type: ignore[no-untyped-call]
    """Notes how many values each whole number of torch's may take, or how many things are shuffled."""

    def __init__(self, found: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is aten.multinomial:
            self._found.add(args[0].shape[-1])
        elif func.overloadpacket in (aten.randint, aten.randint_like, aten.random_, aten.randperm):
            low, high = _ends(args, kwargs)
            self._found.add(high - low)
        return func(*args, **kwargs)


def _choices(a: Any, *_: Any, **__: Any) -> int:
    return a if isinstance(a, int) else len(a)


#: Functions that choose, and among how many values. All of `random` but `choices` come from the first.
_CHOOSING: list[tuple[Any, str, Callable[..., int]]] = [
    (random.Random, "_randbelow", lambda _, n: n),
    (random, "choices", _choices),
    (np.random, "randint", lambda low, high=None, *_, **__: low if high is None else high - low),
    *((np.random, name, _choices) for name in ("choice", "permutation", "shuffle")),
]


@contextmanager
def ranges_asked() -> Iterator[set[int]]:
    """Inside, it is noted among how many values each random whole number is drawn, or how many are shuffled.

    Torch's operations are seen, Python's generators, and NumPy's functions as attributes of `numpy.random`.

    >>> with ranges_asked() as found:
    ...     _ = random.randint(0, 6), torch.randint(5, 10, (3,)), np.random.permutation(4)
    >>> sorted(found)
    [4, 5, 7]
    """
    found: set[int] = set()

    def noted(function: Any, size: Callable[..., int]) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            with suppress(Exception):  # the function itself says what is wrong with its arguments
                found.add(int(size(*args, **kwargs)))
            return function(*args, **kwargs)

        return called

    with ExitStack() as stack:
        for holder, name, size in _CHOOSING:
            stack.enter_context(patch.object(holder, name, noted(getattr(holder, name), size)))
        stack.enter_context(_Ranges(found))
        yield found


# ---- whose they are


class _RandomCalls(SeenOperations):  # type: ignore[no-untyped-call]
    """Notes the shapes that random operations give, in their order; some records may get other numbers.

    Args:
        chosen: which records do, [records]; None for none of them.
        axes: of each random operation in turn, where its result has the records.
    """

    def __init__(self, chosen: Tensor | None = None, axes: Sequence[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, list[torch.Size]]] = []
        self._chosen, self._axes = chosen, axes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_random(func, args, kwargs):
            return func(*args, **kwargs)
        before = args[0].clone() if func._schema.name.endswith("_") else None  # it writes over that
        out = func(*args, **kwargs)
        if self._chosen is not None:
            axis, records = self._axes[len(self.calls)], len(self._chosen)
            generator = (
                _generator_of(func, args, kwargs) or GlobalState(_tensors(out)[0].device)._generators[-1]
            )
            state = generator.get_state()
            others = _tensors(func(*(args if before is None else (before, *args[1:])), **kwargs))
            generator.set_state(state)
            for one, other in zip(_tensors(out), others, strict=True):
                theirs = self._chosen.repeat_interleave(one.shape[axis] // records).nonzero().flatten()
                theirs = theirs.to(one.device)
                one.index_copy_(axis, theirs, other.index_select(axis, theirs))
        self.calls.append((func, [t.shape for t in _tensors(out)]))
        return out


#: Their numbers are not independent from record to record, or not seen apart.
_JOINT = frozenset({aten.randperm, aten.multinomial})


RandomUse = Literal["none", "own", "shared"]
"""Whose random numbers a computation takes: nobody's, each record its own, or some for several records."""


#: Under so many seeds some records get other numbers. A choice: a branch that one seed in three takes is
#: missed with 4%, one of ten with 43%, and each seed costs four forwards and backwards of a few records.
SEEDS = 8


def use_of_random_numbers(
    run: Callable[[int, Tensor], tuple[Tensor, Sequence[Tensor]]],
    small: int,
    large: int,
    *devices: torch.device,
) -> RandomUse:
    """Whether the random numbers that `run` takes belong to single records.

    If so, it does not matter which others stand next to a record. A number for the whole batch (one for a
    layer, the time of a diffusion) is shared. So is what Python or NumPy give, and what is not understood.

    Args:
        run: run(number of records B, weights [B]) -> losses [B] and the gradient of their weighted sum; the
            same records in all calls. Numbers drawn in the backward count too.
        small, large: two numbers of records, whose shapes are compared.
        devices: where it runs.

    >>> use_of_random_numbers(lambda count, weights: (torch.rand(count), [weights.sum()]), 2, 3)
    'own'
    >>> use_of_random_numbers(lambda count, weights: (torch.rand(()).expand(count), []), 2, 3)
    'shared'
    >>> use_of_random_numbers(lambda count, weights: (weights, [torch.rand(count)[0] * weights]), 2, 3)
    'shared'
    """

    def attempt(seed: int, calls: _RandomCalls, weights: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        with random_numbers_from(seed, *devices), calls:
            losses, gradient = run(large, weights)
            return losses.detach().clone().cpu(), gradient

    few, many = _RandomCalls(), _RandomCalls()
    with random_numbers_from(0, *devices):
        before = GlobalState(*devices)
        for count, calls in ((small, few), (large, many)):
            with calls:
                run(count, torch.ones(count))
        moved = before.moved()
    if not moved and not many.calls:
        return "none"
    axes = _record_axes(few, many, small, large)
    if axes is None or not axes or set(moved) - {"torch"}:
        return "shared"

    def kept(seed: int) -> bool:
        """Whether other numbers for some records leave the rest as they are, and the other way round."""
        generator = torch.Generator().manual_seed(seed)
        part = torch.rand(large, generator=generator).argsort() < large // 2
        for chosen in (part, ~part):
            weights = torch.where(chosen, 0.0, 0.5 + torch.rand(large, generator=generator))
            usual, gradient = attempt(seed, _RandomCalls(), weights)
            changed, other = attempt(seed, _RandomCalls(chosen, axes), weights)
            # Rounding may follow what stands next to a record; another number moves far more.
            if not torch.allclose(usual[~chosen], changed[~chosen], rtol=1e-3, atol=1e-5, equal_nan=True):
                return False
            if not _length(map(torch.sub, gradient, other)) <= 1e-3 * _length(gradient):
                return False
        return True

    return "own" if all(map(kept, range(SEEDS))) else "shared"


def _length(tensors: Iterable[Tensor]) -> float:
    """Of all of them together."""
    return math.hypot(*(float(tensor.norm()) for tensor in tensors))


def _record_axes(small: _RandomCalls, large: _RandomCalls, few: int, many: int) -> list[int] | None:
    """The record axis of each random operation; None if one has none, or the operations differ."""
    if [func for func, _ in small.calls] != [func for func, _ in large.calls]:
        return None
    axes = []
    for (func, shapes), (_, larger) in zip(small.calls, large.calls, strict=True):
        layouts = {learn_layout(a, few, b, many) for a, b in zip(shapes, larger, strict=True)}
        layout = layouts.pop()
        if func.overloadpacket in _JOINT or layouts or layout is None or layout is INCONSISTENT:
            return None
        axes.append(layout.axis)
    return axes


def _tensors(out: Any) -> list[Tensor]:
    outs = out if isinstance(out, (tuple, list)) else (out,)
    return [value for value in outs if isinstance(value, Tensor)]
