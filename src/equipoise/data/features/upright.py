"""Slanted writing set upright: each image by its own moments alone, so it costs no privacy.

With m >= 0 the lightness of a pixel above the image's darkest one, (x, y) its place and E the mean weighted
by m, a straight line through the centre of mass that explains the columns by the rows has the slope

    a = E[(x - Ex)(y - Ey)] / E[(y - Ey)^2].

Each row is shifted so that the slope becomes zero and the centre of mass the middle of the image. Known as
deskewing from Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, "Gradient-based learning applied to document
recognition", Proceedings of the IEEE 86, 1998.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.data.readers.images import standardise_each


def set_upright(images: Tensor) -> Tensor:
    """Images ``[n, c, h, w]``, standardised one by one, without their slant.

    Row i depends on image i only, bit for bit: neither the other images nor their number change it.
    A blank image stays blank.

    >>> line = torch.eye(9).flip(0).reshape(1, 1, 9, 9)
    >>> set_upright(line)[0, 0].amax(0).argmax()  # the middle column
    tensor(4)
    """
    light = images - images.amin((1, 2, 3), keepdim=True)
    mass = light.sum(1)
    y, x = (torch.linspace(-1, 1, size) for size in images.shape[2:])
    y = y[:, None]

    # Matrix products (matmul, einsum, affine_grid) would round an image by how many there are.
    # Rows come first: a sum to one number alone is cut between threads.
    def summed(values: Tensor) -> Tensor:
        return values.sum(2).sum(1)[:, None, None]

    total = summed(mass).clamp(min=1e-6)
    middle_y, middle_x = summed(mass * y) / total, summed(mass * x) / total
    dy, dx = y - middle_y, x - middle_x
    height = summed(mass * dy.square()) / total
    both = summed(mass * dy * dx) / total
    # steeper than the diagonal is no slant but something else
    slope = (both / height.clamp(min=1e-4)).clamp(-1, 1)
    columns = x + slope * y + middle_x
    rows = (y + middle_y).expand_as(columns)
    places = torch.stack([columns, rows], -1)
    moved = F.grid_sample(light, places, padding_mode="zeros", align_corners=True)
    return standardise_each(moved, scale=1.0, floor=1 / 255)
