"""A progress bar: steps, speed, epsilon so far, time left; quiet where nobody looks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Progress", "progress_bar"]


class Progress:
    """Takes the numbers of every step; this one shows nothing."""

    def update(self, step: int, epsilon: float | None, evaluation: dict[str, float]) -> None:
        """Step `step` is done."""


class _RichProgress(Progress):
    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task
        self._epsilon, self._evaluation = "", ""

    def update(self, step: int, epsilon: float | None, evaluation: dict[str, float]) -> None:
        if epsilon is not None:
            self._epsilon = f"epsilon {epsilon:.3f}"
        if evaluation:
            self._evaluation = "  ".join(f"{name} {value:.4g}" for name, value in evaluation.items())
        task = self._bar.tasks[self._task]
        speed = f"{task.speed:.1f} steps/s" if task.speed else ""
        self._bar.update(
            self._task,
            completed=step,
            note="  ".join(part for part in (speed, self._epsilon, self._evaluation) if part),
        )


@contextmanager
def progress_bar(steps: int, done: int, show: bool) -> Iterator[Progress]:
    """A progress bar on standard error while the block runs.

    Args:
        steps: of the whole training.
        done: how many were done before (after a resume).
        show: False gives an object that shows nothing.
    """
    if not show:
        yield Progress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    note = TextColumn("{task.fields[note]}")
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), note, TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        yield _RichProgress(bar, bar.add_task("training", total=steps, completed=done, note=""))
