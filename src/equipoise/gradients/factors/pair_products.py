"""Dot products between factors of one parameter, of the same or of different kinds.

Needed for the norm of a parameter that is used more than once (a tied embedding and head), for ``inner``
and for the Gram matrix between records of different batches. With row_i = sum_s b_is (outer) a_is,

    <row_i, row'_j> = sum_{s,t} (a_is . a'_jt)(b_is . b'_jt)

and a look-up is the outer product whose b is a unit vector, so that its dot products are gathers.
The tables ``_INNER`` and ``_GRAM`` name the function of each pair of kinds; one that does not take the
factors in their form gives None. What has no such form is multiplied as rows, formed in chunks. Of look-ups
only those of one index meet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from equipoise.gradients.factors.base import DenseFactor, Factor
from equipoise.gradients.factors.lookup import IndexFactor
from equipoise.gradients.factors.outer import OuterFactor
from equipoise.gradients.factors.scaled import ScaledFactor, SharedFactor
from equipoise.gradients.numerics import (
    CHUNK_ELEMENTS,
    accumulation_dtype,
    chunks,
    dots,
    in_pieces,
)

#: Pairs of look-ups of one index are gathered if at most one pair in so many is one. A choice by time alone:
#: a gathered pair costs more than one of a matrix product, and both ways give the same sums but for rounding.
DENSE_PAIRS = 16


def inner(left: Factor, right: Factor) -> Tensor:
    """Dot products of matching rows, [B]."""
    dtype = _dtype(left, right)
    if left is right:
        return left.norms_squared().to(dtype)
    if left.num_records == 0 or left.shape.numel() == 0:
        return torch.zeros(left.num_records, dtype=dtype, device=left.device)
    for one, other in ((left, right), (right, left)):
        special = _INNER.get((one.kind, other.kind))
        found = None if special is None else special(one, other, dtype)
        if found is not None:
            return found
    out = torch.empty(left.num_records, dtype=dtype, device=left.device)
    for part in chunks(left.num_records, left.shape.numel()):
        rows = left.rows(part).materialise().to(dtype) * right.rows(part).materialise().to(dtype)
        out[part] = rows.flatten(1).sum(1) if rows.ndim > 1 else rows
    return out


def gram(left: Factor, right: Factor) -> Tensor:
    """Dot products of every row of ``left`` with every row of ``right``, [B, B']."""
    dtype = _dtype(left, right)
    if left.num_records == 0 or right.num_records == 0 or left.shape.numel() == 0:
        return torch.zeros(left.num_records, right.num_records, dtype=dtype, device=left.device)
    for one, other in ((left, right), (right, left)):
        special = _GRAM.get((one.kind, other.kind))
        found = None if special is None else special(one, other, dtype)
        if found is not None:
            return found if one is left else found.t()
    # Rows of one side are formed in chunks; the side with cheaper rows is formed again for every chunk.
    if isinstance(left, DenseFactor) and not isinstance(right, DenseFactor):
        return gram(right, left).t()
    out = torch.empty(left.num_records, right.num_records, dtype=dtype, device=left.device)
    if isinstance(right, DenseFactor) and right.dtype == dtype:
        # Held rows (the columns of a subspace) are read whole, and few times: reading takes longest.
        held = _matrix(right, dtype)
        for i in chunks(left.num_records, left.shape.numel(), 16 * CHUNK_ELEMENTS):
            out[i] = dots(_matrix(left.rows(i), dtype), held)
        return out
    for i in chunks(left.num_records, left.shape.numel(), 4 * CHUNK_ELEMENTS):
        rows = _matrix(left.rows(i), dtype)
        for j in chunks(right.num_records, right.shape.numel(), 4 * CHUNK_ELEMENTS):
            out[i, j] = dots(rows, _matrix(right.rows(j), dtype))
    return out


def _matrix(factor: Factor, dtype: torch.dtype) -> Tensor:
    return factor.materialise().to(dtype).reshape(factor.num_records, factor.shape.numel())


def _dtype(left: Factor, right: Factor) -> torch.dtype:
    return torch.promote_types(accumulation_dtype(left.dtype), accumulation_dtype(right.dtype))


def _inner_dense_outer(dense: DenseFactor, outer: OuterFactor, dtype: torch.dtype) -> Tensor:
    matrix = dense.g.to(dtype).reshape(-1, *outer.matrix_shape)
    return in_pieces(outer.b.to(dtype), matrix).mul_(outer.a.to(dtype)).sum((1, 2))


def _inner_outer(left: OuterFactor, right: OuterFactor, dtype: torch.dtype) -> Tensor:
    a, b, c, d = (t.to(dtype) for t in (left.a, left.b, right.a, right.b))
    same = left.matrix_shape == right.matrix_shape
    d_out, d_in = left.matrix_shape
    s, t = left.positions, right.positions
    if same and s * t * (d_in + d_out) <= (s + t) * d_in * d_out:
        out = torch.empty(left.num_records, dtype=dtype, device=left.device)
        for part in chunks(left.num_records, s * t):
            product = in_pieces(a[part], c[part].transpose(1, 2))
            out[part] = (
                product.mul_(in_pieces(b[part], d[part].transpose(1, 2))).sum(2).sum(1, dtype=torch.float64)
            )
        return out
    out = torch.zeros(left.num_records, dtype=dtype, device=left.device)
    for part in chunks(left.num_records, 2 * d_in * d_out):
        rows = left.rows(part).materialise().mul_(right.rows(part).materialise())
        out[part] = rows.flatten(1).sum(1)
    return out


def _inner_index(left: IndexFactor, right: IndexFactor, dtype: torch.dtype) -> Tensor:
    b, d = left.wide_b().to(dtype), right.wide_b().to(dtype)
    out = torch.empty(left.num_records, dtype=dtype, device=left.device)
    for part in chunks(left.num_records, left.positions * right.positions):
        products = in_pieces(b[part], d[part].transpose(1, 2))
        same = left.index[part].unsqueeze(2) == right.index[part].unsqueeze(1)
        out[part] = torch.where(same, products, 0.0).sum(2).sum(1, dtype=torch.float64)
    return out


def _inner_index_outer(table: IndexFactor, outer: OuterFactor, dtype: torch.dtype) -> Tensor | None:
    """sum_{s,t} (b_is . a_it) b'_it[index_is]: the head's output gradients gathered at the looked-up rows."""
    if outer.shape != outer.matrix_shape:  # the product's rows are not the table's
        return None
    b, a, d = table.wide_b().to(dtype), outer.a.to(dtype), outer.b
    out = torch.empty(table.num_records, dtype=dtype, device=table.device)
    for part in chunks(table.num_records, table.positions * outer.positions):
        products = in_pieces(a[part], b[part].transpose(1, 2))  # [c, T, S]
        index = table.index[part].unsqueeze(1).expand(products.shape)
        out[part] = products.mul_(d[part].gather(2, index).to(dtype)).sum(2).sum(1, dtype=torch.float64)
    return out


def _inner_shared_outer(shared: SharedFactor, outer: OuterFactor, dtype: torch.dtype) -> Tensor:
    """<row, sum_s b_s (outer) a_s> = sum_s (b_s^T row) . a_s: one product over all records."""
    a, b = outer.a.to(dtype), outer.b.to(dtype)
    row = shared.row.to(dtype).reshape(1, *outer.matrix_shape)
    seen = in_pieces(b.reshape(1, -1, b.shape[2]), row).view(a.shape)
    return seen.mul_(a).sum(2, dtype=torch.float64).sum(1).to(dtype)


def _inner_shared_index(shared: SharedFactor, table: IndexFactor, dtype: torch.dtype) -> Tensor:
    """The row, only at the looked-up places."""
    b = table.wide_b().to(dtype)
    held = shared.row.to(dtype).reshape(table.num_rows, b.shape[2])
    return (held[table.index] * b).sum(2, dtype=torch.float64).sum(1).to(dtype)


def _inner_shared_scaled(shared: SharedFactor, other: ScaledFactor, dtype: torch.dtype) -> Tensor:
    """<row, D * g_i> = <D * row, g_i>."""
    row = shared.row.to(dtype) * other.diagonal.to(dtype)
    return inner(SharedFactor(row, shared.num_records), other.inner).to(dtype)


def _inner_shared(left: SharedFactor, right: SharedFactor, dtype: torch.dtype) -> Tensor:
    product = left.row.to(dtype) * right.row.to(dtype)
    return product.sum(dtype=torch.float64).to(dtype).expand(left.num_records)


def _gram_outer(left: OuterFactor, right: OuterFactor, dtype: torch.dtype) -> Tensor | None:
    if left.matrix_shape != right.matrix_shape:
        return None
    if left.num_records * left.positions > right.num_records * right.positions:
        found = _gram_outer(right, left, dtype)  # the side with fewer terms is the one in chunks
        return None if found is None else found.t()
    a, b, c, d = (t.to(dtype) for t in (left.a, left.b, right.a, right.b))
    d_out, d_in = left.matrix_shape
    n, s, m, t = left.num_records, left.positions, right.num_records, right.positions
    if s == 1 and t == 1:
        return torch.mm(a[:, 0], c[:, 0].t()).mul_(torch.mm(b[:, 0], d[:, 0].t()))
    out = torch.zeros(n, m, dtype=dtype, device=left.device)
    if n * m * s * t * (d_in + d_out) <= (n * s + m * t + n * m) * d_in * d_out:
        flat_c, flat_d = c.reshape(-1, d_in).t(), d.reshape(-1, d_out).t()
        for part in chunks(n, s * m * t):
            product = torch.mm(a[part].reshape(-1, d_in), flat_c).mul_(
                torch.mm(b[part].reshape(-1, d_out), flat_d)
            )
            out[part] = product.view(-1, s, m, t).sum((1, 3))
        return out
    # Rows of both sides in blocks of output features: each is formed once and memory stays bounded.
    for block in chunks(d_out, max(n, m) * d_in, 4 * CHUNK_ELEMENTS):
        rows = torch.bmm(b[:, :, block].transpose(1, 2), a).flatten(1)
        others = rows if left is right else torch.bmm(d[:, :, block].transpose(1, 2), c).flatten(1)
        out.addmm_(rows, others.t())
    return out


def _gram_outer_dense(left: OuterFactor, right: DenseFactor, dtype: torch.dtype) -> Tensor | None:
    """Rows of the left side in blocks of features."""
    if right.dtype != dtype or not right.g.is_contiguous():  # held rows are read where they are, or not so
        return None
    a, b, held = left.a.to(dtype), left.b.to(dtype), right.g.view(right.num_records, -1)
    d_out, d_in = left.matrix_shape
    out = torch.zeros(left.num_records, right.num_records, dtype=torch.float64, device=left.device)
    size = left.num_records * d_in
    for block in chunks(d_out, size, max(CHUNK_ELEMENTS, 16 * size)):
        rows = torch.bmm(b[:, :, block].transpose(1, 2), a).flatten(1)
        out += dots(rows, held[:, block.start * d_in : block.stop * d_in])
    return out.to(dtype)


def _gram_index(left: IndexFactor, right: IndexFactor, dtype: torch.dtype) -> Tensor:
    n, s, m, t = left.num_records, left.positions, right.num_records, right.positions
    ordered, order = right.index.reshape(-1).sort()
    index = left.index.reshape(-1)
    first = torch.searchsorted(ordered, index)
    counts = torch.searchsorted(ordered, index, right=True) - first
    pairs = int(counts.sum())
    b, d = left.wide_b().to(dtype), right.wide_b().to(dtype)
    if DENSE_PAIRS * pairs > n * s * m * t:
        return _gram_all_pairs(left, right, b, d)
    b, d = b.reshape(n * s, -1), d.reshape(m * t, -1)
    mine = torch.repeat_interleave(counts)  # the position of each pair on the left
    within = torch.arange(pairs, device=left.device) - (counts.cumsum(0) - counts)[mine]
    other = order[first[mine] + within]
    out = torch.zeros(n * m, dtype=dtype, device=left.device)
    for part in chunks(pairs, 2 * b.shape[1]):
        i, j = mine[part], other[part]
        out.index_add_(0, (i // s) * m + j // t, b[i].mul_(d[j]).sum(1))
    return out.view(n, m)


def _gram_all_pairs(left: IndexFactor, right: IndexFactor, b: Tensor, d: Tensor) -> Tensor:
    """All products of positions, those of one index kept: for tables of which a few rows are looked up."""
    n, s, m, t = left.num_records, left.positions, right.num_records, right.positions
    out = torch.empty(n, m, dtype=b.dtype, device=left.device)
    flat_d, flat_index = d.reshape(m * t, -1).t(), right.index.reshape(-1)
    for part in chunks(n, s * m * t):
        products = torch.mm(b[part].reshape(-1, b.shape[2]), flat_d)
        same = left.index[part].reshape(-1, 1) == flat_index
        out[part] = torch.where(same, products, 0.0).view(-1, s, m, t).sum((1, 3))
    return out


def _gram_index_dense(table: IndexFactor, dense: DenseFactor, dtype: torch.dtype) -> Tensor | None:
    """The dense rows, only at the looked-up places."""
    if dense.dtype != dtype or not dense.g.is_contiguous() or table.positions >= table.num_rows:
        return None
    b = table.wide_b().to(dtype)
    held = dense.g.view(dense.num_records, table.num_rows, b.shape[2])
    out = torch.empty(table.num_records, dense.num_records, dtype=dtype, device=table.device)
    for i in range(table.num_records):
        torch.mv(held[:, table.index[i]].flatten(1), b[i].flatten(), out=out[i])
    return out


def _gram_index_outer(table: IndexFactor, outer: OuterFactor, dtype: torch.dtype) -> Tensor | None:
    if outer.shape != outer.matrix_shape:
        return None
    b, a, d = table.wide_b().to(dtype), outer.a.to(dtype), outer.b
    n, s, m, t = table.num_records, table.positions, outer.num_records, outer.positions
    out = torch.empty(n, m, dtype=dtype, device=table.device)
    flat_a, flat_d = a.reshape(m * t, -1), d.reshape(m * t, -1)
    for part in chunks(n, s * m * t):
        index = table.index[part].reshape(-1)
        products = torch.mm(flat_a, b[part].reshape(-1, b.shape[2]).t())  # [m t, c s]
        products.mul_(flat_d[:, index].to(dtype))
        out[part] = products.view(m, t, -1, s).sum((1, 3)).t()
    return out


#: (kind, kind) -> the products of such factors in the common type. Orders that are missing are exchanged.
_INNER: dict[tuple[str, str], Callable[..., Tensor | None]] = {
    ("outer", "outer"): _inner_outer,
    ("index", "index"): _inner_index,
    ("index", "outer"): _inner_index_outer,
    ("dense", "outer"): _inner_dense_outer,
    ("shared", "outer"): _inner_shared_outer,
    ("shared", "index"): _inner_shared_index,
    ("shared", "scaled"): _inner_shared_scaled,
    ("shared", "shared"): _inner_shared,
}
_GRAM: dict[tuple[str, str], Callable[..., Tensor | None]] = {
    ("outer", "outer"): _gram_outer,
    ("index", "index"): _gram_index,
    ("index", "outer"): _gram_index_outer,
    ("outer", "dense"): _gram_outer_dense,
    ("index", "dense"): _gram_index_dense,
}
