"""Private tensors in saved state: marked when written, private again when read.

A method may carry private state from step to step (the raw error memory of DiceSGD as published). It lies in
checkpoints, which are never published, and must come back as `Private` tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from equipoise.privacy.private import Private, unwrap

_MARK = "private tensor"


def mark(state: Any) -> Any:
    """The state with every `Private` tensor as a marked plain one, for a checkpoint.

    Example:
        >>> import torch
        >>> state = {"memory": Private(torch.ones(2)), "step": 3}
        >>> mark(state)["memory"]
        {'private tensor': tensor([1., 1.])}
        >>> unmark(mark(state))["memory"]
        Private(shape=(2,), dtype=torch.float32, device=cpu)
    """
    if isinstance(state, Private):
        return {_MARK: unwrap(state)}
    if isinstance(state, Mapping):
        return {key: mark(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [mark(value) for value in state]
    return state


def unmark(state: Any) -> Any:
    """The state that `mark` was given, tuples as lists."""
    if isinstance(state, Mapping):
        if set(state) == {_MARK}:
            return Private(state[_MARK])
        return {key: unmark(value) for key, value in state.items()}
    if isinstance(state, list):
        return [unmark(value) for value in state]
    return state
