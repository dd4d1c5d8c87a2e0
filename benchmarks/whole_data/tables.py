"""Medians and spreads over seeds, for people and for the package."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.whole_data.cells import Tuned
from benchmarks.whole_data.contenders import CONTENDERS
from benchmarks.whole_data.problems import DESIGNS

Cell = tuple[str, str, float | None]
Done = Mapping[Cell, Tuned]

FORMS = ("dp-sgd", "dp-sgd, momentum", "dp-sgd, adam")
"""Of DP-SGD. The one that is best on the held-out records is what the others are held against."""


def rows(done: Done) -> list[dict[str, Any]]:
    """A row per cell, in the order in which they come."""
    found = []
    for (data, method, epsilon), ((clip_norm, _), _, results) in done.items():
        accuracies = [result["accuracy"] for result in results]
        row = {"data": data, "method": method, "epsilon": epsilon, "clip_norm": clip_norm}
        row |= {"model": DESIGNS[data].model, "steps": DESIGNS[data].steps, "draws": DESIGNS[data].draws}
        row |= {
            "batch": round(results[0]["batch"]),
            "rate": float(f"{results[0]['rate']:.6g}"),
            "median": round(statistics.median(accuracies), 2),
        }
        row |= {"lowest": round(min(accuracies), 2), "highest": round(max(accuracies), 2)}
        row["cpu_seconds"] = round(statistics.median(result["cpu_seconds"] for result in results), 2)
        found.append(row)
    return found


def summary(done: Done) -> str:
    """JSON, a line per private method and model that `equipoise train` knows, as its command names things."""
    private = {name for name, contender in CONTENDERS.items() if contender.private}
    kept = [row for row in rows(done) if row["model"] is not None and row["method"] in private]
    for row in kept:
        del row["cpu_seconds"]
    named = (json.dumps(row | _for_command(row)) for row in kept)
    return "[\n" + ",\n".join(named) + "\n]\n"


def _for_command(row: Mapping[str, Any]) -> dict[str, Any]:
    """The data set, and the optimiser of the method."""
    contender = CONTENDERS.get(row["method"], CONTENDERS["dp-sgd"])
    found = {"data": DESIGNS[row["data"]].data or row["data"]}
    return found | {"optimizer": "adam" if contender.adam else "sgd", "momentum": contender.momentum}


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
    """A table in Markdown, by data set and epsilon: who is ahead of DP-SGD beyond the seeds.

    Each cell names the form of DP-SGD with the best held-out accuracy, or those that share it, then the
    methods whose lowest seed is above its highest one, with the points between the medians.
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
    highest = max(found[data, form, epsilon]["highest"] for form in best)
    bar = max(found[data, form, epsilon]["median"] for form in best)
    gains = {
        method: row["median"] - bar
        for (where, method, at), row in found.items()
        if where == data
        and at == epsilon
        and method in CONTENDERS
        and method not in FORMS
        and row["lowest"] > highest
    }
    named = [f"{method} {gains[method]:.1f}" for method in sorted(gains, key=lambda name: -gains[name])]
    return f"{' and '.join(best)}: {'; '.join(named) or 'nobody'}"


def _shown(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    spread = f"[{row['lowest']:.2f}, {row['highest']:.2f}]"
    return f"{row['median']:.2f} {spread}; {row['clip_norm']:g}, {row['rate']:g}"
