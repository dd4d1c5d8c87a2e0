"""Losses without gradients: rows of a forward that keeps nothing for a backward.

Such a forward runs with gradients switched on, as every other one, so that the model takes the same
operations and kernels and the plan can be held against it. What autograd would save for a backward is let go
at once: the memory is that of inference.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor

from equipoise.gradients.operator import PerSampleGradients

__all__ = ["LossesOnly", "NothingSavedError", "nothing_saved"]


class NothingSavedError(RuntimeError):
    """A backward was asked for where nothing is saved for one."""


def nothing_saved() -> AbstractContextManager[Any]:
    """Inside, autograd saves no tensor; a backward through what is computed there is an error."""
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: None, _refuse_backward)


def _refuse_backward(saved: None) -> NoReturn:
    raise NothingSavedError("a backward was asked for in a forward that keeps nothing for one")


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
    __sub__ = __add__ = scaled = shifted = masked = _refused
