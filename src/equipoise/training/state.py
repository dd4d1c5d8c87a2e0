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


def _check_optimizer(optimizer: torch.optim.Optimizer, kinds: list[dict[str, type]]) -> None:
    """Look whether the optimiser can go on with what was loaded: torch itself finds out in the next step.

    Args:
        optimizer: with the loaded state.
        kinds: of the settings of its groups before.

    Raises:
        ValueError: a setting of another kind, or a tensor that does not fit its parameter.
    """
    for group, before in zip(optimizer.param_groups, kinds, strict=True):
        for name, kind in before.items():
            value = group.get(name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
            if not (number if kind in (int, float) else isinstance(value, kind)):  # True is an int too
                raise ValueError(f"the optimizer's {name} is {value!r:.80}, not a {kind.__name__}")
    for parameter, entry in optimizer.state.items():
        if not isinstance(entry, dict):
            raise ValueError(f"the optimizer's state of a parameter is a {type(entry).__name__}")
        for name, value in entry.items():
            # of the parameter's shape, or a factor of it
            if isinstance(value, torch.Tensor) and value.ndim == parameter.ndim:
                sizes = zip(value.shape, parameter.shape, strict=True)
                if not all(size in (1, own) for size, own in sizes):
                    raise ValueError(f"the optimizer's {name} has another shape than its parameter")


def restore_state(
    state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any
) -> None:
    """Put the state back.

    Raises:
        ValueError: the pieces are not of the same make.
    """
    try:
        model.load_state_dict(state["model"])
        kinds = [{name: type(value) for name, value in group.items()} for group in optimizer.param_groups]
        optimizer.load_state_dict(state["optimizer"])
        _check_optimizer(optimizer, kinds)
        if (scheduler is None) != (state["scheduler"] is None):
            raise ValueError(
                "the run was started with a scheduler" if scheduler is None else "it had no scheduler"
            )
        if scheduler is not None:
            scheduler.load_state_dict(state["scheduler"])
    except Exception as error:  # a state that fits badly can fail in almost any way
        raise ValueError(
            f"model, optimizer or scheduler do not fit the checkpoint: {error}. Build them as "
            "the run was started. Nothing was spent."
        ) from error
