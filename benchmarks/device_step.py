"""What a step of `PrivateTraining` does on a GPU: its start, its wall time, its kernels, and where it waits.

    python benchmarks/device_step.py --tasks mlp-16 mlp cnn gpt2     # a row for each as it ends
    python benchmarks/device_step.py --tasks mlp --on cpu            # in small, where there is no GPU

Waits are those that CUDA reports (`torch.cuda.set_sync_debug_mode`), with the line that waits; kernels are
counted by PyTorch's profiler, where a graph counts with all that it holds, and `launches` are the calls with
which the host starts them. `--check` ends with 1 if a step waits or launches more often than it may.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import equipoise as eq

sys.path.insert(0, str(Path(__file__).parent))
from step_time import private_training
from tasks import TASKS

PACKAGE = str(Path(eq.__file__).parent) + "/"
SETTLED = 10  # steps until all that can be captured is launched as a graph
WAITS, LAUNCHES = 2, 20  # of a step at most: small networks, DP-SGD
LAUNCHED_BY = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cudaGraphLaunch",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
)


def waits_of(steps: Any) -> collections.Counter[str]:
    """Where the host waits for the device in the next step."""
    found: collections.Counter[str] = collections.Counter()

    def note(message: Any, *given: Any, **options: Any) -> None:
        own = [frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
        place = f"{own[-1].filename.removeprefix(PACKAGE)}:{own[-1].lineno}" if own else "outside"
        found[place] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            next(steps)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found


def kernels_of(steps: Any) -> tuple[int, float, int]:
    """Kernels of the next step, their milliseconds, and the calls that start them."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        next(steps)
        torch.cuda.synchronize()
    events = profiled.key_averages()
    kernels = [event for event in events if str(event.device_type).endswith("CUDA")]
    milliseconds = sum(event.self_device_time_total for event in kernels) / 1e3
    launches = sum(event.count for event in events if event.key in LAUNCHED_BY)
    return sum(event.count for event in kernels), milliseconds, launches


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=["mlp-16", "mlp", "cnn", "gpt2"], choices=[*TASKS])
    parser.add_argument("--on", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed")
    parser.add_argument("--check", action="store_true", help="fail where a step waits or launches too often")
    given = parser.parse_args()
    on_gpu, too_many = given.on.startswith("cuda"), []
    for name in given.tasks:
        torch.manual_seed(0)
        task = TASKS[name]().to(given.on)
        started = time.perf_counter()
        training = private_training(task)
        steps = iter(training)
        next(steps)
        start = time.perf_counter() - started
        for _ in range(SETTLED):
            next(steps)
        times = []
        for _ in range(given.steps):
            begun = time.perf_counter()
            next(steps)
            times.append(1e3 * (time.perf_counter() - begun))
        row = f"{name:16} start {start:6.2f} s, step {sorted(times)[len(times) // 2]:8.3f} ms"
        if on_gpu:
            waits, (kernels, busy, launches) = waits_of(steps), kernels_of(steps)
            row += f", {kernels:5} kernels of {busy:8.3f} ms in {launches:4} launches, waits {waits.total()}"
            row += f", memory {torch.cuda.max_memory_allocated() / 1e6:,.0f} MB"
            if waits.total() > WAITS or launches > LAUNCHES:
                too_many.append(name)
        print(row, flush=True)
        if on_gpu:
            print(f"    launched {training.describe().way_of_launching}", flush=True)
            for place, count in waits.most_common():
                print(f"    waits {count} at {place}", flush=True)
            torch.cuda.reset_peak_memory_stats()
    if given.check and too_many:
        sys.exit(f"at most {WAITS} waits and {LAUNCHES} launches: {', '.join(too_many)}")


if __name__ == "__main__":
    main()
