"""Preparation of images, one record at a time.

Every image x is standardised by its own mean and standard deviation,

    x' = (x - mean(x)) / max(std(x), floor),

so that no statistic of the private set is used: the mean image or the per-channel deviations of the training
set would themselves be queries on private data, with no noise and no entry in the ledger.
"""

from __future__ import annotations

import torch
from torch import Tensor


def standardise_each(
    images: Tensor, *, scale: float = 255.0, floor: float | None = None, chunk: int = 8192
) -> Tensor:
    """Images with mean 0 and standard deviation 1 each, computed only from that image, bit for bit.

    Args:
        images: ``[n, ...]``, integers or floats; the mean and deviation run over all axes but the first.
        scale: the public largest value; pixels are divided by it first.
        floor: the least deviation divided by (after scaling), so that a blank image stays blank; one grey
            level (``1 / scale``) if None.
        chunk: images per pass; bounds the memory of temporaries.

    Returns:
        float32 ``[n, ...]``.

    >>> x = standardise_each(torch.tensor([[[0, 255], [0, 255]], [[7, 7], [7, 7]]], dtype=torch.uint8))
    >>> x.flatten(1).tolist()
    [[-1.0, 1.0, -1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
    """
    least = 1.0 / scale if floor is None else floor
    result = torch.empty(images.shape, dtype=torch.float32)
    for start in range(0, len(images), chunk):
        part = images[start : start + chunk].to(torch.float32).flatten(1) / scale
        if len(part) == 1:
            part = part.repeat(2, 1)  # the mean of a large image alone is cut between threads
        part -= part.mean(1, keepdim=True)
        deviation = part.square().mean(1, keepdim=True).sqrt()
        part /= deviation.clamp(min=least)
        result[start : start + chunk] = part[: len(images) - start].reshape(-1, *images.shape[1:])
    return result
