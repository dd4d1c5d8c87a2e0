"""Every method on whole data sets: what is missing in a file is run, until it is complete or stopped.

    python -m benchmarks.whole_data --folder DATA [--out FILE] [--minutes M] [--data mnist] [--methods dp-sgd]
    python -m benchmarks.whole_data --table [--out FILE]

Noise and draws follow public seeds: this measures accuracy, and its runs are not private.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

from benchmarks.whole_data.cells import PARTS, Bench, NotRun, TimeIsUp, cells
from benchmarks.whole_data.contenders import CONTENDERS
from benchmarks.whole_data.problems import DESIGNS, Problem
from benchmarks.whole_data.tables import ahead, choices, table

METHODS = (*CONTENDERS, *PARTS)
RESULTS = Path(__file__).with_name("results.jsonl")
"""What was run so far."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("data"), help="of the data sets")
    parser.add_argument("--out", type=Path, default=RESULTS, help="one line per run")
    parser.add_argument("--minutes", type=float, default=None, help="begin no run after so many")
    parser.add_argument("--data", nargs="+", choices=DESIGNS, default=list(DESIGNS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[3.0, 1.0, 8.0])
    parser.add_argument("--table", action="store_true", help="run nothing, and show what is there")
    parser.add_argument("--choices", action="store_true", help="print methods-settings.csv of docs")
    given = parser.parse_args()
    wanted = list(cells(tuple(given.data), tuple(given.methods), tuple(given.epsilons)))
    until = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    bench = Bench(given.out, partial(Problem.load, folder=given.folder), until, train=not given.table)
    done = {}
    for cell in wanted:
        try:
            done[cell] = bench.cell(*cell)
        except NotRun:
            continue
        except TimeIsUp:
            print("The minutes are over: the same command goes on from here.")
            break
        if not given.table:
            accuracies = sorted(round(result["accuracy"], 2) for result in done[cell].results)
            print(*cell, done[cell].point, accuracies, flush=True)
    print(table(done))
    print("\n## Told apart from the form of DP-SGD with the best held-out accuracy\n")
    print(ahead(done))
    if given.choices:
        print("\n" + choices(done))


if __name__ == "__main__":
    main()
