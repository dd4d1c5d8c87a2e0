"""Full precision for norms and the sums that they describe.

A gradient norm that is wrong in the third digit is a clip bound that is wrong in the third digit, and the
difference of two nearly equal gradients loses those digits first. So the algebra of this room runs without
autocast and without the reduced mantissas (TF32, bfloat16) that PyTorch may use for float32 products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

__all__ = ["full_precision"]


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No gradient recording, no autocast, no reduced-precision float32 products; settings are put back after.

    >>> with torch.autocast("cpu", torch.bfloat16), full_precision(torch.device("cpu")):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.float32
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        for owner, name, full in _switches(device):
            before = getattr(owner, name)
            if before not in (full, "none"):
                setattr(owner, name, full)
                stack.callback(setattr, owner, name, before)
        yield


def _switches(device: torch.device) -> list[tuple[Any, str, Any]]:
    backends: Any = torch.backends
    if hasattr(backends, "fp32_precision"):
        owners: list[Any] = [backends.mkldnn.matmul, backends.mkldnn.conv]
        if device.type == "cuda":
            owners = [backends.cuda.matmul, backends.cudnn.conv]
        return [(owner, "fp32_precision", "ieee") for owner in owners]
    if device.type == "cuda":
        return [(backends.cuda.matmul, "allow_tf32", False), (backends.cudnn, "allow_tf32", False)]
    return []
