"""Where the records are: the axis of a tensor that follows the batch, learned by running the model on two
batch sizes.

An axis whose size is proportional to the number of records follows the batch. Its size may be a multiple, n *
k, when
positions were folded into it: record-major (n, k) as in ``x.view(-1, d)`` of [B, T, d], or record-minor (k,
n) as in a flattened sequence-first tensor. Shapes cannot tell these two apart; gradients can (see
``planning``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["INCONSISTENT", "Fold", "Layout", "learn_layout", "record_first", "sum_to_shape"]


Fold = Literal["none", "major", "minor", "unknown"]


@dataclass(frozen=True)
class Layout:
    """The record axis of a tensor and how positions are folded into it."""

    axis: int
    fold: Fold = "none"


#: A tensor whose shape changes with the batch in a way that is not one axis of proportional size.
INCONSISTENT = Layout(-1, "unknown")


def learn_layout(small: torch.Size, n_small: int, large: torch.Size, n_large: int) -> Layout | None:
    """The layout of a tensor from its shapes at two batch sizes; None if it does not follow the batch.

    >>> learn_layout(torch.Size([7, 2, 4]), 2, torch.Size([7, 3, 4]), 3)
    Layout(axis=1, fold='none')
    >>> learn_layout(torch.Size([14, 4]), 2, torch.Size([21, 4]), 3)
    Layout(axis=0, fold='unknown')
    """
    if len(small) != len(large):
        return INCONSISTENT
    changed = [i for i, (s, l) in enumerate(zip(small, large, strict=True)) if s != l]
    if not changed:
        return None
    axis = changed[0]
    if len(changed) > 1 or small[axis] * n_large != large[axis] * n_small or small[axis] % n_small:
        return INCONSISTENT
    return Layout(axis, "none" if small[axis] == n_small else "unknown")


def record_first(tensor: Tensor, layout: Layout, records: int) -> Tensor:
    """A view of ``tensor`` with the records in dimension 0; folded positions stay where the axis was.

    >>> record_first(torch.arange(6).view(6, 1), Layout(0, "minor"), 3).squeeze(-1)
    tensor([[0, 3],
            [1, 4],
            [2, 5]])
    """
    axis = layout.axis
    if layout.fold == "none":
        return tensor if axis == 0 else tensor.movedim(axis, 0)
    before, after = tensor.shape[:axis], tensor.shape[axis + 1 :]
    folded = tensor.shape[axis] // max(1, records)
    if layout.fold == "major":
        return tensor.reshape(*before, records, folded, *after).movedim(axis, 0)
    if layout.fold == "minor":
        return tensor.reshape(*before, folded, records, *after).movedim(axis + 1, 0)
    raise ValueError(f"layout={layout} is not resolved; learn the fold from gradients first")


def sum_to_shape(rows: Tensor, layout: Layout, ndim: int, shape: torch.Size) -> Tensor | None:
    """Add up what broadcasting a parameter spread out: record-first ``rows`` of a tensor of ``ndim``
    dimensions.

    Returns [B, *shape], or None if ``shape`` does not broadcast to the rows in this layout.
    """
    aligned = [1] * (ndim - len(shape)) + list(shape)
    if layout.fold == "none" and aligned.pop(layout.axis) != 1:
        return None
    dims = []
    for i, (wanted, size) in enumerate(zip(aligned, rows.shape[1:], strict=True), start=1):
        if wanted == 1 and size != 1:
            dims.append(i)
        elif wanted != size:
            return None
    if dims:
        rows = rows.sum(dims)
    return rows.reshape(rows.shape[0], *shape)
