"""The summary that a terminal shows at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from equipoise._relations import condition_in_words
from equipoise._rounding import plain, rounded_up
from equipoise.report.phrases import relation_in_words, score_in_words, score_name
from equipoise.report.run_reader import Run

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["sparkline", "summary"]

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """A curve as one line of block characters, from the least value to the greatest.

    >>> sparkline([0, 1, 2, 3])
    '▁▃▆█'
    >>> sparkline([])
    ''
    """
    if not values:
        return ""
    count = min(width, len(values))
    picked = [values[round(i * (len(values) - 1) / max(count - 1, 1))] for i in range(count)]
    low, high = min(picked), max(picked)
    span = (high - low) or 1.0
    return "".join(BLOCKS[round((v - low) / span * (len(BLOCKS) - 1))] for v in picked)


def summary(run: Run, folder: str, seconds: float | None = None) -> RenderableType:
    """Accuracy and other evaluations, epsilon, guarantee and where the files are, as a rich renderable.

    Args:
        run: what the publishable files say.
        folder: the run folder as the user would type it.
        seconds: how long the training took.
    """
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, value in run.evaluation.items():
        values = [y for _, y in run.curve(f"evaluation.{name}")]
        line = Text(score_in_words(name, value), style="bold")
        if len(values) > 2:
            line.append("  " + sparkline(values), style="blue")
        if name in run.baseline:
            words = f"  ({score_in_words(name, run.baseline[name])} by {run.details.get('baseline')})"
            line.append(words, style="not bold dim")
        grid.add_row("test accuracy" if name == "accuracy" else Text(score_name(name)), line)
    not_private = not run.is_private
    if run.epsilon is None:
        spent = Text("no value: at least one step has no proof", style="bold red")
    else:
        spent = Text(f"ε = {rounded_up(run.epsilon)}", style="bold")
        if run.delta is not None:
            spent.append(f" at δ = {plain(run.delta)}", style="not bold")
    grid.add_row("privacy claimed" if run.is_unfinished else "privacy spent", spent)
    if run.is_unfinished and run.epsilon is not None:
        grid.add_row("", "by the whole plan, whatever decides when to stop")
        for step, so_far in run.curve("epsilon")[-1:]:
            grid.add_row("spent so far", f"ε = {rounded_up(so_far)} by step {step:,.0f}")
    if not_private:
        grid.add_row("guarantee", Text("NOT PRIVATE: the noise follows the public seed", style="bold red"))
    else:
        tone = {"proven": "green", "worst_case": "yellow"}.get(run.guarantee, "bold red")
        text = Text(run.guarantee.replace("_", " "), style=tone)
        if run.guarantee != "none" and (condition := condition_in_words(run.independence)):
            text.append(condition, style="yellow")
        relation = relation_in_words(run.statement)
        if relation:
            text.append(f"; {relation}", style="default")
        grid.add_row("guarantee", text)
    if run.steps_in_words:
        grid.add_row("steps", run.steps_in_words + (f" in {seconds:,.1f} s" if seconds else ""))
    noise, released = (dict(run.curve(name)) for name in ("noise_norm", "released_norm"))
    last = list(noise)[-20:]  # enough steps that one of them does not decide
    if any(map(noise.__getitem__, last)):
        of = sum(released[step] for step in last) / len(last)
        share = sum(map(noise.__getitem__, last)) / len(last) / of if of else 1.0
        grid.add_row(
            "noise", f"at the end {min(share, 1.0):.0%} of a step's length; it averages out over steps"
        )
    grid.add_row("report", Text(f"{folder}/report.html", overflow="fold"))
    model, data = run.details.get("model"), run.details.get("data")
    title = f"{model} on {data}" if model and data else run.name
    return Panel(
        grid, title=title, title_align="left", border_style="red" if not_private else "dim", expand=False
    )
