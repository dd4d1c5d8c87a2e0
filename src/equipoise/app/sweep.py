"""A grid of settings, each combination trained once: a table with a row per run, and a picture.

    equipoise sweep --data digits --epochs 4 --grid epsilon=1,3,8 --grid clip_norm=0.1,1 --grid seed=0,1,2

A process trains many combinations, one after the other, so that PyTorch and the data are loaded once for all.
Every finished run is a file, as of a comparison: a sweep that was stopped goes on, and a larger grid takes
what it shares with a smaller one. Epsilon of a row is that of its run alone; choosing among rows that were
scored on private records costs more.
"""

from __future__ import annotations

import csv
import io
import multiprocessing
import statistics
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from equipoise._files import make_folder, write_atomically, write_json
from equipoise._run_files import read_object
from equipoise.app.contenders import texts
from equipoise.app.option_checks import SettingsError
from equipoise.app.settings import (
    OF_OWN_DATA,
    Count,
    RunSettings,
    parse_option,
    setting,
    settings,
    written,
)

if TYPE_CHECKING:
    from rich.console import Console

    from equipoise.data import DataSet

_SHARED = {
    "data", "data_dir", "subset", "public_records", "ledger", "run_dir", "options", "secret_seed",
    *OF_OWN_DATA,
}  # fmt: skip
"""What no axis can be: data are loaded once, and no run of a sweep has a folder."""

CURVES = 8
"""So many curves can be told apart in a picture; the best ones are drawn."""


@settings
class Grid:
    """Combinations of settings.

    Attributes:
        base: the settings that all runs share.
    """

    base: RunSettings = Field(default_factory=RunSettings)
    grid: Annotated[list[str], BeforeValidator(texts)] = setting(
        list,
        "A setting of the training or an argument of the method, and its values; repeatable.",
        metavar="NAME=VALUES",
        group="Combinations",
    )

    def axes(self) -> dict[str, list[Any]]:
        """The values of each setting that varies.

        Raises:
            SettingsError: none varies, one twice, or one that all runs share.

        >>> Grid(grid=["epsilon=1,3", "clip-norm=0.1", "method=dp-sgd,dice-sgd"]).axes()
        {'epsilon': [1, 3], 'clip_norm': [0.1], 'method': ['dp-sgd', 'dice-sgd']}
        """
        found: dict[str, list[Any]] = {}
        for text in self.grid:
            name, value = parse_option(text)
            if name in found or name in _SHARED:
                why = "is there twice" if name in found else "is shared by all runs"
                raise SettingsError(f"--grid is {text!r}, but {name} {why}.")
            found[name] = value if isinstance(value, list) else [value]
            if isinstance(value, str):  # each by itself: of "1,x" the second is no number
                found[name] = [parse_option(f"{name}={part}")[1] for part in value.split(",")]
        if not found:
            raise SettingsError(
                "--grid is missing: name a setting and its values, such as --grid epsilon=1,3,8 "
                "--grid seed=0,1,2."
            )
        return found

    def combinations(self) -> list[tuple[dict[str, Any], RunSettings]]:
        """The values of each run, and its settings, if they fit together.

        Raises:
            SettingsError: settings of a run that do not.
        """
        if self.base.secret_seed is not None:
            raise SettingsError(
                "--secret-seed would give all runs the same noise and sampling, whose costs would "
                "not add up. Leave it out, and repeat the run that you choose with it"
            )
        axes, own = self.axes(), {field.name for field in fields(RunSettings)}
        found = []
        for values in product(*axes.values()):
            row = dict(zip(axes, values, strict=True))
            options = {name: value for name, value in row.items() if name not in own}
            changes = {name: value for name, value in row.items() if name in own}
            if "epsilon" in changes or "noise_multiplier" in changes:
                changes = {"epsilon": None, "noise_multiplier": None} | changes
            made = replace(self.base, **changes, options={**self.base.options, **options})
            made.check()
            found.append((row, made))
        return found


@settings
class Sweep(Grid):
    """Combinations that are all trained."""

    jobs: Count = setting(1, "Processes that train side by side, with one thread each.")


def sweep(asked: Sweep, folder: str, out: str | None, console: Console) -> dict[str, Any]:
    """Do the runs that are missing in the folder, and write table and picture.

    Returns:
        Plain values: how many `runs` and how many `failed`, the name of the `score`, `best` (the row with the
        best one), and where `results` and `picture` (None without several numbers on an axis) lie.

    Raises:
        SettingsError: before anything is trained.
    """
    from equipoise.app.build import assemble
    from equipoise.app.compare import result_file
    from equipoise.app.data_loading import load_data
    from equipoise.app.method_settings import make_method

    runs, wanted = make_folder(Path(folder) / "runs", "run_dir"), asked.combinations()
    raw, methods = load_data(asked.base), dict[tuple[Any, ...], RunSettings]()
    for _, made in wanted:  # arguments that a method lacks are found before the first run
        methods.setdefault((made.method, made.recipe, *made.options), made)
    for made in methods.values():
        experiment = assemble(made, raw=raw, outline=True)
        make_method(experiment.settings, experiment.sampling, experiment.public)
    score, more_is_better = experiment.task.main
    files = [result_file(runs, "run", made, "sweep", score) for _, made in wanted]
    missing = [(made, file) for (_, made), (file, _) in zip(wanted, files, strict=True) if not file.is_file()]
    failed: dict[Path, str] = {}
    with console.status("") as status:
        done = len(files) - len(missing)
        for (_, file), (error, said) in zip(missing, _trained(asked, score, missing), strict=True):
            done += 1
            status.update(f"{done:,} of {len(files):,} runs")
            for words in said:
                warnings.warn(words, stacklevel=2)
            if error is not None:
                failed[file] = error
    rows = []
    for (row, _), (file, _) in zip(wanted, files, strict=True):
        found = read_object(file) if file.is_file() else {}
        statement = found.get("statement", {})
        figures = {score: found.get("score"), **{name: found.get(name) for name in ("steps", "seconds")}}
        told = {"guarantee": statement.get("guarantee"), "epsilon_of_run": statement.get("epsilon")}
        rows.append({**row, **figures, **told, "error": failed.get(file, "")})
    results = Path(out or Path(folder) / "results.csv")
    table = io.StringIO()
    writer = csv.DictWriter(table, list(rows[0]))
    writer.writeheader()
    for row in rows:
        writer.writerow({name: "" if value is None else written(value) for name, value in row.items()})
    write_atomically(results, table.getvalue().encode(), mode=0o644)
    scored = [row for row in rows if row[score] is not None]
    best = max(scored, key=lambda row: row[score] if more_is_better else -row[score], default=None)
    return {
        "run_dir": folder,
        "runs": len(rows),
        "failed": len(failed),
        "score": score,
        "best": best,
        "results": str(results),
        "picture": _draw(scored, asked.axes(), score, more_is_better, results.with_suffix(".png")),
    }


def _trained(
    asked: Sweep, score: str, missing: list[tuple[RunSettings, Path]]
) -> Iterator[tuple[str | None, list[str]]]:
    """Train these and write their files; for each an error that was raised, or None, and its warnings."""
    if asked.jobs == 1 or len(missing) < 2:
        yield from map(partial(_train_one, asked.base, score), missing)
        return
    import torch

    context, count = multiprocessing.get_context("spawn"), min(asked.jobs, len(missing))
    with ProcessPoolExecutor(count, context, torch.set_num_threads, (1,)) as pool:
        yield from pool.map(partial(_train_one, asked.base, score), missing)


_LOADED: list[tuple[RunSettings, DataSet]] = []
"""The data that this process has loaded."""


def _train_one(base: RunSettings, score: str, one: tuple[RunSettings, Path]) -> tuple[str | None, list[str]]:
    from equipoise.app.build import assemble
    from equipoise.app.compare import result_file, train_in_memory
    from equipoise.app.data_loading import load_data
    from equipoise.privacy import BudgetError

    if not _LOADED or _LOADED[0][0] != base:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `sweep` has said it
            _LOADED[:] = [(base, load_data(base))]
    raw = _LOADED[0][1]
    made, file = replace(one[0], run_dir=None), one[1]
    problem = None
    with warnings.catch_warnings(record=True) as said:  # another process's would not be shown as ours are
        try:
            judges = assemble(made, raw=raw).dataset.test
            found = train_in_memory(made, raw, judges, False)
            write_json(file, result_file(file.parent, "run", made, "sweep", score)[1] | found)
        except (ValueError, TypeError, BudgetError) as error:
            problem = f"{type(error).__name__}: {error}"
    return problem, [str(warning.message) for warning in said]


def _draw(
    rows: list[dict[str, Any]], axes: Mapping[str, list[Any]], score: str, more_is_better: bool, path: Path
) -> str | None:
    """The score against epsilon, or else the first setting with several numbers; a curve per other values.

    A curve is the median over the seeds, and its band their range.
    """
    several = {name: values for name, values in axes.items() if len(values) > 1 and name != "seed"}
    numeric = [name for name, values in several.items() if all(type(x) in (int, float) for x in values)]
    if not rows or not numeric:
        return None
    from matplotlib.figure import Figure

    from equipoise.report.figures import Curve, plot

    across = "epsilon" if "epsilon" in numeric else numeric[0]
    varied = [name for name in several if name != across]
    curves: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        label = ", ".join(f"{name.replace('_', ' ')} {written(row[name])}" for name in varied) or score
        curves[label][row[across]].append(row[score])
    drawn = []
    for label, at in curves.items():
        x = sorted(at)
        bounds = [[of(at[value]) for value in x] for of in (statistics.median, min, max)]
        drawn.append(Curve(label, x, *bounds))
    drawn.sort(key=lambda curve: statistics.mean(curve.y), reverse=more_is_better)
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    subplot = figure.add_subplot()
    for number, curve in enumerate(drawn[:CURVES]):
        plot(subplot, curve, number)
    if min(row[across] for row in rows) > 0:
        subplot.set_xscale("log")
        subplot.set_xticks(axes[across], [written(value) for value in axes[across]], minor=False)
        subplot.minorticks_off()
    subplot.set_xlabel(across.replace("_", " "))
    subplot.set_ylabel(score.replace("_", " "))
    subplot.spines[["top", "right"]].set_visible(False)
    if len(drawn) > 1:
        title = f"best {CURVES} of {len(drawn)}" if len(drawn) > CURVES else None
        subplot.legend(fontsize=8, frameon=False, title=title)
    figure.savefig(path, dpi=160)
    return str(path)
