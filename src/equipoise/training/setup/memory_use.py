"""What a step holds in memory.

A private step holds the parameters' copies (estimate, sums, optimiser state: a few P), and per record the
activations that the backward needs plus the factors kept for the sums. Both are measured by what autograd
saves in one forward of a few records, in which operations are counted, too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from equipoise._dtensor import device_of, local_part
from equipoise._tree import leaves
from equipoise.gradients.capture.attributes import attributes_kept
from equipoise.gradients.capture.isolation import undisturbed
from equipoise.gradients.capture.random_numbers import SeenOperations
from equipoise.gradients.capture.sharded import leaves_told
from equipoise.gradients.engine_inputs import Loss, num_records, run_loss

SHARE_OF_FREE_MEMORY = 0.25
"""What a step may take of it.

A choice: the estimate is rough, and others use the machine. More may run out of memory, less takes more
forwards.
"""

FACTOR_OVERHEAD = 3.0
"""Saved activations are held once by autograd, once as factors (with output gradients); plus temporaries.

An estimate: a smaller one may run out of memory, a larger one takes more forwards.
"""

PASS_OVERHEAD = 32
"""What a pass is counted at without its rows, in rows, at most.

It was measured as 72 for the MLP of `benchmarks/tasks.py` and 29 for the CNN. A choice between these: more
makes micro-batches larger, with more filler rows in the last one, and less makes more passes.
"""

CALL_WORK = {"cpu": 4e6, "cuda": 4e8}
"""How many multiplications and additions of a forward take as long as an operation without them.

Orders of magnitude. They move micro-batch sizes, with them the bits of new runs, and nothing else.
"""

LARGEST_MICRO_BATCH = 1024
"""An upper limit, so that a large machine does not hold activations it gains nothing from. A choice."""


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


class _Work(SeenOperations):  # type: ignore[no-untyped-call]
    """Counts operations, the multiplications and additions in products, and the bytes of all results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = self.work = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        count = flop_registry.get(func.overloadpacket)
        self.work += 0 if count is None else count(*args, **(kwargs or {}), out_val=out)
        self.bytes += sum(leaf.nbytes for leaf in leaves(out) if isinstance(leaf, Tensor))
        return out


def forward_cost(model: nn.Module, loss: Loss, batch: Any) -> tuple[float, float]:
    """The cost of a forward, measured on the batch.

    Returns:
        Bytes that autograd saves per record, without the parameters; where a loss takes derivatives by
        `torch.func`, which does not tell what it saves, the bytes of all that is computed. And what a forward
        and a backward cost without their rows, in rows: it is counted, not timed, so that a run that is
        repeated has the same micro-batches.
    """
    own = {local_part(p).untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def note_leaf(_: str, leaf: Tensor) -> None:
        """A parameter that was gathered for the forward."""
        own.add(local_part(leaf).untyped_storage().data_ptr())

    def note(tensor: Tensor) -> Tensor:
        storage = local_part(tensor).untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # a result that keeps its own graph would never be freed, nor would the graph

    def run(hooks: AbstractContextManager[Any]) -> _Work:
        kept = attributes_kept(model, loss)
        with undisturbed(model, dropout=True), kept, torch.enable_grad(), leaves_told(note_leaf), hooks:
            with _Work() as found:
                held = run_loss(model, loss, batch, None)
            del held  # with the graph: until here no saved tensor had the place of another
        return found

    try:
        found = run(torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor))
        total = sum(saved.values())
    except RuntimeError:
        found = run(nullcontext())
        total = found.bytes
    records = max(1, num_records(batch))
    calls = found.calls * CALL_WORK.get(device_of(next(model.parameters())).type, CALL_WORK["cuda"])
    overhead = max(1.0, min(PASS_OVERHEAD, calls * records / max(1, found.work)))
    return total / records, overhead


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
