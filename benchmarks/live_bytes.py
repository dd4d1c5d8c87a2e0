"""What a step and a start hold in memory, counted tensor by tensor: the same number on any machine.

Memory that an operation takes for itself, and what an allocator keeps or cannot use, does not count; the peak
of the resident set (`step_time.py --measure memory`) has both in it.

    python benchmarks/live_bytes.py --tasks lm-64 resnet20    # steps beside plain training, and starts
"""

from __future__ import annotations

import argparse
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from equipoise.privacy import Private

sys.path.insert(0, str(Path(__file__).parent))
from step_time import BUILDERS
from tasks import TASKS, Task


def storages(nest: Any) -> list[torch.UntypedStorage]:
    """Those of the plain tensors; what is `Private` shows none, and holds a plain one that is seen too.

    A trace's tensors have shapes and no values: they take no memory.
    """
    leaves = (leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor))
    return [leaf.untyped_storage() for leaf in leaves if not isinstance(leaf, Private | FakeTensor)]


class LiveBytes(TorchDispatchMode):
    """Inside, follows what results of operations take in memory, until they are freed.

    Attributes:
        now: bytes at present.
        peak: the most so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        # By address: a number of bytes, and what tells that they were freed.
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def _freed(self, address: int, _: Any) -> None:
        self.now -= self._live.pop(address)[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages((args, kwargs))}
        for storage in storages(out):
            address = storage._cdata
            if address not in self._live and address not in given:  # neither a view nor written in place
                freed = weakref.ref(storage, partial(self._freed, address))
                self._live[address] = storage.nbytes(), freed
                self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        return out


def of_step(method: str, task: Task) -> int:
    """The most bytes that the third step of a method holds beyond what it finds."""
    step = BUILDERS[method](task)
    for _ in range(2):  # the first takes what is made only once
        step()
    with LiveBytes() as found:
        step()
    return found.peak


def of_start(task: Task) -> int:
    """The most bytes that the start of a `PrivateTraining` holds beyond model and data."""
    with LiveBytes() as found:
        BUILDERS["ours-training"](task)
    return found.peak


def parameter_bytes(task: Task) -> int:
    return sum(p.numel() * p.element_size() for p in task.model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=["mlp", "resnet20", "lm-64", "gpt2"], choices=[*TASKS])
    arguments = parser.parse_args()

    def counted(count: Callable[[Task], int], name: str) -> tuple[float, float]:
        torch.manual_seed(0)
        task = TASKS[name]()
        return count(task) / 1e6, parameter_bytes(task) / 1e6

    for name in arguments.tasks:
        start, parameters = counted(of_start, name)
        plain, ours = (counted(partial(of_step, method), name)[0] for method in ("plain", "ours-training"))
        print(
            f"{name:20} parameters {parameters:7.1f} MB, plain step {plain:7.1f}, private {ours:7.1f} "
            f"({ours / plain:.2f}), start {start:7.1f} ({start / parameters:.2f} copies)",
            flush=True,
        )


if __name__ == "__main__":
    main()
