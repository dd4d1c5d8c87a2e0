"""What a training writes down while it runs: what may be published, and what may not.

`metrics.jsonl` holds functions of releases and of public data: step, epsilon, learning rate, noise scale,
norm of the released gradient, accuracy on public test data. Whoever may see the model may see this file.
`private/diagnostics.jsonl` holds numbers computed from the private records (training loss, size of the draw,
records that are not finite): no guarantee covers them.

Both are JSON lines. `CSVWriter`, `TensorBoardWriter`, `WandbWriter` and `MLflowWriter` take the same
publishable rows, and `Events` what an operator waits for. Times of a tracker are step numbers where it allows
that: how long a step took follows how many records it drew. `MetricsLog` makes the rows of a step.
"""

from __future__ import annotations

import csv
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch

from equipoise._extras import of_extra
from equipoise._files import PathLike
from equipoise._run_files import open_regular
from equipoise.distributed.shared_ledger import SharedLedger
from equipoise.privacy import Ledger
from equipoise.privacy.private import unwrap
from equipoise.training.folder.run_folder import RunFolder
from equipoise.training.setup.training_setup import TrainingSetup
from equipoise.training.step import StepOutcome, StepReport


class MetricWriter(Protocol):
    """Takes rows of publishable numbers."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one row; it has a `step`."""

    def close(self) -> None:
        """Finish the file."""


class Events:
    """What happens to a run, as JSON lines or calls, for whoever operates it.

    An event has `time` (UTC), `event`, `step`, `steps` and, if there is one, `epsilon`:

    ============  ====================================================================================
    `start`       the run can take its first step; with `folder`
    `resume`      the run goes on from a checkpoint; with `folder`
    `progress`    20 times in a run, and at each evaluation, with its numbers
    `checkpoint`  it is on the disk
    `stop`        a signal ended this process, not the run; `reason` is "SIGTERM" or "SIGINT"
    `finish`      the run is over; `reason` is "all steps", "patience", "fixed beforehand" or "plan used up"
    ============  ====================================================================================

    The times tell how long steps took, and so how many records they drew, which epsilon does not cover: they
    are for the owner of the data. All else is publishable.

    Args:
        on_event: takes an event, a dict; by default it is printed as a JSON line on standard error.

    Example:
        >>> Events(lambda event: print(event["event"], event["step"])).event({"event": "stop", "step": 20})
        stop 20
    """

    def __init__(self, on_event: Callable[[dict[str, Any]], object] | None = None) -> None:
        self._take = on_event or (lambda event: print(json.dumps(event), file=sys.stderr, flush=True))

    def event(self, row: Mapping[str, Any]) -> None:
        """Write one event down."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        unknown = [
            name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)
        ]
        self._take({"time": now, **row, **dict.fromkeys(unknown)})

    def write(self, row: Mapping[str, Any]) -> None:
        """Write a row down that tells of progress: an epsilon, or an evaluation."""
        kept = {name: row[name] for name in row if name in ("step", "epsilon") or name.startswith("eval")}
        if len(kept) > 1:
            self.event({"event": "progress", **kept})

    def close(self) -> None:
        """Nothing to do: every line is written at once."""


class JSONLines:
    """Rows appended to a file, one JSON object per line; writing gives nothing back that could steer a run.

    A resumed run continues the file: `rewind_jsonl` drops the rows of steps that will be repeated.

    Args:
        path: the file.
        mode: it is made with it: a file that is closed to others later can be read between.
    """

    def __init__(self, path: PathLike, mode: int) -> None:
        self.path, self.mode = Path(path), mode

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row of numbers, short vectors and words."""
        plain = {}
        for name, value in row.items():
            found = unwrap(value).detach().cpu().tolist() if isinstance(value, torch.Tensor) else value
            # JSON has no infinity; null says "no number" to every reader.
            plain[name] = None if isinstance(found, float) and not math.isfinite(found) else found
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, self.mode)
        try:
            with os.fdopen(descriptor, "a") as file:
                file.write(json.dumps(plain) + "\n")
        except OSError as error:  # a full disk names no file
            error.filename = str(self.path)
            raise

    def close(self) -> None:
        """Nothing to do: every row is written at once."""


def rewind_jsonl(path: PathLike, step: int, mode: int) -> None:
    """Cut off the rows after the last one of a step up to `step`; nothing happens without a file.

    Args:
        path: the file.
        step: the last one whose rows stay.
        mode: of the file from then on.
    """
    if not Path(path).exists():
        return
    with open_regular(path, to_change=True) as file:
        os.fchmod(file.fileno(), mode)
        lines = file.read().splitlines(keepends=True)
        while lines and not _stays(lines[-1], step):
            lines.pop()
        file.truncate(sum(map(len, lines)))


def _stays(line: bytes, step: int) -> bool:
    """Whether a line is a whole row of a step up to `step`: a kill can cut the last one short."""
    try:
        return line.endswith(b"\n") and float(json.loads(line)["step"]) <= step
    except Exception:  # no row of ours
        return False


class CSVWriter:
    """The publishable rows as a CSV file; the columns are those of the first row.

    Args:
        path: the file, overwritten.
    """

    def __init__(self, path: PathLike) -> None:
        self._file = Path(path).open("w", newline="", encoding="utf-8")  # noqa: SIM115
        self._writer: csv.DictWriter[str] | None = None

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one row; names that the first row lacks are left out."""
        if self._writer is None:
            self._writer = csv.DictWriter(self._file, list(row), extrasaction="ignore")
            self._writer.writeheader()
        self._writer.writerow(dict(row))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardWriter:
    """The publishable rows as TensorBoard scalars.

    Args:
        folder: the log folder.

    Raises:
        ModuleNotFoundError: the package tensorboard is not installed.
    """

    def __init__(self, folder: PathLike) -> None:
        with of_extra():
            from torch.utils.tensorboard import SummaryWriter
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, row: Mapping[str, Any]) -> None:
        """Write every number of the row at its step."""
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row["step"], walltime=row["step"])
        self._writer.flush()  # otherwise the last rows lie in memory for up to two minutes

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandbWriter:
    """The publishable rows in a run of Weights & Biases, which puts the time of day on each of them.

    Args:
        run: what `wandb.init(...)` gave; finishing it stays with whoever made it.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, row: Mapping[str, Any]) -> None:
        """Write every number of the row at its step."""
        self._run.log(_numbers(row), step=row["step"])

    def close(self) -> None:
        """Nothing to do: the run is another's."""


class MLflowWriter:
    """The publishable rows as metrics of an MLflow run.

    Args:
        client: an `mlflow.MlflowClient`.
        run_id: of a run that goes on.
    """

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id

    def write(self, row: Mapping[str, Any]) -> None:
        """Write every number of the row at its step."""
        for name, value in _numbers(row).items():
            self._client.log_metric(self._run_id, name, value, timestamp=row["step"], step=row["step"])

    def close(self) -> None:
        """Nothing to do: the run is another's."""


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row, without its step."""
    numbers = {
        name: value for name, value in row.items() if isinstance(value, int | float) and name != "step"
    }
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


class MetricsLog:
    """Writes down the steps and evaluations of a training, only on the first process.

    Args:
        setup: for the public numbers of a step.
        folder: of the run, or None; rows of steps that will be repeated are dropped from its files.
        done: steps done so far.
    """

    def __init__(self, setup: TrainingSetup, folder: RunFolder | None, done: int) -> None:
        self._setup, self._num_parameters = setup, setup.num_parameters
        self._writers: list[MetricWriter] = []
        self._diagnostics: JSONLines | None = None
        if not setup.processes.is_first:
            return
        if folder is not None:
            rewind_jsonl(folder.metrics, done, mode=0o644)
            rewind_jsonl(folder.diagnostics, done, mode=0o600)
            self._writers.append(JSONLines(folder.metrics, 0o644))
            self._diagnostics = JSONLines(folder.diagnostics, 0o600)
        self._writers += setup.run.writers

    def step(self, number: int, outcome: StepOutcome, ledger: Ledger | SharedLedger) -> StepReport:
        """Write down step `number` (from 1); its time, which tells how many records it drew, is private."""
        setup, total = self._setup, self._setup.sampling.steps
        std, bound = (0.0, 0.0) if outcome.noise is None else (outcome.noise.std, outcome.noise.bound)
        epsilon: float | None = None
        if number % max(1, total // 20) == 0 or number == total:
            # Some milliseconds for usual plans, a second for millions of steps: not after every step.
            progress = ledger.progress(setup.delta)
            epsilon = progress if math.isfinite(progress) else None
        report = StepReport(
            step=number,
            learning_rate=outcome.learning_rate,
            clip_norm=bound,
            noise_std=std,
            released_norm=outcome.released_norm,
            # A sum's noise has norm std sqrt(P); the estimate is the sum over the expected size.
            noise_norm=std * math.sqrt(self._num_parameters) / setup.sampling.expected_size,
            epsilon=epsilon,
        )
        if self._writers:
            row = {name: value for name, value in vars(report).items() if value is not None}
            self._write(row | {f"method.{name}": value for name, value in outcome.metrics.items()})
        if self._diagnostics is not None:
            row = {"step": number, **outcome.diagnostics.value(), "seconds": outcome.seconds}
            self._diagnostics.write(row)
        return report

    def evaluation(self, number: int, values: Mapping[str, float]) -> None:
        """Write down what was measured on public data after step `number`."""
        self._write({"step": number} | {f"evaluation.{name}": value for name, value in values.items()})

    def event(self, kind: str, number: int, **values: Any) -> None:
        """Tell the writers that take events what happened after step `number`."""
        row = {"event": kind, "step": number, "steps": self._setup.sampling.steps, **values}
        for writer in self._writers:
            if isinstance(writer, Events):
                writer.event(row)

    def _write(self, row: Mapping[str, Any]) -> None:
        for writer in self._writers:
            writer.write(row)
