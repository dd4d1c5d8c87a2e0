"""One self-contained HTML page about a run, for readers who decide whether a model may be published.

The page holds its style and its pictures; it loads nothing and runs nothing. It is made from the publishable
files of the run folder alone (see `equipoise.report.run_reader`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from equipoise._files import PathLike
from equipoise._relations import condition_in_words
from equipoise._rounding import noise_in_words, plain, rounded_up, times_in_words
from equipoise.report.figures import chart
from equipoise.report.pages import (
    curve_of,
    data_in_words,
    figure,
    guarantee_figure,
    lines_of,
    loss_figure,
    render,
    score_charts,
    text_of,
    write_page,
)
from equipoise.report.phrases import (
    ACCOUNTANTS,
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
from equipoise.statements.assumptions import by_reader


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
        details, unit = run.details, drawn_of(run.statement)
        steps = f"{run.steps_in_words} steps" if run.steps_in_words else ""
        begun = f"begun {run.config['begun']}" if run.config.get("begun") else ""
        relation, counted = str(run.statement.get("relation", "")), str(run.statement.get("unit", "record"))
        promise = []
        if run.epsilon is not None and run.delta is not None:
            promise = [
                promise_in_words(
                    run.epsilon, run.delta, relation, counted, condition_in_words(run.independence)
                ),
                epsilon_in_words(run.epsilon, run.delta, relation, counted),
                unit_in_words(counted),
            ]
        return render(
            kind="training report",
            what="run",
            title=run.title,
            subtitle=" · ".join(filter(None, (str(details.get("method") or ""), steps, begun))),
            figures=_figures(run),
            seeded=not run.is_private,
            guarantee=run.guarantee,
            holes=_holes(run.statement),
            warnings=lines_of(run.statement.get("warnings")),
            promise=promise,
            # What is known of a private score is the promise itself.
            scored=next((score_name(n) for n in run.evaluation if not run.is_private_score(n)), ""),
            data=data_in_words(details.get("data"), details.get("data_description"), details, unit),
            charts=_charts(run),
            statement=_statement_rows(run),
            releases=_release_rows(run.statement),
            assumptions=by_reader(lines_of(run.statement.get("assumptions"))),
            unit=unit,
            configuration=_configuration_rows(details),
            command=str(run.config.get("command", "")),
            publishable=PUBLISHABLE_FILES,
            withheld=WITHHELD_FILES,
        )


def _figures(run: Run) -> list[dict[str, str]]:
    figures = []
    if run.evaluation:
        name, value = next(iter(run.evaluation.items()))
        is_score = run.is_private_score(name)
        note = f"on {evaluated_in_words(run.details, is_score)}"
        if name in run.baseline:
            words = run.details.get("baseline", "a model without inputs")
            note += f"; {score_in_words(name, run.baseline[name])} by {words}"
        title = score_name(name) if is_score else f"test {score_name(name)}"
        figures.append(figure(title[:1].upper() + title[1:], score_in_words(name, value), note))
    notes = [relation_in_words(run.statement)]
    accountant = run.statement.get("accountant")
    if accountant:
        notes.append(f"computed by {ACCOUNTANTS.get(str(accountant), accountant)}")
    if any(one.get("used") != one.get("count") for one in run.statement.get("releases", [])):
        fixed = run.statement.get("stop_fixed_beforehand", True)
        notes.append("of the steps taken" if fixed else "of all planned steps, which covers any stop")
    figures.append(loss_figure("Privacy loss ε", run.epsilon, run.delta, "; ".join(filter(None, notes))))
    return [*figures, guarantee_figure(run.guarantee, run.is_private, run.independence)]


def _charts(run: Run) -> list[dict[str, Any]]:
    spent, budget = run.curve("epsilon"), run.details.get("epsilon")
    scores = list(run.evaluation)
    judges = [evaluated_in_words({}, run.is_private_score(name)) for name in scores[:1]]
    return [
        *score_charts(scores, lambda name: run.curve(f"evaluation.{name}"), "step", *judges),
        *chart(
            "Privacy loss so far",
            "Epsilon of everything released up to a step.",
            [curve_of("epsilon", [(0.0, 0.0), *spent] if spent else [])],
            x_label="step",
            target=(float(budget), f"budget {budget:g}") if isinstance(budget, int | float) else None,
        ),
        *chart(
            "Signal over noise, of all steps so far",
            "How far the sum of the steps stands above the sum of their noise, if the signals all point the "
            "same way and each step has noise of its own; above 1 there is more signal than noise. Computed "
            "from released numbers alone.",
            [curve_of("signal over noise", _signal_over_noise(run))],
            x_label="step",
        ),
    ]


def _signal_over_noise(run: Run) -> list[tuple[float, float]]:
    """The sum of the steps' signals over the root of the sum of their squared noises.

    A step's signal is the root of mean(released^2 - noise^2) over neighbouring steps: of one step alone the
    difference may be below 0.

    >>> rows = [{"step": k, "released_norm": 5.0, "noise_norm": 3.0} for k in (1, 2, 3, 4)]
    >>> [(step, round(value, 3)) for step, value in _signal_over_noise(Run("r", {}, rows))[::3]]
    [(1.0, 1.333), (4.0, 2.667)]
    """
    noise = dict(run.curve("noise_norm"))
    rows = [(step, r, noise[step]) for step, r in run.curve("released_norm") if noise.get(step)]
    width = max(1, len(rows) // 20)
    windows = [rows[i : i + width] for i in range(0, len(rows), width)]
    signals = [
        math.sqrt(max(0.0, sum(r * r - n * n for _, r, n in window) / len(window)))
        for window in windows
        for _ in window
    ]
    noises = accumulate(n * n for _, _, n in rows)
    return [
        (step, signal / math.sqrt(square))
        for (step, _, _), signal, square in zip(rows, accumulate(signals), noises, strict=True)
    ]


_NOISES = {
    "floating_point": "floating point",
    "grid": "exact, on a grid of integers: withstands attacks on floating-point noise",
}


def _statement_rows(run: Run) -> list[tuple[str, list[str]]]:
    """Every key of the statement that no other section shows, by its title and in the order of the schema."""
    from equipoise.statements.statement import statement_schema  # imports the accountants

    titles = {key: value["title"] for key, value in statement_schema()["properties"].items()}
    statement = {key: run.statement.get(key) for key in (*titles, *run.statement)}
    accountant, word = str(statement["accountant"]), run.guarantee.replace("_", " ")
    seeded = "" if run.is_private else ", were the noise secret. It is not: NOT PRIVATE"
    epsilons, versions = statement["epsilons"] or [], statement["versions"] or {}
    statement |= {
        "guarantee": word + seeded,
        "private": "from a public seed: NOT PRIVATE"
        if seeded
        else "from a file that the owner keeps"
        if statement["secret_seed"]
        else "from a secret key of the operating system",
        "relation": relation_in_words(run.statement) or statement["relation"],
        "accountant": statement["accountant"] and ACCOUNTANTS.get(accountant, readable(accountant)),
        "noise": _NOISES.get(str(statement["noise"]), statement["noise"]),
        "holes": _holes(run.statement),
        "other_runs": statement["other_runs"] or None,
        "epsilons": [f"{rounded_up(row['epsilon'])} at {plain(row['delta'])}" for row in epsilons],
        "versions": [f"{n} {text_of(v)}" for n, v in versions.items()],
    }
    # shown by the table of releases, or what they come to, and by who is to check them
    hidden = ("releases", "sampling", "unproven", "assumptions")
    rows = [(key, lines_of(value)) for key, value in statement.items() if key not in hidden]
    return [(titles.get(key, readable(key)), lines) for key, lines in rows if lines]


def _holes(statement: Mapping[str, Any]) -> list[str]:
    """What has no proof, and how often."""
    found = statement.get("holes")
    return [
        f"{hole['reason']} ({times_in_words(hole.get('count'))})"
        if isinstance(hole, Mapping) and "reason" in hole
        else text_of(hole)
        for hole in (found if isinstance(found, list) else [])
    ]


def _release_rows(statement: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for release in statement.get("releases", []):
        count, used = release.get("count", ""), release.get("used")
        rows.append(
            [
                readable(str(release.get("name", ""))),
                text_of(count) if used in (None, count) else f"{text_of(used)} of {text_of(count)}",
                text_of(release.get("max_bound", "")),
                noise_in_words(release.get("mechanism"), 5),
                sampling_in_words(release.get("sampling") or {}),
            ]
        )
    return rows


def _configuration_rows(config: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    hidden = ("command", "begun", "data_description", "test_records_apart")
    return [(readable(key), lines_of(value)) for key, value in config.items() if key not in hidden]
