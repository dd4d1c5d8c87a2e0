"""A small network fitted on pictures that the library draws: it learns which two views show the same picture.

After T. Chen, S. Kornblith, M. Norouzi, G. Hinton, "A simple framework for contrastive learning of visual
representations", ICML 2020. Pictures of a random process in place of photographs are the idea of X. Tang, A.
Panda, V. Sehwag, P. Mittal, "Differentially private image classification by learning priors from random
processes", NeurIPS 2023. No record is read, so the network costs no privacy.

The weights that come with the package were made by

    python -m benchmarks.contrastive --channels 1 --output grey.safetensors
    python -m benchmarks.contrastive --channels 3 --output colour.safetensors

in 17 and 28 minutes of one core. Other machines round otherwise and end at slightly other weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn


class ContrastiveNet(nn.Module):
    """Five convolutions; features are three of their maps, averaged over cells.

    Args:
        channels: 1 or 3.

    >>> ContrastiveNet(1)(torch.randn(2, 1, 28, 28)).shape
    torch.Size([2, 3200])
    """

    channels: ClassVar = {1: "grey", 3: "colour"}

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a = _block(channels, 32, 5, 1)
        self.b = _block(32, 64, 3, 2)
        self.c = _block(64, 64, 3, 1)
        self.d = _block(64, 128, 3, 2)
        self.e = _block(128, 256, 3, 1)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @staticmethod
    def packaged(name: str, channels: int) -> ContrastiveNet:
        """With the weights of that name that come with the package, for a key of `channels`."""
        net = ContrastiveNet(channels)
        weights = load_file(
            Path(__file__).with_name(f"{name}-{ContrastiveNet.channels[channels]}.safetensors")
        )
        net.load_state_dict({key: value.float() for key, value in weights.items()})
        return net.eval().requires_grad_(False)

    def maps(self, images: Tensor) -> list[Tensor]:
        """Of the last three convolutions, for images ``[n, c, h, w]``."""
        before = self.c(self.b(self.a(images.contiguous(memory_format=torch.channels_last))))
        middle = self.d(before)
        return [before, middle, self.e(middle)]

    def forward(self, images: Tensor) -> Tensor:
        """Features ``[n, 3200]``: the maps averaged over 4 x 4, 3 x 3 and 2 x 2 cells."""
        pooled = zip(self.maps(images), (4, 3, 2), strict=True)
        return torch.cat([F.adaptive_avg_pool2d(values, cells).flatten(1) for values, cells in pooled], 1)


def _block(before: int, after: int, width: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(before, after, width, stride, width // 2)
    return nn.Sequential(convolution, nn.GroupNorm(8, after), nn.ReLU())
