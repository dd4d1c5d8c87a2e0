"""Scores that say which records of a batch form its tail, each from one record and public randomness.

==========  ====================================================  =======================================
score       of record i                                           distribution when it says nothing
==========  ====================================================  =======================================
`Norm`      ||g_i||                                               -
`Trace`     lambda_i = ||V^T g_i||^2 / ||g_i||^2, V^T V = I_k      Beta(k/2, (P-k)/2) for Gaussian V
`Random`    a uniform number of the record's own                  uniform on [0, 1)
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
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from scipy import special
from torch import Tensor

from equipoise import _validate
from equipoise.methods.base import Context, DrawHandle, Parameters
from equipoise.methods.configuration import Option
from equipoise.methods.subspaces.base import Subspace
from equipoise.methods.subspaces.seeded import SeededSubspace
from equipoise.privacy.private import Private
from equipoise.privacy.rows import PrivateRows

__all__ = [
    "Norm",
    "Random",
    "Score",
    "Scorer",
    "SubspaceTrace",
    "Trace",
    "null_threshold",
    "record_normals",
    "record_uniforms",
    "sub_weibull",
]


Signs = Literal["symmetric", "positive"]


Scorer = Callable[[PrivateRows, Private], Private]
"""From the rows of a micro-batch and their records' numbers to their scores."""


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


class Score(Option, ABC):
    """What says which records form the tail."""

    exact: ClassVar[bool] = False
    """Whether scores have no rounding that a step at the threshold could make large."""

    @abstractmethod
    def start(self, fraction: float, clip_norm: float, params: Parameters) -> float:
        """The first threshold for a tail of this fraction, from public constants."""

    @abstractmethod
    def of_step(self, context: Context, draw: DrawHandle) -> Scorer:
        """The score of a step: a function of rows and their numbers."""


@dataclass(frozen=True, kw_only=True)
class Norm(Score):
    """The norm of a record's gradient."""

    kind: ClassVar[str] = "norm"

    def start(self, fraction: float, clip_norm: float, params: Parameters) -> float:
        return clip_norm

    def of_step(self, context: Context, draw: DrawHandle) -> Scorer:
        return lambda rows, ids: rows.row_norms()


@dataclass(frozen=True, kw_only=True)
class Random(Score):
    """Labels at random: the control. Every record's number is a secret of the draw."""

    kind: ClassVar[str] = "random"
    exact: ClassVar[bool] = True

    def start(self, fraction: float, clip_norm: float, params: Parameters) -> float:
        return 1 - fraction

    def of_step(self, context: Context, draw: DrawHandle) -> Scorer:
        secret = draw.secret_number("lots")
        return lambda rows, ids: record_uniforms(ids, secret)


@dataclass(frozen=True, kw_only=True)
class Trace(Score):
    """The share of a record's squared gradient in a public random subspace.

    Args:
        dimension: k; at most the number of parameters.
        absolute: of the gradient's entries without their signs, as in the authors' program; forms every
            record's gradient and all columns.
        tail_index: theta >= 1/2 of the columns' entries.
        signs: "symmetric" or "positive".
        structure: "khatri_rao" (matrix parameters get columns vec(u w^T), so that nothing of size P k is
            formed) or "dense".
        refresh_every: steps between new subspaces.
        layers: names of the parameters that the trace looks at; all when None.
    """

    kind: ClassVar[str] = "trace"
    dimension: int = 200
    absolute: bool = False
    tail_index: float = 2.0
    signs: Signs = "symmetric"
    structure: Literal["khatri_rao", "dense"] = "khatri_rao"
    refresh_every: int = 1
    layers: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _validate.one_of(("symmetric", "positive"), signs=self.signs)
        _validate.one_of(("khatri_rao", "dense"), structure=self.structure)
        if self.tail_index < 0.5:
            raise ValueError(
                f"tail_index={self.tail_index!r}: the sub-Weibull laws have theta of at least 1/2"
            )
        _validate.count(dimension=self.dimension)
        _validate.count(refresh_every=self.refresh_every)

    def start(self, fraction: float, clip_norm: float, params: Parameters) -> float:
        size = sum(params[name].numel() for name in self.looked_at(params))
        if self.dimension > size:
            raise ValueError(
                f"dimension={self.dimension} exceeds the {size} parameters that the trace looks at; take at "
                "most that many"
            )
        return null_threshold(fraction, self.dimension, size)

    def of_step(self, context: Context, draw: DrawHandle) -> Scorer:
        rng = context.public_rng(context.step - context.step % self.refresh_every)
        seed = int(torch.randint(2**62, (), generator=rng, device=rng.device))
        names = self.looked_at(context.params)
        trace = SubspaceTrace(self._subspace(seed, context.params, names), absolute=self.absolute)
        return lambda rows, ids: trace(rows if self.layers is None else rows.select(names))

    def _subspace(self, seed: int, params: Parameters, names: Sequence[str]) -> SeededSubspace:
        some = params[names[0]]
        return SeededSubspace(
            seed,
            {name: params[name].shape for name in names},
            self.dimension,
            dtype=some.dtype,
            device=some.device,
            dense_limit=4096 if self.structure == "khatri_rao" else 2**62,
            entries=partial(sub_weibull, tail_index=self.tail_index, signs=self.signs),
        )

    def looked_at(self, params: Parameters) -> tuple[str, ...]:
        """The names of the parameters that the trace looks at, in the model's order."""
        if self.layers is None:
            return tuple(params)
        unknown = [name for name in self.layers if name not in params]
        if unknown:
            raise ValueError(
                f"layers names {unknown}, which are no trainable parameters; there are {sorted(params)}"
            )
        return tuple(name for name in params if name in self.layers)


class SubspaceTrace:
    """The share of each row's square that lies in a subspace.

    Args:
        subspace: columns A, not necessarily orthonormal.
        absolute: take the rows' entries without their signs; all calls are for rows of the same parameters.
            That needs the dense rows, [b, P], and the dense columns of a `SeededSubspace`, [P, k].

    Raises:
        ValueError: columns that are linearly dependent to working precision.

    Example:
        >>> from equipoise.gradients import DenseGradients
        >>> from equipoise.methods.subspaces.base import HeldSubspace
        >>> rows = PrivateRows(DenseGradients({"w": torch.tensor([[3.0, 4.0, 0.0]])}))
        >>> SubspaceTrace(HeldSubspace({"w": torch.tensor([[2.0, 0.0, 0.0]])}))(rows).by_record  # 9 / 25
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
        # In float64: the factor of a nearly singular matrix in float32 would be refused without need.
        gram = subspace.gram().double()
        # Heavy-tailed columns differ by orders of magnitude; the score does not change with their lengths.
        self._scale = gram.diagonal().sqrt()
        factor, failed = torch.linalg.cholesky_ex(gram / self._scale / self._scale[:, None])
        if int(failed) or not bool(torch.isfinite(factor).all()):
            raise ValueError(
                f"dimension={subspace.dimension}: the columns are linearly dependent to working precision; "
                "take a smaller dimension or more layers"
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
        if self._columns is None:  # once per step, not per micro-batch
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
    # The finaliser of SplitMix64; its constants are written as signed numbers, since torch has no unsigned.
    bits = ids.long() * -0x61C8864680B583EB + (seed & _LOW)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        bits = (bits ^ _shifted(bits, shift)) * factor
    bits = bits ^ _shifted(bits, 31)
    # 53 bits are what a float64 holds exactly, so that no number rounds up to 1.
    out = _shifted(bits, 11).double() * 2.0**-53
    assert isinstance(out, Private)
    return out


def record_normals(ids: Private, seed: int) -> Private:
    """A standard normal number for every record, as `record_uniforms`."""
    # Box and Muller; the second seed is any other, for an angle of its own. 1 - first is never 0.
    first, second = record_uniforms(ids, seed), record_uniforms(ids, seed ^ 0x5DEECE66D)
    out = (-2 * torch.log1p(-first)).sqrt() * torch.cos(2 * math.pi * second)
    assert isinstance(out, Private)
    return out


def _shifted(bits: Tensor, by: int) -> Tensor:
    """A logical shift to the right of signed 64-bit numbers."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
