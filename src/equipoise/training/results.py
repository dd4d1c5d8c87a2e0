"""What a step and a training report: plain, frozen, publishable."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from equipoise.privacy import Statement

__all__ = ["Result", "Step"]


@dataclass(frozen=True)
class Step:
    """What one step did; every number is public.

    Attributes:
        step: number of steps done.
        learning_rate: of the first parameter group, as used.
        clip_norm: bound of the first released sum.
        noise_std: standard deviation of the noise on that sum.
        released_norm: norm of the estimate.
        noise_norm: expected norm of the estimate's noise, for comparison.
        epsilon: spent so far, where it was computed (see `epsilon_every`).
    """

    step: int
    learning_rate: float
    clip_norm: float
    noise_std: float
    released_norm: float
    noise_norm: float
    epsilon: float | None = None


@dataclass(frozen=True)
class Result:
    """How a training ended.

    Attributes:
        steps: steps done in all.
        finished: False after an interrupt.
        epsilon: spent, at `delta`; None where nothing is guaranteed.
        delta: of the guarantee.
        evaluation: the last evaluation.
        run_dir: the run folder, or None.
        statement: the privacy statement.
    """

    steps: int
    finished: bool
    epsilon: float | None
    delta: float
    evaluation: dict[str, float] = field(default_factory=dict)
    run_dir: Path | None = None
    statement: Statement | None = None
