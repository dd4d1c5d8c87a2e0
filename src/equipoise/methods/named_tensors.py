"""What methods do to named tensors, parameters and released sums alike."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

__all__ = ["copied", "mean_of"]


def copied(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that no optimiser moves: the training moves the parameters in place."""
    return {name: value.detach().clone() for name, value in params.items()}


def mean_of(released: Mapping[str, Tensor], expected_size: float) -> dict[str, Tensor]:
    """A released sum over the public expected size of its draw.

    Example:
        >>> import torch
        >>> mean_of({"w": torch.tensor([6.0])}, 4)
        {'w': tensor([1.5000])}
    """
    return {name: value / expected_size for name, value in released.items()}
