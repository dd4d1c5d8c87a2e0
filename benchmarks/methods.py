"""What a step of every method costs beside DP-SGD's and plain training's, in time and memory, in one run.

Each method of the table runs through ``PrivateTraining`` on the fixed batch of a task of ``tasks.py``, in a
process of its own; rounds visit the methods in turn. Times are means over a visit, since methods with an
anchor or a refresh spend their time unevenly; ratios are taken round by round, and their median and quartiles
reported. Memory is as in step_time.py. Methods that take public records get 100;
``NAME:KEY=VALUE`` gives a method a setting.

    python benchmarks/methods.py                          # all methods, on the CNN and the small transformer
    python benchmarks/methods.py --tasks cnn --methods dice-sgd pcdp-sgd:source.basis=held --rounds 9
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from step_time import PREFIX, start

BASE = "dp-sgd"


def measure(task: str, methods: list[str], rounds: int, threads: int, **visit: float) -> dict[str, dict]:
    """By method: ms per step, ratios to DP-SGD and to plain training with quartiles, extra memory."""
    names = ["plain", *(PREFIX + method for method in methods)]
    workers, failed = start(task, names, threads)
    times: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(rounds):
        for name, process in workers.items():
            times[name].append(process.ask(do="time", **visit)["mean"])
    rows: dict[str, dict] = {name: {"failed": why} for name, why in failed.items()}
    for name, own in times.items():
        rows[name] = {"ms": 1000 * statistics.median(own), "extra_mb": workers[name].ask(do="memory")["mb"]}
        workers[name].close()
        for label, other in (("to_plain", "plain"), ("to_dp_sgd", PREFIX + BASE)):
            if other in times:
                rows[name][label] = spread([t / o for t, o in zip(own, times[other], strict=True)])
    return {name.removeprefix(PREFIX): row for name, row in rows.items()}


def spread(values: list[float]) -> list[float]:
    """Median and quartiles."""
    if len(values) == 1:
        return values * 3
    low, middle, high = statistics.quantiles(values, n=4)
    return [middle, low, high]


def line(name: str, row: dict) -> str:
    """A row for people."""
    if "failed" in row:
        return f"{name:24} failed: {row['failed']}"
    shown = f"{name:24} {row['ms']:9.2f} ms"
    for label in ("to_dp_sgd", "to_plain"):
        if label in row:
            middle, low, high = row[label]
            shown += f"  {label} {middle:5.2f} [{low:5.2f}, {high:5.2f}]"
    return shown + (f"  extra {row['extra_mb']:6.0f} MB" if "extra_mb" in row else "")


def main() -> None:
    """Run and print."""
    from equipoise.methods import METHODS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=["cnn", "gpt2lin"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="time of one visit to one method")
    parser.add_argument("--steps", type=int, default=2, help="steps of a visit, at least")
    parser.add_argument(
        "--processor", action="store_true", help="processor time, for a crowded machine: with --threads 1"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the results as JSON here")
    arguments = parser.parse_args()
    methods = [BASE, *(method for method in arguments.methods if method != BASE)]
    results = {}
    for task in arguments.tasks:
        visit = {"seconds": arguments.seconds, "steps": arguments.steps, "processor": arguments.processor}
        rows = measure(task, methods, arguments.rounds, arguments.threads, **visit)
        results[task] = rows
        print(f"\n{task}", *(line(name, row) for name, row in rows.items()), sep="\n", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
