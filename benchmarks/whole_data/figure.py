"""The README's picture: accuracy on MNIST against epsilon, from the runs in the results file.

    python -m benchmarks.whole_data.figure [docs/figures/mnist.png]

Trains nothing. Each point is the median of five seeds, each bar their range. The form of DP-SGD and the other
method are the ones with the best accuracy on held-out training records, at each epsilon by itself.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.whole_data.__main__ import RESULTS
from benchmarks.whole_data.cells import Bench, Tuned
from benchmarks.whole_data.contenders import CONTENDERS
from benchmarks.whole_data.problems import Problem
from benchmarks.whole_data.tables import FORMS

DATA, EPSILONS = "mnist", (1.0, 3.0, 8.0)
WITHOUT = ("sgd", "sgd, momentum")


def main() -> None:
    """Draw it and say what was drawn."""
    file = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/figures/mnist.png")
    bench = Bench(RESULTS, Problem.load, train=False)

    def best(methods: tuple[str, ...], epsilon: float | None) -> tuple[str, Tuned]:
        cells = {method: bench.cell(DATA, method, epsilon) for method in methods}
        return max(cells.items(), key=lambda cell: cell[1].held_out or 0)

    private = tuple(name for name, contender in CONTENDERS.items() if contender.private)
    lines: dict[str, tuple[str, Callable[[float], tuple[str, Tuned]]]] = {
        "best method": ("#2166ac", lambda epsilon: best(private, epsilon)),
        "DP-SGD, tuned": ("#e08214", lambda epsilon: best(FORMS, epsilon)),
        "SGD without privacy, tuned": ("#777777", lambda epsilon: best(WITHOUT, None)),
    }
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for place, (label, (colour, of)) in enumerate(lines.items()):
        names, medians, below, above = [], [], [], []
        for epsilon in EPSILONS:
            name, tuned = of(epsilon)
            accuracies = [result["accuracy"] for result in tuned.results]
            median = statistics.median(accuracies)
            names.append(name)
            medians.append(median)
            below.append(median - min(accuracies))
            above.append(max(accuracies) - median)
            print(
                f"{label} at {epsilon:g}: {name}, {median:.2f} [{min(accuracies):.2f}, {max(accuracies):.2f}]"
            )
        # Side by side, so that bars of different lines do not cover each other.
        x = [position + 0.06 * (place - 1) for position in range(len(EPSILONS))]
        style = "--" if label.startswith("SGD") else "-"
        shown = f"{label}: {names[0]}" if label.startswith("best") and len(set(names)) == 1 else label
        axes.errorbar(x, medians, yerr=[below, above], fmt="o" + style, color=colour, capsize=3, label=shown)
    axes.set_xticks(range(len(EPSILONS)), [f"ε = {epsilon:g}" for epsilon in EPSILONS])
    axes.set_ylabel("test accuracy, %")
    axes.set_title("MNIST, a linear model on 400 public features, 100 steps, δ = 1e-5", fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="center right")
    figure.savefig(file, dpi=160)


if __name__ == "__main__":
    main()
