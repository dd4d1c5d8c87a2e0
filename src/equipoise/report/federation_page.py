"""The page and the summary of a federation, only from the plain values of `federation.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise._files import PathLike
from equipoise._rounding import plain, rounded_up
from equipoise.report.figures import Curve
from equipoise.report.pages import (
    GUARANTEE_BANNERS,
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
    BYTE_UNITS,
    PERCENTAGES,
    RELATIONS_IN_WORDS,
    SCORES,
    SHARES,
    bytes_in_words,
    epsilon_in_words,
    evaluated_in_words,
    promise_in_words,
    readable,
    score_in_words,
    score_name,
)
from equipoise.report.terminal import sparkline

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["federation_summary", "render_federation", "write_federation_report"]


_PUBLISHABLE = (
    "federation.json", "federation.sig.json", "model.safetensors", "report.html", "clients/*/statement.json",
    "clients/*/statement.sig.json",
)  # fmt: skip
_WITHHELD = ("server/", "settings.json", "everything else under clients/")


def write_federation_report(values: Mapping[str, Any], folder: PathLike) -> Path:
    """Write ``report.html`` into a folder and return its path."""
    return write_page(render_federation(values), folder, "report.html")


def render_federation(values: Mapping[str, Any]) -> str:
    """The page as text; it loads nothing and runs nothing."""
    settings = values["settings"]
    banners = [banner("mid", "Warning", warning) for warning in values.get("warnings", [])]
    if not values["private"]:
        banners.insert(
            0,
            banner(
                "bad",
                "NOT PRIVATE: this federation was made reproducible.",
                "Noise and sampling of every client follow the public seed. The figures describe what the "
                "same training would cost with secret noise.",
            ),
        )
    return render(
        "federation.html.j2",
        title=f"{settings['method']} on {settings['data']}",
        subtitle=_subtitle(values),
        figures=_figures(values),
        banners=banners,
        promise=_promise(values),
        data=_data(values),
        charts=_charts(values),
        clients=[_client_row(one) for one in values["clients"]],
        absences=_absences(values),
        assumptions=values.get("assumptions", []),
        covered=values["private"] and values["guarantee"] != "none",
        publishable=_PUBLISHABLE,
        withheld=_WITHHELD,
        settings=[
            {"name": readable(name), "value": _text(value)} for name, value in settings.items() if value != {}
        ],
        command=str(values["command"]),
    )


def federation_summary(values: Mapping[str, Any]) -> RenderableType:
    """Accuracy, epsilon and bytes as a rich renderable."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name in _scores(values):
        curve = [row[name] for row in values["rounds"] if name in row]
        line = Text(score_in_words(name, curve[-1]), style="bold")
        line.append("  " + sparkline(curve), style="blue")
        grid.add_row("test accuracy" if name == "accuracy" else score_name(name), line)
    spent = "no value" if values["epsilon"] is None else f"ε = {rounded_up(values['epsilon'])}"
    grid.add_row("privacy spent", f"{spent} at δ = {plain(values['delta'])}, the most at any client")
    if not values["private"]:
        grid.add_row("guarantee", Text("NOT PRIVATE: the noise follows the public seed", style="bold red"))
    else:
        grid.add_row("guarantee", values["guarantee"].replace("_", " ") + "; one record at one client")
    if values.get("epsilon_claimed") is not None:
        grid.add_row("published claim", f"ε = {rounded_up(values['epsilon_claimed'])}, not proved here")
    for warning in values.get("warnings", []):
        grid.add_row("warning", Text(warning, style="yellow"))
    grid.add_row(
        "sent", f"{bytes_in_words(values['bytes_up'])} up, {bytes_in_words(values['bytes_down'])} down"
    )
    grid.add_row("report", Text(values["report"], overflow="fold"))
    title = f"{values['settings']['method']}, {len(values['rounds'])} rounds"
    if "seconds" in values:  # not where an old federation is looked at again
        title += f" in {values['seconds']:,.0f} s"
    return Panel(grid, title=title, title_align="left", expand=False)


def _subtitle(values: Mapping[str, Any]) -> str:
    found = f"{values['settings']['clients']} clients, {len(values['rounds'])} rounds: {values['summary']}"
    return f"{found} · finished {values['finished']}" if values.get("finished") else found


def _data(values: Mapping[str, Any]) -> list[str]:
    """What the records are, by public facts."""
    total = sum(one["population"] for one in values["clients"])
    return [
        *data_in_words(values["settings"]["data"], values.get("data_description"), {}),
        f"{total:,} training records by the clients' public sizes; which client holds which was simulated.",
        f"{evaluated_in_words(values)}.",
    ]


def _figures(values: Mapping[str, Any]) -> list[dict[str, str]]:
    scores, relation = _scores(values), RELATIONS_IN_WORDS.get(str(values["relation"]), "")
    first = scores[0] if scores else "accuracy"
    shown = "none" if not scores else score_in_words(first, values["rounds"][-1][first])
    more = [f"{score_name(name)} {score_in_words(name, values['rounds'][-1][name])}" for name in scores[1:]]
    return [
        figure(
            f"Test {score_name(first)}",
            shown,
            "; ".join([f"on {values['test_records']:,} test records, after the last round", *more]),
        ),
        loss_figure(
            "Privacy loss ε, largest of all clients",
            values["epsilon"],
            values["delta"],
            f"for one record at one client; {relation}",
        ),
        guarantee_figure(values["guarantee"], values["private"]),
        figure(
            "Sent by all clients",
            bytes_in_words(values["bytes_up"]),
            f"{bytes_in_words(values['bytes_down'])} sent to them{_public_part(values)}; "
            f"{values['parameters']:,} parameters",
        ),
    ]


def _scores(values: Mapping[str, Any]) -> list[str]:
    """The scores of the last round; those of the task stand before others."""
    return [name for name in SCORES if values["rounds"] and name in values["rounds"][-1]]


def _public_part(values: Mapping[str, Any]) -> str:
    sent = values.get("bytes_public", 0)
    return f", {bytes_in_words(sent)} of it public records, once" if sent else ""


def _promise(values: Mapping[str, Any]) -> list[str]:
    paragraphs = []
    if not values["private"]:
        paragraphs.append(
            "Nothing. The noise of every client follows a public seed: anybody can draw it again and "
            "subtract it."
        )
    elif values["guarantee"] == "none":
        paragraphs.append(
            "Nothing. At least one client took a step without a privacy proof, so what it sent may tell any "
            "detail of any of its records."
        )
    elif values["epsilon"] is not None:
        relation = str(values["relation"])
        paragraphs.append(promise_in_words(values["epsilon"], values["delta"], relation))
        paragraphs.append(epsilon_in_words(values["epsilon"], values["delta"], relation))
    paragraphs.append(
        "The unit is one record at one client, against the server, the other clients and whoever sees the "
        "model. It is not the whole client: what is true of many of its records can show."
    )
    paragraphs.append(
        "The largest epsilon is quoted because no person's records are taken to lie at two owners. For a "
        "person whose records do, the epsilons of these owners add up."
    )
    claimed = values.get("epsilon_claimed")
    if claimed is not None:
        paragraphs.append(
            f"The publication claims ε = {rounded_up(claimed)} for this noise. Its equation, which set the "
            "noise, is proved for subsets drawn without replacement and records that are replaced, not for "
            "the sampling used here, and it is loose: that is why the proved ε of the same noise is so far "
            "from the budget. The claim is no guarantee of this run."
        )
    if values.get("public_records"):
        paragraphs.append(
            f"{values['public_records']:,} records were declared public and sent to every client: they get "
            "no protection at all."
        )
    return paragraphs


def _charts(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    rows = values["rounds"]

    def curve(name: str, label: str | None = None, unit: float = 1.0) -> Curve:
        shown = [row for row in rows if name in row]
        return Curve(label or name, [row["round"] for row in shown], [row[name] / unit for row in shown])

    spent = [one for one in values["clients"] if one["epsilon"] is not None]
    budget = values["settings"].get("epsilon")
    most = max((row["bytes_down"] for row in rows), default=0)
    unit, unit_name = next((size, name) for size, name in BYTE_UNITS if most >= size or size == 1)
    return [
        *(
            item
            for name in _scores(values)[:1]
            for item in chart(
                f"{readable(score_name(name))} by round",
                "On the test records.",
                [curve(name, score_name(name))],
                x_label="round",
                y_label=score_name(name),
                percent=name in PERCENTAGES,
                share=name in SHARES,
            )
        ),
        *chart(
            "Radius by round",
            "The clipping radius of the round, made of noised numbers.",
            [curve("radius")],
            x_label="round",
            y_label="radius",
            from_zero=True,
        ),
        *chart(
            "Epsilon by client",
            "What every client has spent in all; the largest is the one to quote.",
            [Curve("epsilon", [one["client"] for one in spent], [one["epsilon"] for one in spent])],
            joined=False,
            x_label="client",
            y_label="epsilon",
            from_zero=True,
            target=(float(budget), f"budget {budget:g}") if budget is not None else None,
        ),
        *chart(
            "Sent by round",
            "Parameters and numbers of all clients together.",
            [curve("bytes_up", "up", unit), curve("bytes_down", "down", unit)],
            x_label="round",
            y_label=unit_name,
            from_zero=True,
        ),
    ]


def _client_row(one: Mapping[str, Any]) -> dict[str, str]:
    word, tone, _ = GUARANTEE_BANNERS.get(one["guarantee"], GUARANTEE_BANNERS["none"])
    return {
        "client": str(one["client"]),
        "population": f"{one['population']:,}",
        "rounds": str(one["rounds"]),
        "epsilon": "none" if one["epsilon"] is None else rounded_up(one["epsilon"]),
        "guarantee": word,
        "tone": tone,
    }


def _absences(values: Mapping[str, Any]) -> list[str]:
    found = [
        f"round {row['round']}, client {client}: {reason}"
        for row in values["rounds"]
        for client, reason in row["absent"].items()
    ]
    return found[:50] + ([f"and {len(found) - 50} more"] if len(found) > 50 else [])


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{readable(str(name))} {_text(item)}" for name, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return plain(value, 5) if isinstance(value, float) else str(value)
