"""A subspace with columns of its own for every block of parameters.

    V = blockdiag(V_1, ..., V_L),   V_l [p_l, K_l],   K = K_1 + ... + K_L

A block holds its columns in one of two ways, parameter by parameter. *Held*: the columns are in memory,
``p_l K_l`` numbers, and coordinates are products of rows with columns. *Kernel*: the columns are combinations
of public rows, ``V_l = G_pub,l^T W_l``, and are never formed; coordinates are ``(G_l G_pub,l^T) W_l``,
which for a linear layer need the layer's inputs and output gradients only, and the way back is one weighted
sum of public rows (which may be formed themselves: `principal_subspace` does so where K_l = m). A block may
hold one parameter so and another one so: their parts of the coordinates add.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from equipoise.gradients.numerics import dots, full_precision
from equipoise.gradients.operator import DenseGradients, PerSampleGradients, factored_over
from equipoise.methods.subspaces.base import Subspace

__all__ = ["Block", "BlockSubspace"]


@dataclass(frozen=True)
class Block:
    """The columns on some of the parameters.

    Attributes:
        dimension: K_l.
        columns: held parameters, name -> [K_l, *shape].
        names: parameters in kernel form.
        weights: W_l [m, K_l] of the public rows; None if `names` is empty.
    """

    dimension: int
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        for name, held in self.columns.items():
            if held.shape[0] != self.dimension:
                raise ValueError(
                    f"columns[{name!r}] holds {held.shape[0]} columns, the block has "
                    f"dimension={self.dimension}"
                )
        if self.names and (self.weights is None or self.weights.shape[1] != self.dimension):
            raise ValueError(
                f"weights must be [m, {self.dimension}] for the parameters {list(self.names)} in kernel form"
            )


class BlockSubspace(Subspace):
    """Columns block by block, held or spanned by public rows.

    Args:
        shapes: parameter name -> shape, of all parameters; those without a block are outside the subspace.
        blocks: disjoint blocks; their coordinates follow each other in this order.
        public: m public rows over (at least) the parameters in kernel form, at their own parameter point.

    Raises:
        ValueError: no columns, a parameter in two blocks, or kernel form without public rows.

    >>> first, second = Block(1, {"w": torch.eye(1, 3)}), Block(2, {"b": torch.eye(2)})
    >>> V = BlockSubspace({"w": (3,), "b": (2,)}, [first, second])
    >>> G = DenseGradients({"w": torch.tensor([[1.0, 2.0, 3.0]]), "b": torch.tensor([[4.0, 5.0]])})
    >>> V.coordinates(G), V.dimension
    (tensor([[1., 4., 5.]]), 3)
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        blocks: Sequence[Block],
        public: PerSampleGradients | None = None,
    ) -> None:
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self.blocks = tuple(block for block in blocks if block.dimension > 0)
        if not self.blocks:
            raise ValueError("the subspace has no columns (K=0): no block has a direction")
        names = [name for block in self.blocks for name in (*block.names, *block.columns)]
        if len(set(names)) < len(names) or not set(names) <= set(self.shapes):
            raise ValueError(
                f"blocks hold the parameters {sorted(names)}; each may be in one block and must be one of "
                f"{sorted(self.shapes)}"
            )
        self._kernel = [name for block in self.blocks for name in block.names]
        if self._kernel and public is None:
            raise ValueError(f"public rows are missing: {self._kernel} are in kernel form")
        # Only what the kernel form needs is kept: the factors of held parameters are let go.
        self.public = public.select(self._kernel) if self._kernel and public is not None else None
        self._held = {
            name: DenseGradients({name: columns})
            for block in self.blocks
            for name, columns in block.columns.items()
        }
        self._gram: Tensor | None = None

    @property
    @override
    def dimension(self) -> int:
        return sum(block.dimension for block in self.blocks)

    @override
    def coordinates(self, gradients: PerSampleGradients) -> Tensor:
        G = factored_over(gradients, self.shapes)
        products: dict[str, Tensor] = {}
        if self.public is not None:
            found = G.select(self._kernel).cross_gram(self.public, per_tensor=True)
            assert isinstance(found, dict)
            products = found
        parts = []
        with full_precision(G.device):
            for block in self.blocks:
                part = torch.zeros(G.num_records, block.dimension, dtype=G.dtype, device=G.device)
                if block.names:
                    assert block.weights is not None
                    whole = torch.stack([products[name] for name in block.names]).sum(0)
                    part += whole @ block.weights.to(whole)
                for name in block.columns:
                    dots = G.select([name]).cross_gram(self._held[name])
                    assert isinstance(dots, Tensor)
                    part += dots
                parts.append(part)
        return torch.cat(parts, dim=1)

    @override
    def lift(self, y: Tensor) -> dict[str, Tensor]:
        y = self._check_coordinates(y)
        found: dict[str, Tensor] = {}
        coefficients: dict[str, Tensor] = {}
        start = 0
        with full_precision(y.device):
            for block in self.blocks:
                part = y[start : start + block.dimension]
                start += block.dimension
                for name, columns in block.columns.items():
                    found[name] = torch.tensordot(part.to(columns), columns, dims=1)
                if block.weights is not None:
                    weights = block.weights @ part.to(block.weights)
                    coefficients.update(dict.fromkeys(block.names, weights))
        if self.public is not None:
            found |= self.public.weighted_sums(coefficients)
        return {
            name: found[name] if name in found else torch.zeros(shape, dtype=y.dtype, device=y.device)
            for name, shape in self.shapes.items()
        }

    @override
    def gram(self) -> Tensor:
        if self._gram is None:
            products = {}
            if self.public is not None:
                found = self.public.cross_gram(self.public, per_tensor=True)
                assert isinstance(found, dict)
                products = found
            with full_precision(self._device()):
                parts = [self._block_gram(block, products) for block in self.blocks]
                self._gram = torch.block_diag(*parts)  # type: ignore[no-untyped-call]
        return self._gram

    def _block_gram(self, block: Block, products: Mapping[str, Tensor]) -> Tensor:
        total: Tensor | None = None
        for columns in block.columns.values():
            flat = columns.reshape(block.dimension, -1)
            total = dots(flat, flat) if total is None else total + dots(flat, flat)
        if block.names:
            assert block.weights is not None
            whole = torch.stack([products[name] for name in block.names]).sum(0)
            W = block.weights
            inside = (W.t() @ whole.to(W) @ W).to(whole)
            total = inside if total is None else total + inside
        assert total is not None
        return total

    @property
    @override
    def holds_columns(self) -> bool:
        return self.public is None

    def _device(self) -> torch.device:
        if self.public is not None:
            return self.public.device
        return next(iter(self._held.values())).device

    def orthonormal(self) -> BlockSubspace:
        """The same subspace, held, with orthonormal columns (float64), each near the one it replaces."""
        blocks = []
        for block in self.blocks:
            held = dict(block.columns)
            if block.names:
                assert self.public is not None
                assert block.weights is not None
                held |= self.public.select(block.names).weighted_sums(block.weights)
            found = orthonormal_columns(held)
            dots = [(found[name] * held[name]).flatten(1).sum(1) for name in held]
            signs = torch.where(torch.stack(dots).sum(0) < 0, -1, 1)
            columns = {
                name: value * signs.to(value).view(-1, *[1] * (value.ndim - 1))
                for name, value in found.items()
            }
            blocks.append(Block(block.dimension, columns))
        return BlockSubspace(self.shapes, blocks)


def orthonormal_columns(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An orthonormal basis of the columns' span, name -> [K, *shape], taken in float64.

    >>> columns = orthonormal_columns({"w": torch.tensor([[3.0, 0.0], [1.0, 1.0]])})
    >>> columns["w"].abs()
    tensor([[1., 0.],
            [0., 1.]])
    """
    sizes = [held[0].numel() for held in columns.values()]
    flat = torch.cat([held.reshape(held.shape[0], -1).double() for held in columns.values()], dim=1)
    basis = torch.linalg.qr(flat.t())[0].t()
    parts = torch.split(basis, sizes, dim=1)
    return {
        name: part.reshape(-1, *held.shape[1:]).to(held.dtype).contiguous()
        for (name, held), part in zip(columns.items(), parts, strict=True)
    }
