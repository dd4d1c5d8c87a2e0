"""Running something on a model without a trace, and without dropout where rows are to be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["undisturbed"]


class _WithoutDropout(TorchFunctionMode):
    """Dropout is the identity: masks of a batch and of single records cannot be compared."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


_DROPOUTS = frozenset(
    getattr(module, name)
    for module in (F, torch)
    for name in [
        "dropout",
        "dropout_",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "alpha_dropout_",
        "feature_dropout",
        "feature_dropout_",
        "feature_alpha_dropout",
        "feature_alpha_dropout_",
    ]
    if hasattr(module, name)
)


@contextmanager
def undisturbed(model: nn.Module, seed: int = 0, dropout: bool = False) -> Iterator[None]:
    """Run something on the model and leave no trace: buffers and random states come back as they were."""
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng([d.index for d in devices if d.index is not None]):
            torch.manual_seed(seed)
            if dropout:
                yield
            else:
                with _WithoutDropout():
                    yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer  # it may have been assigned anew
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
