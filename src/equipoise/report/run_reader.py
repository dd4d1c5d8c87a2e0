"""A run as its publishable files tell it: what pages and summaries are made from.

Only `statement.json`, `metrics.jsonl` and `config.json` are opened. Nothing under `private/` or `checkpoint/`
is ever read, so a report cannot show a number that the statement does not cover.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equipoise._files import PathLike
from equipoise._run_files import RunFolderError, each_row, file_of_run, finite_number, read_object
from equipoise.report.phrases import SCORES

PUBLISHABLE_FILES = (
    "statement.json",
    "metrics.jsonl",
    "model.safetensors",
    "config.json",
    "report.html",
)


WITHHELD_FILES = ("checkpoint/", "private/")


@dataclass(frozen=True)
class Run:
    """The publishable content of a run folder.

    Attributes:
        name: the folder's name.
        statement: the privacy statement as plain values.
        metrics: one row a logged step.
        config: how the run was started.

    >>> run = Run("r", {"epsilon": 2.9}, [{"step": 1, "evaluation.accuracy": 0.5}, {"step": 2}])
    >>> run.curve("evaluation.accuracy"), run.last("evaluation.accuracy"), run.epsilon
    ([(1.0, 0.5)], 0.5, 2.9)
    """

    name: str
    statement: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, Any]] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    def curve(self, metric: str) -> list[tuple[float, float]]:
        """The points ``(step, value)`` of a metric, where it has a finite value."""
        found = ((row["step"], finite_number(row.get(metric))) for row in self.metrics if "step" in row)
        return [(float(step), value) for step, value in found if value is not None]

    def last(self, metric: str) -> float | None:
        """The metric's last finite value, or None."""
        points = self.curve(metric)
        return points[-1][1] if points else None

    @property
    def details(self) -> Mapping[str, Any]:
        """How the run was set up: the command line's settings, or what the training itself noted."""
        experiment = self.config.get("experiment")
        if isinstance(experiment, Mapping):
            return experiment
        flat: dict[str, Any] = {}
        for key, value in self.config.items():
            # one level is enough: settings, sampling and method hold plain values or small objects
            if isinstance(value, Mapping) and key in ("settings", "sampling", "budget", "method"):
                flat.update({("method" if k == "name" else k): v for k, v in value.items()})
            elif key not in ("format", "plan", "command", "begun", "version", "engine"):
                flat[key] = value
        return flat

    @property
    def title(self) -> str:
        """Model and data, or what a training in Python notes of its model; never the folder's name."""
        model, data = self.details.get("model"), self.details.get("data")
        if isinstance(model, Mapping):
            return f"{model['class']} of {model['parameters']:,} parameters"
        return f"{model} on {data}" if model and data else "private training"

    @property
    def is_private(self) -> bool:
        """False if noise and sampling follow a public seed."""
        return self.statement.get("private") is not False

    @property
    def epsilon(self) -> float | None:
        """Epsilon spent, or None where nothing is promised."""
        return finite_number(self.statement.get("epsilon"))

    @property
    def delta(self) -> float | None:
        """The delta that epsilon belongs to."""
        return finite_number(self.statement.get("delta"))

    @property
    def guarantee(self) -> str:
        """``proven``, ``worst_case`` or ``none``."""
        return str(self.statement.get("guarantee", "none"))

    @property
    def independence(self) -> dict[str, str]:
        """Whether model and data keep records apart: ``proved``, ``compared`` or ``unchecked``."""
        return dict(self.statement.get("independence") or {})

    @property
    def steps_in_words(self) -> str:
        """How many steps were taken, and of how many where some are left; empty where none was noted.

        >>> Run("r", {}, [{"step": 230}], {"sampling": {"steps": 1500}}).steps_in_words
        '230 of 1,500'
        """
        taken = self.last("step")
        if not taken:
            return ""
        return f"{taken:,.0f} of {self.details['steps']:,}" if self._is_short else f"{taken:,.0f}"

    @property
    def is_unfinished(self) -> bool:
        """Whether planned steps are left that can still be taken."""
        return self._is_short and not self.ended_early

    @property
    def ended_early(self) -> bool:
        """Whether the run has ended before its last step: what a resume computes anew is charged again."""
        return self._is_short and self.config.get("ended_after") == self.last("step")

    @property
    def _is_short(self) -> bool:
        """Whether fewer steps were taken than planned, and nobody gave the others up."""
        taken, planned = self.last("step"), finite_number(self.details.get("steps"))
        left = taken is not None and planned is not None and taken < planned
        return left and self.statement.get("stop_fixed_beforehand") is not True

    @property
    def evaluation(self) -> dict[str, float]:
        """The last value of what was evaluated; of a model that answers NaN no earlier one.

        What says most stands first; a page has room for a few.
        """
        prefix = "evaluation."
        names = {key.removeprefix(prefix) for row in self.metrics for key in row if key.startswith(prefix)}
        ordered = [*SCORES, *sorted(names - {*SCORES, "best_step"})]
        curves = {name: self.curve(prefix + name) for name in ordered if name in names}
        found = [(name, points[-1]) for name, points in curves.items() if points]
        last = dict(found[:7])
        since = max(step for step, _ in last.values()) if "finite_answers" in last else 0.0
        return {name: value for name, (step, value) in last.items() if step >= since}

    @property
    def best_step(self) -> float | None:
        """The step whose parameters were published, where the best evaluation chose one."""
        return self.last("evaluation.best_step")

    def is_private_score(self, name: str) -> bool:
        """Whether this number of the evaluation is one of a `Score`, which the statement lists."""
        releases = self.statement.get("releases", [])
        return name.startswith("private_") and any(one.get("name") == "private score" for one in releases)

    @property
    def baseline(self) -> dict[str, float]:
        """What a model without inputs would reach on the same records, by the score's name."""
        prefix = "baseline_"
        return {
            name.removeprefix(prefix): number
            for name, value in self.details.items()
            if name.startswith(prefix) and (number := finite_number(value)) is not None
        }

    @property
    def accuracy(self) -> float | None:
        """Test accuracy in [0, 1], or None if the run evaluated none."""
        return self.evaluation.get("accuracy")


def read_run(folder: PathLike) -> Run:
    """Read the publishable files of a run folder.

    Raises:
        RunFolderError: no such folder, no statement in it, or a file that is not what it should be.
    """
    statement_file = file_of_run(folder, "statement.json")
    path = statement_file.parent
    metrics_file = path / "metrics.jsonl"
    config_file = path / "config.json"
    return Run(
        name=path.resolve().name,
        statement=read_object(statement_file),
        metrics=_thinned(metrics_file) if metrics_file.is_file() else [],
        config=read_object(config_file) if config_file.is_file() else {},
    )


MOST_ROWS = 20_000
"""A page draws no more points of a curve. Longer runs are read in part, which bounds memory."""


def _thinned(path: Path) -> list[dict[str, Any]]:
    """Every k-th row of a file, with k so large that `MOST_ROWS` at most are left; and the last one.

    Rows of other names are thinned apart, so that no rare ones go.
    """
    count = Counter(frozenset(row) for row in each_row(path))
    seen, kept = Counter[frozenset[str]](), []
    for row in each_row(path):
        kind = frozenset(row)
        seen[kind] += 1
        if (seen[kind] - 1) % math.ceil(count[kind] / MOST_ROWS) == 0 or seen[kind] == count[kind]:
            kept.append(row)
    return kept


@contextmanager
def damage_named(name: str, files: str = "statement, metrics or configuration") -> Iterator[None]:
    """Turn what values of another kind make a page's writers raise into one error that says so.

    Args:
        name: of the run.
        files: that are read inside.

    Raises:
        RunFolderError: whatever was raised inside, in words.
    """
    try:
        yield
    except RunFolderError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
        raise RunFolderError(
            f"run={name!r}: {files} hold values of another kind than they should "
            f"({type(error).__name__}: {error!s:.200}). Restore the files or repeat the run."
        ) from error
