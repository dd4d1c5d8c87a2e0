"""Sizes of a convolution: kernel, stride, padding, dilation and groups.

The factor of a convolution: its input and its output gradient, rows derived lazily.

With x padded, stride s, dilation d and R uses of the kernel in one forward, row i of the weight gradient is

    row_i[o, c, k] = sum_r sum_p  b_ir[o, p]  x_ir[c, s p + d k]

Rows of many records at once are one grouped convolution's weight gradient (each record a group), or the
product of b with the unfolded input; or one forward correlation in which stride and dilation change places
(Rochette et al. 2019, arXiv:1912.06015) and whose result is cropped to the kernel. Norms can also be taken
from the Gram matrices of the unfolded input and b. No way wins for all layers: see ``kernel_choice.py``.

A transposed convolution is the same factor with its input and output gradient exchanged:
``ConvFactor(x=output gradient, b=input, geometry)`` with the layer's own sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight
from typing_extensions import override

from equipoise.gradients.factors.base import DenseFactor, Factor
from equipoise.gradients.factors.difference import BilinearDifference
from equipoise.gradients.factors.outer import gram_norms, summed_sizes
from equipoise.gradients.numerics import CHUNK_ELEMENTS, chunks, contracted, squared_rows, take, widen

__all__ = ["ConvFactor", "ConvGeometry"]


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
        padding: int | str | Sequence[int] | Sequence[tuple[int, int]] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> ConvGeometry:
        """The geometry from arguments as PyTorch's convolutions take them (``"same"`` and ``"valid"`` too).

        >>> ConvGeometry.of((3, 2), padding="same").padding
        ((1, 1), (0, 1))
        """
        kernel = tuple(kernel_size)
        if not 1 <= len(kernel) <= 3:
            raise ValueError(
                f"kernel_size={kernel} has {len(kernel)} dimensions; convolutions of 1, 2 or 3 are known"
            )
        steps = _each(stride, len(kernel), "stride")
        dilations = _each(dilation, len(kernel), "dilation")
        pairs: tuple[tuple[int, int], ...]
        if padding == "valid":
            pairs = ((0, 0),) * len(kernel)
        elif padding == "same":
            totals = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
            pairs = tuple((total // 2, total - total // 2) for total in totals)
        elif isinstance(padding, str):
            raise ValueError(f'padding={padding!r} is not known; use "same", "valid" or integers')
        elif not isinstance(padding, int) and padding and not isinstance(padding[0], int):
            pairs = tuple((int(before), int(after)) for before, after in padding)  # type: ignore[misc]
        else:
            pairs = tuple((p, p) for p in _each(padding, len(kernel), "padding"))  # type: ignore[arg-type]
        return cls(kernel, steps, pairs, dilations, groups)

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

    @property
    def symmetric(self) -> bool:
        """Whether as much is padded before as after."""
        return all(before == after for before, after in self.padding)


def _each(value: int | Sequence[int], count: int, name: str) -> tuple[int, ...]:
    values = (value,) * count if isinstance(value, int) else tuple(value)
    if len(values) == 1:
        values *= count
    if len(values) != count:
        raise ValueError(f"{name}={value} has {len(values)} entries; the kernel has {count} dimensions")
    return values


#: As for other factors, but rows save a convolution its second weight gradient, and its kernels are small.
ROWS_GROWTH = 4


#: Elements of the unfolded input at once: it is many times the input, and fits the cache in pieces.
UNFOLDED_ELEMENTS = CHUNK_ELEMENTS // 4


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


class ConvFactor(Factor):
    """The weight gradient of a convolution, record by record; shape [Co, Ci / groups, *kernel].

    Args:
        x: inputs [B, Ci, *in], or [B, R, Ci, *in] for R uses of the kernel that a row sums.
        b: output gradients [B, Co, *out], or [B, R, Co, *out].
        geometry: kernel size, stride, zero padding, dilation and groups.
        kernel: ``"grouped"``, ``"correlate"``, ``"unfold"``, ``"gram"`` or ``"auto"`` (grouped).

    >>> f = ConvFactor(torch.ones(2, 1, 4), torch.ones(2, 1, 3), ConvGeometry.of((2,)))
    >>> f.materialise().flatten(1), f.norms_squared().round()
    (tensor([[3., 3.],
            [3., 3.]]), tensor([18., 18.], dtype=torch.float64))
    """

    kind = "conv"

    def __init__(self, x: Tensor, b: Tensor, geometry: ConvGeometry, kernel: str = "auto") -> None:
        n = geometry.spatial
        x = x.detach().unsqueeze(1) if x.ndim == n + 2 else x.detach()
        b = b.detach().unsqueeze(1) if b.ndim == n + 2 else b.detach()
        if x.ndim != n + 3 or b.ndim != n + 3 or x.shape[:2] != b.shape[:2]:
            raise ValueError(
                f"x has shape {tuple(x.shape)} and b {tuple(b.shape)}; a convolution over {n} "
                "dimensions needs [B, Ci, *in] and [B, Co, *out] with the same records"
            )
        if x.shape[2] % geometry.groups or b.shape[2] % geometry.groups:
            raise ValueError(
                f"groups={geometry.groups} does not divide the channels of x ({x.shape[2]}) "
                f"and of b ({b.shape[2]})"
            )
        if x.dtype != b.dtype:
            wide = torch.promote_types(x.dtype, b.dtype)
            x, b = x.to(wide), b.to(wide)
        self._x, self._b, self.geometry, self.kernel = x, b, geometry, kernel
        self.shape = torch.Size((b.shape[2], x.shape[2] // geometry.groups, *geometry.kernel_size))

    @property
    def x(self) -> Tensor:
        """The inputs, [B, R, Ci, *in]."""
        return self._x

    @property
    def b(self) -> Tensor:
        """The output gradients, [B, R, Co, *out]."""
        return self._b

    @property
    @override
    def num_records(self) -> int:
        return self._x.shape[0]

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self._x.dtype

    @property
    @override
    def device(self) -> torch.device:
        return self._x.device

    @property
    def uses(self) -> int:
        """R, the uses of the kernel that a row sums."""
        return self._x.shape[1]

    @property
    def positions(self) -> int:
        """Output positions that a row sums, all uses together."""
        return self.uses * self._b.shape[3:].numel()

    @override
    def norms_squared(self) -> Tensor:
        out = torch.empty(self.num_records, dtype=torch.float64, device=self.device)
        kernel = self.kernels(False)[0] if self.kernel == "auto" else self.kernel
        if kernel == "gram":
            for part in chunks(self.num_records, self._unfolded_elements(), UNFOLDED_ELEMENTS):
                factor = self.rows(part)
                a, b = factor._patches(), factor._columns()
                out[part] = gram_norms(a, b).view(-1, self.geometry.groups).sum(1)
            return out
        for part in self._record_chunks(kernel):
            out[part] = squared_rows(self.rows(part)._rows_by(kernel))
        return out

    @override
    def magnitudes(self) -> Tensor | None:
        # In each use |sum_p b_p (outer) patch_p| <= |b| |patches|; an input is in `coverage` patches at most.
        if self.positions == 1:
            return None
        sizes = summed_sizes(widen(self.x).flatten(2), widen(self.b).flatten(2))
        return sizes.mul_(math.sqrt(self.geometry.coverage))

    @override
    def terms(self) -> int:
        return self.positions

    @override
    def weighted_sum(self, weights: Tensor) -> Tensor:
        x, b = widen(self.x), widen(self.b)
        weights = weights.to(x.dtype)
        m = weights.shape[1]
        if b.numel() == 0 or m == 0:
            return x.new_zeros(m, *self.shape)
        if m > 4:  # many columns: the rows once instead of a weight gradient a column
            out = x.new_zeros(m, self.shape.numel())
            for part in self._record_chunks(self.kernel):
                out.addmm_(weights[part].t(), self.rows(part).materialise().flatten(1))
            return out.view(m, *self.shape)
        flat = x.flatten(0, 1)
        sums = [
            self._weight_gradient(flat, (b * w.view(-1, *(1,) * (b.ndim - 1))).flatten(0, 1), self.shape, 1)
            for w in weights.t()
        ]
        return torch.stack(sums) if m > 1 else sums[0].unsqueeze(0)

    @override
    def materialise(self) -> Tensor:
        return self._rows_by(self.kernel)

    @override
    def rows(self, index: Tensor | slice) -> ConvFactor:
        return ConvFactor(take(self.x, index), take(self.b, index), self.geometry, self.kernel)

    @override
    def difference(self, other: Factor) -> Factor:
        same = (
            isinstance(other, ConvFactor)
            and self.geometry == other.geometry
            and (self.x.shape, self.b.shape) == (other.x.shape, other.b.shape)
        )
        if not same or not isinstance(other, ConvFactor):
            return self._materialised_difference(other)
        return _ConvDifference(self, other, self.kernel)

    @override
    def join(self, others: Sequence[Factor]) -> Factor | None:
        parts: list[ConvFactor] = [self]
        for part in others:
            if not isinstance(part, ConvFactor) or part.geometry != self.geometry:
                return None
            if part.x.shape[1:] != self.x.shape[1:] or part.b.shape[1:] != self.b.shape[1:]:
                return None
            parts.append(part)
        x, b = torch.cat([part.x for part in parts]), torch.cat([part.b for part in parts])
        return ConvFactor(x, b, self.geometry, self.kernel)

    @override
    def input_elements(self) -> int:
        return self.uses * (self._x.shape[2:].numel() + self._b.shape[2:].numel())

    @override
    def kernels(self, with_rows: bool = True) -> tuple[str, ...]:
        groups, (d_out, d_in) = self.geometry.groups, (self.shape[0], self.shape[1:].numel())
        gram, product = self.positions * (d_in + d_out // groups), d_in * d_out // groups
        routes = ["grouped", "unfold"]
        if self.shape[1] <= 4:  # few input channels a group: they become the batch of a forward correlation
            routes.insert(0 if self.shape[1] == 1 and groups == 1 else 1, "correlate")
        lazy = (
            ["gram", *routes] if 2 * gram <= product else [*routes, "gram"] if gram <= 4 * product else routes
        )
        if not with_rows or self.shape.numel() > ROWS_GROWTH * self.input_elements():
            return tuple(lazy)
        return (*(f"rows_{route}" for route in routes), *lazy)

    @override
    def signature(self) -> str:
        g = self.geometry
        return (
            f"conv R={self.uses} in={tuple(self._x.shape[2:])} out={tuple(self._b.shape[2:])} "
            f"kernel={g.kernel_size} stride={g.stride} "
            f"padding={g.padding} dilation={g.dilation} groups={g.groups}"
        )

    @override
    def _with(self, kernel: str) -> Factor:
        if kernel.startswith("rows_"):
            return DenseFactor(self._rows_by(kernel.removeprefix("rows_")))
        return ConvFactor(self.x, self.b, self.geometry, kernel)

    def _unfolded_elements(self) -> int:
        return self.positions * self._x.shape[2] * self.geometry.taps

    def _record_chunks(self, kernel: str) -> list[slice]:
        if kernel == "unfold":
            return list(chunks(self.num_records, self._unfolded_elements(), UNFOLDED_ELEMENTS))
        return list(chunks(self.num_records, self.shape.numel(), 2 * CHUNK_ELEMENTS))

    def _rows_by(self, kernel: str) -> Tensor:
        if self._b.numel() == 0 or self._x.numel() == 0:
            return widen(self._x[:0]).new_zeros(self.num_records, *self.shape)
        if kernel == "unfold":
            blocks = [
                contracted(part._columns().transpose(1, 2), part._patches()).view(-1, *self.shape)
                for part in map(self.rows, self._record_chunks(kernel))
            ]
            return blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        return self._rows_correlated() if kernel == "correlate" else self._rows_grouped()

    def _rows_grouped(self) -> Tensor:
        """One weight gradient of a convolution whose groups are the records (times the layer's groups)."""
        records = self.num_records
        x = widen(self.x).transpose(0, 1).flatten(1, 2)  # [R, B * Ci, *in], no copy for one use
        b = widen(self.b).transpose(0, 1).flatten(1, 2)
        shape = torch.Size((records * self.shape[0], *self.shape[1:]))
        return self._weight_gradient(x, b, shape, records).view(records, *self.shape)

    def _weight_gradient(self, x: Tensor, b: Tensor, shape: torch.Size, records: int) -> Tensor:
        g = self.geometry
        if g.symmetric:
            padding = [before for before, _ in g.padding]
        else:
            x, padding = self._padded(x), [0] * g.spatial
        gradient = _WEIGHT_GRADIENT[g.spatial]
        return gradient(x, shape, b, list(g.stride), padding, list(g.dilation), g.groups * records)

    def _rows_correlated(self) -> Tensor:
        """One forward convolution of x with b: stride and dilation change places, then a crop."""
        g, records, uses = self.geometry, self.num_records, self.uses
        x = self._padded(widen(self.x))
        x = _split(x, 2, g.groups)  # [B, R, g, Ci/g, *in]
        x = x.movedim(3, 0).transpose(2, 3).flatten(1, 3)  # [Ci/g, B * g * R, *in]
        b = widen(self.b).movedim(1, 2).reshape(records * self.shape[0], uses, *self._b.shape[3:])
        out = _CONVOLUTION[g.spatial](x, b, stride=g.dilation, dilation=g.stride, groups=records * g.groups)
        for dimension, size in enumerate(g.kernel_size):
            out = out.narrow(2 + dimension, 0, size)  # [Ci/g, B * Co, *kernel]
        return _split(out, 1, records).movedim(0, 2)

    def _padded(self, x: Tensor) -> Tensor:
        pairs = [side for pair in reversed(self.geometry.padding) for side in pair]
        return F.pad(x, pairs) if any(pairs) else x

    def _patches(self) -> Tensor:
        """The unfolded input [B * groups, R * L, Ci / groups * taps]."""
        g = self.geometry
        x = self._padded(widen(self.x))
        x = _split(x, 2, g.groups)  # [B, R, g, Ci/g, *in]
        lead, spatial = x.stride()[:4], x.stride()[4:]
        taps = [s * d for s, d in zip(spatial, g.dilation, strict=True)]
        steps = [s * d for s, d in zip(spatial, g.stride, strict=True)]
        size = (*x.shape[:4], *g.kernel_size, *self._b.shape[3:])
        view = x.as_strided(size, (*lead, *taps, *steps)).movedim(1, 3 + g.spatial)
        flat = view.reshape(x.shape[0] * g.groups, self.shape[1:].numel(), self.positions)
        return flat.transpose(1, 2)

    def _columns(self) -> Tensor:
        """The output gradient [B * groups, R * L, Co / groups]."""
        groups = self.geometry.groups
        b = _split(widen(self.b), 2, groups).movedim(1, 3)  # [B, g, Co/g, R, *out]
        flat = b.reshape(b.shape[0] * groups, self.shape[0] // groups, self.positions)
        return flat.transpose(1, 2)


class _ConvDifference(BilinearDifference[ConvFactor], ConvFactor):
    """Each use of the kernel becomes two: (x_x, b_x - b_w) and (x_x - x_w, b_w)."""

    def __init__(self, left: ConvFactor, right: ConvFactor, kernel: str) -> None:
        ConvFactor.__init__(self, left.x, right.b, left.geometry, kernel)  # checks, type and sizes
        super().__init__(left, right, kernel)

    @property
    @override
    def x(self) -> Tensor:
        return self._inputs(self._left.x, self._right.x)

    @property
    @override
    def b(self) -> Tensor:
        return self._output_gradients(self._left.b, self._right.b)

    @property
    @override
    def uses(self) -> int:
        return 2 * self._left.uses
