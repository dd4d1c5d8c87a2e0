"""What methods do to named tensors: parameters, released sums, and the memory of error feedback.

On `Private` tensors `norm_of` and `clipped` compute privately and give `Private` results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from equipoise._dtensor import is_dtensor, norm_of_all, with_part


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
    parts = [getattr(value, "_local_tensor", value) for value in released.values()]
    means = zip(parts, torch._foreach_div(parts, expected_size), strict=True)
    return {
        name: mean if part is value else with_part(mean, value)
        for (name, value), (part, mean) in zip(released.items(), means, strict=True)
    }


def norm_of(tensors: Mapping[str, Tensor]) -> Tensor:
    """The Euclidean norm of all tensors together, a tensor of no dimension.

    Example:
        >>> norm_of({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])})
        tensor(5.)
    """
    if any(map(is_dtensor, tensors.values())):
        return norm_of_all(tensors.values())
    return torch.stack([torch.linalg.vector_norm(value) for value in tensors.values()]).norm()


def clipped(
    tensors: Mapping[str, Tensor], radius: float, rate: float = 1.0, normalised: bool = False
) -> dict[str, Tensor]:
    """`rate` times the tensors, shortened together to norm `radius`; brought to that norm if `normalised`.

    Args:
        tensors: named tensors.
        radius: at least 0; infinity does not bound it.
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
