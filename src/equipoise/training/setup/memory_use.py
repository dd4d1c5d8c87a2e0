"""What a step holds in memory.

A private step holds the parameters' copies (estimate, sums, optimiser state: a few P), and per record the
activations that the backward needs plus the factors kept for the sums. Both are measured by what autograd
saves in one forward of a few records.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise._dtensor import local_part
from equipoise._tree import leaves
from equipoise.gradients.capture.isolation import undisturbed
from equipoise.gradients.capture.sharded import leaves_told
from equipoise.gradients.engine_inputs import Loss, evaluate_loss, num_records

__all__ = ["available_bytes", "bytes_per_record", "fitting", "step_bytes"]

SHARE_OF_FREE_MEMORY = 0.25

FACTOR_OVERHEAD = 3.0
"""Saved activations are held once by autograd, once as factors (with output gradients); plus temporaries."""

LARGEST_MICRO_BATCH = 1024
"""An upper limit, so that a large machine does not hold activations it gains nothing from."""


def available_bytes(device: torch.device) -> int:
    """Free memory of the device, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 4 * 2**30


def bytes_per_record(model: nn.Module, loss: Loss, batch: Any) -> float:
    """Bytes that autograd saves per record in one forward; measured on the batch, without its parameters.

    Where a loss takes derivatives by `torch.func`, which does not tell what it saves: all that is computed.
    """
    own = {local_part(p).untyped_storage().data_ptr() for p in model.parameters()}

    def note_leaf(_: str, leaf: Tensor) -> None:
        """A parameter that was gathered for the forward."""
        own.add(local_part(leaf).untyped_storage().data_ptr())

    seen: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        storage = local_part(saved).untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return saved.detach()  # a result that keeps its own graph would never be freed, nor would the graph

    def total_within(measure: AbstractContextManager[Any], total: Callable[[], int]) -> int:
        with (
            torch.enable_grad(),
            undisturbed(model, dropout=True),
            leaves_told(note_leaf),
            measure,
        ):
            held = evaluate_loss(model, loss, batch, None)  # keep the graph alive until the count is done
            count = total()
            del held
            return count

    made = _Computed()
    try:
        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved)
        total = total_within(hooks, lambda: sum(seen.values()))
    except RuntimeError:
        total = total_within(made, lambda: made.bytes)
    return total / max(1, num_records(batch))


class _Computed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.bytes += sum(leaf.nbytes for leaf in leaves(out) if isinstance(leaf, Tensor))
        return out


def fitting(per_record: float, num_parameters: int, device: torch.device) -> int:
    """How many records' factors fit in a quarter of the free memory, with four float32 copies of P."""
    free = available_bytes(device) * SHARE_OF_FREE_MEMORY - 16.0 * num_parameters
    return max(1, min(LARGEST_MICRO_BATCH, int(free / max(1.0, per_record * FACTOR_OVERHEAD))))


def step_bytes(per_record: float, num_parameters: int, records: float, forward_only: bool = False) -> int:
    """Estimated bytes of a step without the model: factors of a micro-batch, copies of the parameters.

    A step without a backward holds one copy and what makes it, and fewer activations than autograd saves.
    """
    if forward_only:
        return int(per_record * records + 8 * num_parameters)
    return int(FACTOR_OVERHEAD * per_record * records + 16 * num_parameters)
