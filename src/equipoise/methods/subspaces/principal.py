"""The principal subspace of rows: the span of their leading directions, block of parameters by block.

For a block l with rows G_l [m, p_l] the leading right singular vectors are taken through the m x m Gram
matrix:

    G_l G_l^T = Q diag(lambda) Q^T,    W_l = Q_k diag(lambda_k)^(-1/2),    V_l = G_l^T W_l

so that V_l need never be formed (see `BlockSubspace`). Where as many directions are asked for as there are
rows, columns that are to be held are not formed either: the rows, of the same size, are held in their place.
Directions below ``rtol * lambda_max`` are rounding and are left out: the rank may be lower than asked for
(the gradients of a softmax layer's ten biases sum to zero and have rank 9). For more than `GRAM_LIMIT` rows,
randomised subspace iteration (Halko, Martinsson, Tropp 2011) takes the place of the Gram matrix.

How much of a held-out mean gradient the subspace captures, ``||V^T g||^2 / ||g||^2``, is found from the
same Gram matrices, with the subspace of the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from equipoise.gradients.factors.base import DenseFactor, Factor
from equipoise.gradients.factors.lookup import IndexFactor
from equipoise.gradients.factors.outer import OuterFactor
from equipoise.gradients.numerics import chunks
from equipoise.gradients.operator import FactoredGradients, PerSampleGradients, as_factored
from equipoise.methods.subspaces.base import HeldSubspace
from equipoise.methods.subspaces.blocks import Block, BlockSubspace, orthonormal_columns

__all__ = ["Basis", "PrincipalSubspace", "principal_subspace"]


Basis = Literal["auto", "kernel", "held"]


GRAM_LIMIT = 2048  # more rows than this: randomised subspace iteration, held columns


HELD_LIMIT = 1 << 26  # numbers that "auto" holds at most (256 MiB of float32)


RTOL = {torch.float64: 1e-8, torch.float32: 1e-5}


HELD_OUT = 0.2  # share of the rows on which the capture is measured


@dataclass(frozen=True)
class PrincipalSubspace:
    """A subspace and what is known of it.

    Attributes:
        subspace: the columns.
        capture: share of the squared norm of a held-out mean gradient that the subspace of the other rows
            captures, in [0, 1]; None where it was not asked for or too few rows are there.
        short: blocks whose rank was below what was asked for: their first parameter and the rank.
        understated: whether the subspace holds directions that the measure of `capture` had to leave out,
            since it has nearly as many columns as there are rows.
    """

    subspace: BlockSubspace
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
    into: BlockSubspace | None = None,
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
        basis: how the columns are kept: "kernel", "held", or "auto": the fewer multiplications, parameter by
            parameter, while what is held stays below `HELD_LIMIT` numbers. Where m directions are asked for,
            "held" holds the rows, and of look-ups, which are sparse, the factors.
        records: number of rows whose coordinates will be taken at once, for that count.
        measure: whether to compute the capture.
        into: a subspace that nobody needs any more: the memory of its rows is used again.

    Raises:
        ValueError: no row is left, or all gradients are zero.

    >>> from equipoise.gradients.operator import DenseGradients
    >>> rows = DenseGradients({"w": torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])})
    >>> found = principal_subspace(rows, [["w"]], 1)
    >>> found.subspace.coordinates(DenseGradients({"w": torch.tensor([[3.0, 4.0, 5.0]])})).abs()
    tensor([[3.]])
    """
    G = as_factored(rows)
    all_of_them = energy is None and (dimension is None or dimension >= G.num_records)
    # The groups with a direction for every row: no columns are formed for them.
    entire = [all_of_them and _size(G, group) >= G.num_records for group in groups]
    if any(entire) and G.num_records <= GRAM_LIMIT:
        chosen = [group for group, every in zip(groups, entire, strict=True) if every]
        G = _with_rows(G, chosen, basis, records, into)
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
    if dimension is None or dimension > G.num_records:
        dimension = G.num_records
    if G.num_records > GRAM_LIMIT:
        return _randomised(G, groups, dimension, energy, scale)
    grams = _grams(G, groups, scale)
    rtol = RTOL[torch.float64 if G.dtype == torch.float64 else torch.float32]
    limits = [min(dimension, _size(G, group)) for group in groups]
    capture = None
    if measure or energy is not None:
        shares = _captured(grams, limits, rtol, scale)
        if shares is not None and energy is not None:
            enough = (shares >= energy).nonzero().flatten()
            if len(enough):
                dimension = int(enough[0]) + 1
                limits = [min(limit, dimension) for limit in limits]
        if shares is not None:
            capture = float(shares[min(dimension, len(shares)) - 1])
    blocks, short, held = [], {}, 0
    for group, gram, limit, every in zip(groups, grams, limits, entire, strict=True):
        weights = _leading(gram, limit, rtol)
        if weights.shape[1] < limit:
            short[group[0]] = weights.shape[1]
        if weights.shape[1] == 0:
            continue
        weights = weights * scale.unsqueeze(1)
        keep = []
        if not every:
            keep = _held_names(G, group, weights.shape[1], basis, records, HELD_LIMIT - held)
        columns = G.select(keep).weighted_sums(weights) if keep else {}
        held += sum(tensor.numel() for tensor in columns.values())
        names = tuple(name for name in group if name not in columns)
        blocks.append(Block(weights.shape[1], columns, names, weights if names else None))
    understated = any(limit > G.num_records - _held_out(G.num_records) for limit in limits)
    return PrincipalSubspace(BlockSubspace(G.shapes, blocks, G), capture, short, understated)


def _size(G: FactoredGradients, group: Sequence[str]) -> int:
    return sum(G.shapes[name].numel() for name in group)


def _with_rows(
    G: FactoredGradients,
    groups: Sequence[Sequence[str]],
    basis: Basis,
    records: float,
    into: BlockSubspace | None,
) -> FactoredGradients:
    """G with rows formed for the parameters of which they are better held than what they are made of."""
    factors, room = dict(G.factors), HELD_LIMIT
    public = None if into is None else into.public
    old = public.factors if isinstance(public, FactoredGradients) else {}
    for group in groups:
        for name in _held_names(G, group, G.num_records, basis, records, room):
            kept, shape = G.factors[name], (G.num_records, *G.shapes[name])
            if all(isinstance(factor, (DenseFactor, IndexFactor)) for factor in kept):
                continue  # rows already, or sparse ones
            room -= G.num_records * G.shapes[name].numel()
            memory = [f.g for f in old.get(name, ()) if isinstance(f, DenseFactor)]
            if len(memory) != 1 or memory[0].shape != shape or memory[0].dtype != G.dtype:
                memory = [torch.empty(shape, dtype=G.dtype, device=G.device)]
            part = G.select([name])
            for some in chunks(G.num_records, G.shapes[name].numel()):  # copied while they are in the cache
                memory[0][some] = part.rows(some).materialise().tensors[name]
            factors[name] = (DenseFactor(memory[0], rough=True),)
    return FactoredGradients(factors, G.losses, shapes=G.shapes)


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


def _held_names(
    G: FactoredGradients, group: Sequence[str], k: int, basis: Basis, records: float, room: float
) -> list[str]:
    """The parameters of a block whose columns are better held."""
    if basis != "auto":
        return list(group) if basis == "held" else []
    keep = []
    for name in group:
        size = k * G.shapes[name].numel()
        if size <= room and _held_cost(G.factors[name], k, records) <= _kernel_cost(G.factors[name], records):
            keep.append(name)
            room -= size
    return keep


def _held_cost(factors: Sequence[Factor], k: int, records: float) -> float:
    """Multiplications for the coordinates of `records` rows from held columns: their rows, then products."""
    return sum(records * (_terms(f) + k) * f.shape.numel() for f in factors)


def _kernel_cost(factors: Sequence[Factor], records: float) -> float:
    """Multiplications for the products with public rows, by the cheaper of the two ways of `gram`."""
    total = 0.0
    for f in factors:
        m, positions, size = f.num_records, _terms(f), f.shape.numel()
        rows = (records + m) * positions * size + records * m * size
        if isinstance(f, (OuterFactor, IndexFactor)):
            widths = sum(f.matrix_shape) if isinstance(f, OuterFactor) else f.shape[-1]
            rows = min(rows, records * m * positions**2 * widths)
        total += rows
    return total * len(factors)  # every use of a parameter meets every other


def _terms(factor: Factor) -> int:
    """How many terms forming a row adds: none where rows are held."""
    return 0 if isinstance(factor, DenseFactor) else factor.positions


def _randomised(
    G: FactoredGradients,
    groups: Sequence[Sequence[str]],
    dimension: int,
    energy: float | None,
    scale: Tensor,
) -> PrincipalSubspace:
    """Leading directions of very many rows: two rounds of subspace iteration, then Rayleigh and Ritz."""
    m = G.num_records
    out = round(HELD_OUT * m)
    fit, rest = G.rows(slice(0, m - out)), G.rows(slice(m - out, m))
    scale = scale[: m - out].to(G.dtype)
    mean = rest.weighted_sums(torch.full((out,), 1 / out, dtype=G.dtype, device=G.device))
    rng = torch.Generator().manual_seed(0)
    blocks, short, dots = [], {}, []
    for group in groups:
        part = fit.select(group)
        size = sum(G.shapes[name].numel() for name in group)
        k = min(dimension, size)
        width = min(k + 10, size)
        start = torch.randn(part.num_records, width, generator=rng, dtype=torch.float64).to(scale)
        columns = orthonormal_columns(part.weighted_sums(start * scale.unsqueeze(1)))
        for _ in range(2):
            y = HeldSubspace(columns).coordinates(part) * scale.square().unsqueeze(1)
            columns = orthonormal_columns(part.weighted_sums(y))
        y = HeldSubspace(columns).coordinates(part) * scale.unsqueeze(1)
        _, values, right = torch.linalg.svd(y.double(), full_matrices=False)
        rank = int((values[:k] > RTOL[torch.float32] ** 0.5 * values[0]).sum())
        if rank < k:
            short[group[0]] = rank
        if rank == 0:
            continue
        leading = {
            name: torch.tensordot(right[:rank].to(held), held, dims=1) for name, held in columns.items()
        }
        blocks.append(Block(rank, leading))
        flat = torch.stack([(held * mean[name]).flatten(1).sum(1) for name, held in leading.items()]).sum(0)
        dots.append(flat.double().square().cumsum(0))
    total = sum(float(value.double().square().sum()) for value in mean.values())
    capture = None
    if total > 0:
        longest = max(len(d) for d in dots)
        shares = torch.stack([torch.cat([d, d[-1:].expand(longest - len(d))]) for d in dots]).sum(0) / total
        if energy is not None and bool((shares >= energy).any()):
            k = int((shares >= energy).nonzero()[0]) + 1
            blocks = [
                Block(min(k, b.dimension), {n: c[:k].clone() for n, c in b.columns.items()}) for b in blocks
            ]
            longest = k
        capture = min(1.0, float(shares[longest - 1]))
    return PrincipalSubspace(BlockSubspace(G.shapes, blocks), capture, short)
