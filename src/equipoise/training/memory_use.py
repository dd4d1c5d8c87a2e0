"""How many records fit: a micro-batch size that is safe by default.

What a private step holds at once: the parameters' copies (estimate, sums, optimiser state: a few P), and
per record the activations that the backward needs plus the factors kept for the sums, both measured by what
autograd saves in one forward of a few records. The size
is a performance knob: the result does not depend on it (up to rounding), so it is chosen once and kept with
the checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.gradients import Buffers
from equipoise.training.input_checks import Loss
from equipoise.training.record_rows import batch_size

__all__ = ["available_bytes", "bytes_per_record", "default_micro_batch_size", "step_bytes"]


SHARE_OF_FREE_MEMORY = 0.25


FACTOR_OVERHEAD = 3.0
"""Saved activations are held once by autograd, once as factors (with output gradients); plus temporaries."""


LARGEST = 1024
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
    """Bytes that autograd saves a record in one forward; measured on the batch, without its parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return saved

    device = next(model.parameters()).device
    with (
        torch.enable_grad(),
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        Buffers(model).all_kept(),
        torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved),
    ):
        held = loss(model, batch)  # keep the graph alive until the count is done
        total = sum(seen.values())
        del held
    return total / max(1, batch_size(batch))


def default_micro_batch_size(
    per_record: float, num_parameters: int, device: torch.device, expected: float
) -> int:
    """The largest power of two (at most 1024) whose factors fit in a quarter of the free memory.

    Args:
        per_record: bytes a record, from `bytes_per_record`.
        num_parameters: P; four float32 copies of it are set aside.
        device: where the training runs.
        expected: expected batch size; no size above twice this is useful.
    """
    free = available_bytes(device) * SHARE_OF_FREE_MEMORY - 16.0 * num_parameters
    fits = max(1.0, free / max(1.0, per_record * FACTOR_OVERHEAD))
    size = 1
    while size * 2 <= min(fits, LARGEST, 2 * max(1.0, expected)):
        size *= 2
    return size


def step_bytes(per_record: float, num_parameters: int, records: float) -> int:
    """Estimated bytes of a step beside the model: factors of a micro-batch, copies of the parameters."""
    return int(FACTOR_OVERHEAD * per_record * records + 16 * num_parameters)
