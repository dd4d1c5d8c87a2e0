"""What is written down of every step: publishable rows for the writers, private ones for the diagnostics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from equipoise.privacy import Diagnostics
from equipoise.training.metrics import JSONLines, MetricWriter, rewind_jsonl
from equipoise.training.run_folder import RunFolder
from equipoise.training.setup import TrainingSetup
from equipoise.training.shared_ledger import SharedLedger
from equipoise.training.step import StepOutcome, StepReport

__all__ = ["MetricsLog"]


class MetricsLog:
    """Writes down the steps and evaluations of a training, on the first process alone.

    Args:
        pieces: for the public numbers of a step.
        folder: of the run, or None; rows of steps that will be repeated are dropped from its files.
        writers: further takers of the publishable rows.
        done: steps done so far.
    """

    def __init__(
        self, pieces: TrainingSetup, folder: RunFolder | None, writers: Sequence[MetricWriter], done: int
    ) -> None:
        self._pieces = pieces
        self._writers: list[MetricWriter] = []
        self._diagnostics: Diagnostics | None = None
        if not pieces.processes.is_first:
            return
        if folder is not None:
            rewind_jsonl(folder.metrics, done, mode=0o644)
            rewind_jsonl(folder.diagnostics, done, mode=0o600)
            self._writers.append(JSONLines(folder.metrics))
            self._diagnostics = Diagnostics(folder.diagnostics)
        self._writers += writers

    def step(self, number: int, taken: StepOutcome, desk: SharedLedger) -> StepReport:
        """Write down step `number` (from 1)."""
        pieces, total = self._pieces, self._pieces.sampling.steps
        std, bound = desk.last_noise
        every = pieces.settings.epsilon_every or max(1, total // 20)
        due = number % every == 0 or number == total
        epsilon = desk.progress(pieces.delta) if due else math.inf
        norms = torch.stack([torch.linalg.vector_norm(v).double() for v in taken.estimate.values()])
        step = StepReport(
            step=number,
            learning_rate=taken.learning_rate,
            clip_norm=bound,
            noise_std=std,
            released_norm=float(norms.norm()),
            noise_norm=std * math.sqrt(pieces.num_parameters) / pieces.sampling.expected_size,
            epsilon=epsilon if math.isfinite(epsilon) else None,
        )
        row = {name: value for name, value in asdict(step).items() if value is not None}
        self._write(row | {f"method.{name}": value for name, value in taken.metrics.items()})
        if self._diagnostics is not None:
            self._diagnostics.write(number, {**taken.tally.finish(), "seconds": taken.seconds})
        return step

    def evaluation(self, number: int, values: Mapping[str, float]) -> None:
        """Write down what was measured on public data after step `number`."""
        self._write({"step": number} | {f"evaluation.{name}": value for name, value in values.items()})

    def _write(self, row: Mapping[str, Any]) -> None:
        for writer in self._writers:
            writer.write(row)
