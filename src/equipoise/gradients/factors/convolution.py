"""The factor of a convolution: its input and its output gradient, rows derived lazily.

With the input a padded, stride s, dilation d and R uses of the kernel in one forward, row i of the weight
gradient is

    row_i[o, c, k] = sum_r sum_p  b_ir[o, p]  a_ir[c, s p + d k]

Rows of many records at once are one grouped convolution's weight gradient (each record a group), or the
product of b with the unfolded input; or one forward correlation in which stride and dilation change places
(Rochette et al. 2019, arXiv:1912.06015) and whose result is cropped to the kernel. Norms can also be taken
from the Gram matrices of the unfolded input and b. No way wins for all layers: see ``ConvFactor.kernels``.

A transposed convolution is the same factor with its input and output gradient exchanged:
``ConvFactor(a=output gradient, b=input, geometry)`` with the layer's own sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from equipoise.gradients.factors.base import BilinearFactor, DenseFactor, Factor
from equipoise.gradients.factors.outer import gram_norms, summed_sizes
from equipoise.gradients.numerics import (
    CHUNK_ELEMENTS,
    chunks,
    contracted,
    squared_rows,
    widen,
)


@dataclass(frozen=True)
class ConvGeometry:
    """Sizes of a convolution over 1, 2 or 3 spatial dimensions.

    Args:
        kernel_size, stride, dilation: one integer a dimension.
        padding: zeros added (before, after) each dimension; other padding modes are applied to x beforehand.
        groups: as in ``torch.nn.Conv2d``.
    """

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1

    @classmethod
    def of(
        cls,
        kernel_size: Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | str | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> ConvGeometry:
        """The geometry from arguments as PyTorch's convolutions take them (``"same"`` and ``"valid"`` too).

        >>> ConvGeometry.of((3, 2), padding="same").padding
        ((1, 1), (0, 1))
        """
        kernel = tuple(kernel_size)

        def each(value: int | Sequence[int]) -> tuple[int, ...]:
            values = (value,) if isinstance(value, int) else tuple(value)
            return values * (len(kernel) // len(values))

        dilations = each(dilation)
        if padding == "same":
            totals = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
            pairs = tuple((total // 2, total - total // 2) for total in totals)
        else:
            sides = each(0 if isinstance(padding, str) else padding)  # "valid"
            pairs = tuple((side, side) for side in sides)
        return cls(kernel, each(stride), pairs, dilations, groups)

    @property
    def spatial(self) -> int:
        """The number of spatial dimensions."""
        return len(self.kernel_size)

    @property
    def taps(self) -> int:
        """Positions of the kernel."""
        return torch.Size(self.kernel_size).numel()

    @property
    def coverage(self) -> int:
        """At how many output positions an input can count, at most.

        >>> ConvGeometry.of((4, 3), stride=2).coverage
        4
        """
        sizes = zip(self.kernel_size, self.stride, self.dilation, strict=True)
        return math.prod(math.ceil(k * math.gcd(s, d) / s) for k, s, d in sizes)


#: As `ROWS_GROWTH` of other factors, and twice it: rows save a convolution its second weight gradient, and
#: its kernels are small. A choice: more hold more memory, less computes more weight gradients twice.
CONVOLUTION_ROWS_GROWTH = 4


#: Elements of the unfolded input at once: it is many times the input, and fits the cache in pieces. 2 MB are
#: a choice: larger pieces leave the cache, smaller ones take more calls.
UNFOLDED_ELEMENTS = CHUNK_ELEMENTS // 4

#: So many numbers of rows are formed at once: 2 MB stay in the cache, and the allocator keeps their memory.
#: Rows of 37 MB at once took 54 ms, in blocks 30.
ROWS_ELEMENTS = CHUNK_ELEMENTS // 4


_WEIGHT_GRADIENT: dict[int, Callable[..., Tensor]] = {
    1: conv1d_weight,
    2: conv2d_weight,
    3: conv3d_weight,
}


_CONVOLUTION: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def _split(tensor: Tensor, dimension: int, parts: int) -> Tensor:
    """A dimension of ``parts * n`` seen as two of sizes ``parts`` and ``n``."""
    shape = tensor.shape
    size = (*shape[:dimension], parts, shape[dimension] // parts, *shape[dimension + 1 :])
    return tensor.reshape(size)


class ConvFactor(BilinearFactor):
    """The weight gradient of a convolution, record by record; shape [Co, Ci / groups, *kernel].

    Args:
        a: inputs [B, Ci, *in], or [B, R, Ci, *in] for R uses of the kernel that a row sums.
        b: output gradients [B, Co, *out], or [B, R, Co, *out].
        geometry: kernel size, stride, zero padding, dilation and groups.
        kernel: ``"grouped"``, ``"correlate"``, ``"unfold"``, ``"gram"`` or ``"auto"`` (grouped).

    >>> f = ConvFactor(torch.ones(2, 1, 4), torch.ones(2, 1, 3), ConvGeometry.of((2,)))
    >>> f.materialise().flatten(1), f.norms_squared().round()
    (tensor([[3., 3.],
            [3., 3.]]), tensor([18., 18.], dtype=torch.float64))
    """

    kind = "conv"
    kernel_scales = True  # twice the uses are twice the work of every route but the Gram one

    def __init__(self, a: Tensor, b: Tensor, geometry: ConvGeometry, kernel: str = "auto") -> None:
        self._hold(a, b, geometry.spatial + 3)
        a, b, self.geometry = self._a, self._b, geometry
        self.uses, self.positions = a.shape[1], a.shape[1] * b.shape[3:].numel()
        self._describe(a, (b.shape[2], a.shape[2] // geometry.groups, *geometry.kernel_size), kernel)

    def _form(self) -> Hashable:
        return self.kind, self.geometry, self._a.shape[2:], self._b.shape[2:]

    def _like(self, a: Tensor, b: Tensor) -> ConvFactor:
        return ConvFactor(a, b, self.geometry, self.kernel)

    def squares_and_errors(self) -> tuple[Tensor, Tensor | None]:
        out = torch.empty(self.num_records, dtype=torch.float64, device=self.device)
        kernel = self.route()
        if kernel == "gram":
            errors = torch.empty_like(out)
            for part in chunks(self.num_records, self._unfolded_elements(), UNFOLDED_ELEMENTS):
                factor = self.rows(part)
                by_group = gram_norms(factor._patches(), factor._columns())
                out[part], errors[part] = (t.view(-1, self.geometry.groups).sum(1) for t in by_group)
            return out, errors
        for part in self._record_chunks(kernel):
            out[part] = squared_rows(self.rows(part)._rows_by(kernel))
        return out, None

    def magnitudes(self) -> Tensor | None:
        # In each use |sum_p b_p (outer) patch_p| <= |b| |patches|; an input is in `coverage` patches at most.
        if self.positions == 1:
            return None
        sizes = summed_sizes(widen(self.a).flatten(2), widen(self.b).flatten(2))
        return sizes.mul_(math.sqrt(self.geometry.coverage))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        a, b = widen(self.a), widen(self.b)
        weights = weights.to(a.dtype)
        m = weights.shape[1]
        if b.numel() == 0 or m == 0:
            return a.new_zeros(m, *self.shape)
        if m > 4:  # many columns: the rows once instead of a weight gradient per column
            out = a.new_zeros(m, self.shape.numel())
            for part in self._record_chunks(self.kernel):
                out.addmm_(weights[part].t(), self.rows(part).materialise().flatten(1))
            return out.view(m, *self.shape)
        flat = a.flatten(0, 1)
        sums = [
            self._weight_gradient(flat, (b * w.view(-1, *(1,) * (b.ndim - 1))).flatten(0, 1), self.shape, 1)
            for w in weights.t()
        ]
        return torch.stack(sums) if m > 1 else sums[0].unsqueeze(0)

    def materialise(self) -> Tensor:
        return self._rows_by(self.kernel)

    def kernels(self) -> tuple[str, ...]:
        groups, channels = self.geometry.groups, self.shape[1]
        d_out, d_in = self.shape[0], self.shape[1:].numel()
        gram, product = self.positions * (d_in + d_out // groups), d_in * d_out // groups
        routes = ["grouped", "unfold"]
        if channels <= 4:  # few input channels a group: they become the batch of a forward correlation
            routes.append("correlate")
        # On a processor a grouped convolution was within 1.5 of the fastest on 30 layers, but leaves most of
        # its lanes empty for grey or coloured images. On a GPU it is slow for many records.
        first = "correlate" if channels <= 3 and groups == 1 else "grouped"
        first = first if self.device.type == "cpu" else "unfold"
        routes.sort(key=lambda route: route != first)
        lazy = (
            ["gram", *routes] if 2 * gram <= product else [*routes, "gram"] if gram <= 4 * product else routes
        )
        held = self.uses * (self._a.shape[2:].numel() + self._b.shape[2:].numel())
        if self.shape.numel() > CONVOLUTION_ROWS_GROWTH * held:
            return tuple(lazy)
        return (*(f"rows_{route}" for route in routes), *lazy)

    def _with(self, kernel: str) -> Factor:
        if kernel.startswith("rows_"):
            return DenseFactor(self._rows_by(kernel.removeprefix("rows_")))
        return super()._with(kernel)

    def _unfolded_elements(self) -> int:
        return self.positions * self._a.shape[2] * self.geometry.taps

    def _record_chunks(self, kernel: str) -> list[slice]:
        if kernel == "unfold":
            return list(chunks(self.num_records, self._unfolded_elements(), UNFOLDED_ELEMENTS))
        return list(chunks(self.num_records, self.shape.numel(), ROWS_ELEMENTS))

    def _rows_by(self, kernel: str) -> Tensor:
        if self._b.numel() == 0 or self._a.numel() == 0:
            return widen(self._a[:0]).new_zeros(self.num_records, *self.shape)
        make = {
            "unfold": ConvFactor._rows_unfolded,
            "correlate": ConvFactor._rows_correlated,
        }.get(kernel, ConvFactor._rows_grouped)
        places = self._record_chunks(kernel)
        if len(places) == 1:
            return make(self)
        # Each block goes where it belongs: blocks that are joined at the end are there twice.
        out = widen(self._a[:0]).new_empty(self.num_records, *self.shape)
        for place in places:
            out[place] = make(self.rows(place))
        return out

    def _rows_unfolded(self) -> Tensor:
        return contracted(self._columns().transpose(1, 2), self._patches()).view(-1, *self.shape)

    def _rows_grouped(self) -> Tensor:
        """One weight gradient of a convolution whose groups are the records (times the layer's groups)."""
        records = self.num_records
        a = widen(self.a).transpose(0, 1).flatten(1, 2)  # [R, B * Ci, *in], no copy for one use
        b = widen(self.b).transpose(0, 1).flatten(1, 2)
        shape = torch.Size((records * self.shape[0], *self.shape[1:]))
        return self._weight_gradient(a, b, shape, records).view(records, *self.shape)

    def _weight_gradient(self, a: Tensor, b: Tensor, shape: torch.Size, records: int) -> Tensor:
        g = self.geometry
        if all(before == after for before, after in g.padding):
            padding = [before for before, _ in g.padding]
        else:  # PyTorch's convolutions pad both sides alike
            a, padding = self._padded(a), [0] * g.spatial
        gradient = _WEIGHT_GRADIENT[g.spatial]
        return gradient(a, shape, b, list(g.stride), padding, list(g.dilation), g.groups * records)

    def _rows_correlated(self) -> Tensor:
        """One forward convolution of x with b: stride and dilation change places, then a crop."""
        g, records, uses = self.geometry, self.num_records, self.uses
        a = _split(self._padded(widen(self.a)), 2, g.groups)  # [B, R, g, Ci/g, *in]
        a = a.movedim(3, 0).transpose(2, 3).flatten(1, 3)  # [Ci/g, B * g * R, *in]
        b = widen(self.b).movedim(1, 2).reshape(records * self.shape[0], uses, *self._b.shape[3:])
        out = _CONVOLUTION[g.spatial](a, b, stride=g.dilation, dilation=g.stride, groups=records * g.groups)
        for dimension, size in enumerate(g.kernel_size):
            # A stride that does not divide the input leaves taps beyond the kernel.
            out = out.narrow(2 + dimension, 0, size)  # [Ci/g, B * Co, *kernel]
        return _split(out, 1, records).movedim(0, 2)

    def _padded(self, a: Tensor) -> Tensor:
        pairs = [side for pair in reversed(self.geometry.padding) for side in pair]
        return F.pad(a, pairs) if any(pairs) else a

    def _patches(self) -> Tensor:
        """The unfolded input [B * groups, R * L, Ci / groups * taps]."""
        g = self.geometry
        a = _split(self._padded(widen(self.a)), 2, g.groups)  # [B, R, g, Ci/g, *in]
        # A view: an input lies under several taps, and only the reshape below copies it.
        for dim, (size, step, gap) in enumerate(zip(g.kernel_size, g.stride, g.dilation, strict=True), 4):
            a = a.unfold(dim, (size - 1) * gap + 1, step)
            a = a[..., ::gap] if gap > 1 else a
        out, taps = range(4, 4 + g.spatial), range(4 + g.spatial, 4 + 2 * g.spatial)
        view = a.permute(0, 2, 3, *taps, 1, *out)
        flat = view.reshape(a.shape[0] * g.groups, self.shape[1:].numel(), self.positions)
        return flat.transpose(1, 2)

    def _columns(self) -> Tensor:
        """The output gradient [B * groups, R * L, Co / groups]."""
        groups = self.geometry.groups
        b = _split(widen(self.b), 2, groups).movedim(1, 3)  # [B, g, Co/g, R, *out]
        flat = b.reshape(b.shape[0] * groups, self.shape[0] // groups, self.positions)
        return flat.transpose(1, 2)
