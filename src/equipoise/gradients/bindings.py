"""The operations of a graph, called as Python programs call them.

`torch.ops` takes any operation, and boxes its arguments, which costs a microsecond or two at each: a tenth of
the step of a small network. PyTorch has functions for Python that do not. One of them is called instead where
it was seen to ask for the very same operation, with the same arguments, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from equipoise.gradients.capture.random_numbers import is_random

_FOUND: dict[tuple[Any, str], tuple[str, Any] | None] = {}
"""By an operation and the types of its arguments: the kind of node and the function that call it."""


def called_directly(graph: fx.GraphModule) -> Callable[..., list[Tensor]]:
    """What runs the operations of a graph, whose nodes hold their values without numbers."""
    own = fx.Graph()
    own.output(own.graph_copy(graph.graph, {}))
    for node in own.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and (found := _binding(node)):
            node.op, node.target = found
    operations = fx.GraphModule(graph, own).forward

    def run(*tensors: Tensor) -> list[Tensor]:
        with torch._C.DisableTorchFunction():  # modes see functions, and would see no operation
            found: list[Tensor] = operations(*tensors)
        return found

    return run


def _binding(node: fx.Node) -> tuple[str, Any] | None:
    operation: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), lambda one: one.meta.get("val"))
    unreal = detect_fake_mode((args, node.meta.get("val")))
    if unreal is None or is_random(operation, node.args, node.kwargs):
        return None
    key = operation, str(tree_map(_type_of, (args, kwargs)))
    if key not in _FOUND:
        calls = _candidates(operation.__name__.partition(".")[0])
        with _disable_current_modes(), torch.no_grad(), unreal:  # nobody else sees what is tried
            _FOUND[key] = next((one for one in calls if _asks_for(one[1], operation, args, kwargs)), None)
    return _FOUND[key]


def _type_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype
    return value if isinstance(value, torch.dtype) else type(value)


def _candidates(name: str) -> Iterator[tuple[str, Any]]:
    for place in (torch, torch._C._nn, torch._C._linalg):  # type: ignore[attr-defined]
        if function := getattr(place, name, None):
            yield "call_function", function
    if hasattr(Tensor, name):
        yield "call_method", name


def _asks_for(function: Any, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of the function is one call of the operation."""
    asked = _Asked()
    try:
        first, *others = args
        call = getattr(first, function) if isinstance(function, str) else partial(function, first)
        with asked:
            call(*others, **kwargs)
    except Exception:  # it takes other arguments, or shows no values here
        return False
    return asked.calls == [(operation, _in_full(operation, args, kwargs))]


class _Asked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each operation and its arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":  # where a view without values lies
            self.calls.append((func, _in_full(func, args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _in_full(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name, those left out too; tensors by their identity."""
    arguments = operation._schema.arguments
    given = {one.name: one.default_value for one in arguments if one.has_default_value()}
    given |= dict(zip((one.name for one in arguments), args, strict=False)) | dict(kwargs)
    found: dict[str, Any] = tree_map(lambda one: id(one) if isinstance(one, Tensor) else one, given)
    return found
