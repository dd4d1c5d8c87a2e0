"""What a user gives a training: checked for its kinds here, where no record is looked at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from equipoise import _validate
from equipoise.gradients.engine_inputs import Loss
from equipoise.methods import DPSGD, METHODS, Method, find
from equipoise.privacy import Budget, Sampling
from equipoise.training.arguments import Data, Record, Run, Users, refuse_moved, unit_of
from equipoise.training.owners import column_of
from equipoise.training.setup.step_number import with_step

__all__ = ["TrainingInputs"]


@dataclass(frozen=True, kw_only=True)
class TrainingInputs:
    """What a user gives a training; see `PrivateTraining` for its meaning.

    Raises:
        TypeError: an object of another kind than the training needs; it names the argument and what to give.
        ValueError: ids of records that belong to users.
        DataError: the data hold no column of the name that owner or ids is.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Loss
    data: Data
    sampling: Sampling
    method: Method
    budget: Budget | None = None
    unit: Record | Users
    run: Run
    device: str | torch.device | None = None
    compile: bool = False

    @classmethod
    def of(
        cls, *, data: Any, method: Any = None, unit: Any = "record", run: Any = None, **others: Any
    ) -> Self:
        """From the short forms that a user may write: bare records, no method, "record", a path.

        Raises:
            TypeError: an argument that there is not, or not any more.
        """
        refuse_moved({name: one for name, one in others.items() if name not in cls.__dataclass_fields__})
        method = DPSGD() if method is None else method
        return cls(data=Data.of(data), method=method, unit=unit_of(unit), run=Run.of(run), **others)

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", with_step(self.loss))
        _validate.instance(bool, "False", compile=self.compile)
        if isinstance(self.unit, Users):
            self._check_users(self.unit)
        sampling, method = self.sampling, self.method
        _validate.instance(
            Sampling,
            "Poisson(expected_batch_size=256, population=60_000, steps=2_000). State the population "
            "yourself: it is not read from the data",
            sampling=sampling,
        )
        called = f"{find(method).__name__}()" if isinstance(method, str) and method in METHODS else "DPSGD()"
        _validate.instance(Method, f"equipoise.methods.{called}", method=method)
        if self.budget is not None:
            _validate.instance(Budget, "Budget(epsilon=3.0, delta=1e-5)", budget=self.budget)

    def _check_users(self, unit: Users) -> None:
        """No single record is named beside users; the name of their column becomes its values."""
        if self.data.ids is not None:
            raise ValueError("ids names single records, and unit=Users(...) protects users: leave ids out")
        if isinstance(unit.owner, str):
            owner, records = column_of(self.data.records, unit.owner)
            object.__setattr__(self, "unit", replace(unit, owner=owner))
            object.__setattr__(self, "data", replace(self.data, records=records))
