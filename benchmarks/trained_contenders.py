"""What measurements of accuracy share: a training in memory, and the choice of a rate off the test records.

Noise and draws follow public seeds, so that a figure can be made again: such runs are not private.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.app import harness

Fields = Mapping[str, Tensor]

DELTA = 1e-5


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of each record; the mean over its positions, where it has a label for each."""
    losses = F.cross_entropy(model(batch["input"]), batch["label"], reduction="none")
    return losses if losses.ndim == 1 else losses.mean(1)


@torch.no_grad()
def accuracy(model: nn.Module, records: Fields) -> float:
    """In percent."""
    return float((model(records["input"]).argmax(1) == records["label"]).double().mean()) * 100


def train(
    model: nn.Module,
    data: Fields,
    sampling: eq.privacy.Sampling,
    method: eq.Method,
    epsilon: float | None,
    *,
    rate: float,
    seed: int,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    micro_batch_size: int | None = None,
) -> eq.PrivateTraining:
    """Train in place with a rate that falls linearly to 0; answers the training.

    Args:
        epsilon: at `DELTA`; None for a method that has its noise multiplier, or adds no noise.
        optimizer: of (parameters, lr=rate).
    """
    moves = optimizer(model.parameters(), lr=rate)
    steps = sampling.steps
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = eq.PrivateTraining(
            model,
            moves,
            loss=loss,
            data=eq.Data(dict(data), microbatch_size=micro_batch_size),
            sampling=sampling,
            method=method,
            budget=None if epsilon is None else eq.Budget(epsilon, DELTA),
            run=eq.Run(
                scheduler=torch.optim.lr_scheduler.LambdaLR(moves, lambda step: 1 - step / steps),
                reproducible=True,
                seed=seed,
            ),
        )
        for _ in range(steps):
            training.take_step()  # `run` would end early, and quietly, when it is asked to stop
    return training


def small_network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


@dataclass(frozen=True)
class Contender:
    """A way to train the small network.

    Attributes:
        make: the method.
        sampling: of all of its steps.
        rates: to choose from.
        momentum: of its optimiser.
    """

    make: Callable[[], eq.Method]
    sampling: eq.privacy.Sampling
    rates: Sequence[float]
    momentum: float = 0.0

    def run(self, data: Fields, epsilon: float, rate: float, seed: int) -> eq.PrivateTraining:
        model = small_network(seed)
        return train(
            model,
            data,
            self.sampling,
            self.make(),
            epsilon,
            rate=rate,
            seed=seed,
            optimizer=partial(torch.optim.SGD, momentum=self.momentum),
        )


@dataclass(frozen=True)
class Images:
    """The training records in two, and the test records, of MNIST or Fashion-MNIST."""

    train: Fields
    validation: Fields
    test: Fields

    @classmethod
    def load(cls, name: str, folder: str | None, records: int) -> Images:
        """With so many training records; the others of the 60,000 are for validation."""
        found = eq.data.load(name, folder)
        order = torch.randperm(60_000, generator=torch.Generator().manual_seed(0))
        train, validation = (found.train[part] for part in (order[:records], order[records:]))
        return cls(train, validation, found.test[torch.arange(10_000)])


def tuned(contender: Contender, images: Images, epsilon: float, seeds: Sequence[int]) -> dict[str, Any]:
    """The rate that is best on the validation records, and the test accuracy of each seed at that rate."""

    def run(judges: Fields, rate: float, seed: int) -> tuple[float, Any]:
        training = contender.run(images.train, epsilon, rate, seed)
        return accuracy(training.model, judges), training.plan["gradient"]

    found = harness.tuned(
        partial(run, images.validation),
        partial(run, images.test),
        lambda one: one[0],
        contender.rates,
        seeds,
        tuning_seed=100,
    )
    gradient = found.results[0][1]
    return {
        "rate": found.rate,
        "noise_multiplier": gradient.noise_multiplier,
        "bands": getattr(gradient.mechanism, "memory", 0) + 1,
        "validation": {rate: score for rate, (score, _) in found.trials.items()},
        "test": [score for score, _ in found.results],
    }


def append(path: Path, row: Mapping[str, Any]) -> None:
    """One line of JSON more, and the same for people to see."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(row, flush=True)
