"""What a user gives a training: checked for its kinds here, where no record is looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from equipoise import _validate
from equipoise.gradients.engine_inputs import Loss
from equipoise.methods import DPSGD, METHODS, Method, find
from equipoise.privacy import Budget, Sampling
from equipoise.training.owners import column_of
from equipoise.training.setup.step_number import with_step
from equipoise.training.setup.training_settings import TrainingSettings

__all__ = ["TrainingInputs"]


@dataclass(frozen=True, kw_only=True)
class TrainingInputs:
    """What a user gives a training; see `PrivateTraining` for its meaning.

    Raises:
        TypeError: an object of another kind than the training needs; it names the argument and what to give.
        ValueError: users without an owner, or an owner without users; ids of records that belong to users.
        DataError: the data hold no column of the name that owner or ids is.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Loss
    data: Any
    sampling: Sampling
    method: Method = field(default_factory=DPSGD)
    budget: Budget | None = None
    scheduler: Any = None
    augmentation: Callable[[Any, torch.Generator], Any] | None = None
    device: str | torch.device | None = None
    collate: Callable[[list[Any]], Any] | None = None
    workers: int = 0
    owner: Any = None
    ids: Any = None
    settings: TrainingSettings = field(default_factory=TrainingSettings)

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", with_step(self.loss))
        if isinstance(self.data, Mapping):  # as tokenizers answer; records by number have no mapping
            object.__setattr__(self, "data", dict(self.data))
        self._check_owner()
        sampling, method, large = self.sampling, self.method, self.settings.noise_for_cohort
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
        if large is not None and self.budget is not None:
            raise ValueError(
                f"noise_for_cohort={large:g} with a budget, which calibrates the noise to what is drawn: "
                "leave budget out, and give the method a noise_multiplier for the larger cohort"
            )
        if self.augmentation is not None and not callable(self.augmentation):
            name = _validate.given("augmentation", self.augmentation)
            raise TypeError(f"{name} is no function: give augmentation(batch, generator) -> batch")
        _validate.instance(int, "4", workers=self.workers)
        _validate.non_negative(workers=self.workers)

    def _check_owner(self) -> None:
        """Users are named where the unit is the user, and only there; a column's name becomes its values."""
        is_user = self.settings.unit == "user"
        if is_user != (self.owner is not None):
            raise ValueError(
                f"unit={self.settings.unit!r} with owner={'None' if is_user else '...'}: to protect users, "
                "give unit='user', records_per_user=... and owner (one number or text per record that says "
                "whose it is, or the name of the column of data that holds them); for records, give none"
            )
        if is_user and self.ids is not None:
            raise ValueError("ids names single records, and unit='user' protects users: leave ids out")
        for argument in ("owner", "ids"):
            name = getattr(self, argument)
            if isinstance(name, str):
                column, data = column_of(self.data, name, argument)
                object.__setattr__(self, argument, column)
                object.__setattr__(self, "data", data)
