"""The factor of a matrix product: linear layers, attention projections, a transformer's addmm.

A layer's weight gradient for record i is a product of what went in and what came back to its output
(Goodfellow 2015, arXiv:1510.01799; Bu et al. 2022, arXiv:2210.00038). For ``y = x W^T`` at positions s

    row_i = sum_s b_is (outer) a_is                       a: inputs, b: output gradients
    ||row_i||^2 = sum_{s,t} (a_is . a_it)(b_is . b_it)    the Gram route: S x S numbers, not d_out x d_in
    sum_i c_i row_i = (c b)^T a                           one product over all records and positions
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from equipoise.gradients.factors.base import DenseFactor, Factor
from equipoise.gradients.factors.difference import BilinearDifference
from equipoise.gradients.numerics import (
    CANCELLATION_SHARE,
    LOST_SHARE,
    ROWS_GROWTH,
    chunks,
    contracted,
    pad_positions,
    squared_rows,
    take,
    widen,
)

__all__ = ["OuterFactor"]


#: Outside of these a norm may have lost terms whose squares are no float32 any more.
TINY, HUGE = 1e-15, 1e15


class OuterFactor(Factor):
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

    def __init__(
        self, a: Tensor, b: Tensor, shape: Sequence[int] | None = None, kernel: str = "auto"
    ) -> None:
        a = a.detach().unsqueeze(1) if a.ndim == 2 else a.detach()
        b = b.detach().unsqueeze(1) if b.ndim == 2 else b.detach()
        if a.ndim != 3 or b.ndim != 3 or a.shape[:2] != b.shape[:2]:
            raise ValueError(
                f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}; they need [B, S, d_in] and "
                "[B, S, d_out] with the same records and positions"
            )
        if a.dtype != b.dtype:
            wide = torch.promote_types(a.dtype, b.dtype)
            a, b = a.to(wide), b.to(wide)
        self._a, self._b, self.kernel = a, b, kernel
        self.matrix_shape = torch.Size((b.shape[2], a.shape[2]))
        self.shape = self.matrix_shape if shape is None else torch.Size(shape)
        if self.shape.numel() != self.matrix_shape.numel():
            raise ValueError(
                f"shape={tuple(self.shape)} holds {self.shape.numel()} numbers, the product "
                f"{self.matrix_shape.numel()}; pass a shape of the same size"
            )

    @property
    def a(self) -> Tensor:
        """The inputs, [B, S, d_in]."""
        return self._a

    @property
    def b(self) -> Tensor:
        """The output gradients, [B, S, d_out]."""
        return self._b

    @property
    @override
    def num_records(self) -> int:
        return self._a.shape[0]

    @property
    def positions(self) -> int:
        """S, the number of positions summed in a row."""
        return self._a.shape[1]

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self._a.dtype

    @property
    @override
    def device(self) -> torch.device:
        return self._a.device

    @override
    def norms_squared(self) -> Tensor:
        a, b = widen(self.a), widen(self.b)
        if self.positions == 1:
            return outer_norms(a, b)
        kernel = self.route()
        if kernel == "gram":
            return gram_norms(a, b)
        return product_norms(a, b)

    @override
    def magnitudes(self) -> Tensor | None:
        return None if self.positions == 1 else summed_sizes(widen(self.a), widen(self.b))

    @override
    def terms(self) -> int:
        return self.positions

    @override
    def weighted_sum(self, weights: Tensor) -> Tensor:
        a, b = widen(self.a), widen(self.b)
        weights = weights.to(a.dtype)
        m, positions = weights.shape[1], self.positions
        if a.numel() == 0 or b.numel() == 0 or m == 0:
            return a.new_zeros(m, *self.shape)
        if m > 1 and positions * m > 4 * (positions + m):
            return self._sum_of_rows(a, b, weights)
        if a.stride(0) == 0 and a.shape[0] > 1:  # one input for all records: sum the gradients first
            summed = torch.mm(weights.t(), b.reshape(b.shape[0], -1)).view(m, positions, -1)
            return torch.matmul(summed.transpose(1, 2), a[0]).view(m, *self.shape)
        if m == 1:
            return weighted_product(a, b, weights).view(1, *self.shape)
        return torch.stack([weighted_product(a, b, w) for w in weights.t()]).view(m, *self.shape)

    def _sum_of_rows(self, a: Tensor, b: Tensor, weights: Tensor) -> Tensor:
        """Many weight columns: form rows in blocks of d_out once instead of one product a column."""
        blocks = []
        for block in chunks(b.shape[2], a.shape[0] * a.shape[2]):
            rows = contracted(b[:, :, block].transpose(1, 2), a)
            blocks.append(torch.mm(weights.t(), rows.flatten(1)).view(weights.shape[1], -1, a.shape[2]))
        return torch.cat(blocks, dim=1).view(-1, *self.shape)

    @override
    def materialise(self) -> Tensor:
        a, b = widen(self.a), widen(self.b)
        return contracted(b.transpose(1, 2), a).view(self.num_records, *self.shape)

    @override
    def rows(self, index: Tensor | slice) -> OuterFactor:
        return OuterFactor(take(self.a, index), take(self.b, index), self.shape, self.kernel)

    @override
    def difference(self, other: Factor) -> Factor:
        if not isinstance(other, OuterFactor) or (self.a.shape, self.b.shape) != (
            other.a.shape,
            other.b.shape,
        ):
            return self._materialised_difference(other)
        return _OuterDifference(self, other)

    @override
    def join(self, others: Sequence[Factor]) -> Factor | None:
        parts: list[OuterFactor] = [self]
        for part in others:
            if not isinstance(part, OuterFactor) or part.matrix_shape != self.matrix_shape:
                return None
            parts.append(part)
        longest = max(part.positions for part in parts)
        a = torch.cat([pad_positions(part.a, longest) for part in parts])
        b = torch.cat([pad_positions(part.b, longest) for part in parts])
        return OuterFactor(a, b, self.shape, self.kernel)

    @override
    def input_elements(self) -> int:
        return self.positions * sum(self.matrix_shape)

    @override
    def kernels(self) -> tuple[str, ...]:
        if self.positions == 1:
            return ("gram",)
        d_out, d_in = self.matrix_shape
        # Multiplications of a record; a product's d_out x d_in numbers are also written and read once.
        gram, product = self.positions * (d_in + d_out), (d_in * d_out) + 8 * d_in * d_out / self.positions
        order = ("gram", "product") if gram <= product else ("product", "gram")
        if d_out * d_in <= ROWS_GROWTH * self.input_elements():
            return (*order, "rows")
        return order

    @override
    def signature(self) -> str:
        return f"outer S={self.positions} in={self.matrix_shape[1]} out={self.matrix_shape[0]}"

    @override
    def _with(self, kernel: str) -> Factor:
        if kernel == "rows":
            return DenseFactor(self.materialise())
        return OuterFactor(self.a, self.b, self.shape, kernel)


class _OuterDifference(BilinearDifference[OuterFactor], OuterFactor):
    """B_x^T A_x - B_w^T A_w = [B_x - B_w; B_w]^T [A_x; A_x - A_w]."""

    def __init__(self, left: OuterFactor, right: OuterFactor, kernel: str = "auto") -> None:
        OuterFactor.__init__(self, left.a, right.b, left.shape, kernel)  # checks, type and sizes
        super().__init__(left, right, kernel)

    @property
    @override
    def a(self) -> Tensor:
        return self._inputs(self._left.a, self._right.a)

    @property
    @override
    def b(self) -> Tensor:
        return self._output_gradients(self._left.b, self._right.b)

    @property
    @override
    def positions(self) -> int:
        return 2 * self._left.positions


def outer_norms(a: Tensor, b: Tensor) -> Tensor:
    """Squared norms of ``b_i (outer) a_i`` for one position, ``(|a_i| |b_i|)^2``.

    A tiny input beside a huge gradient must not lose its norm to underflow: where squares of numbers may not
    be float32, they are taken in float64.
    """
    both = torch.stack([squared_rows(t) for t in (a, b)])
    if a.shape[0]:
        low, high = torch.stack(torch.aminmax(both)).tolist()
        if not (low >= TINY**2 and high <= HUGE**2):  # NaN too
            odd = ~((both >= TINY**2) & (both <= HUGE**2)).all(0)
            both[:, odd] = torch.stack([squared_rows(t[odd].double()) for t in (a, b)])
    return both.prod(0)


def summed_sizes(a: Tensor, b: Tensor) -> Tensor:
    """``sum_s |a_is| |b_is|``, [B], or a little more: sizes whose squares vanish are ``TINY``."""
    left, right = (torch.linalg.vector_norm(t, dim=2).clamp_(min=TINY) for t in (a, b))
    out = (left * right).sum(1)
    odd = ~(out < torch.inf)
    if bool(odd.any()):
        left, right = (torch.linalg.vector_norm(t[odd], dim=2, dtype=torch.float64) for t in (a, b))
        out[odd] = (left * right).sum(1).to(out.dtype)
    return out


def weighted_product(a: Tensor, b: Tensor, weights: Tensor) -> Tensor:
    """``sum_is w_i b_is (outer) a_is``, [d_out, d_in]: weights folded into the narrower side."""
    w = weights.view(-1, 1, 1)
    kept, scaled = (a, b) if b.shape[2] <= a.shape[2] else (b, a)
    if not kept.is_contiguous() and kept.transpose(0, 1).is_contiguous():
        # Sequence-first models: both sides in (S, B) order flatten without a copy.
        kept, scaled, w = kept.transpose(0, 1), scaled.transpose(0, 1), w.transpose(0, 1)
    folded = torch.mul(scaled, w, out=scaled.new_empty(scaled.shape)).view(-1, scaled.shape[2])
    flat = kept.reshape(-1, kept.shape[2])
    left, right = (folded, flat) if b.shape[2] <= a.shape[2] else (flat, folded)
    return contracted(left.t(), right)


def gram_norms(a: Tensor, b: Tensor) -> Tensor:
    """Squared row norms by S x S Gram matrices; by product for rows that lost digits to cancellation or
    terms to underflow or overflow.
    """
    out, terms, smallest = (a.new_empty(a.shape[0], dtype=torch.float64) for _ in range(3))
    for part in chunks(a.shape[0], a.shape[1] ** 2):
        product, other = (contracted(t[part], t[part].transpose(1, 2)) for t in (a, b))
        sizes = (t.diagonal(dim1=1, dim2=2) for t in (product, other))
        smallest[part] = torch.minimum(*sizes).amin(1)
        product.mul_(other)
        out[part] = product.sum((1, 2))
        terms[part] = product.diagonal(dim1=1, dim2=2).sqrt().sum(1).square_()
    out.abs_()  # rounding may leave a tiny negative number; a larger norm is the safe side
    right = (out >= CANCELLATION_SHARE * terms) & (out < torch.inf)
    suspect = ~(right & (smallest >= TINY**2))
    if bool(suspect.any()):
        # A position whose squares vanish, such as a masked one with b = 0, rarely matters: see how much it
        # can hide.
        left, opposite = (t[suspect].square().sum(2) for t in (a, b))
        hidden = torch.where(left < TINY**2, opposite, 0.0) + torch.where(opposite < TINY**2, left, 0.0)
        enough = TINY**2 * hidden.sum(1) <= LOST_SHARE * out[suspect]
        lost = suspect.nonzero().squeeze(1)[~(right[suspect] & enough)]
        out[lost] = product_norms(a[lost], b[lost])
    return out


def product_norms(a: Tensor, b: Tensor) -> Tensor:
    """Squared row norms by the d_out x d_in products, formed in chunks and thrown away."""
    out = a.new_zeros(a.shape[0], dtype=torch.float64)
    for block in chunks(b.shape[2], a.shape[2]):
        width = block.stop - block.start
        for part in chunks(a.shape[0], a.shape[2] * width):
            out[part] += squared_rows(contracted(b[part, :, block].transpose(1, 2), a[part]))
    return out
