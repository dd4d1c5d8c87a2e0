"""Projected gradients as published: PCDP-SGD, biased GEP and PDP-SGD in R^P.

    PCDP-SGD, biased GEP:   estimate = V V^T (sum_i clip_C(V V^T g_i) + N(0, (z C)^2 I_P)) / B
    PDP-SGD:                estimate = V V^T (sum_i clip_C(g_i)       + N(0, (z C)^2 I_P)) / B

The noise is in all P coordinates and then projected. It equals our form in law for orthonormal columns, which
is checked. The subspace is renewed every step, with a fixed number of directions of public records, taken
of whole gradients as algorithm 1 of PCDP-SGD prints it. That paper's appendix counts a block of columns for
each tensor: `PublicSubspace(records, blocks="per_tensor")`.

Where this is not the letter of algorithm 1: B is the expected batch size, where a realised one would leak
(line 13), and directions whose eigenvalue is rounding are left out (line 7).

Sources: see `equipoise.methods.projected`.
"""

from __future__ import annotations

import math
from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.gradients.operator import DenseGradients
from equipoise.methods.base import Parameters, Plan
from equipoise.methods.estimator import Sums
from equipoise.methods.projected import BiasedGEP as LibraryBiasedGEP
from equipoise.methods.projected import Blocks, ProjectedGradient, PublicSubspace
from equipoise.methods.subspaces import Subspace
from equipoise.privacy import Bounded, PrivateRows, Sampling, clip


@dataclass(frozen=True, kw_only=True)
class PublishedProjection(ProjectedGradient, ABC):
    """What the three have in common. Arguments of `ProjectedGradient`."""

    orthonormal: ClassVar[bool] = True
    default_blocks: ClassVar[Blocks] = "whole"
    default_refresh: ClassVar[int | None] = 1

    source: PublicSubspace

    def __post_init__(self) -> None:
        super().__post_init__()
        if getattr(self.source, "energy", None) is not None:
            raise ValueError(
                f"source={self.source!r}: the published recipe takes a fixed number of directions of public "
                "records, PublicSubspace(records, dimension=100); use the library's recipe"
            )

    def claimed_epsilon(self, plan: Plan, delta: float) -> float | None:
        return renyi_2017(plan.releases.sampling, plan.releases["gradient"].noise_multiplier, delta)

    def _sums(self, rows: PrivateRows, subspace: Subspace) -> dict[str, Bounded]:
        return {"gradient": clip(self._rows(rows, subspace), self.clip_rule, self.clip_norm)}

    def _lifted(self, subspace: Subspace, released: Sums) -> dict[str, Tensor]:
        check_orthonormal(subspace)
        return projected(subspace, released["gradient"])

    def _rows(self, rows: PrivateRows, subspace: Subspace) -> PrivateRows:
        """What is clipped: V V^T g_i."""
        return rows.projection(subspace)


@dataclass(frozen=True, kw_only=True)
class PCDPSGD(PublishedProjection):
    """PCDP-SGD, with the paper's clip norm and V of the whole gradient. Arguments of `ProjectedGradient`."""

    clip_norm: float = 0.01


@dataclass(frozen=True, kw_only=True)
class BiasedGEP(PublishedProjection):
    """GEP without its residual: blocks are layers. Arguments of `ProjectedGradient`."""

    default_blocks: ClassVar[Blocks] = LibraryBiasedGEP.default_blocks


@dataclass(frozen=True, kw_only=True)
class PDPSGD(PublishedProjection):
    """PDP-SGD: the rows are clipped before the projection. Arguments of `ProjectedGradient`."""

    def _rows(self, rows: PrivateRows, subspace: Subspace) -> PrivateRows:
        return rows


# What float32 leaves of columns made orthonormal, with room. A choice: for columns that are further off the
# published noise would be too little by about as much; a tighter one refuses columns for their rounding.
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


def check_orthonormal(subspace: Subspace) -> None:
    """Raise unless the columns are orthonormal to 1e-4: noise that is projected by V V^T is too small else.

    Raises:
        ValueError: they are not.
    """
    gram = subspace.gram().double()
    off = float((gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)).abs().max())
    if off > ORTHONORMAL:
        raise ValueError(
            f"the subspace's columns differ from orthonormal ones by {off:.2g}, more than {ORTHONORMAL:g}: "
            "the published form would add too little noise; use the library's recipe, which needs no "
            "orthonormal columns"
        )


def projected(subspace: Subspace, value: Parameters) -> dict[str, Tensor]:
    """``V V^T value``."""
    row = DenseGradients({name: tensor[None] for name, tensor in value.items()})
    return subspace.lift(subspace.coordinates(row)[0])
