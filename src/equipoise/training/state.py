"""The state of the user's pieces, for checkpoints: model, optimiser, scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["collect_state", "restore_state"]


def collect_state(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    """Their state dicts."""
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
    }


def restore_state(
    state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any
) -> None:
    """Put the state back.

    Raises:
        ValueError: the pieces are not of the same make.
    """
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if (scheduler is None) != (state["scheduler"] is None):
            raise ValueError(
                "the run was started with a scheduler" if scheduler is None else "it had no scheduler"
            )
        if scheduler is not None:
            scheduler.load_state_dict(state["scheduler"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(
            f"model, optimizer or scheduler do not fit the checkpoint: {error}. Build them as "
            "the run was started. Nothing was spent."
        ) from error
