"""Where the time of a step of `PrivateTraining` goes, by timers around its parts.

A part counts with the wall time of its functions, less that of other parts which they call. Reported is the
lowest decile of each part over the steps, because whatever disturbs a step makes it longer, as a share of the
sum of all. What no part claims is the last row. Training has one thread, and keeps its journal in memory.

    python benchmarks/step_parts.py --tasks mlp-16 cnn-16 mlp gpt2
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from equipoise.gradients.engine import GradientEngine
from equipoise.gradients.trace import Replayed, Traced
from equipoise.methods import estimator
from equipoise.privacy.digests import KeyedDigest
from equipoise.privacy.ledger.ledger import Ledger
from equipoise.training import forwards, step
from equipoise.training.constants import Constants
from equipoise.training.record_source import RecordSource
from equipoise.training.watch import Watch

sys.path.insert(0, str(Path(__file__).parent))
from step_time import BUILDERS
from tasks import TASKS

PARTS: dict[str, list[tuple[Any, str]]] = {
    "forward, backward, norms": [(Traced, "gradients")],
    "guards of the forward": [
        (GradientEngine, "by_plan"),
        (forwards.RowSource, "of_batch"),  # starts the random numbers of a forward, and puts them back
    ],
    "clip weights, weighted sums": [(Replayed, "weighed")],
    "digests": [(KeyedDigest, "__call__"), (step, "read")],
    "noise": [(Ledger, "_noised")],
    "estimate and its norm": [(estimator, "mean_of"), (step, "norm_of_all")],
    "optimiser": [(torch.optim.SGD, "step")],
    "draw, reading, filling": [
        (Ledger, "sample"),
        (RecordSource, "read"),
        (forwards.RowSource, "_batch"),
    ],
    "ledger, journal, finite sums": [(Ledger, "release"), (Ledger, "open")],
    "watch over model and optimiser": [
        (Watch, "begin"),
        (Watch, "step"),
        (Watch, "now"),
        (Constants, "check"),
    ],
}
"""By part: owners and names of its functions."""

REST = "everything else"


class Clock:
    """Time by part, each without that of the parts within it."""

    def __init__(self) -> None:
        self.seconds: collections.Counter[str] = collections.Counter()
        self._part, self._since = REST, 0.0

    @contextlib.contextmanager
    def within(self, part: str) -> Iterator[None]:
        outer = self._switch(part)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, part: str) -> str:
        now, outer = time.perf_counter(), self._part
        self.seconds[outer] += now - self._since
        self._part, self._since = part, time.perf_counter()
        return outer

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.within(part):
                return function(*args, **kwargs)

        return run


def shares(task_name: str, steps: int) -> dict[str, float]:
    """By part: its share of a step."""
    torch.manual_seed(0)
    clock = Clock()
    found: dict[str, list[float]] = {part: [] for part in (*PARTS, REST)}
    with contextlib.ExitStack() as stack:
        for part, functions in PARTS.items():
            for owner, name in functions:
                timed = clock.timed(part, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, timed))
        take = BUILDERS["ours-training"](TASKS[task_name]())
        for number in range(steps + 3):
            clock.seconds.clear()
            with clock.within(REST):
                take()
            if number >= 3:  # the first make what is made only once
                for part, times in found.items():
                    times.append(clock.seconds[part])
    lowest = {part: statistics.quantiles(times, n=10, method="inclusive")[0] for part, times in found.items()}
    return {part: seconds / sum(lowest.values()) for part, seconds in lowest.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=["mlp-16", "cnn-16", "mlp", "gpt2"], choices=[*TASKS])
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [shares(task, arguments.steps) for task in arguments.tasks]
    print("| part |", " | ".join(arguments.tasks), "|")
    for part in rows[0]:
        print(f"| {part} |", " | ".join(f"{row[part]:.1%}" for row in rows), "|")


if __name__ == "__main__":
    main()
