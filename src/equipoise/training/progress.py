"""A progress bar: steps done, time left, epsilon so far, the main score; none if nobody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from equipoise._rounding import rounded_up


@contextmanager
def progress_bar(
    steps: int, done: int, show: bool
) -> Iterator[Callable[[int, float | None, dict[str, float]], None]]:
    """A progress bar on standard error while the block runs; it takes the numbers of every step.

    Args:
        steps: of the whole training.
        done: how many were done before (after a resume).
        show: False shows nothing, and so does True without the extra `cli`.
    """
    if not show or find_spec("rich") is None:
        yield lambda step, epsilon, evaluation: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    # The bar alone shrinks on a narrow terminal; whatever else is cut off would be cut off unseen.
    note = TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True))
    columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TimeRemainingColumn(compact=True), note)
    latest: dict[str, str] = {}

    def update(step: int, epsilon: float | None, evaluation: dict[str, float]) -> None:
        if epsilon is not None:
            latest["epsilon"] = f"epsilon {rounded_up(epsilon)}"
        if evaluation:  # only the first, which is the main score: more would leave no room for the bar
            name, value = next(iter(evaluation.items()))
            latest["score"] = f"{name} {value:.4g}"
        bar.update(task, completed=step, note="  ".join(latest[key] for key in sorted(latest)))

    with Progress(*columns, console=Console(stderr=True), expand=True) as bar:
        task = bar.add_task("training", total=steps, completed=done, note="")
        yield update
