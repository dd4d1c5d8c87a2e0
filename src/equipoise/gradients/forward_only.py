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

from equipoise.gradients.capture.recorder import CapturePlan
from equipoise.gradients.checks.oracle import losses_one_by_one
from equipoise.gradients.engine import GradientEngine, Numbers
from equipoise.gradients.engine_inputs import trainable_parameters
from equipoise.gradients.operator import PerSampleGradients

__all__ = ["LossEngine", "LossesOnly", "nothing_saved"]


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


class LossesOnly(PerSampleGradients):
    """Rows of which only the losses are known; whatever takes their gradients is refused.

    Args:
        losses: [B].
        shapes: of the parameters whose gradients the rows would be.

    >>> rows = LossesOnly(torch.tensor([1.0, 2.0]), {"w": torch.Size([3])})
    >>> rows.rows(slice(1, None)).losses
    tensor([2.])
    >>> rows.row_norms()
    Traceback (most recent call last):
    ...
    TypeError: the rows of a method with forward_only = True have losses and no gradients
    """

    def __init__(self, losses: Tensor, shapes: Mapping[str, torch.Size]) -> None:
        self.losses, self.shapes = losses, dict(shapes)
        self.num_records, self.dtype, self.device = len(losses), losses.dtype, losses.device

    def rows(self, index: Tensor | slice) -> LossesOnly:
        assert self.losses is not None
        return LossesOnly(self.losses[index], self.shapes)

    def _refused(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("the rows of a method with forward_only = True have losses and no gradients")

    row_norms = weighted_sums = cross_gram = inner = select = materialise = _refused
    __sub__ = __add__ = scaled = shifted = _refused


class LossEngine(GradientEngine):
    """The engine of a method with `forward_only`: `by_plan` and `alone` answer `LossesOnly`.

    They take the memory of inference. A plan is still made by a backward, of three records. Checks of rows
    are left out: nobody asks for rows.

    Raises:
        ValueError: the loss takes derivatives itself; and what a `GradientEngine` raises.
    """

    forward_only: ClassVar[bool] = True

    def _by_plan(
        self, batch: Any, params: Mapping[str, Tensor] | None, upstream: Tensor | None = None
    ) -> LossesOnly:
        plan = self._plan_for(batch)
        if plan.ruled:
            return self._losses_only(self._planned_losses(plan, batch, params))
        # Nothing is held against a plan: a record at a time, as dense rows are.
        with nothing_saved():
            substitute = self._leaves(params)[1]
            return self._losses_only(losses_one_by_one(self.model, self.loss, batch, substitute))

    def _planned_losses(self, plan: CapturePlan, batch: Any, params: Mapping[str, Tensor] | None) -> Tensor:
        with nothing_saved():
            return super()._planned_losses(plan, batch, params)

    def alone(
        self,
        batch: Any,
        params: Mapping[str, Tensor] | None = None,
        numbers: Numbers | None = None,
        place: int = 0,
    ) -> LossesOnly:
        with self._watched(params, numbers), torch.enable_grad():
            return self._losses_only(self._losses(batch, self._leaves(params)[1])[place : place + 1])

    def _losses_only(self, losses: Tensor) -> LossesOnly:
        return LossesOnly(losses, {name: p.shape for name, p in trainable_parameters(self.model).items()})

    def _losses(self, batch: Any, params: Mapping[str, Tensor] | None) -> Tensor:
        with nothing_saved():
            return super()._losses(batch, params)
