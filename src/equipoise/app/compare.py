"""Several methods at one budget, over several seeds, each tuned with the same number of trials.

A comparison is a set of runs of the harness: trials are scored on one half of the test records, results on
the other half. Every finished run is a file of its own, named after its settings and written in one move, so
a comparison that was stopped goes on where it stopped, and one with more seeds or methods reuses what it
shares.

The search costs privacy that no figure here holds: every run's statement is about that run only.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from equipoise._files import PathLike, make_folder, schema_file, write_json
from equipoise._run_files import read_object
from equipoise._version import __version__
from equipoise.app.build import assemble, build_training
from equipoise.app.contenders import Comparison
from equipoise.app.data_loading import load_data
from equipoise.app.harness import Tuned, sampling_error, tuned, tuning_grid
from equipoise.app.method_settings import make_method, make_setting
from equipoise.app.option_checks import SettingsError
from equipoise.app.settings import RunSettings
from equipoise.app.tasks import outputs_of
from equipoise.data import DataSet, Records
from equipoise.privacy import BudgetError
from equipoise.report.comparison_page import write_comparison
from equipoise.training.setup.argument_checks import existing_device

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = 4
"""Of the files of runs and comparisons: a run of another format is not taken for this one."""

Note = Callable[[int, int, str], None]
"""note(done, total, what): so many runs are done, and what comes next."""


def compare(
    comparison: Comparison, folder: PathLike, note: Note, warn: Callable[[str], None]
) -> dict[str, Any]:
    """Do the runs that are missing in the folder; write and return the whole comparison.

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
    base = comparison.base
    existing_device(base.device or "cpu")
    raw = load_data(base)
    entries: dict[str, RunSettings] = {}
    for label, settings in comparison.check().items():
        experiment = assemble(settings, raw=raw)
        if not entries:  # the first speaks for all of what they share
            first, (score, more_is_better) = experiment, experiment.task.main
            if first.population_warning is not None:
                warn(first.population_warning)
        shared: dict[str, Any] = {"epsilon": first.settings.epsilon, "delta": first.settings.delta}
        entries[label] = replace(experiment.settings, **shared)
        try:  # what cannot be planned is found before the first run
            method, budget = make_method(entries[label], experiment.sampling, experiment.public)
            method.plan(make_setting(entries[label], experiment.sampling, budget))
        except (ValueError, BudgetError) as error:
            raise SettingsError(f"method {label}: {error}") from error
    of_all = {
        "data": base.data_name,
        "model": first.settings.model,
        "population": first.sampling.population,
        "public_records": base.public_records,
        **shared,
    }
    path = Path(folder) / "comparison.json"
    old = read_object(path) if path.is_file() else of_all
    if changed := [name for name, value in of_all.items() if old.get(name) != value]:
        raise SettingsError(
            f"--run-dir {str(folder)!r} holds a comparison with another {' and '.join(changed)}, which would "
            "be written over. Name a new folder."
        )
    # one half of the test records chooses the learning rates, the other judges
    halves = dict(zip(("trial", "result"), first.dataset.test.split(0.5, seed=0), strict=True))
    runs, done = make_folder(Path(folder) / "runs", "run_dir"), 0
    total = len(entries) * (comparison.seeds + (comparison.trials if comparison.trials > 1 else 0))

    def run(label: str, kind: str, rate: float, seed: int) -> dict[str, Any]:
        """The run from its file, or trained now and written to it."""
        nonlocal done
        note(done, total, f"{label}: {kind} with learning rate {rate:g}, seed {seed}")
        done += 1
        settings = replace(entries[label], learning_rate=rate, seed=seed)
        file, identity = result_file(runs, f"{label}-{kind}-lr{rate:g}-seed{seed}", settings, kind, score)
        if file.is_file():
            return read_object(file)
        found = {**identity, **train_in_memory(settings, raw, halves[kind], kind == "result")}
        write_json(file, found)
        return found

    rows = []
    for label, settings in entries.items():
        assert settings.learning_rate is not None
        found = tuned(
            partial(run, label, "trial"),
            partial(run, label, "result"),
            lambda trial: trial["score"] if more_is_better else -trial["score"],
            comparison.learning_rates or tuning_grid(settings.learning_rate, comparison.trials),
            range(comparison.seeds),
        )
        rows.append(_row(label, found))
    baseline, baseline_answer = first.task.baseline(halves["result"].fields[first.task.field], raw)
    values = {
        "format": FORMAT,
        "version": __version__,
        "finished": time.strftime("%Y-%m-%d", time.gmtime()),
        "data_description": raw.description,
        **of_all,
        "score": score,
        "more_is_better": more_is_better,
        "baseline": baseline[score],
        "baseline_answer": baseline_answer,
        "seeds": comparison.seeds,
        "trials": comparison.trials,
        "device": rows[0]["device"],
        "reproducible": base.reproducible,
        "command": comparison.command(),
        "methods": rows,
    }
    write_json(path, values)
    return values


def run_comparison(comparison: Comparison, folder: str, console: Console) -> dict[str, Any]:
    """Compare with a progress bar, and write the page; the answer tells where things lie."""
    with console.status("reading the data") as status:

        def note(done: int, total: int, what: str) -> None:
            status.update(f"[{done + 1}/{total}] {what}")
            if not console.is_terminal:
                console.print(f"[{done + 1}/{total}] {what}", markup=False, style="dim")

        def warn(what: str) -> None:
            console.print(f"[bold yellow]Warning[/]: {what}")

        try:
            found = compare(comparison, folder, note, warn)
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on with the runs that are missing", style="yellow")
            raise
    return found | {"run_dir": str(folder), "page": str(write_comparison(found, folder))}


def result_file(
    runs: Path, label: str, settings: RunSettings, kind: str, score: str
) -> tuple[Path, dict[str, Any]]:
    """The file of a run, named by what decides its result (files of data by place and time), and that."""
    identity = {"version": __version__, "format": FORMAT, "kind": kind, "scored_by": score}
    identity["settings"] = settings.publishable()
    schema = settings.schema or str(schema_file(settings.data))
    given = filter(None, (settings.data, schema, settings.test))
    files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns)
             for path in map(Path, given) if path.exists()]  # fmt: skip
    digest = hashlib.sha256(json.dumps([identity, files], sort_keys=True).encode()).hexdigest()[:10]
    return runs / f"{label}-{digest}.json".replace(os.sep, "-"), identity


def train_in_memory(settings: RunSettings, raw: DataSet, judges: Records, is_result: bool) -> dict[str, Any]:
    """One training in memory: curve, score by these judges, its sampling error, statement, time, memory."""
    experiment = assemble(settings, raw=raw)
    task, device = experiment.task, torch.device(settings.device or "cpu")
    training = build_training(experiment, on_disk=False)
    steps, is_cuda = experiment.sampling.steps, device.type == "cuda"
    judge = experiment.scored_by(
        lambda model: {"score": task.main_score(outputs_of(model, judges), judges, raw)}
    )
    curve: list[tuple[int, float]] = []
    times: list[float] = []
    held = peak = 0
    if is_cuda:  # from here on: calibrating and attaching would hide what the steps need
        held = torch.cuda.memory_allocated(device)
    while training.steps_done < steps:
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(device)  # judging needs memory of its own
        began = time.perf_counter()
        training.take_step()
        if is_cuda:
            torch.cuda.synchronize(device)
            peak = max(peak, torch.cuda.max_memory_allocated(device) - held)
        times.append(time.perf_counter() - began)
        if training.steps_done % max(1, steps // 10) == 0 or training.steps_done == steps:
            curve.append((training.steps_done, training.evaluate(judge)["score"]))
    result = training.finish()
    assert result.statement is not None
    outputs = outputs_of(experiment.model, judges)

    def of_records(ids: torch.Tensor) -> float:
        return task.main_score(outputs[ids], Records(judges[ids]), raw)

    return {
        "learning_rate": settings.learning_rate,
        "seed": settings.seed,
        "score": curve[-1][1],
        "sampling_error": sampling_error(of_records, len(judges)) if is_result else None,
        "curve": curve,
        "steps": result.steps,
        "seconds": sum(times),
        "seconds_per_step": statistics.median(times),
        "memory_bytes": peak if is_cuda else None,
        "device": torch.cuda.get_device_name(device) if is_cuda else "CPU",
        "judges": len(judges),
        "statement": json.loads(result.statement.to_json()),
    }


def _row(label: str, found: Tuned[dict[str, Any]]) -> dict[str, Any]:
    results, first = found.results, found.results[0]
    scores = [float(run["score"]) for run in results]
    curves = zip(*(run["curve"] for run in results), strict=True)

    def median(name: str) -> float | None:
        values = [run[name] for run in results if run[name] is not None]
        return statistics.median(values) if values else None

    return {
        "label": label,
        "method": first["settings"]["method"],
        "settings": {name: value for name, value in first["settings"].items() if name != "seed"},
        "learning_rate": found.rate,
        "score": statistics.median(scores),
        "scores": scores,
        "curve": [
            [points[0][0], statistics.median(v), min(v), max(v)]
            for points in curves
            if (v := [score for _, score in points])
        ],
        **{name: median(name) for name in ("sampling_error", "seconds", "seconds_per_step", "memory_bytes")},
        **{name: first[name] for name in ("judges", "steps", "device", "statement")},
        "trials": [[rate, trial["score"]] for rate, trial in found.trials.items()],
    }
