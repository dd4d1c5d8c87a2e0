"""What a training writes down while it runs: what may be published, and what may not.

`metrics.jsonl` holds functions of releases and of public data alone (step, epsilon, learning rate, noise
scale, norm of the released gradient, accuracy on public test data): whoever may see the model may see this
file. `private/diagnostics.jsonl` holds numbers computed from the private records (training loss, size of
the draw, records that are not finite): no guarantee covers them. It is written by
`equipoise.privacy.Diagnostics`.

Both are JSON lines. `CSVWriter` and `TensorBoardWriter` take the same publishable rows.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from equipoise.report.files import read_rows
from equipoise.training.checkpoint import write_atomically

__all__ = ["CSVWriter", "JSONLines", "MetricWriter", "TensorBoardWriter", "rewind_jsonl"]

PUBLISHABLE = frozenset(
    {"step", "epsilon", "delta", "learning_rate", "clip_norm", "noise_std", "noise_norm", "released_norm"}
)
"""The names a row of metrics may have; evaluation results come under `evaluation.*`.

Not the time of a step: it tells how many records were drawn.
"""


class MetricWriter(Protocol):
    """Takes rows of publishable numbers."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one row; it has a `step`."""
        ...

    def close(self) -> None:
        """Finish the file."""
        ...


class JSONLines:
    """Publishable rows appended to a file, one JSON object a line.

    A resumed run continues the file: `rewind_jsonl` drops the rows of steps that will be repeated.

    Args:
        path: the file; its folder must exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row.

        Raises:
            ValueError: a name that is not on the list of publishable metrics.
        """
        wrong = [n for n in row if n not in PUBLISHABLE and not n.startswith(("evaluation.", "method."))]
        if wrong:
            raise ValueError(
                f"{wrong} may not go into {self.path.name}: it holds publishable numbers only. "
                "Numbers computed from private records belong in the diagnostics."
            )
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({k: _plain(v) for k, v in row.items()}) + "\n")

    def close(self) -> None:
        """Nothing to do: every row is written at once."""


def rewind_jsonl(path: str | os.PathLike[str], step: int, mode: int) -> None:
    """Keep the rows of steps up to `step`, in a file of this mode; nothing happens without a file."""
    if not Path(path).exists():
        return
    rows = [row for row in read_rows(path) if _step_of(row) <= step]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows).encode(), mode=mode)


class CSVWriter:
    """The publishable rows as a CSV file; the columns are those of the first row.

    Args:
        path: the file, overwritten.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
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

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "TensorBoardWriter needs the package tensorboard: pip install tensorboard, or use CSVWriter"
            ) from error
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, row: Mapping[str, Any]) -> None:
        """Write every number of the row at its step."""
        for name, value in row.items():
            if name != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def _step_of(row: Mapping[str, Any]) -> float:
    """The step of a row; of a row that none of our writers wrote, none that is kept."""
    step = row.get("step", 0)
    return step if isinstance(step, int | float) else math.inf


def _plain(value: Any) -> Any:
    # JSON has no infinity; null says "no number" to every reader.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
