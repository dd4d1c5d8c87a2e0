"""The models of the bench, beside those that the package knows by name.

    equipoise train --data cifar10 --data-dir DIR --model benchmarks.models:resnet20 --epsilon 3

Models on fixed features are linear: give the features as data (`benchmarks.data`) with `--model logistic`.
"""

from __future__ import annotations

from math import prod

import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.data import DataSet


def linear(dataset: DataSet) -> nn.Module:
    """One linear layer, random start."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(dataset.input_shape), dataset.num_classes))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with group normalisation, and a shortcut."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet20(dataset: DataSet) -> nn.Module:
    """ResNet-20 with group normalisation, since batch normalisation mixes records.

    K. He et al., "Deep residual learning for image recognition", CVPR 2016.
    """
    groups, before = 8, 16
    layers: list[nn.Module] = [
        nn.Conv2d(dataset.input_shape[0], 16, 3, padding=1, bias=False),
        nn.GroupNorm(groups, 16),
        nn.ReLU(),
    ]
    for width, stride in ((16, 1), (32, 2), (64, 2)):
        for i in range(3):
            layers.append(BasicBlock(before, width, stride if i == 0 else 1, groups))
            before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, dataset.num_classes))


class TextBag(nn.Module):
    """The mean of a text's token embeddings, then a linear layer; token 0 is padding and does not count."""

    def __init__(self, vocabulary_size: int, num_classes: int, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, width)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.head = nn.Linear(width, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids ``[B, S]`` -> logits ``[B, num_classes]``; a text without tokens has the mean 0."""
        return self.head(mean_of_tokens(self.embedding(tokens), tokens))


def mean_of_tokens(values: Tensor, tokens: Tensor) -> Tensor:
    """Of ``[B, S, width]`` over the tokens that are no padding."""
    present = (tokens != 0).unsqueeze(-1).to(values.dtype)
    # weighting by the mask keeps padding out of the gradient as well as out of the sum
    return (values * present).sum(1) / present.sum(1).clamp(min=1.0)


class TextGRU(nn.Module):
    """The mean of a GRU's states over a text's first 24 tokens, then a linear layer; token 0 is padding.

    Padding stands at the end of a text, so that no state of a token depends on it.
    """

    length = 24

    def __init__(self, vocabulary_size: int, num_classes: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens[:, : self.length]
        states, _ = self.gru(self.embedding(tokens))
        return self.head(mean_of_tokens(states, tokens))


def text_gru(dataset: DataSet) -> nn.Module:
    """16-wide token embeddings, a GRU over 24 tokens, one linear layer."""
    assert dataset.vocabulary_size is not None
    return TextGRU(dataset.vocabulary_size, dataset.num_classes)


def text_bag(dataset: DataSet) -> nn.Module:
    """The mean of 32-wide token embeddings, one linear layer."""
    assert dataset.vocabulary_size is not None
    return TextBag(dataset.vocabulary_size, dataset.num_classes)
