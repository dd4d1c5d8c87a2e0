"""What explains the order of methods: what clipping and noise do to DP-SGD on the bench's linear models.

    python -m benchmarks.whole_data.explain --folder DATA [--data mnist]

It is DP-SGD without momentum, at the settings that the bench chose, at the end of a training on all private
training records. What is printed reads those records without privacy. It is the median of the bench's five
seeds; asymmetry has the range, and the tail is that of seed 0, which is trained again:

- parameters, and the share of the records' gradients that are longer than the clip norm;
- asymmetry: of what clipping cuts off, the share that does not cancel (1: it all points one way);
- bias and noise of a step, each relative to the mean gradient: its norm, and the norm of the noise in all
  parameters;
- tail: the share of the sum of all norms that the longest hundredth of the gradients has.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.whole_data.__main__ import RESULTS
from benchmarks.whole_data.cells import SEEDS, Bench, measure
from benchmarks.whole_data.problems import LINEAR, Problem


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("data"), help="of the data sets")
    parser.add_argument("--data", nargs="+", choices=LINEAR, default=LINEAR)
    given = parser.parse_args()
    bench = Bench(RESULTS, partial(Problem.load, folder=given.folder), train=False)
    print("| data | ε | parameters | clipped | asymmetry | bias | noise | tail |")
    print("|---|---|---|---|---|---|---|---|")
    for name in given.data:
        problem = Problem.load(name, given.folder)
        size = sum(p.numel() for p in problem.model().parameters())
        for epsilon in (1.0, 3.0, 8.0):
            point, _, runs = bench.cell(name, "dp-sgd", epsilon)
            clipped = median(run["clipped"] for run in runs)
            asymmetries = sorted(run["asymmetry"] for run in runs)
            bias, noise = (median(run[part] / run["gradient"] for run in runs) for part in ("bias", "noise"))
            tail = measure(problem, "dp-sgd", epsilon, point, SEEDS[0], "test")["tail"]
            print(
                f"| {name} | {epsilon:g} | {size:,} | {clipped:.0%} | {median(asymmetries):.2f} "
                f"[{asymmetries[0]:.2f}, {asymmetries[-1]:.2f}] | {bias:.2f} | {noise:.1f} | {tail:.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
