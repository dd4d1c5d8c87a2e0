"""TODO."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from equipoise.gradients.factors.base import Factor
from equipoise.gradients.factors.outer import OuterFactor
from equipoise.gradients.factors.pair_products import gram
from equipoise.gradients.numerics import accumulation_dtype, full_precision
from equipoise.gradients.operator import DenseGradients, PerSampleGradients, factored_over
from equipoise.gradients.subspaces.base import Subspace, _coordinates

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
    value = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return (value ^ (value >> 31)) % 2**63
