"""The page and the table of a comparison of methods, only from the plain values of `comparison.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise._files import PathLike
from equipoise._rounding import noise_in_words, plain, rounded_up, significant, times_in_words
from equipoise.report.figures import Curve, line_chart, range_chart
from equipoise.report.pages import (
    GUARANTEE_BANNERS,
    banner,
    data_in_words,
    figure,
    on_any_screen,
    render,
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

MOST = 10
"""Colours for curves; further methods are only in the tables."""


def write_comparison(values: Mapping[str, Any], folder: PathLike) -> Path:
    """Write ``comparison.html`` into a folder and return its path."""
    return write_page(render_comparison(values), folder, "comparison.html")


def render_comparison(values: Mapping[str, Any]) -> str:
    """The page as text; it loads nothing and runs nothing."""
    methods = values["methods"]
    shown = methods[:MOST]
    name, percent = score_name(values["score"]), values["score"] in PERCENTAGES
    curves = on_any_screen(
        partial(
            line_chart,
            [_curve(m) for m in shown],
            title=f"{readable(name)} along the training",
            x_label="step",
            y_label=name,
            percent=percent,
        )
    )
    ranges = on_any_screen(
        partial(
            range_chart,
            [(m["label"], m["scores"]) for m in shown],
            title=f"Final {name} of every seed",
            x_label=name,
            percent=percent,
        )
    )
    unequal = [m["label"] for m in methods if not _is_equal(m, values["epsilon"]) and not _is_plain(m)]
    references = [m["label"] for m in methods if _is_plain(m)]
    banners = []
    if values["reproducible"]:
        banners.append(
            banner(
                "bad",
                "NOT PRIVATE: the runs were made reproducible.",
                "Their noise and their sampling follow public seeds. The figures tell what the same runs "
                "would reach and cost with secret noise.",
            )
        )
    if unequal:
        banners.append(
            banner(
                "bad",
                "Not at the same budget.",
                f"{', '.join(unequal)}: the true epsilon is above {plain(values['epsilon'])} or does not "
                f"exist, so the {name} is not comparable with that of the others. The statements below say "
                "why.",
            )
        )
    if references:
        banners.append(
            banner(
                "mid",
                f"Not private: {_listed(references)}.",
                "Neither clipped nor noised: it stands here to show the price of privacy.",
            )
        )
    banners.append(banner("mid", "Please note", SEARCH))
    private = not values["reproducible"] and not unequal and not references
    return render(
        "comparison.html.j2",
        title=f"{len(methods)} methods on {values['data']}",
        subtitle=_subtitle(values),
        figures=_figures(values),
        banners=banners,
        score=readable(name),
        best="Higher" if values["more_is_better"] else "Lower",
        baseline=f"{values['baseline_answer']} would be at {_score(values, values['baseline'])}",
        curves=curves,
        ranges=ranges,
        legend=[m["label"] for m in shown],
        seeds=values["seeds"],
        judges=methods[0]["judges"],
        rows=table_rows(values),
        data=_data(values),
        private=private,
        publishable=_PUBLISHABLE,
        together=_together(values, private),
        trials=_trials(values),
        statements=[_statement(m) for m in methods],
        settings=_settings(methods),
        command=values["command"],
        device=values["device"],
    )


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
    for name in ("rate", "time", "memory"):
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
            row["memory"],
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


def _together(values: Mapping[str, Any], private: bool) -> str:
    """What the figures of all runs reveal of the records, if they are published side by side."""
    if not private:
        return "They may tell any detail of any record: publish them only where the records are public."
    runs = {m["label"]: len(m["scores"]) + len(m["trials"]) for m in values["methods"]}
    spent = sum(runs[m["label"]] * m["statement"]["epsilon"] for m in values["methods"])
    return (
        f"They hold figures of {sum(runs.values())} runs over the same records. Their epsilons add up to "
        f"{rounded_up(spent)}, their deltas to {plain(sum(runs.values()) * values['delta'])}. No statement "
        "covers times and memory."
    )


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


def _trials(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for method in values["methods"]:
        cells = [
            {
                "rate": plain(rate, 4),
                "score": _score(values, score),
                "taken": rate == method["learning_rate"],
            }
            for rate, score in method["trials"]
        ]
        if cells:
            rows.append({"label": method["label"], "cells": cells})
    return rows


def _statement(method: Mapping[str, Any]) -> dict[str, Any]:
    statement = method["statement"]
    word, tone, _ = GUARANTEE_BANNERS[statement["guarantee"]]
    epsilon, delta = statement["epsilon"], statement["delta"]
    at = "" if delta is None else f" at δ = {plain(delta)}"
    spent = "no epsilon" if epsilon is None else f"ε = {rounded_up(epsilon)}{at}"
    facts = [RELATIONS_IN_WORDS.get(str(statement["relation"]), str(statement["relation"]))]
    if statement["epsilon_claimed"] is not None:
        facts.append(f"the paper's figure is ε = {plain(statement['epsilon_claimed'], 4)}")
    holes = [f"{hole['reason']} ({times_in_words(hole['count'])})" for hole in statement["holes"]]
    return {
        "label": method["label"],
        "word": word,
        "tone": tone,
        "spent": spent,
        "facts": facts + [str(warning) for warning in statement["warnings"]],
        "holes": holes,
        "releases": [
            {
                "name": readable(str(r["name"])),
                "count": f"{r['count']:,}",
                "noise": noise_in_words(r.get("mechanism")),
                "bound": "" if r.get("max_bound") is None else plain(r["max_bound"], 4),
            }
            for r in statement["releases"]
        ],
    }


def _settings(methods: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What all methods share in the first row, and what is each method's own in the others."""
    plain_ones = [
        {k: v for k, v in {**m["settings"], **m["settings"].get("options", {})}.items() if k != "options"}
        for m in methods
    ]
    keys = {k for settings in plain_ones for k in settings}
    common = {k for k in keys if all(k in s and s[k] == plain_ones[0].get(k) for s in plain_ones)}

    def words(settings: Mapping[str, Any], of: set[str]) -> str:
        return ", ".join(f"{k.replace('_', ' ')} {_value(settings[k])}" for k in settings if k in of)

    rows = [{"label": "all of them", "words": words(plain_ones[0], common)}]
    for method, settings in zip(methods, plain_ones, strict=True):
        rows.append({"label": method["label"], "words": words(settings, keys - common)})
    return rows


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and math.isfinite(value):
        return plain(value)
    return str(value)


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
