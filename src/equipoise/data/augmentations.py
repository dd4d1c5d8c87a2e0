"""Random views of images: shifts by a few pixels, and mirror images where left and right mean nothing.

Every record is changed on its own, from the secret randomness of its draw. The views of a record are averaged
before its gradient is clipped, so they cost no privacy (S. De et al., "Unlocking high-accuracy differentially
private image classification through scale", 2022).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def shift_and_flip(
    images: Tensor, generator: torch.Generator, *, pixels: int | None = None, flip: bool | None = None
) -> Tensor:
    """Images ``[B, c, h, w]``, each shifted by its own random offset and perhaps mirrored.

    Args:
        images: floating point.
        generator: on the CPU; a training gives one that follows the draw's secret.
        pixels: largest shift; an eighth of the shorter side by default.
        flip: mirror half of them; for colour images by default, since digits and letters have a right way
            round.

    >>> x = torch.arange(16.0).reshape(1, 1, 4, 4)
    >>> shift_and_flip(x, torch.Generator().manual_seed(0), pixels=0, flip=False).equal(x)
    True
    """
    count, channels, height, width = images.shape
    most = min(height, width) // 8 if pixels is None else pixels
    device = images.device
    if most:
        offsets = torch.randint(0, 2 * most + 1, (2, count), generator=generator).to(device)
        padded = F.pad(images, (most,) * 4, mode="replicate")
        rows = (offsets[0, :, None] + torch.arange(height, device=device))[:, None, :, None]
        columns = (offsets[1, :, None] + torch.arange(width, device=device))[:, None, None, :]
        records = torch.arange(count, device=device)[:, None, None, None]
        images = padded[records, torch.arange(channels, device=device)[None, :, None, None], rows, columns]
    if channels == 3 if flip is None else flip:
        mirrored = (torch.rand(count, generator=generator) < 0.5).to(device)
        images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
    return images
