"""Trained at one budget with four kinds of noise and draws, each at its best learning rate.

    python benchmarks/noise_over_steps_trained.py --data mnist [--folder FOLDER] [--out FILE]

A network of 784-64-10 on 55,000 of the training records, 400 steps of 1,100, clip norm 0.3, SGD with a rate
that falls linearly to 0. The rate is the one of 2, 4, 8, ... 64 with the best accuracy on the other 5,000
training records, from one run with a seed of its own. Then three more seeds are trained at that rate, and
the test records are looked at once for each. Noise and draws follow public seeds: this measures accuracy,
and its runs are not private.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import equipoise as eq

RECORDS, SIZE, STEPS = 55_000, 1_100, 400
RATES = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
SEEDS = (1, 2, 3)
EPSILONS = (1.0, 3.0, 8.0)
POISSON = eq.Poisson(SIZE, RECORDS, STEPS)
EPOCHS = eq.FixedEpochs(SIZE, RECORDS, STEPS)

CONTENDERS: dict[str, tuple[Callable[[], eq.Method], eq.privacy.Sampling]] = {
    "dp-sgd, Poisson": (lambda: eq.DPSGD(clip_norm=0.3), POISSON),
    "dp-mf, groups in turn": (lambda: eq.DPMF(clip_norm=0.3), POISSON),
    "dp-mf, no sampling assumed": (lambda: eq.DPMF(clip_norm=0.3), EPOCHS),
    "dp-sgd, no sampling assumed": (lambda: eq.DPSGD(clip_norm=0.3), EPOCHS),
}


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["input"]), batch["label"], reduction="none")


def accuracy(model: nn.Module, records: dict[str, torch.Tensor]) -> float:
    with torch.no_grad():
        return float((model(records["input"]).argmax(1) == records["label"]).float().mean()) * 100


def trained(name: str, data: dict, epsilon: float, rate: float, seed: int) -> tuple[nn.Module, dict]:
    make, sampling = CONTENDERS[name]
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = eq.PrivateTraining(
            model,
            optimizer,
            loss=loss,
            data=data,
            sampling=sampling,
            method=make(),
            budget=eq.Budget(epsilon, 1e-5),
            scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS),
            reproducible=True,
            seed=seed,
            epsilon_every=10**9,
        )
        training.run(progress=False)
    gradient = training.plan["gradient"]
    bands = getattr(gradient.mechanism, "memory", 0) + 1
    return model, {"noise_multiplier": gradient.noise_multiplier, "bands": bands}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=("mnist", "fashion-mnist"), required=True)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--out", type=Path, default=Path("noise_over_steps.jsonl"))
    given = parser.parse_args()
    found = eq.data.load(given.data, given.folder)
    order = torch.randperm(60_000, generator=torch.Generator().manual_seed(0))
    train, validation = (dict(found.train[part]) for part in (order[:RECORDS], order[RECORDS:]))
    test = dict(found.test[torch.arange(10_000)])
    for epsilon in sorted(EPSILONS, reverse=True):
        for name in CONTENDERS:
            scores = {}
            for rate in RATES:
                model, _ = trained(name, train, epsilon, rate, seed=100)
                scores[rate] = accuracy(model, validation)
            best = max(scores, key=lambda rate: scores[rate])
            tests, facts = [], {}
            for seed in SEEDS:
                model, facts = trained(name, train, epsilon, best, seed)
                tests.append(accuracy(model, test))
            row = {"data": given.data, "epsilon": epsilon, "name": name, "rate": best, **facts}
            row |= {"validation": scores, "test": tests}
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)


if __name__ == "__main__":
    main()
