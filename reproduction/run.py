"""Running an experiment of a paper: findings into a folder, as numbers and as a picture."""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise import __version__
from reproduction.findings import Findings, Site
from reproduction.papers import EXPERIMENTS, find_experiment
from reproduction.result_cache import ResultCache, processor_seconds

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["list_experiments", "run_experiment"]

RECORDED = ("experiment", "command", "seeds", "seed_offset", "processor_seconds")
"""What the line of a result says beside its verdicts and numbers."""


def list_experiments() -> list[dict[str, Any]]:
    """Name, title, summary and default number of seeds of every experiment."""
    found = [find_experiment(name) for name in sorted(EXPERIMENTS)]
    return [
        {"name": e.name, "title": e.title, "summary": e.summary, "default_seeds": e.default_seeds}
        for e in found
    ]


def run_experiment(
    name: str,
    console: Console,
    *,
    seeds: int | None = None,
    seed_offset: int = 0,
    folder: str | None = None,
    data_dir: str | None = None,
) -> tuple[Findings, dict[str, Any]]:
    """Run an experiment with the seeds offset, offset + 1, ... and write what it found.

    `findings.json` has all of it, `figure.png` the curves, `result.jsonl` the line that
    `docs/measurements/data/papers-results.jsonl` keeps.

    Args:
        name: of the experiment.
        console: where progress is shown.
        seeds: how many; the experiment's own number by default.
        seed_offset: the first seed; from the default number on, no seed is one that the docs report.
        folder: where to write; `runs/experiment-NAME` by default. A long experiment keeps its finished runs
            there in `runs.jsonl` and goes on with the others.
        data_dir: folder with the data files, for experiments that read some.

    Returns:
        The findings, and all that is written about them as plain values.

    Raises:
        ValueError: an unknown name, or no seeds.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    experiment = find_experiment(name)
    count = experiment.default_seeds if seeds is None else seeds
    if count < 1:
        raise ValueError(f"--seeds is {count}, but an experiment needs at least one.")
    if seed_offset < 0:
        raise ValueError(f"--seed-offset is {seed_offset}, but seeds are numbers from 0 on.")
    path = Path(folder or f"runs/experiment-{name}")
    path.mkdir(parents=True, exist_ok=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    began, used = time.perf_counter(), processor_seconds()
    kept = ResultCache(path / "runs.jsonl")
    with bar:
        task = bar.add_task(name, total=None)

        def note(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        chosen = range(seed_offset, seed_offset + count)
        with _similar_warnings_once():
            findings = experiment.carry_out(chosen, note, Site(data_dir, kept))
    values = {
        "experiment": name,
        "title": experiment.title,
        "seeds": count,
        "seed_offset": seed_offset,
        "seconds": time.perf_counter() - began,
        "processor_seconds": round(processor_seconds() - used + kept.seconds_before, 1),
        "version": __version__,
        "command": f"python -m reproduction {name} --seeds {count}"
        + (f" --seed-offset {seed_offset}" if seed_offset else "")
        + ("" if experiment.run_on is None else " --data-dir DIR"),
        **findings.to_json(),
    }
    (path / "findings.json").write_text(
        json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8"
    )
    line = {key: values[key] for key in RECORDED} | {
        "met": sum(verdict.met for verdict in findings.verdicts),
        "missed": [verdict.sentence for verdict in findings.verdicts if not verdict.met],
        "numbers": values["numbers"],
    }
    (path / "result.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    figure = experiment.draw(findings)
    figure.savefig(path / "figure.png", dpi=150)
    return findings, values | {"run_dir": str(path), "figure": str(path / "figure.png")}


@contextmanager
def _similar_warnings_once() -> Iterator[None]:
    """Show the first of warnings that differ in numbers alone: an experiment has hundreds of trainings."""
    shown: set[str] = set()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_first(message: Warning | str, *rest: Any, **more: Any) -> None:
            kind = re.sub(r"[\d.]+", "", str(message))
            if kind not in shown:
                shown.add(kind)
                show(message, *rest, **more)

        warnings.showwarning = show_first
        yield
