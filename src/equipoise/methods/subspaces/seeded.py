"""Random columns that are drawn anew from a seed whenever they are needed, and never held.

A column on a matrix parameter is vec(u w^T) (Khatri-Rao structure): the coordinate of a factor's row is
``sum_s (b_s . u)(a_s . w)`` and the Gram matrix ``(U^T U) * (W^T W)``, so that no column is formed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from equipoise.gradients.factors.base import Factor
from equipoise.gradients.factors.lookup import IndexFactor
from equipoise.gradients.factors.outer import OuterFactor
from equipoise.gradients.factors.pair_products import gram
from equipoise.gradients.numerics import accumulation_dtype, chunks, full_precision
from equipoise.gradients.operator import DenseGradients, PerSampleGradients, factored_over
from equipoise.methods.subspaces.base import Subspace

__all__ = ["SeededSubspace"]


class SeededSubspace(Subspace):
    """Random columns drawn anew from a seed, parameter by parameter, whenever they are needed.

    A matrix parameter with more than ``dense_limit`` numbers gets columns vec(u_j w_j^T) with standard normal
    u and w, every other parameter normal columns, all scaled by 1/sqrt(P): the expected squared norm of a
    column is one.
    A parameter of more than two dimensions counts as the matrix (shape[0], the rest).

    Args:
        seed: of the public randomness; one seed gives the same columns on every process of one device type.
        shapes: parameter name -> shape.
        dimension: K, the number of columns.
        dtype, device: of the columns.
        dense_limit: parameters up to this size get columns without structure.
        entries: law of the independent numbers that columns, u and w consist of, as a function of their
            shape and a generator; standard normal when None.

    >>> V = SeededSubspace(0, {"w": (4, 3)}, 2, dense_limit=0)
    >>> V.gram().shape, V.lift(torch.ones(2))["w"].shape
    (torch.Size([2, 2]), torch.Size([4, 3]))
    """

    def __init__(
        self,
        seed: int,
        shapes: Mapping[str, Sequence[int]],
        dimension: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        dense_limit: int = 4096,
        entries: Callable[[Sequence[int], torch.Generator], Tensor] | None = None,
    ) -> None:
        if dimension < 1:
            raise ValueError(f"dimension={dimension} leaves no column; pass at least 1")
        self.seed, self.dtype, self.device = seed, accumulation_dtype(dtype), torch.device(device)
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self.dense_limit = dense_limit
        self._entries = _standard_normal if entries is None else entries
        self._dimension = dimension
        self._scale = max(1, sum(shape.numel() for shape in self.shapes.values())) ** -0.5

    @property
    @override
    def dimension(self) -> int:
        return self._dimension

    def block(self, name: str) -> Factor:
        """The columns on one parameter, as a factor whose "records" are the K columns."""
        # Drawn in float32 on the CPU, so that neither the type nor the device changes the subspace.
        position = list(self.shapes).index(name)
        state = torch.Generator().manual_seed(_mixed(self.seed, position))
        shape = self.shapes[name]
        if len(shape) < 2 or shape.numel() <= self.dense_limit:
            dense = self._draw((self._dimension, *shape), state)
            return DenseGradients({name: dense.mul_(self._scale)}).factors[name][0]
        u = self._draw((self._dimension, shape[0]), state)
        w = self._draw((self._dimension, shape[1:].numel()), state)
        return OuterFactor(w, u.mul_(self._scale), shape)

    def _draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        return self._entries(shape, generator).to(self.device, self.dtype)

    @override
    def coordinates(self, gradients: PerSampleGradients) -> Tensor:
        G = factored_over(gradients, self.shapes)
        out = torch.zeros(G.num_records, self._dimension, dtype=G.dtype, device=G.device)
        with full_precision(G.device):
            for name, kept in G.factors.items():
                block = self.block(name) if kept else None
                for factor in kept:
                    assert block is not None
                    out += _coordinates(factor, block).to(out.dtype)
        return out

    @override
    def lift(self, y: Tensor) -> dict[str, Tensor]:
        weights = self._check_coordinates(y).unsqueeze(1)
        with full_precision(self.device):
            return {name: self.block(name).weighted_sum(weights)[0] for name in self.shapes}

    @override
    def gram(self) -> Tensor:
        out = torch.zeros(self._dimension, self._dimension, dtype=self.dtype, device=self.device)
        with full_precision(self.device):
            for name in self.shapes:
                block = self.block(name)
                out += gram(block, block)
        return out


def _standard_normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _mixed(seed: int, position: int) -> int:
    """A seed for one parameter: neighbouring seeds and positions must not share streams."""
    # The last steps are SplitMix64's: each bit of the sum changes half of the bits of the result.
    value = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return (value ^ (value >> 31)) % 2**63


def _coordinates(factor: Factor, block: Factor) -> Tensor:
    """Dot products of a factor's rows with columns; with Khatri-Rao columns by two narrow products."""
    if not isinstance(block, OuterFactor):
        return gram(factor, block)
    u, w = block.b[:, 0], block.a[:, 0]
    dtype = torch.promote_types(accumulation_dtype(u.dtype), accumulation_dtype(factor.dtype))
    u, w = u.to(dtype), w.to(dtype)
    out = torch.empty(factor.num_records, u.shape[0], dtype=dtype, device=factor.device)
    if isinstance(factor, IndexFactor) or (
        isinstance(factor, OuterFactor) and factor.matrix_shape == block.matrix_shape
    ):
        for part in chunks(factor.num_records, 2 * factor.positions * u.shape[0]):
            if isinstance(factor, OuterFactor):
                one, other = factor.a[part].to(dtype), torch.matmul(factor.b[part].to(dtype), u.t())
            else:  # a look-up's b is a unit vector, so that its product with u is an entry of u
                one, other = factor.wide_b()[part].to(dtype), u.t()[factor.index[part]]
            out[part] = torch.matmul(one, w.t()).mul_(other).sum(1)
        return out
    for part in chunks(factor.num_records, factor.shape.numel()):
        rows = factor.rows(part).materialise().to(dtype).reshape(-1, *block.matrix_shape)
        out[part] = torch.matmul(rows, w.t()).mul_(u.t()).sum(1)
    return out
