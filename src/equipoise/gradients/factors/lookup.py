"""The factor of a look-up: embeddings and everything else that reads rows of a table by index."""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise._host import host_waits
from equipoise.gradients.factors.base import Factor
from equipoise.gradients.factors.outer import TINY
from equipoise.gradients.numerics import (
    CANCELLATION_SHARE,
    LOST_SHARE,
    ROWS_GROWTH,
    chunks,
    in_pieces,
    products_error,
    squared_rows,
    take,
    widen,
    without_lost,
)


class IndexFactor(Factor):
    """``row_i = sum_s e_{index_is} (outer) b_is``: embeddings and other look-ups of rows of a table.

    Args:
        index: looked-up rows [B, S], integers in [0, num_rows). Positions without
            a gradient (padding) have b = 0.
        b: output gradients [B, S, *tail].
        num_rows: rows of the table; the parameter's shape is (num_rows, *tail).
        kernel: ``"gram"``, ``"sort"`` or ``"auto"``.

    >>> f = IndexFactor(torch.tensor([[2, 2, 0]]), torch.ones(1, 3, 1), num_rows=4)
    >>> f.norms_squared(), f.weighted_sum(torch.ones(1, 1)).flatten()
    (tensor([5.], dtype=torch.float64), tensor([1., 0., 2., 0.]))
    """

    kind = "index"

    def __init__(self, index: Tensor, b: Tensor, num_rows: int, kernel: str = "auto") -> None:
        if index.ndim != 2 or b.ndim < 2 or b.shape[:2] != index.shape:
            raise ValueError(f"index {tuple(index.shape)} and b {tuple(b.shape)} do not fit")
        self.index, self.b, self.num_rows = index.detach().long(), b.detach(), num_rows
        self.positions = index.shape[1]
        self._describe(b, (num_rows, *b.shape[2:]), kernel)

    def wide_b(self) -> Tensor:
        """``b`` as [B, S, d] in the accumulation type."""
        return widen(self.b).reshape(*self.index.shape, self.shape[1:].numel())

    def squares_and_errors(self) -> tuple[Tensor, Tensor | None]:
        b = self.wide_b()
        if self.positions == 1:
            return squared_rows(b), None
        if self.route() == "sort":
            return self._segmented_norms(b), None
        out = b.new_empty(b.shape[0], dtype=torch.float64)
        for part in chunks(b.shape[0], self.positions**2):
            products = in_pieces(b[part], b[part].transpose(1, 2))
            same = self.index[part].unsqueeze(2) == self.index[part].unsqueeze(1)
            # `where`, not a product with `same`: a look-up that is infinite must not make 0 * inf elsewhere.
            out[part] = torch.where(same, products, 0.0).sum(2).sum(1, dtype=torch.float64)
        # Look-ups of one index that cancel leave no digits in the sum of products, tiny ones no square.
        terms = self._sizes(b).double().square()
        right = (out >= CANCELLATION_SHARE * terms) & (out < torch.inf)
        errors = products_error(b.dtype, b.shape[1], b.shape[2]) * terms
        lost = ~(right & (out >= self.positions * TINY**2 / LOST_SHARE))
        most = terms + self.positions * TINY**2
        found = without_lost(out, errors, lost, lambda at: self.rows(at)._segmented_norms(b[at]), most)
        return found, errors

    def magnitudes(self) -> Tensor | None:
        return None if self.positions == 1 else self._sizes(self.wide_b())

    def additions(self) -> int:
        return self.positions  # one look-up is added after another, however many there are

    def _sizes(self, b: Tensor) -> Tensor:
        """Norms [B] of rows whose look-ups never cancel: only those of one index are added."""
        sizes = torch.linalg.vector_norm(b, dim=2, keepdim=True)
        return torch.linalg.vector_norm(self._segment_sums(sizes).view(b.shape[0], self.positions), dim=1)

    def _segmented_norms(self, b: Tensor) -> Tensor:
        return squared_rows(self._segment_sums(b).view(b.shape[0], self.positions * b.shape[2]))

    def _segment_sums(self, b: Tensor) -> Tensor:
        """Look-ups of equal index added up within their record: [B * S, d], empty segments zero."""
        records, positions, width = b.shape
        ordered, order = self.index.sort(dim=1)
        new = torch.ones_like(ordered)
        new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        segment = torch.empty_like(order).scatter_(1, order, new.cumsum(1) - 1)
        # By the record's number and the place in it: no index, whatever it is, leads to another record.
        own = torch.arange(records, device=b.device).unsqueeze(1)
        sums = b.new_zeros(records, positions, width).index_put_((own, segment), b, accumulate=True)
        return sums.view(records * positions, width)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self._summed(weights, self.index.reshape(-1), self.num_rows).view(-1, *self.shape)

    def _summed(self, weights: Tensor, index: Tensor, num_rows: int) -> Tensor:
        """The weighted sum [m, num_rows, d] of look-ups at other indices, [B * S]."""
        b = self.wide_b()
        weights = weights.to(b.dtype)
        out = b.new_zeros(weights.shape[1], num_rows, b.shape[2])
        for k in range(weights.shape[1]):
            terms = (b * weights[:, k, None, None]).reshape(-1, b.shape[2])
            if out.is_cpu:
                out[k].index_add_(0, index, terms)
            else:  # which sorts: atomics would give a repeated step other bits
                out[k].index_put_((index,), terms, accumulate=True)
        return out

    def add_weighted_sum(self, total: Tensor, weights: Tensor) -> Tensor:
        few = self.index.numel() < self.num_rows
        alike = total.dtype == widen(self.b).dtype and total.is_contiguous()
        # On a device the host would wait for the number of rows that are looked up.
        if not (few and alike) or host_waits(self.device):
            return super().add_weighted_sum(total, weights)
        used, places = torch.unique(self.index.reshape(-1), return_inverse=True)
        # Each row once: the table of all rows would have the same numbers there, and zeros elsewhere.
        sums = self._summed(weights, places, len(used))
        total.view(len(total), self.num_rows, -1).index_add_(1, used, sums)
        return total

    def materialise(self) -> Tensor:
        b = self.wide_b()
        records, _, width = b.shape
        own = torch.arange(records, device=b.device).unsqueeze(1)
        out = b.new_zeros(records, self.num_rows, width)
        return out.index_put_((own, self.index), b, accumulate=True).view(records, *self.shape)

    def rows(self, index: Tensor | slice) -> IndexFactor:
        return IndexFactor(self.index[index], take(self.b, index), self.num_rows, self.kernel)

    def difference(self, other: Factor) -> Factor:
        if not isinstance(other, IndexFactor) or self.shape != other.shape:
            return super().difference(other)
        if self.index.shape == other.index.shape and bool((self.index == other.index).all()):
            return IndexFactor(self.index, self.b - other.b, self.num_rows, self.kernel)
        # Look-ups that moved: equal indices are added before they are squared, else the norm would cancel.
        index = torch.cat([self.index, other.index], dim=1)
        return IndexFactor(index, torch.cat([self.b, -other.b], dim=1), self.num_rows, "sort")

    def kernels(self) -> tuple[str, ...]:
        order = ("gram", "sort") if self.positions <= 32 else ("sort", "gram")
        held = self.positions * (1 + self.shape[1:].numel())
        return ("rows", *order) if self.shape.numel() <= ROWS_GROWTH * held else order
