"""One self-contained HTML page about a run, for readers who decide whether a model may be published.

The page holds its style and its pictures; it loads nothing and runs nothing. It is made from the publishable
files of the run folder alone (see `equipoise.report.run_reader`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise._files import PathLike
from equipoise._rounding import noise_in_words, plain, rounded_up, times_in_words
from equipoise._version import __version__
from equipoise.report.figures import Curve, drawn_by
from equipoise.report.pages import (
    banner,
    chart,
    data_in_words,
    figure,
    guarantee_figure,
    loss_figure,
    render,
    write_page,
)
from equipoise.report.phrases import (
    ACCOUNTANTS,
    PERCENTAGES,
    RELATIONS_IN_WORDS,
    SHARES,
    drawn_of,
    epsilon_in_words,
    evaluated_in_words,
    promise_in_words,
    readable,
    relation_in_words,
    sampling_in_words,
    score_in_words,
    score_name,
    unit_in_words,
)
from equipoise.report.run_reader import PUBLISHABLE_FILES, WITHHELD_FILES, Run, damage_named, read_run

__all__ = ["render_page", "write_report"]


def write_report(folder: PathLike) -> Path:
    """Write ``report.html`` into a run folder and return its path.

    Raises:
        RunFolderError: the folder is not that of a run.
    """
    return write_page(render_page(read_run(folder)), folder, "report.html")


def render_page(run: Run) -> str:
    """The page as text.

    >>> page = render_page(Run("demo", {"guarantee": "proven", "epsilon": 2.9, "delta": 1e-5}))
    >>> "2.90" in page and "<script" not in page
    True
    """
    with damage_named(run.name):
        return render(
            "page.html.j2",
            name=run.name,
            title=_title(run),
            subtitle=_subtitle(run),
            figures=_figures(run),
            banners=_banners(run),
            promise=_promise(run),
            data=data_in_words(
                run.details.get("data"),
                run.details.get("data_description"),
                run.details,
                drawn_of(run.statement),
            ),
            charts=_charts(run),
            statement=_statement_rows(run),
            releases=_release_rows(run.statement),
            drawn=drawn_of(run.statement),
            configuration=_configuration_rows(run.details),
            command=str(run.config.get("command", "")),
            repeat_note=_repeat_note(run),
            covered=run.is_private and run.guarantee != "none",
            publishable=PUBLISHABLE_FILES,
            withheld=WITHHELD_FILES,
            maker=_maker(),
        )


def _maker() -> str:
    return f"equipoise {__version__}, {drawn_by()}"


def _title(run: Run) -> str:
    data, model = run.details.get("data"), run.details.get("model")
    return f"{model} on {data}" if data and model else run.name


def _subtitle(run: Run) -> str:
    parts = [run.name]
    method = run.details.get("method")
    if method:
        parts.append(str(method))
    if run.steps_in_words:
        parts.append(f"{run.steps_in_words} steps")
    if run.begun:
        parts.append(f"begun {run.begun}")
    return " · ".join(parts)


def _figures(run: Run) -> list[dict[str, str]]:
    figures = []
    if run.evaluation:
        name, value = next(iter(run.evaluation.items()))
        note = f"on {evaluated_in_words(run.details)}"
        if name in run.baseline:
            words = run.details.get("baseline", "a model without inputs")
            note += f"; {score_in_words(name, run.baseline[name])} by {words}"
        figures.append(figure(f"Test {score_name(name)}", score_in_words(name, value), note))
    notes = [relation_in_words(run.statement)]
    accountant = run.statement.get("accountant")
    if accountant:
        notes.append(f"computed by {ACCOUNTANTS.get(str(accountant), accountant)}")
    if any(one.get("used") != one.get("count") for one in run.statement.get("releases", [])):
        fixed = run.statement.get("stop_fixed_beforehand", True)
        notes.append("of the steps taken" if fixed else "of all planned steps, which covers any stop")
    figures.append(loss_figure("Privacy loss ε", run.epsilon, run.delta, "; ".join(filter(None, notes))))
    return [*figures, guarantee_figure(run.guarantee, run.is_private, run.independence)]


def _banners(run: Run) -> list[dict[str, Any]]:
    banners = []
    if not run.is_private:
        banners.append(
            banner(
                "bad",
                "NOT PRIVATE: this run was made reproducible.",
                "Its noise and its sampling follow the seed that the configuration shows. The figures "
                "describe what the same run would cost with secret noise; do not publish this model as "
                "private.",
            )
        )
    if holes := _holes(run.statement):
        banners.append(banner("bad", "Steps without a proof", *holes))
    if warnings := _lines(run.statement.get("warnings")):
        banners.append(banner("mid", "Please note", *warnings))
    return banners


def _promise(run: Run) -> list[str]:
    statement = run.statement
    paragraphs = []
    if not run.is_private:
        paragraphs.append(
            "Nothing. The noise follows a public seed: anybody can draw it again, subtract it, and see what "
            "each step took from the records."
        )
    elif run.guarantee == "none":
        paragraphs.append(
            "Nothing. At least one step has no privacy proof, so what was published may tell any detail of "
            "any record."
        )
    elif run.epsilon is not None and run.delta is not None:
        relation, unit = str(statement.get("relation", "")), str(statement.get("unit", "record"))
        paragraphs.append(promise_in_words(run.epsilon, run.delta, relation, unit))
        paragraphs.append(epsilon_in_words(run.epsilon, run.delta, relation, unit))
        paragraphs.append(unit_in_words(unit))
    if run.evaluation:
        what = score_name(next(iter(run.evaluation)))
        paragraphs.append(
            f"The {what} was measured on the test records. The statement covers only the training records: "
            f"if the test records are personal data too, the {what} is a figure about them without noise."
        )
    return paragraphs


def _charts(run: Run) -> list[Mapping[str, Any]]:
    spent = run.curve("epsilon")
    budget = run.details.get("epsilon")
    return [
        *chart(
            "Accuracy",
            "Share of test records classified rightly.",
            [_curve("accuracy", run.curve("evaluation.accuracy"))],
            x_label="step",
            y_label="accuracy",
            percent=True,
        ),
        *itertools.chain.from_iterable(
            chart(
                readable(score_name(name)),
                "" if number else "Other scores, as evaluated along the way.",
                [_curve(name, run.curve(f"evaluation.{name}"))],
                x_label="step",
                y_label=score_name(name),
                percent=name in PERCENTAGES,
                share=name in SHARES,
            )
            for number, name in enumerate(run.other_evaluations)
        ),
        *chart(
            "Privacy loss so far",
            "Epsilon of everything released up to a step.",
            [_curve("epsilon", [(0.0, 0.0), *spent] if spent else [])],
            x_label="step",
            y_label="epsilon",
            from_zero=True,
            target=(float(budget), f"budget {budget:g}") if isinstance(budget, int | float) else None,
        ),
        *chart(
            "Noise against signal",
            "Length of the noise in a step's gradient, and of what is left of the released gradient without "
            "it (a mean over neighbouring steps, computed from released numbers alone).",
            [_curve("signal", _signal(run)), _curve("noise", run.curve("noise_norm"))],
            x_label="step",
            y_label="length",
            wide=True,
            from_zero=True,
        ),
    ]


def _curve(label: str, points: Sequence[tuple[float, float]]) -> Curve | None:
    return Curve(label, [x for x, _ in points], [y for _, y in points]).drawable()


def _signal(run: Run) -> list[tuple[float, float]]:
    """Length of the estimate without its noise: the root of mean(released^2 - noise^2) over windows."""
    noise = dict(run.curve("noise_norm"))
    rows = [(step, r * r - noise[step] ** 2) for step, r in run.curve("released_norm") if step in noise]
    width = max(1, len(rows) // 20)
    windows = [rows[i : i + width] for i in range(0, len(rows), width)]
    means = [[sum(column) / len(window) for column in zip(*window, strict=True)] for window in windows]
    return [(step, math.sqrt(max(0.0, square))) for step, square in means]


_STATEMENT_NAMES = {
    "guarantee": "Guarantee",
    "epsilon": "Epsilon",
    "delta": "Delta",
    "epsilons": "Epsilon at other deltas",
    "epsilon_claimed": "Epsilon that the method's paper claims",
    "accountant": "Accountant",
    "cross_check": "Cross-check: epsilon by Renyi accounting",
    "relation": "Neighbouring data sets",
    "unit": "Unit of privacy",
    "users": "Records of a user",
    "recipe": "Recipe",
    "private": "Noise and sampling",
    "noise": "Arithmetic of the noise",
    "assumptions": "Taken as public or true",
    "search": "Search for settings included in the figure",
    "other_runs": "Other runs included in the figure",
    "holes": "Steps without a proof",
    "warnings": "Warnings",
    "interval": "Discretisation of the accountant",
    "noise_tail": "Added to delta for the end of the noise's tail",
    "plan": "SHA-256 of the privacy plan",
    "run": "Name of the run in the journal",
    "stop_fixed_beforehand": "Ended early, at a step fixed beforehand",
    "versions": "Computed with",
}

_PROJECTS = {"python": "Python", "numpy": "NumPy", "scipy": "SciPy", "torch": "PyTorch"}
"""Packages whose projects write their name in another way than an installer."""


NOISES = {
    "floating_point": "floating point",
    "grid": "exact, on a grid of integers: withstands attacks on floating-point noise",
}


def _statement_rows(run: Run) -> list[dict[str, Any]]:
    rows = []
    statement = dict(run.statement)
    for key, meanings in (("relation", RELATIONS_IN_WORDS), ("accountant", ACCOUNTANTS)):
        if statement.get(key):
            statement[key] = meanings.get(str(statement[key]), readable(str(statement[key])))
    if relation_in_words(run.statement):
        statement["relation"] = relation_in_words(run.statement)
    statement["guarantee"] = run.guarantee.replace("_", " ")
    if not run.is_private:
        statement["guarantee"] += ", were the noise secret. It is not: NOT PRIVATE"
    statement["private"] = (
        "from a secret key of the operating system" if run.is_private else "from a public seed: NOT PRIVATE"
    )
    if statement.get("noise") in NOISES:
        statement["noise"] = NOISES[statement["noise"]]
    statement["holes"] = _holes(statement)
    if not statement.get("other_runs"):
        statement.pop("other_runs", None)
    # these two repeat what the table of releases shows, for who computes the plan's hash again
    for key in ("sampling", "unproven"):
        statement.pop(key, None)
    epsilons = statement.get("epsilons")
    if isinstance(epsilons, list):
        statement["epsilons"] = [
            f"{rounded_up(row['epsilon'])} at {plain(row['delta'])}"
            for row in epsilons
            if isinstance(row, Mapping) and _is_pair(row)
        ]
    versions = statement.get("versions")
    if isinstance(versions, Mapping):
        statement["versions"] = [f"{_PROJECTS.get(n, n)} {_text(v)}" for n, v in versions.items()]
    for key in [
        *(k for k in _STATEMENT_NAMES if k in statement),
        *(k for k in statement if k not in _STATEMENT_NAMES),
    ]:
        lines = _lines(statement[key])
        if key == "releases" or not lines:
            continue
        rows.append({"name": _STATEMENT_NAMES.get(key, readable(key)), "lines": lines})
    return rows


def _holes(statement: Mapping[str, Any]) -> list[str]:
    """What has no proof, and how often."""
    found = statement.get("holes")
    return [
        f"{hole['reason']} ({times_in_words(hole.get('count'))})"
        if isinstance(hole, Mapping) and "reason" in hole
        else _text(hole)
        for hole in (found if isinstance(found, list) else [])
    ]


def _is_pair(row: Mapping[str, Any]) -> bool:
    return all(isinstance(row.get(key), int | float) for key in ("epsilon", "delta"))


def _release_rows(statement: Mapping[str, Any]) -> list[dict[str, str]]:
    rows = []
    for release in statement.get("releases", []):
        rows.append(
            {
                "name": readable(str(release.get("name", ""))),
                "count": _times(release),
                "bound": _text(release.get("max_bound", "")),
                "noise_multiplier": noise_in_words(release.get("mechanism"), 5),
                "sampling": sampling_in_words(release.get("sampling") or {}, drawn_of(statement)),
            }
        )
    return rows


def _times(release: Mapping[str, Any]) -> str:
    count, used = release.get("count"), release.get("used")
    if used is None or used == count:
        return _text(count if count is not None else "")
    return f"{_text(used)} of {_text(count)}"


def _configuration_rows(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"name": readable(k), "lines": lines}
        for k, v in config.items()
        if k not in ("command", "begun", "data_description", "test_records_apart") and (lines := _lines(v))
    ]


def _repeat_note(run: Run) -> str:
    if not run.is_private:
        return "The same command gives the same model, to the last digit on the same machine."
    noise, spends = "fresh noise and fresh sampling", ", and it spends the budget again"
    if not run.statement.get("releases"):
        noise, spends = "fresh sampling", ""
    return (
        f"The same command repeats the run with {noise} from the operating system, so its figures will "
        f"differ a little{spends}. The seed fixes only the initial weights and other public randomness."
    )


def _lines(value: Any) -> list[str]:
    """A plain value as lines of text: one line an item of a list or a key of a mapping, none for nothing."""
    if value is None or value == "" or value == [] or value == {}:
        return []
    if isinstance(value, Mapping):
        return [f"{readable(str(k))}: {_text(v)}" for k, v in value.items() if v is not None]
    if isinstance(value, list | tuple):
        return [
            line
            for item in value
            for line in ([", ".join(_lines(item))] if isinstance(item, Mapping) else [_text(item)])
        ]
    return [_text(value)]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return plain(value, 5)
    if isinstance(value, Mapping | list | tuple):
        return ", ".join(_lines(value))
    return str(value)
