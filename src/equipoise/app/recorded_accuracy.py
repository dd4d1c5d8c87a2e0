"""What the methods reached on whole public data sets, all tuned alike.

The file is what `python -m benchmarks.whole_data --summary` writes;
docs/measurements/methods-compared.md says how the figures were measured.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from equipoise.app.contenders import SHORTHANDS

__all__ = ["RecordedAccuracy", "recorded", "simplest_level"]

FILE = Path(__file__).with_name("whole_data.json")

LEVEL = 0.3
"""Points of accuracy by which a method must be ahead before it is preferred to a simpler one."""

SIMPLEST = ("dp-sgd", "auto-s")
NEED_PUBLIC_RECORDS = ("pcdp-sgd", "public-warm-start")


@dataclass(frozen=True)
class RecordedAccuracy:
    """One method on one data set at one budget.

    Attributes:
        data: the data set's name.
        method: as `equipoise compare` names it, and what else its steps have: "dp-sgd, momentum".
        epsilon: the budget.
        median, lowest, highest: of the seeds' test accuracies, in percent.
        model: as `equipoise train` names it.
        clip_norm, rate: the settings that were chosen; the rate falls linearly to zero.
        batch, steps: expected records per step, and the number of steps.
        draws: batches in one pass over the records.
        optimizer, momentum: of its steps.
    """

    data: str
    method: str
    epsilon: float
    median: float
    lowest: float
    highest: float
    model: str
    clip_norm: float
    rate: float
    batch: int
    steps: int
    draws: int
    optimizer: str
    momentum: float

    @property
    def name(self) -> str:
        """The method without its optimiser."""
        return self.method.partition(",")[0]

    def __str__(self) -> str:
        return f"{self.method} {self.median:.2f}% [{self.lowest:.2f}, {self.highest:.2f}]"

    def changes(self) -> dict[str, Any]:
        """The method, as fields of `RunSettings`."""
        return dict(SHORTHANDS.get(self.name, {"method": self.name}))

    def settings(self) -> dict[str, Any]:
        """The settings, as fields of `RunSettings`."""
        found = {"model": self.model, "batch_size": float(self.batch), "epochs": self.steps / self.draws}
        found |= {"learning_rate": self.rate, "schedule": "linear"}
        found |= {"optimizer": self.optimizer, "momentum": self.momentum}
        return {"clip_norm": f"{self.clip_norm:g}", **found, **self.changes()}


@cache
def _all() -> tuple[RecordedAccuracy, ...]:
    names = RecordedAccuracy.__dataclass_fields__
    rows = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple(RecordedAccuracy(**{name: row[name] for name in names}) for row in rows)


def recorded(data: str, epsilon: float, model: str | None = None) -> list[RecordedAccuracy]:
    """The private methods on a data set, at the recorded budget that is nearest in ratio; the best first.

    Args:
        data: the data set's name.
        epsilon: the budget.
        model: only with this one; with any where None.
    """
    rows = [row for row in _all() if row.data == data and model in (None, row.model)]
    if not rows:
        return []
    nearest = min({row.epsilon for row in rows}, key=lambda other: abs(math.log(other / epsilon)))
    return sorted((row for row in rows if row.epsilon == nearest), key=lambda row: -row.median)


def simplest_level(rows: list[RecordedAccuracy], public_records: bool) -> RecordedAccuracy:
    """The simplest method that is level with the best, among those that can be used.

    Args:
        rows: the best first.
        public_records: whether there are any.
    """
    rows = [row for row in rows if public_records or row.name not in NEED_PUBLIC_RECORDS]
    simple = [row for name in SIMPLEST for row in rows if row.name == name]
    return next(row for row in [*simple, *rows] if row.median >= rows[0].median - LEVEL)
