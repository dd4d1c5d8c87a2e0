"""The parts of a training, checked and connected to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from equipoise.methods import Method
from equipoise.methods.base import Plan
from equipoise.privacy import Budget, PrivacyPlan, Sampling, digest
from equipoise.training.assumptions import ALONE, Assumption
from equipoise.training.distributed import Processes
from equipoise.training.moving_average import MovingAverage
from equipoise.training.record_rows import RowSource
from equipoise.training.setup.public_copies import public_assumptions
from equipoise.training.setup.training_settings import TrainingSettings

__all__ = ["TrainingSetup"]


@dataclass(frozen=True)
class TrainingSetup:
    """What a training is made of.

    Attributes:
        model, optimizer, scheduler: the user's.
        sampling, method, budget: as given, or the defaults.
        settings: with the micro-batch size that was chosen.
        parameters: the trainable ones by name, live.
        device: where the model is.
        processes: who shares the work.
        method_plan: what the method will release, and what else it fixed beforehand.
        rows: makes gradient rows of records.
        record_bytes: memory that one record takes in a step.
        found: what all processes of the run found out, those before this one too.
        average: the moving average of the parameters, or None.
        restore_modes: puts the modules back into the modes that they had.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    sampling: Sampling
    method: Method
    budget: Budget | None
    settings: TrainingSettings
    parameters: dict[str, nn.Parameter]
    device: torch.device
    processes: Processes
    method_plan: Plan
    rows: RowSource
    record_bytes: float
    found: Sequence[Assumption]
    average: MovingAverage | None
    restore_modes: Callable[[], None]

    @property
    def num_parameters(self) -> int:
        """P, the number of trainable values."""
        return sum(p.numel() for p in self.parameters.values())

    @property
    def delta(self) -> float:
        """The delta of the guarantee; below 1/population where no budget names one."""
        return self.budget.delta if self.budget is not None else 0.1 / self.sampling.population

    def config(self) -> dict[str, Any]:
        """The public settings, as `config.json` holds them."""
        return {
            "format": 1,
            "settings": self.settings.to_json(),
            "sampling": self.sampling.describe(),
            "budget": None if self.budget is None else asdict(self.budget),
            "method": self.method.config(),
            "plan": self.method_plan.releases.fingerprint(),
            "optimizer": type(self.optimizer).__name__,
            "model": {"class": type(self.model).__qualname__, "parameters": self.num_parameters},
            "assumptions": [str(one) for one in self.found],
        }

    @property
    def plan(self) -> PrivacyPlan:
        """The releases of the method's plan."""
        return self.method_plan.releases

    def assumptions(self) -> list[str]:
        """What the guarantee rests on besides population and sampling, in the words of the statement."""
        is_scanned = Assumption.SCANNED in self.found
        return [
            ALONE,
            *map(str, self.found),
            *self.method.assumptions(self.method_plan),
            *public_assumptions(is_scanned, self.method, self.settings.allow_public_duplicates),
        ]

    def kernels(self) -> str:
        """Digest of what the released numbers depend on besides parameters and records.

        With another value, no noise is used again.
        """
        return digest(
            {
                "engine": self.rows.engine.state_dict(),
                "micro_batch": self.settings.micro_batch_size,
                "dealt": self.rows.dealt,
                "views": self.settings.views,
                "method": self.method.config(),
                "processes": self.processes.count,
                "device": self.device.type,
            }
        )
