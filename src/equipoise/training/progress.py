"""A progress bar: steps done, time left, epsilon so far, the main score; none if nobody looks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from equipoise._rounding import rounded_up

__all__ = ["Progress", "progress_bar"]


class Progress:
    """Takes the numbers of every step; this one shows nothing."""

    def update(self, step: int, epsilon: float | None, evaluation: dict[str, float]) -> None:
        """Step `step` is done."""


class _RichProgress(Progress):
    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task
        self._epsilon, self._score = "", ""

    def update(self, step: int, epsilon: float | None, evaluation: dict[str, float]) -> None:
        if epsilon is not None:
            self._epsilon = f"epsilon {rounded_up(epsilon)}"
        if evaluation:  # only the first, which is the main score: more would leave no room for the bar
            name, value = next(iter(evaluation.items()))
            self._score = f"{name} {value:.4g}"
        note = "  ".join(part for part in (self._epsilon, self._score) if part)
        self._bar.update(self._task, completed=step, note=note)


@contextmanager
def progress_bar(steps: int, done: int, show: bool) -> Iterator[Progress]:
    """A progress bar on standard error while the block runs.

    Args:
        steps: of the whole training.
        done: how many were done before (after a resume).
        show: False gives an object that shows nothing, and so does True without the extra `cli`.
    """
    if not show or find_spec("rich") is None:
        yield Progress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    # The bar alone shrinks on a narrow terminal; whatever else is cut off would be cut off unseen.
    note = TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True))
    columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TimeRemainingColumn(compact=True), note)
    with Bar(*columns, console=Console(stderr=True), expand=True) as bar:
        yield _RichProgress(bar, bar.add_task("training", total=steps, completed=done, note=""))
