"""The page and the table of a comparison of methods, only from the plain values of `comparison.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise._files import PathLike
from equipoise._rounding import noise_in_words, plain, rounded_up, significant, times_in_words
from equipoise.report.figures import COLOURS, Curve
from equipoise.report.pages import (
    GUARANTEE_BANNERS,
    chart,
    data_in_words,
    figure,
    render,
    text_of,
    write_page,
)
from equipoise.report.phrases import PERCENTAGES, RELATIONS_IN_WORDS, readable, score_name, unit_in_words

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["comparison_table", "render_comparison", "told_apart", "write_comparison"]


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
            [_curve(method) for method in methods[: len(COLOURS)]],
            x_label="step",
            percent=values["score"] in PERCENTAGES,
        ),
        seeds=values["seeds"],
        judges=methods[0]["judges"],
        rows=[_cells(row) for row in table_rows(values)],
        device=values["device"],
        data=_data(values),
        trials=_trials(values),
        statements=[(m["label"], _statement(m)) for m in methods],
        shared=_settings(methods),
        command=values["command"],
        publishable=_PUBLISHABLE,
        runs=sum(runs.values()),
        spent=rounded_up(spent),
        deltas=plain(sum(runs.values()) * values["delta"]),
    )


def _cells(row: Mapping[str, str]) -> list[Any]:
    """A row of `table_rows` on the page, with what is said below a figure in small letters."""
    return [
        row["label"],
        [row["score"], row["spread"], f"± {row['error']}"],
        [row["epsilon"], row["claimed"] and f"paper: {row['claimed']}"],
        {"word": row["guarantee"], "tone": row["tone"]},
        row["rate"],
        [row["time"], f"× {row['times']}"],
        [row["memory"], row["memories"] and f"× {row['memories']}"],
    ]


def _curve(method: Mapping[str, Any]) -> Curve:
    """The median score along the training, with the least and the most of the seeds."""
    steps, medians, low, high = zip(*method["curve"], strict=True) if method["curve"] else ((),) * 4
    return Curve(method["label"], steps, medians, low, high)


def table_rows(values: Mapping[str, Any]) -> list[dict[str, str]]:
    """The cells of the table, one row per method; time and memory are also relative to the first method's."""
    methods = values["methods"]
    first = methods[0]
    rows = []
    for method in methods:
        statement = method["statement"]
        word, tone, _ = GUARANTEE_BANNERS[statement["guarantee"]]
        epsilon, claimed = statement["epsilon"], statement["epsilon_claimed"]
        rows.append(
            {
                "label": method["label"],
                "score": _score(values, method["score"]),
                "error": _error(values, method["sampling_error"]),
                "spread": " to ".join(_score(values, end(method["scores"])) for end in (min, max)),
                "epsilon": "none" if epsilon is None else rounded_up(epsilon),
                "claimed": "" if claimed is None else plain(claimed, 4),
                "guarantee": word,
                "tone": tone,
                "rate": plain(method["learning_rate"], 4),
                "time": f"{significant(1000 * method['seconds_per_step'])} ms",
                "times": f"{method['seconds_per_step'] / first['seconds_per_step']:.2f}",
                "memory": _megabytes(method["memory_bytes"]),
                "memories": _ratio(method["memory_bytes"], first["memory_bytes"]),
            }
        )
    return rows


def comparison_table(values: Mapping[str, Any]) -> RenderableType:
    """The table for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    is_share = values["score"] in PERCENTAGES
    table.add_column("method", style="bold", no_wrap=True)
    for name in ("median" if is_share else score_name(values["score"]), "±", "range", "epsilon"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("guarantee", no_wrap=True)
    measured = any(method["memory_bytes"] is not None for method in values["methods"])
    for name in ("rate", "time", *(["memory"] if measured else [])):
        table.add_column(name, justify="right", no_wrap=True)
    styles = {"good": "green", "mid": "yellow", "bad": "bold red"}
    for row, method in zip(table_rows(values), values["methods"], strict=True):
        low, high = min(method["scores"]), max(method["scores"])
        table.add_row(
            row["label"],
            f"{method['score']:.1%}" if is_share else row["score"],
            f"{100 * method['sampling_error']:.1f}" if is_share else f"{method['sampling_error']:.2g}",
            f"{100 * low:.1f}-{100 * high:.1f}" if is_share else f"{low:.4g}-{high:.4g}",
            row["epsilon"],
            Text(row["guarantee"], style=styles[row["tone"]]),
            row["rate"],
            f"x{row['times']}",
            *([row["memory"]] if measured else []),
        )
    error = f"± is a standard error: another sample of {values['methods'][0]['judges']:,} test records."
    said = [Text(), Text(" ".join(filter(None, (_verdict(values), error))))]
    return Group(table, *said, Text(), Text(SEARCH, style="dim"))


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


def _error(values: Mapping[str, Any], error: float) -> str:
    """A standard error in words: of shares in percentage points."""
    return f"{100 * error:.2f} points" if values["score"] in PERCENTAGES else f"{error:.2g}"


def _gap(values: Mapping[str, Any], name: str, better: float, worse: float, note: str) -> dict[str, str]:
    """The headline figure of how much better one score is than another."""
    lead = better - worse if values["more_is_better"] else worse - better
    if values["score"] in PERCENTAGES:
        return figure(name, f"{100 * lead:.2f}", note, unit="points")
    return figure(name, f"{lead:.4g}", note, unit=score_name(values["score"]))


_BY = "its worst seed is better than their best, by more than two standard errors of the test records"


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
        return ""
    if rivals:
        return f"{ranked[0]['label']} is not told apart from {_listed(rivals)}."
    return f"{ranked[0]['label']} is ahead: {_BY}."


def _figures(values: Mapping[str, Any]) -> list[dict[str, str]]:
    ranked, rivals = _ranked(values)
    best = ranked[0]
    left_out = [m for m in values["methods"] if m not in ranked]
    of_all = "method" if not left_out else "private method"
    if not all(map(_is_plain, left_out)):
        of_all = "method at this budget"
    name = score_name(values["score"])
    headline = f"Best median {name}"
    if len(ranked) == 1:
        note = f"No other {of_all} was compared."
    elif not rivals:
        note = f"Told apart from every other {of_all}: {_BY}."
    else:
        headline = f"Highest median {name}, not told apart"
        note = f"Not told apart here from {_listed(rivals)}."
    figures = [figure(headline, _score(values, best["score"]), note, unit=best["label"])]
    first = values["methods"][0]
    if first is not best and first in ranked and first["label"] not in rivals:
        note = f"{first['label']} has {_score(values, first['score'])}."
        figures.append(_gap(values, f"Ahead of {first['label']} by", best["score"], first["score"], note))
    plain_ones = [m for m in values["methods"] if _is_plain(m)]
    if plain_ones:
        free = plain_ones[0]["score"]
        note = f"Without privacy {_score(values, free)}."
        figures.append(_gap(values, "Price of privacy", free, best["score"], note))
    return [
        *figures,
        figure(
            "Budget of one run",
            f"ε = {plain(values['epsilon'])}",
            "The noise of every method is calibrated to it.",
            unit=f"at δ = {plain(values['delta'])}",
        ),
    ]


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _is_plain(method: Mapping[str, Any]) -> bool:
    """Whether it is the reference without privacy."""
    return method["settings"].get("method") == "sgd"


def _is_equal(method: Mapping[str, Any], epsilon: float) -> bool:
    found = method["statement"]["epsilon"]
    return method["statement"]["guarantee"] == "proven" and found is not None and found <= epsilon * 1.001


def _trials(values: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """The learning rates that each method tried, with their scores."""
    return [
        (
            method["label"],
            [
                f"{plain(rate, 4)}: {_score(values, score)}"
                + (", taken" if rate == method["learning_rate"] else "")
                for rate, score in method["trials"]
            ],
        )
        for method in values["methods"]
        if method["trials"]
    ]


def _statement(method: Mapping[str, Any]) -> list[str]:
    """What a run of the method claims, in lines."""
    statement = method["statement"]
    word, _, _ = GUARANTEE_BANNERS[statement["guarantee"]]
    epsilon, delta, claimed = (statement[key] for key in ("epsilon", "delta", "epsilon_claimed"))
    at = "" if delta is None else f" at δ = {plain(delta)}"
    spent = "no epsilon" if epsilon is None else f"ε = {rounded_up(epsilon)}{at}"
    relation = RELATIONS_IN_WORDS.get(str(statement["relation"]), str(statement["relation"]))
    bounds = (
        "" if r.get("max_bound") is None else f", bound {plain(r['max_bound'], 4)}"
        for r in statement["releases"]
    )
    return [
        f"{word}: {spent}; {relation}",
        *([] if claimed is None else [f"the paper's figure is ε = {plain(claimed, 4)}"]),
        *map(str, statement["warnings"]),
        *(f"Without proof: {h['reason']} ({times_in_words(h['count'])})" for h in statement["holes"]),
        *(
            f"{readable(str(r['name']))}: {times_in_words(r['count'])}, noise multiplier "
            f"{noise_in_words(r.get('mechanism'))}{bound}"
            for r, bound in zip(statement["releases"], bounds, strict=True)
        ),
    ]


def _settings(methods: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """What all methods share in the first row, and what is each method's own in the others."""
    each = [
        {k: v for k, v in {**m["settings"], **m["settings"].get("options", {})}.items() if k != "options"}
        for m in methods
    ]
    common = {k for k in each[0] if all(k in s and s[k] == each[0][k] for s in each)}

    def words(settings: Mapping[str, Any], shared: bool) -> list[str]:
        of = [f"{k.replace('_', ' ')} {text_of(v)}" for k, v in settings.items() if (k in common) is shared]
        return [", ".join(of)] if of else []

    own = [(m["label"], words(settings, False)) for m, settings in zip(methods, each, strict=True)]
    return [("all of them", words(each[0], True)), *own]


def _megabytes(value: float | None) -> str:
    if value is None:  # on a processor, whose memory holds what else the process does
        return "–"
    size = value / 2**20
    return f"{size:,.0f} MiB" if size >= 10 else f"{significant(size, 2)} MiB"


def _ratio(value: float | None, of: float | None) -> str:
    """Of two sizes in memory; none below 1 MiB, which cannot be told from the noise of measuring."""
    if value is None or of is None or min(value, of) < 2**20:
        return ""
    return f"{value / of:.2f}"
