"""The factor of a matrix product: linear layers, attention projections, a transformer's addmm.

A layer's weight gradient for record i is a product of what went in and what came back to its output
(Goodfellow 2015, arXiv:1510.01799; Bu et al. 2022, arXiv:2210.00038). For ``y = x W^T`` at positions s

    row_i = sum_s b_is (outer) a_is                       a: inputs, b: output gradients
    ||row_i||^2 = sum_{s,t} (a_is . a_it)(b_is . b_it)    the Gram route: S x S numbers, not d_out x d_in
    sum_i c_i row_i = (c b)^T a                           one product over all records and positions
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from equipoise._host import host_waits
from equipoise.gradients.factors.base import BilinearFactor
from equipoise.gradients.numerics import (
    CANCELLATION_SHARE,
    CHUNK_ELEMENTS,
    LOST_SHARE,
    MOST_EXCESS,
    PARTIAL_SUM,
    ROWS_GROWTH,
    WIDE_PRODUCT,
    are_lost_nan,
    chunks,
    contracted,
    in_pieces,
    products_error,
    squared_rows,
    squared_rows_in_float64,
    without_lost,
)

#: Outside of these a norm may have lost terms: float32 ends at 1e-45 and at 3e38. At 1e-15 what vanished of a
#: term is 1e-15 of the norm's square, and 1e15 leaves room for 1e8 terms. Nearer to the ends norms read too
#: short, and rows pass their bound; further from them more rows are computed once more, in float64.
TINY, HUGE = 1e-15, 1e15


class OuterFactor(BilinearFactor):
    """``row_i = sum_s b_is (outer) a_is``: linear layers and every product of a matrix parameter.

    Args:
        a: inputs [B, S, d_in] (or [B, d_in] for one position); may be strided or expanded, nothing is copied.
        b: output gradients [B, S, d_out] (or [B, d_out]).
        shape: the parameter's shape if it is not (d_out, d_in); the product is viewed as it. For a weight
            stored as (in, out) exchange ``a`` and ``b`` instead.
        kernel: ``"gram"``, ``"product"`` or ``"auto"`` (by count).

    >>> f = OuterFactor(torch.ones(2, 1, 3), torch.tensor([[[0.0, 2.0]], [[0.0, 1.0]]]))
    >>> f.shape, f.norms_squared().round(), f.weighted_sum(torch.ones(2, 1)).shape
    (torch.Size([2, 3]), tensor([12.,  3.], dtype=torch.float64), torch.Size([1, 2, 3]))
    """

    kind = "outer"
    kernel_scales = False  # the Gram route's work grows with the square of the positions

    def __init__(
        self, a: Tensor, b: Tensor, shape: Sequence[int] | None = None, kernel: str = "auto"
    ) -> None:
        self._hold(a, b, 3)
        a, b = self._a, self._b
        self.uses = self.positions = a.shape[1]
        self.matrix_shape = torch.Size((b.shape[2], a.shape[2]))
        self._describe(a, self.matrix_shape if shape is None else shape, kernel)
        if self.shape.numel() != self.matrix_shape.numel():
            raise ValueError(f"shape={tuple(self.shape)} does not fit a product of {self.matrix_shape}")

    def _form(self) -> Hashable:
        return self.kind, self.matrix_shape, self.shape

    def _like(self, a: Tensor, b: Tensor) -> OuterFactor:
        return OuterFactor(a, b, self.shape, self.kernel)

    def squares_and_errors(self) -> tuple[Tensor, Tensor | None]:
        a, b = self._sides()
        if self.positions == 1:
            return outer_norms(a, b), None
        return gram_norms(a, b) if self.route() == "gram" else (product_norms(a, b), None)

    def magnitudes(self) -> Tensor | None:
        return None if self.positions == 1 else summed_sizes(*self._sides())

    def weighted_sum(self, weights: Tensor) -> Tensor:
        a, b = self._sides()
        weights = weights.to(a.dtype)
        m, positions = weights.shape[1], self.positions
        if a.numel() == 0 or b.numel() == 0 or m == 0:
            return a.new_zeros(m, *self.shape)
        # One product per column reads positions * m terms; forming rows reads each term once, and the rows.
        if m > 1 and positions * m > 4 * (positions + m):
            return self._sum_of_rows(a, b, weights)
        if a.stride(0) == 0 and a.shape[0] > 1:  # one input for all records: sum the gradients first
            summed = torch.mm(weights.t(), b.reshape(b.shape[0], -1)).view(m, positions, -1)
            return torch.matmul(summed.transpose(1, 2), a[0]).view(m, *self.shape)
        if m == 1:
            return weighted_product(a, b, weights).view(1, *self.shape)
        return torch.stack([weighted_product(a, b, w) for w in weights.t()]).view(m, *self.shape)

    def _sum_of_rows(self, a: Tensor, b: Tensor, weights: Tensor) -> Tensor:
        """Many weight columns: form rows in blocks of d_out once instead of one product per column."""
        blocks = []
        for block in chunks(b.shape[2], a.shape[0] * a.shape[2]):
            rows = contracted(b[:, :, block].transpose(1, 2), a)
            blocks.append(torch.mm(weights.t(), rows.flatten(1)).view(weights.shape[1], -1, a.shape[2]))
        return torch.cat(blocks, dim=1).view(-1, *self.shape)

    def materialise(self) -> Tensor:
        a, b = self._sides()
        return contracted(b.transpose(1, 2), a).view(self.num_records, *self.shape)

    def kernels(self) -> tuple[str, ...]:
        if self.positions == 1:
            return ("gram",)  # with one term the norm is the product of two norms
        d_out, d_in = self.matrix_shape
        # Multiplications of a record; a product's d_out x d_in numbers are also written and read once.
        gram, product = self.positions * (d_in + d_out), (d_in * d_out) + 8 * d_in * d_out / self.positions
        order = ("gram", "product") if gram <= product else ("product", "gram")
        # Rows spare the sum its own product: of 40 layers none of this size was faster without them.
        return ("rows", *order) if d_out * d_in <= ROWS_GROWTH * self.positions * (d_in + d_out) else order


def outer_norms(a: Tensor, b: Tensor) -> Tensor:
    """Squared norms of ``b_i (outer) a_i`` for one position, ``(|a_i| |b_i|)^2``.

    A tiny input times a huge gradient must not lose its norm to underflow: squares that float32 may not hold
    are taken in float64. If no value can be read, a vanished square counts as the largest that vanishes, so
    that a norm is longer and never shorter, and one that is too large is not finite.
    """
    if host_waits(a.device):
        if not are_lost_nan():
            return squared_rows_in_float64(a) * squared_rows_in_float64(b)
        # What vanished below the smallest normal number, at most; it moves no bit of other squares.
        vanished = torch.finfo(a.dtype).tiny
        return torch.mul(*(squared_rows(t) + vanished * t.shape[1:].numel() for t in (a, b)))
    both = torch.stack([squared_rows(t) for t in (a, b)])
    if a.shape[0]:
        low, high = torch.stack(torch.aminmax(both)).tolist()
        if not (low >= TINY**2 and high <= HUGE**2):  # NaN too
            odd = ~((both >= TINY**2) & (both <= HUGE**2)).all(0)
            both[:, odd] = torch.stack([squared_rows(t[odd].double()) for t in (a, b)])
    return both[0] * both[1]


def summed_sizes(a: Tensor, b: Tensor) -> Tensor:
    """``sum_s |a_is| |b_is|``, [B], or a little more: sizes whose squares vanish are ``TINY``."""
    if host_waits(a.device) and not are_lost_nan():
        return summed_sizes_in_float64(a, b)
    left, right = (torch.linalg.vector_norm(t, dim=2).clamp_(min=TINY) for t in (a, b))
    out = (left * right).sum(1)
    odd = ~(out < torch.inf)
    if are_lost_nan():
        return out.masked_fill(odd, torch.nan)
    if bool(odd.any()):
        out[odd] = summed_sizes_in_float64(a[odd], b[odd])
    return out


def summed_sizes_in_float64(a: Tensor, b: Tensor) -> Tensor:
    """Per record, the sum over positions of the products of both lengths, [B]."""
    left, right = (torch.linalg.vector_norm(t, dim=2, dtype=torch.float64) for t in (a, b))
    return (left * right).sum(1).to(a.dtype)


def weighted_product(a: Tensor, b: Tensor, weights: Tensor) -> Tensor:
    """``sum_is w_i b_is (outer) a_is``, [d_out, d_in]: weights folded into the narrower side."""
    w = weights.view(-1, 1, 1)
    kept, scaled = (a, b) if b.shape[2] <= a.shape[2] else (b, a)
    if not kept.is_contiguous() and kept.transpose(0, 1).is_contiguous():
        # Sequence-first models: both sides in (S, B) order flatten without a copy.
        kept, scaled, w = kept.transpose(0, 1), scaled.transpose(0, 1), w.transpose(0, 1)
    # `out=` makes the product contiguous whatever the strides (an expanded side has none to view).
    out = None if scaled.is_contiguous() else scaled.new_empty(scaled.shape)
    folded = torch.mul(scaled, w, out=out)
    left, right = (folded, kept) if b.shape[2] <= a.shape[2] else (kept, folded)
    if min(left.shape[2], right.shape[2]) >= WIDE_PRODUCT:
        return torch.mm(left.reshape(-1, left.shape[2]).t(), right.reshape(-1, right.shape[2]))
    # As `contracted`, in pieces of whole records, or of one.
    total = left.new_zeros(left.shape[2], right.shape[2], dtype=torch.float64)
    for some in chunks(left.shape[0], left.shape[1], PARTIAL_SUM):
        for part in chunks(left.shape[1], 1, PARTIAL_SUM):
            one, other = left[some, part].flatten(0, 1), right[some, part].flatten(0, 1)
            total += torch.mm(one.t(), other)
    return total.to(left.dtype)


def gram_norms(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Squared row norms by S x S Gram matrices, and how much they may have lost.

    By product, with no such loss, for rows that lost digits to cancellation, or terms to underflow or
    overflow.
    """
    out, terms, hidden = (a.new_empty(a.shape[0], dtype=torch.float64) for _ in range(3))
    # Few at a time: the pieces of wide products are added to what is still in the cache.
    for part in chunks(a.shape[0], a.shape[1] ** 2, CHUNK_ELEMENTS // 8):
        product, other = (in_pieces(t[part], t[part].transpose(1, 2)) for t in (a, b))
        left, right = (t.diagonal(dim1=1, dim2=2) for t in (product, other))
        # A position whose squares vanish, such as a masked one with b = 0, rarely matters: see how much it
        # can hide.
        low, high = torch.minimum(left, right), torch.maximum(left, right)
        hidden[part] = torch.where(low < TINY**2, high, 0.0).sum(1)
        product.mul_(other)
        out[part] = product.sum(2).sum(1, dtype=torch.float64)
        terms[part] = product.diagonal(dim1=1, dim2=2).sqrt().sum(1).square()
    errors = products_error(a.dtype, a.shape[1], a.shape[2], b.shape[2]) * terms
    least = torch.maximum(CANCELLATION_SHARE**2 * terms, errors / MOST_EXCESS)
    kept = (out >= least) & (out < torch.inf) & (TINY**2 * hidden <= LOST_SHARE * out)
    # A position of small squares adds at most TINY |a| or TINY |b| to the norm.
    most = (terms.sqrt() + TINY * (a.shape[1] * hidden).sqrt()).square()
    return without_lost(out, errors, ~kept, lambda at: product_norms(a[at], b[at]), most), errors


def product_norms(a: Tensor, b: Tensor) -> Tensor:
    """Squared row norms by the d_out x d_in products, formed in chunks and thrown away."""
    out = a.new_zeros(a.shape[0], dtype=torch.float64)
    for block in chunks(b.shape[2], a.shape[2]):
        width = block.stop - block.start
        for part in chunks(a.shape[0], a.shape[2] * width):
            out[part] += squared_rows(contracted(b[part, :, block].transpose(1, 2), a[part]))
    return out
