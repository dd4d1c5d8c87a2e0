"""Projected gradients as published: the form in R^P, what it asks of the columns, and the papers' epsilon."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equipoise.gradients.operator import DenseGradients
from equipoise.gradients.subspaces.blocks import BlockSubspace
from equipoise.methods.base import Parameters
from equipoise.privacy.sampling import Sampling

__all__ = ["check_orthonormal", "projected", "renyi_2017"]


ORTHONORMAL = 1e-4


def renyi_2017(sampling: Sampling, noise_multiplier: float, delta: float) -> float:
    """min over a of RDP(a) + ln(1/delta) / (a - 1): epsilon by the conversion of 2017.

    It gives the figures that PCDP-SGD's paper prints (q = 0.025, 3,200 steps): valid, and loose.

    Example:
        >>> from equipoise.privacy import Poisson
        >>> round(renyi_2017(Poisson(250, 10_000, 3200), 6.0, 1e-5), 2)
        1.18
    """
    from dp_accounting import rdp

    orders = [1 + x / 10 for x in range(1, 100)] + list(range(11, 257)) + [320, 512, 1024]
    accountant = rdp.RdpAccountant(orders)
    accountant.compose(sampling.event(noise_multiplier, sampling.steps))
    return min(
        float(value) + math.log(1 / delta) / (float(order) - 1)
        for order, value in zip(accountant._orders, accountant._rdp, strict=True)
    )


def check_orthonormal(subspace: BlockSubspace) -> None:
    """Raise unless the columns are orthonormal to 1e-4: noise that is projected by V V^T is too small else.

    Raises:
        ValueError: they are not.
    """
    gram = subspace.gram().double()
    off = float((gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)).abs().max())
    if off > ORTHONORMAL:
        raise ValueError(
            f"the subspace's columns differ from orthonormal ones by {off:.2g}, more than "
            f"{ORTHONORMAL:g}: the "
            "published form would add too little noise; use recipe='library', which needs no "
            "orthonormal columns"
        )


def projected(subspace: BlockSubspace, value: Parameters) -> dict[str, Tensor]:
    """``V V^T value``."""
    row = DenseGradients({name: tensor[None] for name, tensor in value.items()})
    return subspace.lift(subspace.coordinates(row)[0])
