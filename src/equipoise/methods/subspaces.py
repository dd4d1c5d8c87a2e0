"""Subspaces of the parameter space: coordinates of the rows of G, and the way back.

A subspace has columns V [P, K], with columns of its own for every block of parameters:

    V = blockdiag(V_1, ..., V_L),   V_l [p_l, K_l],   K = K_1 + ... + K_L
    coordinates(G) = G V     [B, K]
    lift(y)        = V y     named tensors
    gram()         = V^T V   [K, K]

The columns of a block are rows R of a gradient matrix, V_l = R^T, or combinations of such rows,
V_l = R^T W: then they are never formed. Coordinates are ``(G_l R^T) W``, which for a linear layer need the
layer's inputs and output gradients only, and the way back is one weighted sum of R.

The principal subspace of rows has the span of their leading directions, taken through the m x m Gram matrix:

    G_l G_l^T = Q diag(lambda) Q^T,    W_l = Q_k diag(lambda_k)^(-1/2),    V_l = G_l^T W_l

Directions below ``rtol * lambda_max`` are rounding and are left out: the rank may be lower than asked for
(the gradients of a softmax layer's ten biases sum to zero and have rank 9). For more than `GRAM_LIMIT` rows,
randomised subspace iteration (Halko, Martinsson, Tropp 2011) takes the place of the Gram matrix.

Random columns on a matrix parameter are vec(u w^T) (Khatri-Rao structure), so that none is formed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from equipoise.gradients.factors.base import DenseFactor, Factor
from equipoise.gradients.factors.lookup import IndexFactor
from equipoise.gradients.factors.outer import OuterFactor
from equipoise.gradients.numerics import accumulation_dtype, full_precision
from equipoise.gradients.operator import (
    DenseGradients,
    FactoredGradients,
    PerSampleGradients,
    as_factored,
    factored_over,
)

Basis = Literal["auto", "kernel", "held"]

GRAM_LIMIT = 2048
"""More rows than this go by subspace iteration: the Gram matrix and its eigenvectors take their cube.

A choice: more take longer, fewer take approximate directions in place of the exact ones.
"""

HELD_LIMIT = 1 << 26
"""Numbers that "auto" holds at most: 256 MiB of float32. A choice: fewer form columns anew in every step."""

RTOL = {torch.float64: 1e-8, torch.float32: 1e-5}
"""Eigenvalues below this share of the largest are rounding.

Choices, about the root of float64's eps, and 80 eps of float32: a smaller share keeps columns that are
rounding, a larger one drops directions that the rows have.
"""

HELD_OUT = 0.2
"""Share of the rows on which the capture is measured.

A choice: fewer tell less of the private gradients, more leave out more directions.
"""


class Part(NamedTuple):
    """Columns on some of the parameters: the rows of a matrix, or their combinations W [m, K_l]."""

    rows: FactoredGradients
    weights: Tensor | None = None


class Subspace:
    """Columns block by block.

    Args:
        shapes: parameter name -> shape, of all parameters; those without a block are outside the subspace.
        blocks: of each block its parts, on different parameters, with K_l columns each; the coordinates of
            the blocks follow each other in this order, those of a block's parts add.

    Raises:
        ValueError: no columns.

    Example:
        >>> first, second = held({"w": torch.eye(1, 3)}), held({"b": torch.eye(2)})
        >>> V = Subspace({"w": (3,), "b": (2,)}, [*first.blocks, *second.blocks])
        >>> G = DenseGradients({"w": torch.tensor([[1.0, 2.0, 3.0]]), "b": torch.tensor([[4.0, 5.0]])})
        >>> V.coordinates(G), V.dimension
        (tensor([[1., 4., 5.]]), 3)
        >>> V.lift(torch.tensor([1.0, 0.5, 0.0]))
        {'w': tensor([1., 0., 0.]), 'b': tensor([0.5000, 0.0000])}
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], blocks: Sequence[Sequence[Part]]) -> None:
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self.blocks = tuple(tuple(block) for block in blocks)
        self.sizes = [
            block[0].rows.num_records if block[0].weights is None else block[0].weights.shape[1]
            for block in self.blocks
        ]
        if not self.dimension:
            raise ValueError("the subspace has no columns (K=0): no block has a direction")

    @property
    def dimension(self) -> int:
        """K, the number of columns."""
        return sum(self.sizes)

    def coordinates(self, gradients: PerSampleGradients) -> Tensor:
        """``G V`` [B, K]: dot products of the rows with the columns."""
        G = factored_over(gradients, self.shapes)
        parts = []
        with full_precision(G.device):
            for block, size in zip(self.blocks, self.sizes, strict=True):
                found = torch.zeros(G.num_records, size, dtype=G.dtype, device=G.device)
                for rows, weights in block:
                    dots = G.select(rows.names).cross_gram(rows)
                    assert isinstance(dots, Tensor)
                    found += dots if weights is None else dots @ weights.to(dots)
                parts.append(found)
        return torch.cat(parts, dim=1)

    def lift(self, y: Tensor) -> dict[str, Tensor]:
        """``V y`` as named tensors, for coordinates y [K], or for [B, K] those of each row."""
        if y.shape[-1] != self.dimension:
            raise ValueError(f"y has shape {tuple(y.shape)}; it needs [{self.dimension}], the coordinates")
        found: dict[str, Tensor] = {}
        for block, part in zip(self.blocks, torch.split(y.detach(), self.sizes, dim=-1), strict=True):
            for rows, weights in block:
                with full_precision(y.device):
                    inner = part.t() if weights is None else weights @ part.t().to(weights)
                found |= rows.weighted_sums(inner)
        return {
            name: found[name].to(y.device)
            if name in found
            else torch.zeros(*y.shape[:-1], *shape, dtype=y.dtype, device=y.device)
            for name, shape in self.shapes.items()
        }

    def gram(self) -> Tensor:
        """``V^T V`` [K, K]."""
        parts = []
        for block in self.blocks:
            inner = []
            for rows, weights in block:
                dots = rows.cross_gram(rows)
                assert isinstance(dots, Tensor)
                with full_precision(rows.device):
                    inner.append(
                        dots if weights is None else (weights.t() @ dots.to(weights) @ weights).to(dots)
                    )
            parts.append(torch.stack(inner).sum(0))
        return torch.block_diag(*parts)  # type: ignore[no-untyped-call]

    def residual(self, gradients: PerSampleGradients, coordinates: Tensor | None = None) -> DenseGradients:
        """The rows minus their part in the subspace, ``g - V V^T g``, formed: norms of what is left are true.

        Args:
            gradients: the rows.
            coordinates: the rows' coordinates [B, K], where they are known already.
        """
        y = self.coordinates(gradients) if coordinates is None else coordinates
        inside, whole = self.lift(y), gradients.materialise()
        rows = {name: kept - inside[name] for name, kept in whole.tensors.items()}
        return DenseGradients(rows, gradients.losses, num_records=len(y), device=y.device)

    def projection(self, gradients: PerSampleGradients) -> DenseGradients:
        """The rows' parts in the subspace, ``V V^T g``, formed."""
        y = self.coordinates(gradients)
        return DenseGradients(self.lift(y), gradients.losses, num_records=len(y), device=y.device)

    def columns(self) -> list[dict[str, Tensor]]:
        """The columns of each block, formed: name -> [K_l, *shape]."""
        return [
            {
                name: column
                for rows, weights in block
                for name, column in (
                    rows.materialise().tensors if weights is None else rows.weighted_sums(weights)
                ).items()
            }
            for block in self.blocks
        ]

    def orthonormal(self) -> Subspace:
        """The same subspace, held, with orthonormal columns (float64), each near the one it replaces."""
        blocks: list[Sequence[Part]] = []
        for columns in self.columns():
            found = orthonormal_columns(columns)
            dots = torch.stack([(found[name] * columns[name]).flatten(1).sum(1) for name in columns]).sum(0)
            signs = torch.where(dots < 0, -1, 1)
            turned = {
                name: value * signs.to(value).view(-1, *[1] * (value.ndim - 1))
                for name, value in found.items()
            }
            blocks += held(turned).blocks
        return Subspace(self.shapes, blocks)


def held(columns: Mapping[str, Tensor]) -> Subspace:
    """The subspace of one block whose columns are in memory, name -> [K, *shape]."""
    return Subspace({name: c.shape[1:] for name, c in columns.items()}, [[Part(DenseGradients(columns))]])


def orthonormal_columns(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An orthonormal basis of the columns' span, name -> [K, *shape], taken in float64.

    Example:
        >>> columns = orthonormal_columns({"w": torch.tensor([[3.0, 0.0], [1.0, 1.0]])})
        >>> columns["w"].abs()
        tensor([[1., 0.],
                [0., 1.]])
    """
    sizes = [held[0].numel() for held in columns.values()]
    flat = torch.cat([held.reshape(held.shape[0], -1).double() for held in columns.values()], dim=1)
    basis = torch.linalg.qr(flat.t())[0].t()
    return {
        name: part.reshape(-1, *held.shape[1:]).to(held.dtype).contiguous()
        for (name, held), part in zip(columns.items(), torch.split(basis, sizes, dim=1), strict=True)
    }


# ---- random columns


def random_subspace(
    seed: int,
    shapes: Mapping[str, Sequence[int]],
    dimension: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    dense_limit: int = 4096,
    entries: Callable[[Sequence[int], torch.Generator], Tensor] | None = None,
) -> Subspace:
    """K random columns over all parameters, from a seed.

    A matrix parameter with more than ``dense_limit`` numbers gets columns vec(u_j w_j^T) with standard normal
    u and w, every other parameter normal columns, all scaled by 1/sqrt(P): the expected squared norm of a
    column is one. A parameter of more than two dimensions counts as the matrix (shape[0], the rest).

    Args:
        seed: of the public randomness; one seed gives the same columns on every process of one device type.
        shapes: parameter name -> shape.
        dimension: K, the number of columns.
        dtype, device: of the columns.
        dense_limit: parameters up to this size get columns without structure.
        entries: law of the independent numbers that columns, u and w consist of, as a function of their
            shape and a generator; standard normal when None.

    Example:
        >>> V = random_subspace(0, {"w": (4, 3)}, 2, dense_limit=0)
        >>> V.gram().shape, V.lift(torch.ones(2))["w"].shape
        (torch.Size([2, 2]), torch.Size([4, 3]))
    """
    if dimension < 1:
        raise ValueError(f"dimension={dimension} leaves no column; pass at least 1")
    sizes = {name: torch.Size(shape) for name, shape in shapes.items()}
    scale = max(1, sum(size.numel() for size in sizes.values())) ** -0.5
    draw = entries or (lambda shape, generator: torch.randn(*shape, generator=generator))
    factors: dict[str, tuple[Factor, ...]] = {}
    for position, (name, shape) in enumerate(sizes.items()):
        # Drawn in float32 on the CPU, so that neither the type nor the device changes the subspace.
        state = torch.Generator().manual_seed(_mixed(seed, position))

        def drawn(*size: int, state: torch.Generator = state) -> Tensor:
            return draw((dimension, *size), state).to(device, accumulation_dtype(dtype))

        if len(shape) < 2 or shape.numel() <= dense_limit:
            factors[name] = DenseGradients({name: drawn(*shape).mul_(scale)}).factors[name]
        else:
            u, w = drawn(shape[0]), drawn(shape[1:].numel())
            factors[name] = (OuterFactor(w, u.mul_(scale), shape),)
    return Subspace(sizes, [[Part(FactoredGradients(factors, shapes=sizes))]])


def _mixed(seed: int, position: int) -> int:
    """A seed for one parameter: neighbouring seeds and positions must not share streams."""
    # The last steps are SplitMix64's: each bit of the sum changes half of the bits of the result.
    value = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return (value ^ (value >> 31)) % 2**63


# ---- the leading directions of rows


@dataclass(frozen=True)
class PrincipalSubspace:
    """A subspace and what is known of it.

    Attributes:
        subspace: the columns.
        capture: share of the squared norm of a held-out mean gradient that the subspace of the other rows
            captures, ``||V^T g||^2 / ||g||^2`` in [0, 1]; None where it was not asked for or too few rows are
            there. Of more than `GRAM_LIMIT` rows the first ones tell it.
        short: blocks whose rank was below what was asked for: their first parameter and the rank.
        understated: whether the subspace holds directions that the measure of `capture` had to leave out,
            since it has nearly as many columns as there are rows.
    """

    subspace: Subspace
    capture: float | None
    short: dict[str, int]
    understated: bool = False

    def orthonormal(self) -> PrincipalSubspace:
        """The same, with columns that are held and orthonormal."""
        return replace(self, subspace=self.subspace.orthonormal())


def principal_subspace(
    rows: PerSampleGradients,
    groups: Sequence[Sequence[str]],
    dimension: int | None = None,
    *,
    energy: float | None = None,
    normalise: bool = False,
    basis: Basis = "auto",
    records: float = 256,
    measure: bool = True,
) -> PrincipalSubspace:
    """The span of the leading directions of each block of parameters.

    Args:
        rows: m rows (public ones); rows that are not finite, and rows of zeros where they are normalised, are
            left out.
        groups: disjoint blocks of parameter names.
        dimension: columns per block, at most; the smaller of m and the block's parameters when None.
        energy: the least number of columns per block that captures this share of a held-out mean gradient, up
            to `dimension`.
        normalise: scale every row to norm one first, so that a few large rows do not choose the directions.
        basis: how the columns are kept: "kernel" (combinations of the rows), "held", or "auto": the fewer
            multiplications, parameter by parameter, while what is held stays below `HELD_LIMIT` numbers.
        records: number of rows whose coordinates will be taken at once, for that count.
        measure: whether to compute the capture.

    Raises:
        ValueError: no row is left, or all gradients are zero.

    Example:
        >>> rows = DenseGradients({"w": torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])})
        >>> found = principal_subspace(rows, [["w"]], 1)
        >>> found.subspace.coordinates(DenseGradients({"w": torch.tensor([[3.0, 4.0, 5.0]])})).abs()
        tensor([[3.]])
    """
    G = as_factored(rows)
    norms = G.row_norms().double()
    usable = torch.isfinite(norms) & ((norms > 0) | (not normalise))
    if not bool(usable.all()):
        G, norms = G.rows(usable), norms[usable]
    if G.num_records == 0 or not bool((norms > 0).any()):
        raise ValueError(
            "the public gradients are all zero or not finite, so that they span no subspace; give public "
            "records on which the loss has a gradient. Private rows never take their place"
        )
    scale = 1 / norms if normalise else torch.ones_like(norms)
    m = G.num_records
    dimension = m if dimension is None else min(dimension, m)
    limits = [min(dimension, sum(G.shapes[name].numel() for name in group)) for group in groups]
    few = slice(0, GRAM_LIMIT)
    grams = _grams(G.rows(few), groups, scale[few])
    rtol = RTOL[torch.float64 if G.dtype == torch.float64 else torch.float32]
    shares = _captured(grams, limits, rtol, scale[few]) if measure or energy is not None else None
    if shares is not None and energy is not None and bool((shares >= energy).any()):
        dimension = int((shares >= energy).nonzero()[0]) + 1
        limits = [min(limit, dimension) for limit in limits]
    capture = None if shares is None else float(shares[min(dimension, len(shares)) - 1])
    blocks, short, room = [], {}, HELD_LIMIT
    for group, gram, limit in zip(groups, grams, limits, strict=True):
        part = G.select(group)
        if m > GRAM_LIMIT:
            block = [Part(DenseGradients(_iterated(part, limit, scale)))]
            k = block[0].rows.num_records
        else:
            weights = _leading(gram, limit, rtol) * scale.unsqueeze(1)
            k, kept = weights.shape[1], []
            for name in group:
                size = k * G.shapes[name].numel()
                if basis == "held" or (
                    basis == "auto" and size <= room and _cheaper_held(G.factors[name], k, records)
                ):
                    kept.append(name)
                    room -= size
            rest = [name for name in group if name not in kept]
            block = [Part(G.select(rest), weights)] if rest else []
            if kept:
                block.append(Part(DenseGradients(G.select(kept).weighted_sums(weights))))
        if k < limit:
            short[group[0]] = k
        if k > 0:
            blocks.append(block)
    understated = any(limit > m - _held_out(m) for limit in limits)
    return PrincipalSubspace(Subspace(G.shapes, blocks), capture, short, understated)


def _grams(G: FactoredGradients, groups: Sequence[Sequence[str]], scale: Tensor) -> list[Tensor]:
    """G_l G_l^T of every block in float64, rows scaled."""
    by_name = G.cross_gram(G, per_tensor=True)
    assert isinstance(by_name, dict)
    out = []
    for group in groups:
        total = torch.stack([by_name[name].double() for name in group]).sum(0)
        total = total * scale.unsqueeze(1) * scale
        out.append((total + total.t()) / 2)
    return out


def _leading(gram: Tensor, k: int, rtol: float) -> Tensor:
    """W [m, K]: at most k leading eigenvectors over the roots of their eigenvalues, largest first."""
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0)[:k], vectors.flip(1)[:, :k]
    keep = (values > rtol * values[:1]) & (values > 0)
    return vectors[:, keep] / values[keep].sqrt()


def _captured(grams: list[Tensor], limits: list[int], rtol: float, scale: Tensor) -> Tensor | None:
    """Share of a held-out mean gradient in the leading k directions of the other rows, for k = 1, 2, ..."""
    m = len(scale)
    out = _held_out(m)
    if m < 5:
        return None
    # The last rows: which they are is as good as random, since public records come in no order.
    fit, rest = slice(0, m - out), slice(m - out, m)
    mean = 1 / scale[rest] / out  # the mean of the rows as they were, not of the scaled ones
    longest = max(limits)
    captured, total = torch.zeros(longest, dtype=torch.float64, device=scale.device), 0.0
    for gram, limit in zip(grams, limits, strict=True):
        weights = _leading(gram[fit, fit], limit, rtol)
        part = (weights.t() @ (gram[fit, rest] @ mean)).square().cumsum(0)
        if len(part):
            captured[: len(part)] += part
            captured[len(part) :] += part[-1]
        total += float(mean @ gram[rest, rest] @ mean)
    return (captured / total).clamp(max=1) if total > 0 else None


def _held_out(m: int) -> int:
    """How many of m rows are left out to measure the capture."""
    return max(1, round(HELD_OUT * m))


def _cheaper_held(factors: Sequence[Factor], k: int, records: float) -> bool:
    """Whether coordinates of `records` rows take fewer products with held columns than with public rows.

    Held: the rows are formed, then multiplied with k columns. Else the cheaper of the two ways of `gram`:
    all rows formed and multiplied, or the products of the factors of each pair of positions.
    """
    held = kernel = 0.0
    for f in factors:
        m, size = f.num_records, f.shape.numel()
        terms = 0 if isinstance(f, DenseFactor) else f.positions  # that forming a row adds
        held += records * (terms + k) * size
        pairs = (records + m) * terms * size + records * m * size
        if isinstance(f, (OuterFactor, IndexFactor)):
            widths = sum(f.matrix_shape) if isinstance(f, OuterFactor) else f.shape[-1]
            pairs = min(pairs, records * m * terms**2 * widths)
        kernel += pairs * len(factors)  # every use of a parameter meets every other
    return held <= kernel


def _iterated(G: FactoredGradients, k: int, scale: Tensor) -> dict[str, Tensor]:
    """Leading directions of very many rows: two rounds of subspace iteration, then Rayleigh and Ritz."""
    scale = scale.to(G.dtype).unsqueeze(1)
    width = min(k + 10, sum(shape.numel() for shape in G.shapes.values()))
    rng = torch.Generator().manual_seed(0)
    start = torch.randn(G.num_records, width, generator=rng, dtype=torch.float64).to(scale) * scale
    columns = orthonormal_columns(G.weighted_sums(start))
    for _ in range(2):
        y = held(columns).coordinates(G) * scale.square()
        columns = orthonormal_columns(G.weighted_sums(y))
    y = held(columns).coordinates(G) * scale
    _, values, right = torch.linalg.svd(y.double(), full_matrices=False)
    rank = int((values[:k] > RTOL[torch.float32] ** 0.5 * values[0]).sum())
    return DenseGradients(columns).weighted_sums(right[:rank].t())
