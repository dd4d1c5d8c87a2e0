"""Records that belong to nobody: they fill up micro-batches, and what is measured on them is public."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equipoise.gradients.engine_inputs import map_records, repeat_to, take_records
from equipoise.training.record_rows import filled, out_of_memory

__all__ = ["choose_filler", "made_up"]


def choose_filler(run: Callable[[Any], Any], example: Any, size: int) -> float | None:
    """What fills up a micro-batch: zeros or ones, if the model takes such; None for a record's copies.

    Args:
        run: run(batch) -> gradients; it augments.
        example: a few records that the model takes.
        size: of a micro-batch.
    """
    one = take_records(example, slice(1))
    for value in (0.0, 1.0):  # a length or a mask of zero is often refused
        try:
            losses = run(filled(one, size, value)).losses
        except Exception as error:
            if out_of_memory(error):
                raise
            continue
        if bool(torch.isfinite(losses).all()):
            return value
    return None


def made_up(losses: Callable[[Any], Tensor], batch: Any) -> Any:
    """Public records in the shape of these, for what is measured and published.

    Args:
        losses: of records.
        batch: a few records that the model takes.

    Returns:
        Four records: uniform numbers from 0 to 1, and ones or zeros where only whole numbers go. The batch
        itself where the model fails on such.
    """
    rng = torch.Generator().manual_seed(0)
    for whole in (1, 0):

        def made(leaf: Tensor, whole: int = whole) -> Tensor:
            if leaf.is_floating_point():
                return torch.rand(leaf.shape, generator=rng).to(leaf)
            return torch.full_like(leaf, whole)

        records = map_records(made, repeat_to(batch, 4))
        try:
            if bool(torch.isfinite(losses(records)).all()):
                return records
        except Exception as error:
            if out_of_memory(error):
                raise
    return batch
