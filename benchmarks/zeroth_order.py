"""Memory of a zeroth-order step, compared with a forward, plain training and DP-SGD.

    python -m benchmarks.zeroth_order [--tasks mlp cnn gpt2] [--threads 1]

Bytes that tensors take at most beyond what they took before, by the log of PyTorch's allocator on the CPU: of
a forward without gradients, of a forward and a backward, of the second step of each method, and of what
`PrivateTraining` tries before its first step. All use the same rows.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch

import equipoise as eq
from benchmarks.tasks import TASKS, Task

METHODS = {"dp-zo": eq.methods.DPZO, "dp-sgd": eq.DPSGD}


def highest(work: Callable[[], object]) -> int:
    """Bytes that tensors took at most beyond what they took before."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        work()
    log = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    log.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in log), default=0)


def training(task: Task, method: eq.Method) -> eq.PrivateTraining:
    records = len(task.inputs)
    return eq.PrivateTraining(
        task.model,
        torch.optim.SGD(task.model.parameters(), lr=0.01),
        loss=lambda model, batch: task.losses(model(batch["x"]), batch["y"]),
        data=eq.Data({"x": task.inputs, "y": task.labels}, microbatch_size=records),
        sampling=eq.FullBatch(records, 10),
        method=method,
        run=eq.Run(reproducible=True),
    )


def measured(name: str) -> dict[str, float]:
    """Megabytes by what was run."""
    task = TASKS[name]()

    def losses() -> torch.Tensor:
        return task.losses(task.model(task.inputs), task.labels)

    found = {"the parameters": sum(p.nbytes for p in task.model.parameters())}
    with torch.no_grad():
        losses()
        found["a forward"] = highest(losses)
    losses().sum().backward()
    task.model.zero_grad()
    found["plain training"] = highest(lambda: losses().sum().backward())
    task.model.zero_grad()
    for method, make in METHODS.items():
        made = {}
        found[f"{method}, start"] = highest(
            lambda make=make, made=made: made.update(run=training(task, make(noise_multiplier=1.0)))
        )
        made["run"].take_step()
        found[f"{method}, a step"] = highest(made["run"].take_step)
    return {key: value / 1e6 for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["mlp", "cnn", "gpt2"])
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for name in given.tasks:
        torch.manual_seed(0)
        print(name, *(f"  {what}: {size:,.1f} MB" for what, size in measured(name).items()), sep="\n")


if __name__ == "__main__":
    main()
