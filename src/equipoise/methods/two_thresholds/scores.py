"""Scores that say which records of a batch form its tail, each from one record and public randomness.

==========  ====================================================  =======================================
score       of record i                                           distribution when it says nothing
==========  ====================================================  =======================================
`norm`      ||g_i||                                               -
`trace`     lambda_i = ||V^T g_i||^2 / ||g_i||^2, V^T V = I_k      Beta(k/2, (P-k)/2) for Gaussian V
`trace_abs` the same of |g_i|, entry by entry                     the same
`random`    a uniform number of the record's own                  uniform on [0, 1)
==========  ====================================================  =======================================

The trace (Sha et al., "DC-DPSGD", arXiv 2405.17529) comes from any columns A that span the subspace, without
an orthonormal basis: with y_i = A^T g_i and the Cholesky factor A^T A = L L^T it is
||L^-1 y_i||^2 / ||g_i||^2.
A has heavy-tailed entries, |v| = E^theta with E exponential, of random sign.

The trace carries no information about the norm. If the entries are symmetric, a signed permutation S leaves
the law of A as it is, so that E[V V^T] commutes with all of them and equals (k/P) I: every record has the
expected score k/P.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from scipy import special
from torch import Tensor

from equipoise.gradients.subspaces.base import Subspace
from equipoise.gradients.subspaces.seeded import SeededSubspace
from equipoise.privacy.private import Private
from equipoise.privacy.rows import PrivateRows

__all__ = ["Trace", "null_threshold", "record_normals", "record_uniforms", "sub_weibull"]


Signs = Literal["symmetric", "positive"]


_LOW = (1 << 63) - 1


def sub_weibull(
    shape: Sequence[int], generator: torch.Generator, tail_index: float = 2.0, signs: Signs = "symmetric"
) -> Tensor:
    """Independent numbers with |v| = E^theta, E ~ Exp(1): P(|v| > x) = exp(-x^(1/theta)).

    Args:
        shape: of the result.
        generator: public randomness.
        tail_index: theta >= 1/2; 1/2 is a Rayleigh law (no Gaussian), 1 exponential, more is heavier.
        signs: "symmetric" (a fair sign each) or "positive".

    Returns:
        float32, on the generator's device.

    Example:
        >>> v = sub_weibull((1000,), torch.Generator().manual_seed(0), tail_index=1.0)
        >>> bool(v.abs().mean() > 0.9), bool((v < 0).any())
        (True, True)
    """
    uniform = torch.rand(*shape, generator=generator, dtype=torch.float64)
    out = (-torch.log1p(-uniform)).pow(tail_index)
    if signs == "symmetric":
        out = out * (2 * torch.randint(2, tuple(shape), generator=generator) - 1)
    return out.to(torch.float32)


def null_threshold(fraction: float, dimension: int, parameters: int) -> float:
    """The upper `fraction` quantile of the trace of a fixed direction: Beta(k/2, (P-k)/2).

    Exact for Gaussian columns, approximate for symmetric heavy-tailed ones, wrong for positive ones.

    Example:
        >>> round(null_threshold(0.1, 200, 2000), 6)
        0.112315
    """
    return float(special.betaincinv(dimension / 2, (parameters - dimension) / 2, 1 - fraction))


class Trace:
    """The share of each row's square that lies in a subspace.

    Args:
        subspace: columns A, not necessarily orthonormal.
        absolute: take the rows' entries without their signs; all calls are for rows of the same parameters.
            That needs the dense rows, [b, P], and the dense columns of a `SeededSubspace`, [P, k].

    Raises:
        ValueError: columns that are linearly dependent to working precision.

    Example:
        >>> from equipoise.gradients import DenseGradients
        >>> from equipoise.gradients.subspaces.held import HeldSubspace
        >>> rows = PrivateRows(DenseGradients({"w": torch.tensor([[3.0, 4.0, 0.0]])}))
        >>> Trace(HeldSubspace({"w": torch.tensor([[2.0, 0.0, 0.0]])}))(rows).by_record  # 9 / 25
        True
    """

    def __init__(self, subspace: Subspace, absolute: bool = False) -> None:
        if absolute and not isinstance(subspace, SeededSubspace):
            raise TypeError(
                f"subspace={type(subspace).__name__}: rows without signs are multiplied with dense columns, "
                "which a SeededSubspace gives"
            )
        self.subspace, self._absolute = subspace, absolute
        self._columns: Tensor | None = None
        gram = subspace.gram().double()
        # Heavy-tailed columns differ by orders of magnitude; the score does not change with their lengths.
        self._scale = gram.diagonal().sqrt()
        factor, failed = torch.linalg.cholesky_ex(gram / self._scale / self._scale[:, None])
        if int(failed) or not bool(torch.isfinite(factor).all()):
            raise ValueError(
                f"subspace_dimension={subspace.dimension}: the columns are linearly dependent to working "
                "precision; take a smaller dimension or more layers"
            )
        eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        self._inverse = torch.linalg.solve_triangular(factor, eye, upper=False)

    def __call__(self, rows: PrivateRows) -> Private:
        """lambda_i in [0, 1], float64, [b]; zero for a row of zeros or one that is not finite."""
        y = self._coordinates(rows).double() / self._scale
        squares = (y @ self._inverse.t()).square().sum(dim=1)
        scores = squares / rows.row_norms().double().square()
        out = torch.nan_to_num(scores, nan=0.0, posinf=0.0).clamp(min=0, max=1)
        assert isinstance(out, Private)
        return out

    def _coordinates(self, rows: PrivateRows) -> Tensor:
        if not self._absolute:
            return rows.coordinates(self.subspace)
        if self._columns is None:  # once a step, not once a micro-batch
            assert isinstance(self.subspace, SeededSubspace)
            blocks = [self.subspace.block(name).materialise().flatten(1) for name in rows.names]
            self._columns = torch.cat(blocks, dim=1).t().to(rows.dtype)
        return rows.matrix().abs() @ self._columns


def record_uniforms(ids: Private, seed: int) -> Private:
    """A uniform number in [0, 1) for every record, from its own number and a secret seed, float64.

    A record keeps its number however the batch is cut. The seed must be a secret of the draw
    (`draw.secret_number`): numbers are positions in the data set, which shift when a record leaves.

    Example:
        >>> record_uniforms(Private(torch.arange(3)), seed=1).by_record
        True
    """
    bits = ids.long() * -0x61C8864680B583EB + (seed & _LOW)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        bits = (bits ^ _shifted(bits, shift)) * factor
    bits = bits ^ _shifted(bits, 31)
    out = _shifted(bits, 11).double() * 2.0**-53
    assert isinstance(out, Private)
    return out


def record_normals(ids: Private, seed: int) -> Private:
    """A standard normal number for every record, as `record_uniforms`."""
    first, second = record_uniforms(ids, seed), record_uniforms(ids, seed ^ 0x5DEECE66D)
    out = (-2 * torch.log1p(-first)).sqrt() * torch.cos(2 * math.pi * second)
    assert isinstance(out, Private)
    return out


def _shifted(bits: Tensor, by: int) -> Tensor:
    """A logical shift to the right of signed 64-bit numbers."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
