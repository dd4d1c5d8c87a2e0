"""What explains the order of methods: what clipping and noise do to DP-SGD on the bench's linear models.

    python -m benchmarks.whole_data.explain --folder DATA [--data mnist]

DP-SGD without momentum is trained again, at the settings that the bench chose, with seed 0 on all private
training records. What is printed is of the end of the training, and reads those records without privacy:

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

from benchmarks.whole_data.__main__ import RESULTS
from benchmarks.whole_data.cells import SEEDS, Bench, measure
from benchmarks.whole_data.problems import DESIGNS, Problem, linear


def main() -> None:
    linear_ones = [name for name, design in DESIGNS.items() if design.network is linear]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("data"), help="of the data sets")
    parser.add_argument("--data", nargs="+", choices=linear_ones, default=linear_ones)
    given = parser.parse_args()
    bench = Bench(RESULTS, partial(Problem.load, folder=given.folder), train=False)
    print("| data | ε | parameters | clipped | asymmetry | bias | noise | tail |")
    print("|---|---|---|---|---|---|---|---|")
    for name in given.data:
        problem = Problem.load(name, given.folder)
        size = sum(p.numel() for p in problem.model().parameters())
        for epsilon in (1.0, 3.0, 8.0):
            point = bench.cell(name, "dp-sgd", epsilon).point
            found = measure(problem, "dp-sgd", epsilon, point, SEEDS[0], "test")
            bias, noise = (found[part] / found["gradient"] for part in ("bias", "noise"))
            print(
                f"| {name} | {epsilon:g} | {size:,} | {found['clipped']:.0%} | {found['asymmetry']:.2f} | "
                f"{bias:.2f} | {noise:.1f} | {found['tail']:.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
