"""Several methods at one budget, over several seeds, each tuned with the same number of trials.

A comparison is a set of runs. A trial trains with one learning rate of the method's grid and a tuning seed;
the rate with the best accuracy on one half of the test records is taken. The results train with that rate
and the seeds 0, 1, ..., and are scored on the other half. With the centre rate r and K trials the grid is

    r * 4^(i - (K - 1) / 2),    i = 0, ..., K - 1.

Every finished run is a file of its own, named after its settings and written in one move, so a comparison
that was stopped goes on where it stopped, and one with more seeds or methods reuses what it shares.

The search costs privacy that no figure here holds: every run's statement is about that run alone.

The methods of a comparison, each with its own settings, from the words of the command line and back.

The most memory that a piece of work held beyond what was held before it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from equipoise._version import __version__
from equipoise.app.build import accuracy, assemble, build_training, load_data
from equipoise.app.method_settings import make_method
from equipoise.app.option_checks import SettingsError
from equipoise.app.settings import Settings, parse_option
from equipoise.data import DataSet
from equipoise.methods.registry import registered
from equipoise.report.comparison_page import write_comparison
from equipoise.report.json_files import read_object

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "SHORTHANDS",
    "Comparison",
    "Contender",
    "PeakMemory",
    "compare",
    "entry_word",
    "method_word",
    "parse_method_option",
    "read_entries",
    "run_comparison",
    "tuning_grid",
]


TUNING_SEED = 1000


GRID_FACTOR = 4.0


Note = Callable[[int, int, str], None]
"""note(done, total, what): so many runs are done, and what comes next."""


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
        entries: the methods.
        base: the settings that they share.
        seeds: results a method.
        trials: learning rates tried a method; with one trial nothing is tuned.
        learning_rates: the grid of all methods instead of one around each method's own rate.
    """

    entries: Sequence[Contender]
    base: Settings
    seeds: int = 3
    trials: int = 3
    learning_rates: Sequence[float] | None = None

    def __post_init__(self) -> None:
        for name in ("seeds", "trials"):
            if getattr(self, name) < 1:
                raise SettingsError(f"--{name} is {getattr(self, name)}, but at least one is needed.")
        labels = [entry.label for entry in self.entries]
        if not labels or len(set(labels)) != len(labels):
            raise SettingsError(
                f"--methods is {','.join(labels)!r}, but it must name at least one method, and none twice. "
                "LABEL=METHOD gives a second form of a method a name of its own."
            )
        if self.base.noise_multiplier is not None:
            raise SettingsError("methods are compared at one budget: give --epsilon, no noise multiplier.")


def tuning_grid(centre: float, trials: int) -> tuple[float, ...]:
    """The learning rates that are tried around a method's own.

    Example:
        >>> tuning_grid(1.0, 3), tuning_grid(0.5, 1)
        ((0.25, 1.0, 4.0), (0.5,))
    """
    return tuple(float(f"{centre * GRID_FACTOR ** (i - (trials - 1) / 2):.6g}") for i in range(trials))


def compare(comparison: Comparison, folder: str | os.PathLike[str], note: Note) -> dict[str, Any]:
    """Do the runs that are missing in the folder, and write and answer the whole comparison.

    Args:
        comparison: what is compared.
        folder: a file a run under `runs/`, and `comparison.json`.
        note: told before every run.

    Returns:
        Plain values: `methods` (one row an entry, with medians, spread, curve, time, memory, statement and
        trials) and what was compared.

    Raises:
        SettingsError: settings that cannot be used, before anything is trained.
    """
    bench = _Bench(comparison, Path(folder))
    rows = []
    for number, entry in enumerate(comparison.entries):
        grid = bench.grids[number]
        trials = []
        for rate in grid if comparison.trials > 1 else ():
            what = f"{entry.label}: trial with learning rate {rate:g}"
            trials.append(bench.run(entry, rate, TUNING_SEED, "trial", what, note))
        # the first of equals: the smaller rate
        best = max(trials, key=lambda run: run["accuracy"])["learning_rate"] if trials else grid[0]
        results = []
        for seed in range(comparison.seeds):
            what = f"{entry.label}: seed {seed} with learning rate {best:g}"
            results.append(bench.run(entry, best, seed, "result", what, note))
        rows.append(_row(entry, best, trials, results))
    found = {
        "format": 1,
        "version": __version__,
        "data": comparison.base.data,
        "model": bench.model,
        "population": bench.population,
        "public_records": comparison.base.public_records,
        "epsilon": bench.epsilon,
        "delta": bench.delta,
        "seeds": comparison.seeds,
        "trials": comparison.trials,
        "device": rows[0]["device"],
        "reproducible": comparison.base.reproducible,
        "command": _command(comparison),
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

        try:
            found = compare(comparison, folder, note)
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on with the runs that are missing", style="yellow")
            raise
    return found | {"run_dir": str(folder), "page": str(write_comparison(found, folder))}


class _Bench:
    """Makes runs of a comparison, or takes them from the folder."""

    def __init__(self, comparison: Comparison, folder: Path) -> None:
        self._comparison, self._folder = comparison, folder / "runs"
        base = comparison.base
        raw = load_data(base)
        # assembled once: what cannot be used is found before the first run, and the raw data can go
        first = assemble(comparison.entries[0].settings(base), raw=raw)
        self.dataset, self.model = raw, first.settings.model
        self.population = first.sampling.population
        self.epsilon, self.delta = first.settings.epsilon, first.settings.delta
        # one half of the test records chooses the learning rates, the other judges
        self._halves = dict(zip(("trial", "result"), first.dataset.test.split(0.5, seed=0), strict=True))
        self.grids: list[tuple[float, ...]] = []
        self._entries: dict[str, Settings] = {}
        for entry in comparison.entries:
            experiment = first if entry is comparison.entries[0] else assemble(entry.settings(base), raw=raw)
            make_method(experiment.settings, experiment.sampling, experiment.public)
            resolved = replace(experiment.settings, epsilon=self.epsilon, delta=self.delta)
            self._entries[entry.label] = resolved
            rate = resolved.learning_rate
            assert rate is not None
            self.grids.append(tuple(comparison.learning_rates or tuning_grid(rate, comparison.trials)))
        self._folder.mkdir(parents=True, exist_ok=True)
        trials = sum(map(len, self.grids)) if comparison.trials > 1 else 0
        self._total = trials + comparison.seeds * len(comparison.entries)
        self._done = 0

    def run(
        self, entry: Contender, rate: float, seed: int, kind: str, what: str, note: Note
    ) -> dict[str, Any]:
        """The run from its file, or trained now and written to it."""
        note(self._done, self._total, what)
        self._done += 1
        settings = replace(self._entries[entry.label], learning_rate=rate, seed=seed)
        identity = {"version": __version__, "kind": kind, "settings": settings.publishable()}
        text = json.dumps(identity, sort_keys=True)
        name = f"{entry.label}-{kind}-lr{rate:g}-seed{seed}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
        path = self._folder / f"{name.replace(os.sep, '-')}.json"
        if path.is_file():
            return read_object(path)
        found = {**identity, **_train(settings, self.dataset, self._halves[kind])}
        _write(path, found)
        return found


def _train(settings: Settings, raw: DataSet, judges: Any) -> dict[str, Any]:
    """One training in memory: its curve, accuracy, statement, time and memory."""
    experiment = assemble(settings, raw=raw)
    device = torch.device(settings.device or "cpu")
    curve: list[tuple[int, float]] = []

    class Curve:
        def write(self, row: Mapping[str, Any]) -> None:
            if "evaluation.accuracy" in row:
                curve.append((int(row["step"]), float(row["evaluation.accuracy"])))

        def close(self) -> None:
            pass

    training = build_training(
        experiment, on_disk=False, epsilon_every=experiment.sampling.steps, writers=[Curve()]
    )
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
            training.evaluate(lambda model: {"accuracy": accuracy(model, judges)})
            memory.restart()
    result = training.finish()
    assert result.statement is not None
    return {
        "learning_rate": settings.learning_rate,
        "seed": settings.seed,
        "accuracy": result.evaluation["accuracy"],
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
    accuracies = [float(run["accuracy"]) for run in results]
    memory = [run["memory_bytes"] for run in results if run["memory_bytes"] is not None]
    steps = [step for step, _ in results[0]["curve"]]
    values = [[dict(map(tuple, run["curve"]))[step] for run in results] for step in steps]
    first = results[0]
    return {
        "label": entry.label,
        "method": first["settings"]["method"],
        "settings": {k: v for k, v in first["settings"].items() if k not in ("seed",)},
        "learning_rate": rate,
        "accuracy": statistics.median(accuracies),
        "accuracies": accuracies,
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
        "trials": [[run["learning_rate"], run["accuracy"]] for run in trials],
    }


def _command(comparison: Comparison) -> str:
    """The command that repeats the comparison, with placeholders for paths."""
    words = ["equipoise compare --methods", ",".join(entry_word(entry) for entry in comparison.entries)]
    base = replace(comparison.base, method="dp-sgd", seed=0, run_dir=None)
    shared = base.command().removeprefix("equipoise train ").replace("--method dp-sgd ", "")
    words += [shared.replace(" --seed 0", ""), f"--seeds {comparison.seeds} --trials {comparison.trials}"]
    if comparison.learning_rates:
        words.append("--learning-rates " + ",".join(f"{rate:g}" for rate in comparison.learning_rates))
    for entry in comparison.entries:
        own = SHORTHANDS.get(method_word(entry), {})
        for name, value in {**entry.changes, **entry.changes["options"]}.items():
            if name in ("method", "options") or own.get(name) == value:
                continue
            text = value if isinstance(value, str) else json.dumps(value)
            words.append(f"--option {entry.label}.{name}={text}")
    return " ".join(words)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """In one move, so that a kill leaves the whole file or none."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


SHORTHANDS: dict[str, dict[str, Any]] = {
    "auto-s": {"method": "dp-sgd", "clip_rule": "auto_s"},
    "psac": {"method": "dp-sgd", "clip_rule": "psac"},
    "quantile-clipping": {"method": "dp-sgd", "clip_norm": "quantile"},
}
"""Names for settings of DP-SGD that are usually compared as methods of their own."""


_COMMON = {"data", "data_dir", "population", "subset", "public_records", "epsilon", "delta", "seed", "device"}


_COMMON |= {"reproducible", "ledger", "run_dir", "noise_multiplier", "method", "options", "model"}


@dataclass(frozen=True)
class Contender:
    """A method with its settings, under the name that the table shows.

    Attributes:
        label: the name.
        changes: fields of `Settings` that differ from the comparison's.
    """

    label: str
    changes: Mapping[str, Any]

    def settings(self, base: Settings) -> Settings:
        """The comparison's settings with this entry's changes."""
        changes = dict(self.changes)
        return replace(base, **changes)


def read_entries(methods: str, options: Sequence[tuple[str, Any]] = ()) -> list[Contender]:
    """Entries from the words of the command line.

    Args:
        methods: names of methods or `SHORTHANDS`, or LABEL=METHOD, separated by commas.
        options: ("METHOD.NAME", value) with METHOD a label; NAME is a setting of the training
            (learning_rate, clip_norm, epochs, ...) or an argument of the method.

    Raises:
        SettingsError: an unknown method or label, or a setting that all methods must share.

    Example:
        >>> plain, wide = read_entries("dp-sgd,wide=auto-s", [("wide.clip_norm", 4)])
        >>> wide.label, wide.changes["clip_rule"], wide.changes["clip_norm"]
        ('wide', 'auto_s', '4')
    """
    found: dict[str, dict[str, Any]] = {}
    order: list[str] = []
    for word in filter(None, (part.strip() for part in methods.split(","))):
        label, equals, name = word.partition("=")
        name = name if equals else label
        if name not in registered() and name not in SHORTHANDS and ":" not in name:
            known = ", ".join([*registered(), *SHORTHANDS])
            raise SettingsError(f"--methods names {name!r}, but the methods are {known}.")
        order.append(label)
        found[label] = {"options": {}, **SHORTHANDS.get(name, {"method": name})}
    texts = {field.name for field in fields(Settings) if str(field.type).startswith("str")}
    own = {field.name for field in fields(Settings)} - _COMMON
    for where, value in options:
        label, _, name = where.partition(".")
        if label not in found or not name:
            raise SettingsError(
                f"--option names {where!r}, but it must be METHOD.NAME=VALUE with METHOD one of "
                f"{', '.join(found)}."
            )
        if name in _COMMON:
            raise SettingsError(
                f"--option {where} would set {name} for one method alone, but all methods share it: give "
                f"--{name.replace('_', '-')} to the comparison."
            )
        if name in own:
            found[label][name] = str(value) if name in texts else value
        else:
            found[label]["options"] = {**found[label]["options"], name: value}
    return [Contender(label, found[label]) for label in order]


def parse_method_option(text: str) -> tuple[str, Any]:
    """METHOD.NAME=VALUE of the command line; see `equipoise.app.settings.parse_option`.

    >>> parse_method_option("dp-sgd.clip-norm=0.5")
    ('dp-sgd.clip_norm', 0.5)
    """
    label, dot, rest = text.partition(".")
    if not dot or "=" in label:
        raise SettingsError(
            f"--option is {text!r}, but it must be METHOD.NAME=VALUE, such as dp-sgd.clip_norm=0.1."
        )
    name, value = parse_option(rest)
    return f"{label}.{name}", value


def method_word(entry: Contender) -> str:
    """The word for the entry's method: a shorthand where the label is one."""
    return entry.label if entry.label in SHORTHANDS else str(entry.changes["method"])


def entry_word(entry: Contender) -> str:
    """The entry as `read_entries` reads it."""
    name = method_word(entry)
    return name if entry.label == name else f"{entry.label}={name}"


_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """The highest of the peaks that were noted: of the device on CUDA, of the process otherwise.

    Args:
        device: where the work is done.

    Attributes:
        highest: bytes above what was held at the start; None before the first note, and where the system
            cannot tell.

    Example:
        >>> peak = PeakMemory(torch.device("cpu"))
        >>> block = torch.ones(2**24)
        >>> peak.note()
        >>> peak.highest is None or peak.highest > 2**25
        True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.highest: int | None = None
        gc.collect()
        if device.type != "cuda":
            # what the allocator keeps of earlier work would hide what this one needs
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)
        self._can_tell = self.restart()
        self._before = self._held() if self._can_tell else None

    def restart(self) -> bool:
        """Forget the peak so far, unless noted; what was held at the start stays the zero."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return True
        try:
            _CLEAR.write_text("5")
        except OSError:
            return False
        return True

    def note(self) -> None:
        """Take the peak since the start or the last restart into account."""
        if self._before is None:
            return
        if self._device.type == "cuda":
            peak: int | None = torch.cuda.max_memory_allocated(self._device)
        else:
            peak = _read("VmHWM")
        if peak is not None:
            self.highest = max(self.highest or 0, peak - self._before)

    def _held(self) -> int | None:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return _read("VmRSS")


def _read(name: str) -> int | None:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
