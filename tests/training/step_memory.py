"""The memory of one step of 64 micro-batches: python step_memory.py; numbers in bytes, as JSON."""

from __future__ import annotations

import json

import torch
from small_problems import training
from torch import nn

import equipoise as eq

SIZE, RECORDS = 2000, 128


def resident(name: str) -> int:
    """A number of /proc/self/status, in bytes."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(name))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(SIZE, SIZE, bias=False)
    run = training(
        model,
        data={"x": torch.randn(RECORDS, SIZE)},
        loss=lambda model, batch: model(batch["x"]).square().sum(1),
        sampling=eq.WithoutReplacement(RECORDS, RECORDS, 4),
        relation="replace_one",
        microbatch_size=2,
        population=RECORDS,
    )
    steps = iter(run)
    next(steps)  # what is made once
    before = resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    next(steps)
    parts = run._setup.rows.micro_batch_size
    print(json.dumps({"peak": resident("VmHWM") - before, "parameters": 4 * SIZE**2, "size": parts}))


if __name__ == "__main__":
    main()
