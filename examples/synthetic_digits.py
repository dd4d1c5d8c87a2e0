"""Synthetic digits: a generator is trained privately, and its samples train a classifier.

    python examples/synthetic_digits.py --model vae --epsilon 8
    python examples/synthetic_digits.py --model diffusion --views 8 --seeds 3

The figure is the accuracy on real test digits of a logistic regression that saw samples alone. What follows
from the generator, any number of samples too, costs nothing more.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional

import equipoise as eq

PIXELS, CLASSES, LATENT, LEVELS = 64, 10, 8, 50
TRAIN = 1400  # of 1,797, in the order of the set


def with_class(x: Tensor, label: Tensor) -> Tensor:
    """Pixels or codes with the class behind them."""
    return torch.cat([x, functional.one_hot(label, CLASSES).to(x)], dim=1)


class VAE(nn.Module):
    """A variational autoencoder, conditioned on the class."""

    clip_norm, learning_rate = 3.0, 5e-3

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(PIXELS + CLASSES, 128), nn.Tanh(), nn.Linear(128, 2 * LATENT))
        self.decode = nn.Sequential(nn.Linear(LATENT + CLASSES, 128), nn.Tanh(), nn.Linear(128, PIXELS))

    def loss(self, x: Tensor, label: Tensor) -> Tensor:
        """Minus the evidence bound of each record, which draws its own noise; [B]."""
        mean, log_variance = self.encode(with_class(x, label)).chunk(2, dim=1)
        code = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        logits = self.decode(with_class(code, label))
        missed = functional.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1)
        return missed + 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)

    def sample(self, label: Tensor) -> Tensor:
        """Pixels of new records of these classes."""
        return self.decode(with_class(torch.randn(len(label), LATENT), label)).sigmoid()


class Diffusion(nn.Module):
    """A denoiser of 50 levels of noise, conditioned on the class, that predicts the clean record."""

    clip_norm, learning_rate = 10.0, 2e-3
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(PIXELS + CLASSES + 4, 256),
            nn.SiLU(),
            nn.Linear(256, 256),
            nn.SiLU(),
            nn.Linear(256, PIXELS),
        )
        self.register_buffer("kept", torch.cos(torch.linspace(0, 1.5, LEVELS + 1)).square())

    def clean(self, x: Tensor, level: Tensor, label: Tensor) -> Tensor:
        """The clean record behind a noisy one."""
        time = (level / LEVELS).to(x)[:, None]
        waves = [time, (3 * time).sin(), (6 * time).sin(), (9 * time).cos()]
        return self.net(torch.cat([with_class(x, label), *waves], dim=1))

    def loss(self, x: Tensor, label: Tensor) -> Tensor:
        """At a level of noise that each record draws, with noise of its own; [B]."""
        x = 2 * x - 1
        level = torch.randint(1, LEVELS + 1, (len(x),))
        kept = self.kept[level][:, None]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * torch.randn_like(x)
        return (self.clean(noisy, level, label) - x).square().sum(1)

    def sample(self, label: Tensor) -> Tensor:
        """Pixels of new records of these classes, from noise, level by level."""
        x = torch.randn(len(label), PIXELS)
        for level in range(LEVELS, 0, -1):
            here, after = self.kept[level], self.kept[level - 1]
            clean = self.clean(x, torch.full((len(label),), level), label).clamp(-1, 1)
            x = after.sqrt() * clean + (1 - after).sqrt() * (x - here.sqrt() * clean) / (1 - here).sqrt()
        return (x + 1) / 2


MODELS = {"vae": VAE, "diffusion": Diffusion}


def main(model: str = "vae", epsilon: float = 8.0, views: int = 1, steps: int = 400, seed: int = 0) -> float:
    """Accuracy on real digits of a classifier that saw samples alone.

    Args:
        model: "vae" or "diffusion".
        epsilon: at delta 1e-5.
        views: draws of the loss's random numbers that are averaged before a record's gradient is clipped.
        steps: of the training.
        seed: of noise and draws too, so that a figure can be made again: the run is not private.
    """
    pixels, labels = (torch.from_numpy(one) for one in load_digits(return_X_y=True))
    pixels = pixels.float() / 16
    train, test = slice(0, TRAIN), slice(TRAIN, None)
    torch.manual_seed(seed)
    generator = MODELS[model]()
    training = eq.PrivateTraining(
        generator,
        torch.optim.Adam(generator.parameters(), lr=generator.learning_rate),
        loss=lambda model, batch: model.loss(batch["input"], batch["label"]),
        data=eq.Data({"input": pixels[train], "label": labels[train]}, views=views),
        sampling=eq.Poisson(expected_batch_size=200, population=TRAIN, steps=steps),
        method=eq.DPSGD(clip_norm=generator.clip_norm),
        budget=eq.Budget(epsilon, delta=1e-5),
        run=eq.Run(seed=seed, reproducible=True),
    )
    training.run(progress=False, stop="return")
    chosen = torch.arange(CLASSES).repeat(200)
    with torch.no_grad():
        samples = generator.sample(chosen)
    classifier = LogisticRegression(max_iter=1000).fit(samples, chosen)
    return float(classifier.score(pixels[test], labels[test]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="vae")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--views", type=int, default=1)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    found = [main(given.model, given.epsilon, given.views, given.steps, seed) for seed in range(given.seeds)]
    print(f"{given.model}: {statistics.median(found):.1%} ({', '.join(f'{one:.1%}' for one in found)})")
