"""The memory of error feedback: named tensors that are measured and shortened, public or private alike.

On `Private` tensors every function computes privately and gives `Private` results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["clipped", "norm_of", "zeros_like"]


def norm_of(tensors: Mapping[str, Tensor]) -> Tensor:
    """The Euclidean norm of all tensors together, a tensor of no dimension.

    Example:
        >>> norm_of({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])})
        tensor(5.)
    """
    return torch.stack([torch.linalg.vector_norm(value) for value in tensors.values()]).norm()


def clipped(
    tensors: Mapping[str, Tensor], radius: float, rate: float = 1.0, normalised: bool = False
) -> dict[str, Tensor]:
    """`rate` times the tensors, shortened together to norm `radius`; brought to that norm if `normalised`.

    Args:
        tensors: named tensors.
        radius: at least 0; infinity leaves the norm alone.
        rate: a positive factor, applied first.
        normalised: bring shorter ones to the radius too (zero stays zero).

    Example:
        >>> clipped({"a": torch.tensor([3.0, 4.0])}, 1.0)
        {'a': tensor([0.6000, 0.8000])}
    """
    if math.isinf(radius) and not normalised:
        return {name: value * rate for name, value in tensors.items()}
    if radius == 0:
        return {name: torch.zeros_like(value) for name, value in tensors.items()}
    norm = norm_of(tensors) * rate
    if normalised:
        factor = torch.where(norm > 0, radius / norm, torch.zeros_like(norm))
    else:
        factor = radius / norm.clamp(min=radius)
    return {name: value * (rate * factor) for name, value in tensors.items()}


def zeros_like(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zeros in the shapes of the parameters, in float32 at least."""
    return {
        name: torch.zeros_like(value, dtype=torch.promote_types(value.dtype, torch.float32))
        for name, value in params.items()
    }
