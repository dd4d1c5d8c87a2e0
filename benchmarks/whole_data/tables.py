"""Medians and spreads over seeds, for people and for the package."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.whole_data.contenders import CONTENDERS
from benchmarks.whole_data.problems import DESIGNS

Cell = tuple[str, str, float | None]
Done = Mapping[Cell, tuple[tuple[float, float], list[dict[str, Any]]]]


def rows(done: Done) -> list[dict[str, Any]]:
    """A row per cell, in the order in which they come."""
    found = []
    for (data, method, epsilon), ((clip_norm, _), results) in done.items():
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
        for name in ("clipped", "asymmetry", "bias", "gradient", "noise"):
            if name in results[0]:
                row[name] = round(statistics.median(result[name] for result in results), 4)
        found.append(row)
    return found


def summary(done: Done) -> str:
    """JSON, a line per row of a model that `equipoise train` knows, as its command names things."""
    named = (json.dumps(row | _for_command(row)) for row in rows(done) if row["model"] is not None)
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


def _shown(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    spread = f"[{row['lowest']:.2f}, {row['highest']:.2f}]"
    return f"{row['median']:.2f} {spread}; {row['clip_norm']:g}, {row['rate']:g}"
