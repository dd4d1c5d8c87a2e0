"""The page and the table of a comparison of methods, only from the plain values of `comparison.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise._files import PathLike
from equipoise._rounding import plain, rounded_up, significant
from equipoise.report.figures import COLOURS, Curve, chart
from equipoise.report.pages import badge, data_in_words, figure, render, write_page
from equipoise.report.phrases import PERCENTAGES, bytes_in_words, readable, score_name, unit_in_words

if TYPE_CHECKING:
    from rich.console import RenderableType

SEARCH = (
    "The search for learning rates is not accounted, and neither are the runs with other seeds: each epsilon "
    "is that of a single run, started with settings that were known beforehand. Whoever searches on private "
    "data spends the budget of every trial, or makes a random number of runs, uses the best alone and "
    "charges it for the choice: equipoise search."
)


_PUBLISHABLE = ("comparison.html", "comparison.json", "runs/")


def write_comparison(values: Mapping[str, Any], folder: PathLike) -> Path:
    """Write ``comparison.html`` into a folder and return its path."""
    return write_page(render_comparison(values), folder, "comparison.html")


def render_comparison(values: Mapping[str, Any]) -> str:
    """The page as text; it loads nothing and runs nothing."""
    methods, name = values["methods"], score_name(values["score"])
    unequal = [m["label"] for m in methods if not _is_equal(m, values["epsilon"]) and not _is_plain(m)]
    references = [m["label"] for m in methods if _is_plain(m)]
    runs = {m["label"]: len(m["scores"]) + len(m["trials"]) for m in methods}
    is_proven = not unequal and not references
    spent = sum(runs[m["label"]] * m["statement"]["epsilon"] for m in methods) if is_proven else 0.0
    return render(
        kind="comparison of methods",
        what="comparison",
        title=f"{len(methods)} methods on {values['data']}",
        subtitle=_subtitle(values),
        figures=_figures(values),
        seeded=values["reproducible"],
        guarantee="proven" if is_proven else "none",
        unequal=unequal,
        references=references,
        warnings=[SEARCH],
        score=readable(name),
        best="Higher" if values["more_is_better"] else "Lower",
        baseline=f"{values['baseline_answer']} would be at {_score(values, values['baseline'])}",
        charts=chart(
            f"{readable(name)} along the training",
            "",
            # the median of the seeds, with their least and most
            [
                Curve(m["label"], *zip(*m["curve"], strict=True))
                for m in methods[: len(COLOURS)]
                if m["curve"]
            ],
            x_label="step",
            percent=values["score"] in PERCENTAGES,
        ),
        seeds=values["seeds"],
        judges=methods[0]["judges"],
        rows=table_rows(values),
        device=values["device"],
        data=_data(values),
        command=values["command"],
        publishable=_PUBLISHABLE,
        runs=sum(runs.values()),
        spent=rounded_up(spent),
        deltas=plain(sum(runs.values()) * values["delta"]),
    )


def table_rows(values: Mapping[str, Any]) -> list[list[Any]]:
    """The cells of the table, one row per method; what is small below a figure stands behind it in a list."""
    rows: list[list[Any]] = []
    for method in values["methods"]:
        statement, memory = method["statement"], method["memory_bytes"]
        epsilon, claimed = statement["epsilon"], statement["epsilon_claimed"]
        times = method["seconds_per_step"] / values["methods"][0]["seconds_per_step"]
        low, high = (_score(values, end(method["scores"])) for end in (min, max))
        rows.append(
            [
                method["label"],
                [_score(values, method["score"]), f"{low} to {high}", f"± {_error(values, method)}"],
                [
                    "none" if epsilon is None else rounded_up(epsilon),
                    "" if claimed is None else f"paper: {plain(claimed, 4)}",
                ],
                badge(statement["guarantee"]),
                plain(method["learning_rate"], 4),
                [f"{significant(1000 * method['seconds_per_step'])} ms", f"x{times:.2f}"],
                # none on a processor, whose memory holds what else the process does
                "–" if memory is None else bytes_in_words(memory),
            ]
        )
    return rows


def comparison_table(values: Mapping[str, Any]) -> RenderableType:
    """The table for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("method", style="bold", no_wrap=True)
    for name in (
        f"median {score_name(values['score'])}",
        "of the seeds",
        "epsilon",
        "guarantee",
        "rate",
        "time",
    ):
        table.add_column(name, justify="left" if name == "guarantee" else "right")
    styles = {"good": "green", "mid": "yellow", "bad": "bold red"}
    for label, (score, spread, error), (epsilon, _), proof, rate, (_, times), _ in table_rows(values):
        word = Text(proof["word"], style=styles[proof["tone"]])
        table.add_row(label, f"{score} {error}", spread, epsilon, word, rate, times)
    error = f"± is a standard error: another sample of {values['methods'][0]['judges']:,} test records."
    return Group(table, Text(), Text(f"{_verdict(values)} {error}"), Text(), Text(SEARCH, style="dim"))


def _subtitle(values: Mapping[str, Any]) -> str:
    public = values["public_records"]
    parts = [
        str(values["model"]),
        f"{values['population']:,} private records" + (f", {public:,} public ones" if public else ""),
        f"epsilon {plain(values['epsilon'])} at delta {plain(values['delta'])}",
        f"{values['seeds']} seed{'s' if values['seeds'] > 1 else ''} each",
        *([f"finished {values['finished']}"] if values.get("finished") else []),
    ]
    return " · ".join(parts)


def _data(values: Mapping[str, Any]) -> list[str]:
    """What the records are, and what one of them is to the statements."""
    facts = data_in_words(values["data"], values.get("data_description"), values)
    units = {m["statement"].get("unit", "record") for m in values["methods"] if not _is_plain(m)}
    return [*facts, *(unit_in_words(str(unit)) for unit in sorted(units))]


def _score(values: Mapping[str, Any], score: float) -> str:
    """A score in words: shares of records as percentages."""
    return f"{score:.2%}" if values["score"] in PERCENTAGES else f"{score:.4g}"


def _error(values: Mapping[str, Any], method: Mapping[str, Any]) -> str:
    """The standard error of a score; of shares in percentage points."""
    error = method["sampling_error"]
    return f"{100 * error:.2f}" if values["score"] in PERCENTAGES else f"{error:.2g}"


def told_apart(best: Mapping[str, Any], other: Mapping[str, Any], more_is_better: bool = True) -> bool:
    """Whether a method is ahead of another by more than chance explains.

    A gap may come from the seeds or from which records were there to judge, so it must be beyond both. The
    standard errors are added as if of different records, which overstates that of the gap.

    Args:
        best, other: with `scores` of the seeds, their median `score`, and its `sampling_error`.
        more_is_better: of a score.

    >>> near = {"scores": [0.90, 0.91], "score": 0.905, "sampling_error": 0.01}
    >>> told_apart({**near, "scores": [0.92, 0.93], "score": 0.925}, near)
    False
    >>> told_apart({**near, "scores": [0.94, 0.95], "score": 0.945}, near)
    True
    """
    sign = 1 if more_is_better else -1
    worst, rival = min(sign * x for x in best["scores"]), max(sign * x for x in other["scores"])
    error = 2 * math.hypot(best["sampling_error"], other["sampling_error"])
    return worst > rival and sign * (best["score"] - other["score"]) > error


def _ranked(values: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The methods at the budget, best median first, and the labels of those not told apart from the first."""
    sign = 1 if values["more_is_better"] else -1
    at_budget = [m for m in values["methods"] if _is_equal(m, values["epsilon"])]
    ranked = sorted(at_budget or values["methods"], key=lambda m: -sign * m["score"])
    best = ranked[0]
    apart = [told_apart(best, m, values["more_is_better"]) for m in ranked[1:]]
    return ranked, [m["label"] for m, is_apart in zip(ranked[1:], apart, strict=True) if not is_apart]


def _verdict(values: Mapping[str, Any]) -> str:
    """Who is ahead, in a sentence."""
    ranked, rivals = _ranked(values)
    if len(ranked) == 1:
        return "No other method at this budget was compared."
    if rivals:
        return f"{ranked[0]['label']} is not told apart from {', '.join(rivals)}."
    return (
        f"{ranked[0]['label']} is ahead: its worst seed is better than the others' best, by more than two "
        "standard errors of the test records."
    )


def _figures(values: Mapping[str, Any]) -> list[dict[str, str]]:
    best = _ranked(values)[0][0]
    without = [m for m in values["methods"] if _is_plain(m)][:1]
    return [
        figure(
            f"Best median {score_name(values['score'])}",
            _score(values, best["score"]),
            _verdict(values),
            unit=best["label"],
        ),
        *(figure("Without privacy", _score(values, m["score"]), unit=m["label"]) for m in without),
        figure(
            "Budget of one run",
            f"ε = {plain(values['epsilon'])}",
            "The noise of every method is calibrated to it.",
            unit=f"at δ = {plain(values['delta'])}",
        ),
    ]


def _is_plain(method: Mapping[str, Any]) -> bool:
    """Whether it is the reference without privacy."""
    return method["settings"].get("method") == "sgd"


def _is_equal(method: Mapping[str, Any], epsilon: float) -> bool:
    found = method["statement"]["epsilon"]
    return method["statement"]["guarantee"] == "proven" and found is not None and found <= epsilon * 1.001
