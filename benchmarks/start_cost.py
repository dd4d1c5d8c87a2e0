"""What the start of a `PrivateTraining` costs, in steps of plain training, and which trials run the model.

Starts and plain steps are taken in turn in one process, by the processor's time of one thread.

    python benchmarks/start_cost.py                                  # the ratios
    python benchmarks/start_cost.py --tasks gpt2 --rounds 1 --trials   # and the forwards of every trial
"""

from __future__ import annotations

import argparse
import collections
import statistics
import sys
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

import equipoise as eq

sys.path.insert(0, str(Path(__file__).parent))
from step_time import CLIP_NORM, LEARNING_RATE, NOISE_MULTIPLIER, plain_step
from tasks import TASKS, Task

PLAIN_STEPS = 3  # beside each start
#: Functions of the package that are a trial, or a part of the start: forwards are counted by these.
TRIALS = (
    "check_loss",
    "check_repeatable",
    "away_from_zero",
    "learn",
    "_settle",
    "_compare_with_others",
    "replayable",
    "_refuse_other_function",
    "bytes_per_record",
    "random_use",
    "_operations_follow_numbers",
    "pass_overhead",
    "serves",
)


def task_of(name: str) -> Task:
    """The task of this name; with "+dropout" at the end its layers drop a tenth."""
    torch.manual_seed(0)
    task = TASKS[name.removesuffix("+dropout")]()
    for module in task.model.modules() if name.endswith("+dropout") else ():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    return task


def start(task: Task, forwards: SimpleQueue[tuple[str, int]] | None = None) -> None:
    """Start a training; the queue, which no trial puts back, takes trial and records of each forward."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if forwards is not None:
            frame, name = sys._getframe(1), "others"
            while frame is not None and (name := frame.f_code.co_name) not in TRIALS:
                frame = frame.f_back
            forwards.put((name if frame is not None else "others", len(batch["label"])))
        return task.losses(model(batch["input"]), batch["label"])

    records = len(task.labels)
    eq.PrivateTraining(
        task.model,
        torch.optim.SGD(task.model.parameters(), lr=LEARNING_RATE),
        loss=loss,
        data=eq.Data({"input": task.inputs, "label": task.labels}, microbatch_size=records),
        sampling=eq.FullBatch(population=records, steps=1000),
        method=eq.DPSGD(clip_norm=CLIP_NORM, noise_multiplier=NOISE_MULTIPLIER),
    )


def seconds(run: Any) -> float:
    began = time.thread_time()
    run()
    return time.thread_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=["mlp", "cnn", "resnet20", "gpt2", "gpt2+dropout"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trials", action="store_true", help="also count the forwards of every trial")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.tasks:
        step = plain_step(task_of(name))
        step(), start(task_of(name))  # warms up
        plain, starts = [], []
        for _ in range(arguments.rounds):
            plain.append(statistics.median(seconds(step) for _ in range(PLAIN_STEPS)))
            task = task_of(name)
            starts.append(seconds(lambda task=task: start(task)))
        ratios = sorted(s / p for s, p in zip(starts, plain, strict=True))
        forwards: SimpleQueue[tuple[str, int]] = SimpleQueue()
        start(task_of(name), forwards)
        run = [forwards.get() for _ in range(forwards.qsize())]
        print(
            f"{name:14} {1000 * statistics.median(starts):7.0f} ms, {statistics.median(ratios):5.1f} plain "
            f"steps [{ratios[0]:.1f}, {ratios[-1]:.1f}], {len(run)} forwards of "
            f"{sum(records for _, records in run)} records",
            flush=True,
        )
        if arguments.trials:
            by_trial: dict[str, list[int]] = collections.defaultdict(list)
            for trial, records in run:
                by_trial[trial].append(records)
            for trial, of in by_trial.items():
                print(f"    {len(of):3} forwards {sum(of):5} records  {trial}")


if __name__ == "__main__":
    main()
