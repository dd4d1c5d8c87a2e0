"""Steps of several processes beside those of one, and of a sharded model beside plain FSDP2.

    torchrun --nproc_per_node 2 benchmarks/processes.py
    torchrun --nproc_per_node 2 benchmarks/processes.py --exchanges --tasks lm-64

Efficiency is the CPU time of a step in one process over that of the busiest of n processes, times n, round
by round in turn, since machines change from minute to minute. What is not computed by all of them once costs
it. Every forward is filled up, and n processes run n forwards where one runs one: "by rows" is what the
fillers leave of it. Processes also share caches and the way to memory: plain training without any exchange
shows what that leaves. The ratio to plain FSDP2 is of wall times, in turn in one run: forward, backward and
SGD of the mean loss on the same records. The share is of the parameters that a process keeps between two
steps.

`--exchanges` counts instead what one process exchanges in a step, its forwards included, where the model is
whole in each, sharded, and tensor parallel.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import equipoise as eq
from equipoise.training.forwards import forward_rows
from tasks import Task, language, resnet18

#: By name: a network with a batch of 256 records, all the data there is, and the records of a step.
TASKS: dict[str, tuple[Callable[[], Task], int]] = {
    "lm-256": (lambda: language(256, 256), 16),
    "lm-256-32": (lambda: language(256, 256), 32),
    "lm-64": (lambda: language(256, 64), 32),
    "resnet18": (lambda: resnet18(256), 32),
}


def private(
    name: str, steps: int, shared: Callable[[nn.Module], nn.Module] = lambda model: model
) -> eq.PrivateTraining:
    torch.manual_seed(0)
    make, batch = TASKS[name]
    task = make()
    shared(task.model)
    return eq.PrivateTraining(
        task.model,
        torch.optim.SGD(task.model.parameters(), lr=0.01),
        loss=lambda model, batch: task.losses(model(batch["input"]), batch["label"]),
        data=eq.Data({"input": task.inputs, "label": task.labels}, microbatch_size=batch),
        # Every draw has as many records: times do not follow their number.
        sampling=eq.WithoutReplacement(batch, 256, steps),
        method=eq.DPSGD(clip_norm=1.0, noise_multiplier=1.0),
        unit=eq.Record(relation="replace_one"),
        run=eq.Run(reproducible=True),
    )


def shard(model: nn.Module) -> nn.Module:
    for part in getattr(model, "blocks", model.children()):
        if any(True for _ in part.parameters()):
            fully_shard(part)
    return fully_shard(model)


def cut(model: nn.Module) -> nn.Module:
    """The wide layers of a language model, tensor parallel; attention and look-ups stay whole."""
    ways: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
    ways |= {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), ways)


class Exchanged(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the exchanges of this process, and the bytes of the whole tensor of each."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.times, self.bytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its parts come here by themselves
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func):
            self.times += 1
            self.bytes += max(leaf.nbytes for leaf in tree_leaves((args, out)) if isinstance(leaf, Tensor))
        return out


def exchanges(name: str) -> dict[str, str]:
    """What this process exchanges in a step, and the CPU time of it, by how the model is shared."""
    found = {}
    for how, shared in (("whole", lambda model: model), ("sharded", shard), ("cut", cut)):
        run = private(name, 4, shared)
        taken = iter(run)
        next(taken)
        seconds = []
        for _ in range(2):
            before = time.process_time()
            next(taken)
            seconds.append(time.process_time() - before)
        with Exchanged() as counted:
            next(taken)
        here = sum(getattr(p, "_local_tensor", p).nbytes for p in run.model.parameters())
        found[how] = (
            f"{counted.times} exchanges, {counted.bytes / 1e6:.1f} MB in them, {min(seconds):.3f} CPU s, "
            f"{here / 1e6:.1f} MB of parameters here"
        )
    return found


class Steps:
    """Private steps, and plain ones on this process' share of the records without any exchange.

    Attributes:
        rows: of the forwards of a private step.
    """

    def __init__(self, name: str, steps: int) -> None:
        run = private(name, steps)
        size, processes = run.config()["settings"]["micro_batch_size"], run.processes.count
        make, batch = TASKS[name]
        self.rows = math.ceil(batch / processes / size) * forward_rows(size)
        self._private = iter(run)
        torch.manual_seed(0)
        self._task = task = make()
        self._optimizer = torch.optim.SGD(task.model.parameters(), lr=0.01)
        self._share = [records[: batch // processes] for records in (task.inputs, task.labels)]

    def take(self) -> tuple[float, float]:
        """CPU times of a private step and of a plain one."""
        began = time.process_time()
        next(self._private)
        middle = time.process_time()
        inputs, labels = self._share
        self._optimizer.zero_grad()
        self._task.losses(self._task.model(inputs), labels).mean().backward()
        self._optimizer.step()
        return middle - began, time.process_time() - middle


class Alone:
    """The same steps in one process, which waits while the others work."""

    def __init__(self, name: str, steps: int) -> None:
        command = [sys.executable, __file__, "--alone", "--steps", str(steps), "--tasks", name]
        own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own
        )
        self.rows = self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def take(self) -> tuple[float, float]:
        """As `Steps.take`."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        private, plain = self._answer()
        return private, plain

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def answer_alone(name: str, steps: int) -> None:
    """A step for each line of the input."""
    taken = Steps(name, steps)
    print(json.dumps(taken.rows), flush=True)
    for _ in sys.stdin:
        print(json.dumps(taken.take()), flush=True)


def compared(name: str, steps: int) -> str:
    """CPU times of one process and of each of several, in turn; rank 0 has the answer."""
    alone = Alone(name, steps) if dist.get_rank() == 0 else None
    here, count = Steps(name, steps), dist.get_world_size()
    found = []
    for _ in range(steps):
        one = (0.0, 0.0) if alone is None else alone.take()
        dist.barrier()  # waits without a thread that works
        many = torch.tensor(here.take(), dtype=torch.float64)
        dist.all_reduce(many, dist.ReduceOp.MAX)
        found.append((*one, *many.tolist()))
    if alone is None:
        return ""
    alone.close()
    one, one_plain, many, many_plain = (list(each) for each in zip(*found[1:], strict=True))

    def efficiency(single: list[float], busiest: list[float]) -> str:
        return spread([a / (count * b) for a, b in zip(single, busiest, strict=True)])

    return (
        f"efficiency {efficiency(one, many)}, {alone.rows / (count * here.rows):.2f} by rows, "
        f"{efficiency(one_plain, many_plain)} of plain training without any exchange (CPU s of a step "
        f"{spread(one, 3)} in one process, {spread(many, 3)} in the busier of {count})"
    )


def spread(values: list[float], digits: int = 2) -> str:
    """The median, and the quartiles in brackets."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def against_fsdp(name: str, steps: int) -> dict[str, Any]:
    """Wall times of private and plain steps of a sharded model, in turn, and what a process keeps."""
    run = private(name, steps, shard)
    taken = iter(run)
    torch.manual_seed(0)
    make, batch = TASKS[name]
    task = make()
    model = shard(task.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    share = slice(dist.get_rank() * batch // dist.get_world_size(), None)
    inputs, labels = (
        records[:batch][share][: batch // dist.get_world_size()] for records in (task.inputs, task.labels)
    )
    mine, plain = [], []
    for _ in range(steps):
        dist.barrier()
        began = time.perf_counter()
        next(taken)
        dist.barrier()
        middle = time.perf_counter()
        optimizer.zero_grad()
        task.losses(model(inputs), labels).mean().backward()
        optimizer.step()
        dist.barrier()
        mine.append(middle - began)
        plain.append(time.perf_counter() - middle)
    ratios = [a / b for a, b in zip(mine[1:], plain[1:], strict=True)]
    kept = [getattr(p, "_local_tensor", p) for p in run.model.parameters()]
    return {
        "private": statistics.median(mine[1:]),
        "plain": statistics.median(plain[1:]),
        "ratios": ratios,
        "parameters_here": sum(p.numel() for p in kept),
        "parameters": sum(p.numel() for p in run.model.parameters()),
    }


def main() -> None:
    """Measure one process and all of them in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--exchanges", action="store_true", help="count what a process exchanges in a step")
    parser.add_argument("--alone", action="store_true", help="a step for each line of the input")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.alone:
        answer_alone(arguments.tasks[0], arguments.steps)
        return
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if arguments.exchanges:
        for name in arguments.tasks:
            for how, said in exchanges(name).items():
                if rank == 0:
                    print(f"{name}, {how}: {said}", flush=True)
        dist.destroy_process_group()
        return
    for name in arguments.tasks:
        said = compared(name, arguments.steps)
        beside = against_fsdp(name, arguments.steps)
        if rank == 0:
            print(
                f"{name}: {said}; sharded {spread(beside['ratios'])} times plain FSDP2 "
                f"({beside['private']:.3f} s, {beside['plain']:.3f} s), "
                f"{beside['parameters_here'] / beside['parameters']:.2f} of the parameters here",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
