"""Several methods at one budget, over several seeds, each tuned with the same number of trials.

A comparison is a set of runs. A trial trains with one learning rate of the method's grid and a tuning seed;
the rate with the best score on one half of the test records is taken. The results train with that rate
and the seeds 0, 1, ..., and are scored on the other half. With the centre rate r and K trials the grid is

    r * 4^(i - (K - 1) / 2),    i = 0, ..., K - 1.

Every finished run is a file of its own, named after its settings and written in one move, so a comparison
that was stopped goes on where it stopped, and one with more seeds or methods reuses what it shares.

The search costs privacy that no figure here holds: every run's statement is about that run only.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from equipoise._files import PathLike, make_folder, write_atomically
from equipoise._run_files import read_object
from equipoise._version import __version__
from equipoise.app.build import assemble, build_training
from equipoise.app.contenders import Comparison, Contender
from equipoise.app.data_loading import load_data
from equipoise.app.method_settings import make_method, make_setting
from equipoise.app.option_checks import SettingsError
from equipoise.app.peak_memory import PeakMemory
from equipoise.app.settings import RunSettings
from equipoise.app.tasks import Task, outputs_of
from equipoise.data import DataSet, Records
from equipoise.privacy import BudgetError
from equipoise.report.comparison_page import write_comparison
from equipoise.training.setup.argument_checks import existing_device

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["compare", "run_comparison", "tuning_grid"]


TUNING_SEED = 1000


GRID_FACTOR = 4.0

FORMAT = 3
"""Of the files of runs and comparisons: a run of another format is not taken for this one."""


Note = Callable[[int, int, str], None]
"""note(done, total, what): so many runs are done, and what comes next."""


def tuning_grid(centre: float, trials: int) -> tuple[float, ...]:
    """The learning rates that are tried around a method's own.

    Example:
        >>> tuning_grid(1.0, 3), tuning_grid(0.5, 1)
        ((0.25, 1.0, 4.0), (0.5,))
    """
    return tuple(float(f"{centre * GRID_FACTOR ** (i - (trials - 1) / 2):.6g}") for i in range(trials))


def compare(
    comparison: Comparison, folder: PathLike, note: Note, warn: Callable[[str], None]
) -> dict[str, Any]:
    """Do the runs that are missing in the folder, and write and answer the whole comparison.

    Args:
        comparison: what is compared.
        folder: a file a run under `runs/`, and `comparison.json`.
        note: called before every run.
        warn: called once with what the data's owner must know, and nobody else.

    Returns:
        Plain values: `methods` (one row an entry, with medians, spread, curve, time, memory, statement and
        trials), what was compared, and the name of the `score`, the task's main one.

    Raises:
        SettingsError: settings that cannot be used, before anything is trained.
    """
    bench = _Bench(comparison, Path(folder))
    if bench.population_warning is not None:
        warn(bench.population_warning)
    rows = []
    for number, entry in enumerate(comparison.entries):
        grid = bench.grids[number]
        trials = []
        for rate in grid if comparison.trials > 1 else ():
            what = f"{entry.label}: trial with learning rate {rate:g}"
            trials.append(bench.run(entry, rate, TUNING_SEED, "trial", what, note))
        # the first of equals: the smaller rate
        best = (max if bench.more_is_better else min)(trials, key=lambda run: run["score"], default=None)
        rate = grid[0] if best is None else best["learning_rate"]
        results = []
        for seed in range(comparison.seeds):
            what = f"{entry.label}: seed {seed} with learning rate {rate:g}"
            results.append(bench.run(entry, rate, seed, "result", what, note))
        rows.append(_row(entry, rate, trials, results))
    found = {
        "format": FORMAT,
        "version": __version__,
        "finished": time.strftime("%Y-%m-%d", time.gmtime()),
        "data": comparison.base.data_name,
        "data_description": bench.dataset.description,
        "model": bench.model,
        "population": bench.population,
        "public_records": comparison.base.public_records,
        "epsilon": bench.epsilon,
        "delta": bench.delta,
        "score": bench.score,
        "more_is_better": bench.more_is_better,
        "baseline": bench.baseline,
        "baseline_answer": bench.baseline_answer,
        "seeds": comparison.seeds,
        "trials": comparison.trials,
        "device": rows[0]["device"],
        "reproducible": comparison.base.reproducible,
        "command": comparison.command(),
        "methods": rows,
    }
    _write(Path(folder) / "comparison.json", found)
    return found


def run_comparison(comparison: Comparison, folder: str, console: Console) -> dict[str, Any]:
    """Compare with a progress bar, and write the page; the answer tells where things lie."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading the data", total=None)

        def note(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)
            if not console.is_terminal:
                console.print(f"[{done + 1}/{total}] {what}", markup=False, style="dim")

        def warn(what: str) -> None:
            console.print(f"[bold yellow]Warning[/]: {what}", soft_wrap=True)

        try:
            found = compare(comparison, folder, note, warn)
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on with the runs that are missing", style="yellow")
            raise
    return found | {"run_dir": str(folder), "page": str(write_comparison(found, folder))}


class _Bench:
    """Makes runs of a comparison, or takes them from the folder."""

    def __init__(self, comparison: Comparison, folder: Path) -> None:
        self._folder, base = folder / "runs", comparison.base
        existing_device(base.device or "cpu")
        raw = load_data(base)
        # assembled once: what cannot be used is found before the first run, and the raw data can go
        first = assemble(comparison.entries[0].settings(base), raw=raw)
        self.dataset, self.model = raw, first.settings.model
        self.population, self.population_warning = first.sampling.population, first.population_warning
        self.epsilon, self.delta = first.settings.epsilon, first.settings.delta
        # one half of the test records chooses the learning rates, the other judges
        self._halves = dict(zip(("trial", "result"), first.dataset.test.split(0.5, seed=0), strict=True))
        task = first.task
        self.score, self.more_is_better = task.main
        baseline, self.baseline_answer = task.baseline(self._halves["result"].fields[task.field], raw)
        self.baseline = baseline[self.score]
        self.grids: list[tuple[float, ...]] = []
        self._entries: dict[str, RunSettings] = {}
        for entry in comparison.entries:
            experiment = first if entry is comparison.entries[0] else assemble(entry.settings(base), raw=raw)
            resolved = replace(experiment.settings, epsilon=self.epsilon, delta=self.delta, ledger=None)
            with _named(entry):
                method, budget = make_method(resolved, experiment.sampling, experiment.public)
                method.plan(make_setting(resolved, experiment.sampling, budget))
            self._entries[entry.label] = resolved
            rate = resolved.learning_rate
            assert rate is not None
            self.grids.append(tuple(comparison.learning_rates or tuning_grid(rate, comparison.trials)))
        make_folder(self._folder, "run_dir")
        trials = sum(map(len, self.grids)) if comparison.trials > 1 else 0
        self._total = trials + comparison.seeds * len(comparison.entries)
        self._done = 0
        self._is_warm = False

    def run(
        self, entry: Contender, rate: float, seed: int, kind: str, what: str, note: Note
    ) -> dict[str, Any]:
        """The run from its file, or trained now and written to it."""
        note(self._done, self._total, what)
        self._done += 1
        settings = replace(self._entries[entry.label], learning_rate=rate, seed=seed)
        identity: dict[str, Any] = {"version": __version__, "format": FORMAT, "kind": kind}
        identity["scored_by"] = self.score
        identity["settings"] = settings.publishable()
        text = json.dumps(identity, sort_keys=True)
        name = f"{entry.label}-{kind}-lr{rate:g}-seed{seed}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
        path = self._folder / f"{name.replace(os.sep, '-')}.json"
        if path.is_file():
            return read_object(path)
        if not self._is_warm:
            _warm_up(settings, self.dataset)
            self._is_warm = True
        found = {**identity, **_train(settings, self.dataset, self._halves[kind], kind == "result")}
        _write(path, found)
        return found


@contextmanager
def _named(entry: Contender) -> Iterator[None]:
    """Let an error say whose settings it is about."""
    try:
        yield
    except (ValueError, BudgetError) as error:
        raise SettingsError(f"method {entry.label}: {error}") from error


def _warm_up(settings: RunSettings, raw: DataSet) -> None:
    """One step that is not measured: what the process loads once is charged to no method."""
    build_training(assemble(settings, raw=raw), on_disk=False).take_step()


def _sampling_error(task: Task, outputs: torch.Tensor, judges: Records, raw: DataSet) -> float:
    """The standard error of the main score that comes from which records happen to be test records.

    By the bootstrap, which holds for every score. Of 50 resamples it is itself known to about 10%.
    """
    resamples = torch.Generator().manual_seed(0)
    count = len(judges)
    drawn = [torch.randint(count, (count,), generator=resamples) for _ in range(50)]
    return statistics.stdev(task.main_score(outputs[ids], Records(judges[ids]), raw) for ids in drawn)


def _train(settings: RunSettings, raw: DataSet, judges: Records, is_result: bool) -> dict[str, Any]:
    """One training in memory: its curve, score, its sampling error, statement, time and memory."""
    experiment = assemble(settings, raw=raw)
    task = experiment.task
    device = torch.device(settings.device or "cpu")
    curve: list[tuple[int, float]] = []

    class Curve:
        def write(self, row: Mapping[str, Any]) -> None:
            if "evaluation.score" in row:
                curve.append((int(row["step"]), float(row["evaluation.score"])))

        def close(self) -> None:
            pass

    training = build_training(experiment, on_disk=False, writers=[Curve()])
    steps = experiment.sampling.steps
    times: list[float] = []
    # from here on: calibrating and attaching would hide what the steps need, and so would judging
    memory = PeakMemory(device)
    while training.steps_done < steps:
        if training.steps_done == steps - 1:
            memory.note()  # the last step also computes the epsilon, which takes memory of its own
        began = time.perf_counter()
        training.take_step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
        if training.steps_done % max(1, steps // 10) == 0 or training.steps_done == steps:
            if training.steps_done < steps:
                memory.note()
            training.evaluate(
                experiment.scored_by(
                    lambda model: {"score": task.main_score(outputs_of(model, judges), judges, raw)}
                )
            )
            memory.restart()
    result = training.finish()
    assert result.statement is not None
    return {
        "learning_rate": settings.learning_rate,
        "seed": settings.seed,
        "score": result.evaluation["score"],
        "sampling_error": (
            _sampling_error(task, outputs_of(experiment.model, judges), judges, raw) if is_result else None
        ),
        "curve": curve,
        "steps": result.steps,
        "seconds": sum(times),
        "seconds_per_step": statistics.median(times),
        "memory_bytes": memory.highest,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "judges": len(judges),
        "statement": json.loads(result.statement.to_json()),
    }


def _row(
    entry: Contender, rate: float, trials: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    scores = [float(run["score"]) for run in results]
    memory = [run["memory_bytes"] for run in results if run["memory_bytes"] is not None]
    steps = [step for step, _ in results[0]["curve"]]
    values = [[dict(map(tuple, run["curve"]))[step] for run in results] for step in steps]
    first = results[0]
    return {
        "label": entry.label,
        "method": first["settings"]["method"],
        "settings": {k: v for k, v in first["settings"].items() if k not in ("seed",)},
        "learning_rate": rate,
        "score": statistics.median(scores),
        "scores": scores,
        "sampling_error": statistics.median(float(run["sampling_error"]) for run in results),
        "judges": first["judges"],
        "steps": first["steps"],
        "curve": [
            [step, statistics.median(v), min(v), max(v)] for step, v in zip(steps, values, strict=True)
        ],
        "seconds": statistics.median(float(run["seconds"]) for run in results),
        "seconds_per_step": statistics.median(float(run["seconds_per_step"]) for run in results),
        "memory_bytes": statistics.median(memory) if memory else None,
        "device": first["device"],
        "statement": first["statement"],
        "trials": [[run["learning_rate"], run["score"]] for run in trials],
    }


def _write(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode(), mode=0o644)
