"""Ordinary models and data pipelines: does one record move anything besides its own part?

Each is written as one would write it without a thought of privacy: transforms that ask torch or NumPy for
random numbers, a collate function that pads, dropout, layers that are skipped at random, sampled latents.
`audit` holds one of them against its bound on neighbouring data sets.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import equipoise as eq
from equipoise.audit.neighbours import CHANGES, NeighbourAudit, audit_neighbours

__all__ = ["PIPELINES", "Pipeline", "audit"]

RECORDS, DRAWN, MICRO_BATCH = 96, 64, 16
"""Records, how many a step draws on average, and records per forward: several forwards in a step."""


@dataclass(frozen=True)
class Pipeline:
    """A model with its loss and its data.

    Attributes:
        make: the model, with its initial weights.
        loss: loss(model, batch) -> [B].
        data: the records.
        options: further arguments of the training.
    """

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    data: Callable[[], Any]
    options: Mapping[str, Any] = field(default_factory=dict)


def audit(
    name: str, positions: int = 10, threads: tuple[int, ...] = (1, 2), seed: int = 0, **options: Any
) -> NeighbourAudit:
    """The audit of one pipeline, at C = 1; the options are those of `Data`."""
    pipeline = PIPELINES[name]
    torch.manual_seed(seed)
    return audit_neighbours(
        pipeline.make(),
        pipeline.loss,
        eq.Data(pipeline.data(), **{"microbatch_size": MICRO_BATCH, **pipeline.options, **options}),
        sampling=eq.Poisson(DRAWN, RECORDS, 10),
        method=eq.DPSGD(clip_norm=1.0, noise_multiplier=2.0),
        positions=positions,
        threads=threads,
        seed=seed,
    )


# ---- data


def features() -> dict[str, Tensor]:
    x = torch.randn(RECORDS, 20)
    return {"x": x, "y": (x[:, 0] > 0).long()}


def images() -> dict[str, Tensor]:
    return {"x": torch.randn(RECORDS, 3, 12, 12), "y": torch.randint(0, 5, (RECORDS,))}


def sentences() -> dict[str, Tensor]:
    return {"x": torch.randint(1, 50, (RECORDS, 12)), "y": torch.randint(0, 2, (RECORDS,))}


def sequences() -> dict[str, Tensor]:
    return {
        "x": torch.randn(RECORDS, 9, 6),
        "n": torch.randint(1, 10, (RECORDS,)),
        "y": torch.randint(0, 3, (RECORDS,)),
    }


class Pictures(Dataset):
    """Pictures with random transforms in `__getitem__`, as they are ordinarily written."""

    def __init__(self, transform: Callable[[Tensor], Tensor]) -> None:
        self.data, self.transform = images(), transform

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"x": self.transform(self.data["x"][number]), "y": self.data["y"][number]}


def flipped_and_cropped(picture: Tensor) -> Tensor:
    if torch.rand(()) < 0.5:
        picture = picture.flip(2)
    top, left = torch.randint(0, 3, (2,)).tolist()
    return F.pad(picture, (1, 1, 1, 1))[:, top : top + 12, left : left + 12]


def noisy_and_erased(picture: Tensor) -> Tensor:
    """By NumPy and Python; how many numbers are drawn depends on the picture."""
    picture = picture + torch.from_numpy(np.random.normal(0, 0.1, tuple(picture.shape))).float()
    if random.random() < 0.5 and picture.mean() > 0:
        top, left = random.randrange(8), random.randrange(8)
        picture = picture.clone()
        picture[:, top : top + 4, left : left + 4] = 0.0
    return picture


class Texts(Dataset):
    """Texts of many lengths."""

    def __init__(self) -> None:
        self.lengths = torch.randint(3, 13, (RECORDS,)).tolist()
        self.tokens = [torch.randint(1, 50, (n,)) for n in self.lengths]
        self.labels = torch.randint(0, 2, (RECORDS,))

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.tokens[number], self.labels[number]


def padded(items: list[tuple[Tensor, Tensor]], length: int | None = None) -> dict[str, Tensor]:
    """A batch, padded to the longest text of it or to a fixed length."""
    texts = [tokens for tokens, _ in items]
    batch = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    if length is not None:
        batch = F.pad(batch, (0, length - batch.shape[1]))
    return {"x": batch, "y": torch.stack([label for _, label in items])}


# ---- losses


def classified(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def with_lengths(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["n"]), batch["y"], reduction="none")


def hinge(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.relu(1 - (2.0 * batch["y"] - 1) * model(batch["x"]).squeeze(1))


def next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["x"][:, :-1])
    return F.cross_entropy(scores.transpose(1, 2), batch["x"][:, 1:], reduction="none").mean(1)


def elbo(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    rebuilt, mean, log_variance = model(batch["x"])
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
    return (rebuilt - batch["x"]).square().sum(1) + divergence


def denoising(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of a diffusion model: a time and noise of its own for every record."""
    x = batch["x"]
    time, noise = torch.rand(len(x), 1), torch.randn_like(x)
    return (model(torch.cat([(1 - time) * x + time * noise, time], 1)) - noise).square().mean(1)


# ---- models


def mlp(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), *layers, nn.Linear(32, 2))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(64, 5),
    )  # fmt: skip


class Residual(nn.Module):
    """A block with a shortcut, which is skipped at random by each record for itself, or by all at once.

    Args:
        channels: C.
        skipped: probability of skipping.
        together: one random number for the whole batch.
    """

    def __init__(self, channels: int, skipped: float = 0.0, together: bool = False) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(2, channels)
        self.skipped, self.together = skipped, together

    def forward(self, x: Tensor) -> Tensor:
        if not self.skipped:
            return x + F.relu(self.norm(self.conv(x)))
        shape = () if self.together else (len(x), 1, 1, 1)
        kept = (torch.rand(shape) >= self.skipped).float() / (1 - self.skipped)
        return x + kept * F.relu(self.norm(self.conv(x)))


def resnet(skipped: float = 0.0, together: bool = False) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), *(Residual(8, skipped, together) for _ in range(3)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (
            nn.Linear(20, 8),
            nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 20)),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        latent = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        return self.decoder(latent), mean, log_variance


class Recurrent(nn.Module):
    """The last output of an LSTM or a GRU; packed, where lengths are given."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.head = kind(6, 10, batch_first=True), nn.Linear(10, 3)  # type: ignore[arg-type, call-arg]

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            return self.head(self.layer(x)[0][:, -1])
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths.clamp(min=1), batch_first=True, enforce_sorted=False
        )
        return self.head(self.layer(packed)[1][-1])


class Reader(nn.Module):
    """A transformer encoder over tokens; padding is masked."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=0)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        empty = tokens == 0
        first = torch.arange(tokens.shape[1]) == 0
        hidden = self.encoder(self.embedding(tokens), src_key_padding_mask=empty & ~first)
        weights = (~empty).float()[..., None]
        return self.head((weights * hidden).sum(1) / weights.sum(1).clamp(min=1))


class Writer(nn.Module):
    """A small causal language model with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 16), nn.Embedding(12, 16)
        self.query, self.value, self.norm = nn.Linear(16, 32), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        query, key = self.query(self.norm(hidden)).chunk(2, -1)
        mixed = F.scaled_dot_product_attention(query, key, self.value(hidden), is_causal=True)
        return (hidden + mixed) @ self.tokens.weight.T


class LowRank(nn.Module):
    """A frozen linear layer with a trained update of low rank (LoRA by hand)."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(0.1 * torch.randn(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + x @ self.down.T @ self.up.T


def lora() -> nn.Module:
    return nn.Sequential(LowRank(20, 32), nn.ReLU(), nn.Dropout(0.1), LowRank(32, 2))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16, padding_idx=0), nn.Linear(16, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(tokens).mean(1)))


def flipped(batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Mirror images by the generator that the training hands over."""
    mirrored = torch.rand(len(batch["x"]), generator=generator) < 0.5
    return {**batch, "x": torch.where(mirrored[:, None, None, None], batch["x"].flip(3), batch["x"])}


def separable() -> nn.Module:
    """Depthwise and pointwise convolutions over a signal, layer norms, GELU."""
    return nn.Sequential(
        nn.Conv1d(9, 9, 3, padding=1, groups=9), nn.GELU(), nn.Conv1d(9, 12, 1), nn.Flatten(),
        nn.LayerNorm(72), nn.Linear(72, 3),
    )  # fmt: skip


PIPELINES: dict[str, Pipeline] = {
    "linear with a hinge": Pipeline(lambda: nn.Linear(20, 1), hinge, features),
    "MLP with ReLU": Pipeline(mlp, classified, features),
    "MLP with dropout": Pipeline(lambda: mlp(nn.Dropout(0.3)), classified, features),
    "CNN with GroupNorm": Pipeline(cnn, classified, images),
    "ResNet with GroupNorm": Pipeline(resnet, classified, images),
    "flips and crops by torch": Pipeline(cnn, classified, lambda: Pictures(flipped_and_cropped)),
    "noise and erasing by NumPy and Python": Pipeline(cnn, classified, lambda: Pictures(noisy_and_erased)),
    "two augmented views": Pipeline(cnn, classified, images, {"augmentation": flipped, "views": 2}),
    "stochastic depth by record": Pipeline(lambda: resnet(0.3), classified, images),
    "stochastic depth by batch": Pipeline(lambda: resnet(0.3, together=True), classified, images),
    "separable convolutions over a signal": Pipeline(separable, classified, sequences),
    "VAE": Pipeline(VAE, elbo, features),
    "diffusion": Pipeline(
        lambda: nn.Sequential(nn.Linear(21, 32), nn.SiLU(), nn.Linear(32, 20)), denoising, features
    ),
    "LSTM": Pipeline(lambda: Recurrent(nn.LSTM), classified, sequences),
    "packed GRU": Pipeline(lambda: Recurrent(nn.GRU), with_lengths, sequences),
    "transformer with dropout": Pipeline(lambda: Reader(0.1), classified, sentences),
    "texts padded to a length": Pipeline(Reader, classified, Texts, {"collate": lambda i: padded(i, 12)}),
    "texts padded to the longest": Pipeline(Reader, classified, Texts, {"collate": padded}),
    "bag of embeddings": Pipeline(Bag, classified, sentences),
    "causal language model": Pipeline(Writer, next_token, sentences),
    "LoRA by hand": Pipeline(lora, classified, features),
}
"""By name."""


def main(names: Sequence[str]) -> None:
    """Print the table, or some of its lines."""
    print("| pipeline | added | removed | replaced | others |\n|---|---|---|---|---|")
    for name in names or PIPELINES:
        try:
            found = audit(name)
        except ValueError as error:
            print(f"| {name} | refused: {str(error)[:150]} | | | |", flush=True)
            continue
        worst = [pair for kind in CHANGES if (pair := found.worst_of(kind)) is not None]
        cells = [f"{pair.movement:.7f}" for pair in worst[:3]] + [f"{worst[3].movement:.1e}"]
        print(f"| {name} | {' | '.join(cells)} |{'' if found.holds else ' TOO FAR'}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
