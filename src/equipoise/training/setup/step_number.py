"""The number of a step in a loss: ``loss(model, batch, step)``.

The number is a tensor that the training moves, so that a loss is the same function in every step and can be
tried before the first one. A loss that branches on it (``if step > 100``) is another function later, which
nobody tried; so it is traced once over tensors without values, which have no branch to show.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from equipoise.gradients.engine_inputs import record_leaves, replace_leaves

__all__ = ["WithStep"]


class WithStep:
    """``loss(model, batch, step)`` as ``loss(model, batch)``.

    Args:
        loss: with three arguments.

    Attributes:
        step: the number of the step, from 1 on, int64 without dimensions.

    Example:
        >>> of_step = WithStep.of(lambda model, batch, step: model(batch) * torch.clamp(step / 100, max=1))
        >>> of_step.step.fill_(50)
        tensor(50)
        >>> of_step(lambda x: x, torch.ones(2))
        tensor([0.5000, 0.5000])
    """

    def __init__(self, loss: Callable[[Any, Any, Tensor], Tensor]) -> None:
        self.loss, self.step = loss, torch.ones((), dtype=torch.int64)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self.loss(model, batch, self.step)

    @classmethod
    def of(cls, loss: Any) -> Any:
        """The loss, wrapped if it has three arguments that must be given."""
        try:
            arguments = inspect.signature(loss).parameters.values()
        except (TypeError, ValueError):  # no function, or one that does not tell
            return loss
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        needed = [one for one in arguments if one.kind in by_place and one.default is one.empty]
        return cls(loss) if len(needed) == 3 else loss

    def check(self, model: nn.Module, batch: Any) -> None:
        """See that the loss branches on no value, the number of the step among them.

        Raises:
            ValueError: it does, or cannot be traced for another reason.
        """

        def losses(step: Tensor, *records: Tensor) -> Tensor:
            return self.loss(model, replace_leaves(batch, [*records]), step)

        try:
            given = self.step, *record_leaves(batch)
            make_fx(losses, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
        except Exception as error:
            raise ValueError(
                "loss(model, batch, step) cannot be traced over tensors without values, so it may be another "
                "function in a later step than the one that was tried. Compute with step, such as "
                "torch.clamp(step / 1000, max=1) or torch.where(step < 1000, ...), in place of a branch "
                f"({type(error).__name__}: {str(error).splitlines()[0]}). Nothing was spent."
            ) from error
