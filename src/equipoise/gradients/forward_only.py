"""Losses without gradients: rows of a forward that keeps nothing for a backward.

Such a forward runs with gradients switched on, as every other one, so that the model takes the same
operations and kernels and the plan can be held against it. What autograd would save for a backward is let go
at once: the memory is that of inference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from equipoise.gradients.checks.oracle import losses_one_by_one
from equipoise.gradients.engine import GradientEngine, Numbers
from equipoise.gradients.engine_inputs import trainable_parameters
from equipoise.gradients.operator import LossesOnly

__all__ = ["LossEngine", "nothing_saved"]


class _NothingSaved(RuntimeError):
    """A backward was asked for where nothing is saved for one."""


@contextmanager
def nothing_saved() -> Iterator[None]:
    """Inside, autograd saves no tensor.

    Raises:
        ValueError: a backward goes through what is computed there.
    """
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: None, _refuse_backward):
            yield
    except RuntimeError as error:
        # torch.func refuses such hooks by itself.
        if not isinstance(error, _NothingSaved) and "saved tensor hooks" not in str(error):
            raise
        raise ValueError(
            "the method asks for losses and no gradients, and the loss takes derivatives itself, as "
            "LocalUpdates of several steps and gradient penalties do. Take another method, such as DPSGD"
        ) from error


def _refuse_backward(saved: None) -> NoReturn:
    raise _NothingSaved("a backward was asked for in a forward that keeps nothing for one")


class LossEngine(GradientEngine):
    """The engine of a method with `forward_only`: `by_plan` and `alone` answer `LossesOnly`.

    They take the memory of inference. A plan is still made by a backward, of three records. Checks of rows
    are left out: nobody asks for rows.

    Raises:
        ValueError: the loss takes derivatives itself; and what a `GradientEngine` raises.
    """

    forward_only: ClassVar[bool] = True

    def run_plan(
        self, batch: Any, params: Mapping[str, Tensor] | None, upstream: Tensor | None = None
    ) -> LossesOnly:
        if self.plan_for(batch).ruled:
            return self._losses_only(self.planned_losses(batch, params))
        # Nothing is held against a plan: a record at a time, as dense rows are.
        with nothing_saved():
            substitute = self._leaves(params)[1]
            return self._losses_only(losses_one_by_one(self.model, self.loss, batch, substitute))

    def planned_losses(self, batch: Any, params: Mapping[str, Tensor] | None = None) -> Tensor:
        with nothing_saved():
            return super().planned_losses(batch, params)

    def alone(
        self,
        batch: Any,
        params: Mapping[str, Tensor] | None = None,
        numbers: Numbers | None = None,
        place: int = 0,
    ) -> LossesOnly:
        with self._watched(params, numbers), torch.enable_grad():
            return self._losses_only(self.losses(batch, self._leaves(params)[1])[place : place + 1])

    def _losses_only(self, losses: Tensor) -> LossesOnly:
        return LossesOnly(losses, {name: p.shape for name, p in trainable_parameters(self.model).items()})

    def losses(self, batch: Any, params: Mapping[str, Tensor] | None) -> Tensor:
        with nothing_saved():
            return super().losses(batch, params)
