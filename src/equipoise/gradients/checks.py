"""Checks at attach.

The engine against single records by ordinary autograd, and the module that mixes records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from equipoise.gradients.batches import perturb_record
from equipoise.gradients.capture import output_tensors
from equipoise.gradients.layouts import Layout, record_first

__all__ = ["find_mixing_module", "rows_differ"]

#: Relative error of rows that is taken for rounding, by the parameter's type.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
LOW_PRECISION = 1e-1


def rows_differ(rows: Tensor, expected: Tensor, low_precision: bool = False) -> str | None:
    """Why rows [B, *shape] are not the expected ones, or None if they are."""
    tolerance = LOW_PRECISION if low_precision else TOLERANCE.get(expected.dtype, LOW_PRECISION)
    difference = (rows.double() - expected.double()).reshape(rows.shape[0], -1).norm(dim=1)
    scale = expected.double().norm() + 1e-30
    worst = float((difference / scale).max()) if difference.numel() else 0.0
    if worst <= tolerance or float(difference.max()) < 1e-12:
        return None
    return f"its rows differ from single records by {worst:.1e} of their norm, more than {tolerance:.0e}"


def find_mixing_module(
    model: nn.Module, run: Callable[[Any], Tensor], batch: Any
) -> tuple[str | None, str | None]:
    """Path and type of the first module whose output for records 1, 2, ... moves with record 0.

    Watches through a global hook that lives for two runs; nothing is put on the model.
    """
    names: Mapping[nn.Module, str] = {module: name for name, module in model.named_modules()}
    outputs: list[tuple[nn.Module, list[Tensor]]] = []

    def keep(module: nn.Module, _: Any, out: Any) -> None:
        if module in names:
            outputs.append((module, [t.detach().clone() for t in output_tensors((out,))]))

    handle = register_module_forward_hook(keep)
    try:
        run(batch)
        before, outputs = outputs, []
        run(perturb_record(batch, 0))
    finally:
        handle.remove()
    records = run(batch).shape[0]
    for (module, one), (other, two) in zip(before, outputs, strict=False):
        if module is not other:
            break
        if any(_mixed(a, b, records) for a, b in zip(one, two, strict=False)):
            return names[module], type(module).__name__
    return None, None


def _mixed(before: Tensor, after: Tensor, records: int) -> bool:
    """Whether no way to read records off the axes confines the change to record 0."""
    if before.shape != after.shape:
        return True
    if not before.is_floating_point():
        return False
    size = before.detach().double().abs().amax() if before.numel() else torch.tensor(0.0)
    tolerance = 1e-10 if before.dtype == torch.float64 else 1e-5
    changed = (before.double() - after.double()).abs() > tolerance * size
    if not bool(changed.any()):
        return False
    for axis, length in enumerate(before.shape):
        if length % records:
            continue
        layouts = (Layout(axis, "major"), Layout(axis, "minor"))
        if any(not bool(record_first(changed, layout, records)[1:].any()) for layout in layouts):
            return False
    return True
