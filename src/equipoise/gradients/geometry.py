"""Sizes of a convolution: kernel, stride, padding, dilation and groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["ConvGeometry"]


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
