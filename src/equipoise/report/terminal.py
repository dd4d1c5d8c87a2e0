"""The summary that a terminal shows at the end of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from equipoise._relations import condition_in_words
from equipoise._rounding import plain, rounded_up
from equipoise.report.phrases import relation_in_words, score_in_words, score_name
from equipoise.report.run_reader import Run

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text


def panel(rows: Iterable[tuple[str, RenderableType]], title: str, *, bad: bool = False) -> RenderableType:
    """A frame of names and what is said of each, in red where nothing is protected."""
    from rich.panel import Panel
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for row in rows:
        grid.add_row(*row)
    return Panel(grid, title=title, title_align="left", border_style="red" if bad else "dim", expand=False)


def score_row(name: str, value: float, beside: str = "") -> tuple[str, RenderableType]:
    """The row of a score."""
    from rich.text import Text

    line = Text(score_in_words(name, value), style="bold")
    line.append(beside, style="not bold dim")
    return "test accuracy" if name == "accuracy" else score_name(name), line


def guarantee_text(guarantee: str, private: bool = True, condition: str = "", relation: str = "") -> Text:
    """What may be claimed, in the colour of it."""
    from rich.text import Text

    if not private:
        return Text("NOT PRIVATE: the noise follows the public seed", style="bold red")
    tone = {"proven": "green", "worst_case": "yellow"}.get(guarantee, "bold red")
    text = Text(guarantee.replace("_", " "), style=tone)
    if guarantee != "none":
        text.append(condition, style="yellow")
    return text.append(f"; {relation}" if relation else "", style="default")


def summary(run: Run, folder: str, seconds: float | None = None) -> RenderableType:
    """Accuracy and other evaluations, epsilon, guarantee and where the files are, as a rich renderable.

    Args:
        run: what the publishable files say.
        folder: the run folder as the user would type it.
        seconds: how long the training took.
    """
    from rich.text import Text

    rows: list[tuple[str, RenderableType]] = []
    for name in run.evaluation:
        beside = ""
        if name in run.baseline:
            beside = f"  ({score_in_words(name, run.baseline[name])} by {run.details.get('baseline')})"
        rows.append(score_row(name, run.evaluation[name], beside))
    if run.epsilon is None:
        spent = Text("no value: at least one step has no proof", style="bold red")
    else:
        spent = Text(f"ε = {rounded_up(run.epsilon)}", style="bold")
        if run.delta is not None:
            spent.append(f" at δ = {plain(run.delta)}", style="not bold")
    rows.append(("privacy claimed" if run.is_unfinished else "privacy spent", spent))
    if run.is_unfinished and run.epsilon is not None:
        rows.append(("", "by the whole plan, whatever decides when to stop"))
        for step, so_far in run.curve("epsilon")[-1:]:
            rows.append(("spent so far", f"ε = {rounded_up(so_far)} by step {step:,.0f}"))
    said = guarantee_text(
        run.guarantee, run.is_private, condition_in_words(run.independence), relation_in_words(run.statement)
    )
    rows.append(("guarantee", said))
    if run.steps_in_words:
        rows.append(("steps", run.steps_in_words + (f" in {seconds:,.1f} s" if seconds else "")))
    noise, released = (dict(run.curve(name)) for name in ("noise_norm", "released_norm"))
    last = list(noise)[-20:]  # enough steps that one of them does not decide
    if any(map(noise.__getitem__, last)):
        of = sum(released[step] for step in last) / len(last)
        share = sum(map(noise.__getitem__, last)) / len(last) / of if of else 1.0
        words = f"at the end {min(share, 1.0):.0%} of a step's length; it averages out over steps"
        rows.append(("noise", words))
    rows.append(("report", Text(f"{folder}/report.html", overflow="fold")))
    return panel(rows, run.title, bad=not run.is_private)
