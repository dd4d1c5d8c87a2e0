"""The page and the summary of a federation, only from the plain values of `federation.json`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise._files import PathLike
from equipoise._rounding import plain, rounded_up
from equipoise.report.pages import (
    badge,
    data_in_words,
    figure,
    guarantee_figure,
    lines_of,
    loss_figure,
    render,
    score_charts,
    write_page,
)
from equipoise.report.phrases import (
    RELATIONS_IN_WORDS,
    SCORES,
    bytes_in_words,
    epsilon_in_words,
    evaluated_in_words,
    promise_in_words,
    readable,
    score_in_words,
    score_name,
)
from equipoise.report.terminal import guarantee_text, panel, score_row

if TYPE_CHECKING:
    from rich.console import RenderableType

_PUBLISHABLE = (
    "federation.json", "model.safetensors", "report.html", "clients/*/statement.json",
)  # fmt: skip
_WITHHELD = ("server/", "settings.json", "everything else under clients/")


def write_federation_report(values: Mapping[str, Any], folder: PathLike) -> Path:
    """Write ``report.html`` into a folder and return its path."""
    return write_page(render_federation(values), folder, "report.html")


def render_federation(values: Mapping[str, Any]) -> str:
    """The page as text; it loads nothing and runs nothing."""
    settings = values["settings"]
    promise, claimed, units = [], values.get("epsilon_claimed"), _unit(values, "s")
    has_scores = any(row.get("scores") for row in values["rounds"])
    if values["epsilon"] is not None:
        given = values["epsilon"], values["delta"], str(values["relation"]), _unit(values)
        promise = [promise_in_words(*given), epsilon_in_words(*given)]
    return render(
        kind="federated training report",
        what="federation",
        title=" on ".join(str(settings[name]) for name in ("method", "data") if settings[name]),
        subtitle=_subtitle(values),
        figures=_figures(values),
        seeded=not values["private"],
        guarantee=values["guarantee"],
        warnings=values.get("warnings", []),
        promise=promise,
        claimed=None if claimed is None else rounded_up(claimed),
        public_records=values.get("public_records"),
        data=_data(values),
        charts=score_charts(_scores(values)[:1], partial(_points, values), "round"),
        columns=[
            *("Client", f"{units.capitalize()}, public number", "Rounds", "ε spent", "Guarantee"),
            *(["Private score"] if has_scores else []),
            *(["Signed by the key"] if values.get("gathered") else []),
        ],
        unit=_unit(values),
        clients=[
            [
                ", ".join([f"Client {one['client']}", *([one["site"]] if "site" in one else [])]),
                f"{one['population']:,}" if one["population"] else "none",
                str(one["rounds"]),
                "none" if one["epsilon"] is None else rounded_up(one["epsilon"]),
                badge(one["guarantee"]),
                *([_score_of(values, one["client"])] if has_scores else []),
                *([one.get("signer") or "not signed"] if values.get("gathered") else []),
            ]
            for one in values["clients"]
        ],
        assumptions=[("By the statements of the clients", values.get("assumptions", []))],
        absences=_absences(values),
        configuration=[(readable(name), lines_of(value)) for name, value in settings.items()],
        command=str(values["command"]),
        publishable=_PUBLISHABLE,
        withheld=_WITHHELD,
    )


def federation_summary(values: Mapping[str, Any]) -> RenderableType:
    """Accuracy, epsilon and bytes as a rich renderable."""
    from rich.text import Text

    spent = "no value" if values["epsilon"] is None else f"ε = {rounded_up(values['epsilon'])}"
    rows: list[tuple[str, RenderableType]] = [
        *(score_row(name, _points(values, name)[-1][1]) for name in _scores(values)),
        ("privacy spent", f"{spent} at δ = {plain(values['delta'])}, the most at any client"),
        (
            "guarantee",
            guarantee_text(values["guarantee"], values["private"], "", f"one {_unit(values)} at one client"),
        ),
        *(
            ("published claim", f"ε = {rounded_up(claimed)}, not proved here")
            for claimed in [values.get("epsilon_claimed")]
            if claimed is not None
        ),
        *(("warning", Text(warning, style="yellow")) for warning in values.get("warnings", [])),
        ("sent", f"{bytes_in_words(values['bytes_up'])} up, {bytes_in_words(values['bytes_down'])} down"),
        ("report", Text(values["report"], overflow="fold")),
    ]
    title = f"{values['settings']['method']}, {len(values['rounds'])} rounds"
    if "seconds" in values:  # not where an old federation is looked at again
        title += f" in {values['seconds']:,.0f} s"
    return panel(rows, title, bad=not values["private"])


def _subtitle(values: Mapping[str, Any]) -> str:
    found = f"{values['settings']['clients']} clients, {len(values['rounds'])} rounds: {values['summary']}"
    return f"{found} · finished {values['finished']}" if values.get("finished") else found


def _data(values: Mapping[str, Any]) -> list[str]:
    """What the records are, by public facts."""
    total = sum(one["population"] for one in values["clients"])
    simulated = "" if values.get("gathered") else "; which client holds which was simulated"
    return [
        *data_in_words(values["settings"]["data"], values.get("data_description"), {}),
        f"{total:,} training {_unit(values, 's')} by the clients' public sizes{simulated}.",
        *([] if values.get("gathered") else [f"{evaluated_in_words(values)}."]),
    ]


def _unit(values: Mapping[str, Any], ending: str = "") -> str:
    """What is protected at a client; with the ending of a plural."""
    return " or ".join(sorted({one.get("unit", "record") + ending for one in values["clients"]}))


def _score_of(values: Mapping[str, Any], client: int) -> str:
    """The last private score of a client and its error."""
    for row in reversed(values["rounds"]):
        if found := row.get("scores", {}).get(str(client)):
            (name, value), (_, error) = found.items()
            words = f"{score_name(name.removeprefix('private_'))} {score_in_words(name, value)}"
            return f"{words} ± {score_in_words(name, error)}"
    return "none"


def _figures(values: Mapping[str, Any]) -> list[dict[str, str]]:
    scores, relation = _scores(values), RELATIONS_IN_WORDS.get(str(values["relation"]), "")
    first = scores[0] if scores else "accuracy"
    shown = "none" if not scores else score_in_words(first, values["rounds"][-1][first])
    more = [f"{score_name(name)} {score_in_words(name, values['rounds'][-1][name])}" for name in scores[1:]]
    return [
        figure(
            f"Test {score_name(first)}",
            shown,
            "; ".join([f"on {evaluated_in_words(values)}, after the last round", *more]),
        ),
        loss_figure(
            "Privacy loss ε, largest of all clients",
            values["epsilon"],
            values["delta"],
            f"for one {_unit(values)} at one client; {relation}",
        ),
        guarantee_figure(values["guarantee"], values["private"]),
        figure(
            "Sent by all clients",
            bytes_in_words(values["bytes_up"]),
            f"{bytes_in_words(values['bytes_down'])} sent to them; {values['parameters']:,} parameters",
        ),
    ]


def _scores(values: Mapping[str, Any]) -> list[str]:
    """The scores of the last round; those of the task stand before others."""
    return [name for name in SCORES if values["rounds"] and name in values["rounds"][-1]]


def _points(values: Mapping[str, Any], name: str) -> list[tuple[float, float]]:
    """A number of each round that has it, with the round."""
    return [(row["round"], row[name]) for row in values["rounds"] if name in row]


def _absences(values: Mapping[str, Any]) -> list[str]:
    found = [
        f"round {row['round']}, client {client}: {reason}"
        for row in values["rounds"]
        for client, reason in row["absent"].items()
    ]
    return found[:50] + ([f"and {len(found) - 50} more"] if len(found) > 50 else [])
