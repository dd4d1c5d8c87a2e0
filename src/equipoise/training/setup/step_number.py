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

from equipoise.gradients.engine_inputs import Loss, evaluate_loss, record_leaves, replace_leaves


def with_step(loss: Any) -> Any:
    """A loss of model, batch and step as one of model and batch; any other loss as it is.

    A function, and no object of a class of ours: what it holds is looked into.

    Example:
        >>> loss = with_step(lambda model, batch, step: model(batch) * torch.clamp(step / 100, max=1))
        >>> step_of(loss).fill_(50)
        tensor(50)
        >>> loss(lambda x: x, torch.ones(2))
        tensor([0.5000, 0.5000])
    """
    try:
        arguments = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters
    except (TypeError, ValueError):  # no function, or one that does not tell
        return loss
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [one for one in arguments.values() if one.kind in by_place and one.default is one.empty]
    return _at(loss, torch.ones((), dtype=torch.int64)) if len(needed) == 3 else loss


def _at(loss: Callable[[Any, Any, Tensor], Tensor], step: Tensor) -> Loss:
    def of_step(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch, step)

    of_step.step, of_step.loss = step, loss  # type: ignore[attr-defined]
    return of_step


def with_step_on(loss: Any, device: torch.device) -> Any:
    """The same loss, with the number on this device: one on the host would be a constant of a CUDA graph."""
    step = step_of(loss)
    return loss if step is None or step.device == device else _at(loss.loss, step.to(device))


def step_of(loss: Any) -> Tensor | None:
    """What the loss takes for the number of the step, int64 without dimensions, from 1 on; or None."""
    return getattr(loss, "step", None) if getattr(loss, "__module__", None) == __name__ else None


def check_number(loss: Any, model: nn.Module, batch: Any) -> None:
    """See that a loss that takes the number of the step branches on no value, the number among them.

    Raises:
        ValueError: it does, or cannot be traced for another reason.
    """
    number = step_of(loss)
    if number is None:
        return

    def losses(step: Tensor, *records: Tensor) -> Tensor:
        return evaluate_loss(model, _at(loss.loss, step), replace_leaves(batch, [*records]), None)

    try:
        make_fx(losses, tracing_mode="fake", _allow_non_fake_inputs=True)(number, *record_leaves(batch))
    except Exception as error:
        raise ValueError(
            "loss(model, batch, step) cannot be traced, so it may be another function in a later step: "
            "compute with step (torch.where(step < 1000, ...)) in place of a branch "
            f"({type(error).__name__}: {str(error).splitlines()[0]}). Nothing was spent."
        ) from error
