"""Subspaces of the parameter space: coordinates of the rows of G, and the way back.

A subspace has columns V [P, K], seldom held as such:

    coordinates(G) = G V     [B, K]
    lift(y)        = V y     named tensors
    gram()         = V^T V   [K, K]

The columns need not be orthonormal; ``gram()`` says what they are. For a column vec(u w^T) of a matrix
parameter (Khatri-Rao structure) the coordinate of a factor's row is ``sum_s (b_s . u)(a_s . w)``, and the
Gram matrix is ``(U^T U) * (W^T W)``, so that no column is formed. Columns that are combinations of public
rows, ``V = G_pub^T W``, need only the cross-Gram matrix of public and private rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from equipoise.gradients.base import Factor, accumulation_dtype, chunks, widen
from equipoise.gradients.factored import DenseGradients, factored_over
from equipoise.gradients.index import IndexFactor
from equipoise.gradients.operator import PerSampleGradients
from equipoise.gradients.outer import OuterFactor
from equipoise.gradients.precision import full_precision

__all__ = ["HeldSubspace", "SeededSubspace", "SpanSubspace", "Subspace", "holds_orthonormal"]


class Subspace(ABC):
    """Columns V [P, K] over named parameters."""

    @property
    @abstractmethod
    def dimension(self) -> int:
        """K, the number of columns."""

    @abstractmethod
    def coordinates(self, gradients: PerSampleGradients) -> Tensor:
        """``G V`` [B, K]: dot products of the rows with the columns."""

    @abstractmethod
    def lift(self, y: Tensor) -> dict[str, Tensor]:
        """``V y`` as named tensors, for coordinates y [K]."""

    @abstractmethod
    def gram(self) -> Tensor:
        """``V^T V`` [K, K]."""

    @property
    def holds_columns(self) -> bool:
        """Whether the columns are in memory, so that `gram` is true to rounding."""
        return False

    def _check_coordinates(self, y: Tensor) -> Tensor:
        if y.shape != (self.dimension,):
            raise ValueError(f"y has shape {tuple(y.shape)}; it needs [{self.dimension}], the coordinates")
        return y.detach()


def holds_orthonormal(subspace: Subspace) -> bool:
    """Whether the columns are in memory and orthonormal, V^T V within 0.01 of I in the Frobenius norm.

    Only then do products give the norms of residuals and projections to rounding. A Gram matrix taken from
    public rows, ``W^T (G_pub G_pub^T) W``, is off by eps times the ratio of the largest to the smallest
    eigenvalue, and reads I where the columns are not orthonormal; long columns magnify rounding as well.

    >>> holds_orthonormal(HeldSubspace({"w": torch.eye(2, 3)}))
    True
    >>> holds_orthonormal(HeldSubspace({"w": 2 * torch.eye(2, 3)}))
    False
    """
    if not subspace.holds_columns:
        return False
    gram = subspace.gram()
    off = gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return float(torch.linalg.matrix_norm(off)) <= 0.01


class HeldSubspace(Subspace):
    """Columns held in memory, name by name.

    Args:
        columns: parameter name -> [K, *shape].

    >>> V = HeldSubspace({"w": torch.eye(2, 3)})
    >>> G = DenseGradients({"w": torch.tensor([[1.0, 2.0, 3.0]])})
    >>> V.coordinates(G), V.lift(torch.tensor([1.0, 0.5]))
    (tensor([[1., 2.]]), {'w': tensor([1.0000, 0.5000, 0.0000])})
    """

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        counts = {name: tensor.shape[0] for name, tensor in columns.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(
                f"columns has different numbers of columns by name: {counts}; all need the same K"
            )
        self.columns = DenseGradients(columns)

    @property
    @override
    def dimension(self) -> int:
        return self.columns.num_records

    @override
    def coordinates(self, gradients: PerSampleGradients) -> Tensor:
        out = gradients.cross_gram(self.columns)
        assert isinstance(out, Tensor)
        return out

    @override
    def lift(self, y: Tensor) -> dict[str, Tensor]:
        return self.columns.weighted_sums(self._check_coordinates(y))

    @override
    def gram(self) -> Tensor:
        out = self.columns.cross_gram(self.columns)
        assert isinstance(out, Tensor)
        return out

    @property
    @override
    def holds_columns(self) -> bool:
        return True


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
                out += block.gram(block)
        return out


class SpanSubspace(Subspace):
    """Combinations of public rows: ``V = G_pub^T W``, the weights W by parameter or common.

    Args:
        public: m public rows, at their own parameter point.
        weights: name -> W [m, K_l], when each parameter has coordinates of its own (K = sum of K_l, in the
            order of ``public.names``); or one W [m, K] for all.

    >>> V = SpanSubspace(DenseGradients({"w": torch.eye(2, 3)}), torch.tensor([[1.0], [1.0]]))
    >>> V.coordinates(DenseGradients({"w": torch.tensor([[1.0, 2.0, 3.0]])})), V.gram()
    (tensor([[3.]]), tensor([[2.]]))
    """

    def __init__(self, public: PerSampleGradients, weights: Tensor | Mapping[str, Tensor]) -> None:
        self.public = public
        self.per_tensor = not isinstance(weights, Tensor)
        self.weights: dict[str, Tensor]
        if isinstance(weights, Tensor):
            self.weights = {"": weights.detach()}
        else:
            if set(weights) != set(public.names):
                raise ValueError(
                    f"weights has entries for {', '.join(sorted(weights))}; the public rows are over "
                    f"{', '.join(public.names)}, and each needs one"
                )
            self.weights = {name: weights[name].detach() for name in public.names}
        for name, W in self.weights.items():
            if W.ndim != 2 or W.shape[0] != public.num_records:
                raise ValueError(
                    f"weights {name} has shape {tuple(W.shape)}; it needs [{public.num_records}, K], a row a "
                    "public record"
                )

    @property
    @override
    def dimension(self) -> int:
        return sum(W.shape[1] for W in self.weights.values())

    @override
    def coordinates(self, gradients: PerSampleGradients) -> Tensor:
        products = gradients.cross_gram(self.public, per_tensor=self.per_tensor)
        if isinstance(products, Tensor):
            products = {"": products}
        with full_precision(gradients.device):
            return torch.cat(
                [products[name] @ W.to(products[name]) for name, W in self.weights.items()], dim=1
            )

    @override
    def lift(self, y: Tensor) -> dict[str, Tensor]:
        y = self._check_coordinates(y)
        rows, start = {}, 0
        with full_precision(self.public.device):
            for name, W in self.weights.items():
                rows[name] = W @ y[start : start + W.shape[1]].to(W)
                start += W.shape[1]
        return self.public.weighted_sums(rows if self.per_tensor else rows[""])

    @override
    def gram(self) -> Tensor:
        products = self.public.cross_gram(self.public, per_tensor=self.per_tensor)
        if isinstance(products, Tensor):
            products = {"": products}
        with full_precision(self.public.device):
            blocks = [
                W.to(products[n]).t() @ products[n] @ W.to(products[n]) for n, W in self.weights.items()
            ]
            out = blocks[0].new_zeros(self.dimension, self.dimension)
            start = 0
            for block in blocks:
                stop = start + block.shape[0]
                out[start:stop, start:stop] = block
                start = stop
            return out


def _coordinates(factor: Factor, block: Factor) -> Tensor:
    """Dot products of a factor's rows with columns; with Khatri-Rao columns by two narrow products."""
    if not isinstance(block, OuterFactor):
        return factor.gram(block)
    u, w = block.b[:, 0], block.a[:, 0]
    dtype = torch.promote_types(widen(u[:0]).dtype, accumulation_dtype(factor.dtype))
    u, w = u.to(dtype), w.to(dtype)
    if isinstance(factor, OuterFactor) and factor.matrix_shape == block.matrix_shape:
        out = torch.empty(factor.num_records, u.shape[0], dtype=dtype, device=factor.device)
        for part in chunks(factor.num_records, 2 * factor.positions * u.shape[0]):
            products = torch.matmul(factor.b[part].to(dtype), u.t())
            out[part] = products.mul_(torch.matmul(factor.a[part].to(dtype), w.t())).sum(1)
        return out
    if isinstance(factor, IndexFactor):
        out = torch.empty(factor.num_records, u.shape[0], dtype=dtype, device=factor.device)
        for part in chunks(factor.num_records, 2 * factor.positions * u.shape[0]):
            products = torch.matmul(factor.wide_b()[part].to(dtype), w.t())
            out[part] = products.mul_(u.t()[factor.index[part]]).sum(1)
        return out
    out = torch.empty(factor.num_records, u.shape[0], dtype=dtype, device=factor.device)
    for part in chunks(factor.num_records, factor.shape.numel()):
        rows = factor.rows(part).materialise().to(dtype).reshape(-1, *block.matrix_shape)
        out[part] = torch.matmul(rows, w.t()).mul_(u.t()).sum(1)
    return out


def _standard_normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _mixed(seed: int, position: int) -> int:
    """A seed for one parameter: neighbouring seeds and positions must not share streams."""
    value = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return (value ^ (value >> 31)) % 2**63
