"""Medians and spreads over seeds, as tables."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.whole_data.cells import Tuned
from benchmarks.whole_data.contenders import CONTENDERS
from benchmarks.whole_data.problems import DESIGNS
from equipoise.report.comparison_page import told_apart

Cell = tuple[str, str, float | None]
Done = Mapping[Cell, Tuned]

LEVEL = 0.3
"""Points of accuracy by which a method must be ahead before it is preferred to a simpler one."""

SIMPLEST = ("dp-sgd", "auto-s")
NEED_PUBLIC_RECORDS = ("pcdp-sgd", "public-warm-start")

AS_OPTIONS = {
    "dp-sgd": "--method dp-sgd",
    "auto-s": "--method dp-sgd --clip-rule auto_s",
    "quantile-clipping": "--method dp-sgd --clip-norm quantile",
}
"""Settings of DP-SGD that are compared as methods of their own."""

FORMS = ("dp-sgd", "dp-sgd, momentum", "dp-sgd, adam")
"""Of DP-SGD. The one that is best on the held-out records is what the others are held against."""


def rows(done: Done) -> list[dict[str, Any]]:
    """A row per cell, in the order in which they come."""
    found = []
    for (data, method, epsilon), ((clip_norm, _), _, results) in done.items():
        accuracies = [result["accuracy"] for result in results]
        row = {"data": data, "method": method, "epsilon": epsilon, "clip_norm": clip_norm}
        row |= {"steps": DESIGNS[data].steps, "draws": DESIGNS[data].draws}
        row |= {
            "batch": round(results[0]["batch"]),
            "rate": float(f"{results[0]['rate']:.6g}"),
            "median": round(statistics.median(accuracies), 2),
        }
        row |= {"lowest": round(min(accuracies), 2), "highest": round(max(accuracies), 2)}
        share = row["median"] / 100
        row |= {"score": row["median"], "scores": accuracies}
        judged = results[0]["judges"] * DESIGNS[data].labels
        row["sampling_error"] = 100 * (share * (1 - share) / judged) ** 0.5
        row["cpu_seconds"] = round(statistics.median(result["cpu_seconds"] for result in results), 2)
        found.append(row)
    return found


def choices(done: Done) -> str:
    """A table as CSV, by data set and epsilon: the simplest private method that is level, as a command.

    Level are those whose median is within `LEVEL` points of the best. The simplest is DP-SGD, then AUTO-S; of
    others the best is taken. What `equipoise train` has no model for, or needs public records, is left out.
    """
    out = io.StringIO()
    written = csv.writer(out, lineterminator="\n")
    written.writerow(("data, ε", "accuracy", "best of the methods", "what to give equipoise train"))
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in rows(done):
        contender = CONTENDERS.get(row["method"])
        public = row["method"].partition(",")[0] in NEED_PUBLIC_RECORDS
        if contender is not None and contender.private and DESIGNS[row["data"]].options and not public:
            found.setdefault((row["data"], row["epsilon"]), []).append(row)
    for (data, epsilon), cell in sorted(
        found.items(), key=lambda one: (list(DESIGNS).index(one[0][0]), one[0][1])
    ):
        cell.sort(key=lambda row: -row["median"])
        level = [row for row in cell if row["median"] >= cell[0]["median"] - LEVEL]
        simple = (row for kind in SIMPLEST for row in level if row["method"].partition(",")[0] == kind)
        one = next(simple, cell[0])
        spread = f"{one['median']:.2f} [{one['lowest']:.2f}, {one['highest']:.2f}]"
        best = f"{cell[0]['method']} {cell[0]['median']:.2f}"
        written.writerow((f"{data}, {epsilon:g}", spread, best, _words(one, epsilon)))
    return out.getvalue()


def _words(row: Mapping[str, Any], epsilon: float) -> str:
    """The options of `equipoise train` that train a row."""
    contender = CONTENDERS[row["method"]]
    words = [f"{DESIGNS[row['data']].options} --epsilon {epsilon:g}"]
    words.append(AS_OPTIONS.get(name := row["method"].partition(",")[0], f"--method {name}"))
    words.append(f"--clip-norm {row['clip_norm']:g}" if "--clip-norm" not in words[-1] else "")
    words.append(f"--learning-rate {row['rate']:g} --schedule linear --batch-size {row['batch']}")
    words.append(f"--epochs {row['steps'] / row['draws']:g}")
    words.append("--optimizer adam" if contender.adam else f"--momentum {contender.momentum:g}")
    return " ".join(filter(None, words))


def table(done: Done) -> str:
    """A table in Markdown per data set, methods by epsilon: median [lowest, highest]; clip norm, rate."""
    by_data: dict[str, dict[str, dict[float | None, dict[str, Any]]]] = {}
    for row in rows(done):
        by_data.setdefault(row["data"], {}).setdefault(row["method"], {})[row["epsilon"]] = row
    lines = []
    for data, methods in by_data.items():
        epsilons = sorted({epsilon for found in methods.values() for epsilon in found if epsilon is not None})
        lines += ["", f"## {data}", ""]
        lines.append("| method | " + " | ".join(f"ε = {epsilon:g}" for epsilon in epsilons) + " | CPU s |")
        lines.append("|---" * (len(epsilons) + 2) + "|")
        for method, found in methods.items():
            shown = [_shown(found.get(epsilon, found.get(None))) for epsilon in epsilons]
            seconds = statistics.median(row["cpu_seconds"] for row in found.values())
            lines.append(f"| {method} | " + " | ".join(shown) + f" | {seconds:.1f} |")
    return "\n".join(lines)


def ahead(done: Done) -> str:
    """A table in Markdown, by data set and epsilon: who is told apart from DP-SGD.

    Each cell names the form of DP-SGD with the best held-out accuracy, or those that share it, then the
    methods that are ahead beyond the seeds and two standard errors of the test records, with the points
    between the medians.
    """
    found = {(row["data"], row["method"], row["epsilon"]): row for row in rows(done)}
    epsilons = sorted({epsilon for _, _, epsilon in found if epsilon is not None})
    lines = ["| data | " + " | ".join(f"ε = {epsilon:g}" for epsilon in epsilons) + " |"]
    lines.append("|---" * (len(epsilons) + 1) + "|")
    for data in dict.fromkeys(data for data, _, _ in found):
        cells = [_ahead(done, found, data, epsilon) for epsilon in epsilons]
        lines.append(f"| {data} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ahead(done: Done, found: Mapping[Cell, Mapping[str, Any]], data: str, epsilon: float) -> str:
    held_out = {form: done[data, form, epsilon].held_out for form in FORMS if (data, form, epsilon) in done}
    if not held_out:
        return ""
    best = [form for form, accuracy in held_out.items() if accuracy == max(held_out.values())]
    forms = [found[data, form, epsilon] for form in best]
    bar = max(found[data, form, epsilon]["median"] for form in best)
    gains = {
        method: row["median"] - bar
        for (where, method, at), row in found.items()
        if where == data
        and at == epsilon
        and method in CONTENDERS
        and method not in FORMS
        and all(told_apart(row, form) for form in forms)
    }
    named = [f"{method} {gains[method]:.1f}" for method in sorted(gains, key=lambda name: -gains[name])]
    return f"{' and '.join(best)}: {'; '.join(named) or 'nobody'}"


def _shown(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    spread = f"[{row['lowest']:.2f}, {row['highest']:.2f}]"
    return f"{row['median']:.2f} {spread}; {row['clip_norm']:g}, {row['rate']:g}"
