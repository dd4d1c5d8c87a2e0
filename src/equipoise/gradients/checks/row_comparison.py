"""Check at the start: the engine's rows against those of ordinary autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from equipoise._dtensor import is_dtensor
from equipoise.gradients.numerics import squared_rows, widen

__all__ = ["distance_and_length", "each_gradient", "length", "rows_differ"]


#: Relative error of rows that is taken for rounding, by the parameter's type.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}


LOW_PRECISION = 1e-1


#: In units of eps: what two orders of adding the same terms may differ by, relative to the terms' sizes.
ROUNDING = 64


#: The same where the terms come in half precision.
LOW_PRECISION_ROUNDING = 5e-2


def length(tensor: Tensor) -> Tensor:
    """The norm of all entries, in float64, without a copy of them in that type."""
    found = squared_rows(widen(tensor)[None])[0].sqrt()
    if bool(torch.isfinite(found)):
        return found
    return torch.linalg.vector_norm(tensor, dtype=torch.float64)  # squares of large numbers overflow


def distance_and_length(row: Tensor, expected: Tensor) -> Tensor:
    """How far a row lies from the expected one, and how long that one is, [2], in float64."""
    return torch.stack([length(row - expected), length(expected)])


def each_gradient(
    value: Tensor, leaves: Mapping[str, Tensor], visit: Callable[[str, Tensor | None], None]
) -> None:
    """Differentiate, and let each gradient go once it was looked at: a model may fill the memory by itself.

    Args:
        value: a number that requires a gradient.
        leaves: what it is differentiated by, by name.
        visit: visit(name, gradient), once per leaf; None where the value does not depend on it.
    """
    met: set[str] = set()
    backward: list[int] = []  # this one, not one that a function of the model runs inside of it

    def begins(_: Tensor) -> None:
        backward.append(torch._C._current_graph_task_id())

    def looked_at(name: str) -> Callable[[Tensor], Tensor | None]:
        def hook(gradient: Tensor) -> Tensor | None:
            if backward != [torch._C._current_graph_task_id()]:
                return None
            met.add(name)
            visit(name, gradient)
            if gradient.layout != torch.strided:
                return None
            return gradient.new_zeros(()).expand(gradient.shape)  # in its place: one number

        return hook

    # What lies on several processes is exchanged between them, outside of the backward.
    local = {name: leaf for name, leaf in leaves.items() if not is_dtensor(leaf)}
    handles = [
        leaf.register_hook(looked_at(name))  # type: ignore[no-untyped-call]
        for name, leaf in local.items()
    ]
    value.register_hook(begins)  # type: ignore[no-untyped-call]
    try:
        found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    finally:
        for handle, leaf in zip(handles, local.values(), strict=True):
            handle.remove()
            leaf._backward_hooks = leaf._backward_hooks or None
    for name, gradient in zip(leaves, found, strict=True):
        if name not in met:
            visit(name, gradient)


def rows_differ(
    found: Tensor, dtype: torch.dtype, low_precision: bool = False, sizes: Tensor | None = None
) -> str | None:
    """Why rows are not the expected ones, or None if they are.

    Args:
        found: `distance_and_length` of each row, [B, 2].
        dtype: of the expected rows.
        low_precision: whether the model computes in a shorter type than its parameters.
        sizes: what the rounding of each row is relative to, [B]: the sizes of the terms that it adds, and of
            the record's whole gradient. Where terms cancel, here or before (the key bias of an attention
            layer has a gradient of zero), both sides hold nothing but rounding.
    """
    tolerance = LOW_PRECISION if low_precision else TOLERANCE.get(dtype, LOW_PRECISION)
    difference = found[:, 0]
    scale = found[:, 1].norm() + 1e-30
    worst = float(difference.max() / scale)
    if worst <= tolerance or float(difference.max()) < 1e-12:
        return None
    if sizes is not None:
        share = LOW_PRECISION_ROUNDING if low_precision else ROUNDING * torch.finfo(dtype).eps
        if bool((difference <= share * sizes.double()).all()):
            return None
    return f"its rows differ from single records by {worst:.1e} of their norm, more than {tolerance:.0e}"
