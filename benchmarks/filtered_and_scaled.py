"""Filters over steps and scales of gradients, compared with DP-SGD at one budget, each at its best rate.

    python benchmarks/filtered_and_scaled.py [--data mnist] [--folder FOLDER] [--epsilon 3] [--out FILE]

A network of 784-64-10 on 55,000 of the training records, 240 steps of 1,000, clip norm 0.3, SGD with a rate
that falls linearly to 0. The rate is the one of six, each twice the one before, with the best accuracy on
the other 5,000 training records, from one run with a seed of its own. Then three more seeds are trained at
that rate, and the test records are looked at once for each. Noise and draws follow public seeds: this
measures accuracy, and its runs are not private.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.methods import AdaClip, DiSK, Doppler, DPAdamBC, ScaleThenPrivatise

RECORDS, SIZE, STEPS = 55_000, 1_000, 240
SEEDS = (1, 2, 3)
RATES = tuple(2.0**k for k in range(2, 8))

CONTENDERS: dict[str, tuple[Callable[[], eq.Method], float, tuple[float, ...]]] = {
    "dp-sgd": (lambda: eq.DPSGD(clip_norm=0.3), 0.0, RATES),
    "dp-sgd, momentum 0.9": (lambda: eq.DPSGD(clip_norm=0.3), 0.9, tuple(rate / 10 for rate in RATES)),
    "disk": (lambda: DiSK(clip_norm=0.3, kappa=0.7, gamma=0.5), 0.0, RATES),
    "doppler": (lambda: Doppler(clip_norm=0.3), 0.0, RATES),
    "scale-then-privatise": (lambda: ScaleThenPrivatise(clip_norm=0.3), 0.0, RATES),
    "adaclip": (lambda: AdaClip(clip_norm=0.3), 0.0, RATES),
    "dp-adam-bc": (lambda: DPAdamBC(clip_norm=0.3), 0.0, tuple(rate / 2**12 for rate in RATES)),
}
"""How each is made, the momentum of its optimiser, and the rates to choose from."""


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["input"]), batch["label"], reduction="none")


def accuracy(model: nn.Module, records: dict[str, torch.Tensor]) -> float:
    with torch.no_grad():
        return float((model(records["input"]).argmax(1) == records["label"]).float().mean()) * 100


def trained(name: str, data: dict, epsilon: float, rate: float, seed: int) -> nn.Module:
    make, momentum, _ = CONTENDERS[name]
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = eq.PrivateTraining(
            model,
            optimizer,
            loss=loss,
            data=data,
            sampling=eq.Poisson(SIZE, RECORDS, STEPS),
            method=make(),
            budget=eq.Budget(epsilon, 1e-5),
            scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS),
            reproducible=True,
            seed=seed,
            epsilon_every=10**9,
        )
        training.run(progress=False)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=("mnist", "fashion-mnist"), default="mnist")
    parser.add_argument("--folder", default=None)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--methods", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--out", type=Path, default=Path("filtered_and_scaled.jsonl"))
    given = parser.parse_args()
    found = eq.data.load(given.data, given.folder)
    order = torch.randperm(60_000, generator=torch.Generator().manual_seed(0))
    train, validation = (dict(found.train[part]) for part in (order[:RECORDS], order[RECORDS:]))
    test = dict(found.test[torch.arange(10_000)])
    for name in given.methods:
        start = time.perf_counter()
        scores = {
            rate: accuracy(trained(name, train, given.epsilon, rate, seed=100), validation)
            for rate in CONTENDERS[name][2]
        }
        best = max(scores, key=lambda rate: scores[rate])
        tests = [accuracy(trained(name, train, given.epsilon, best, seed), test) for seed in SEEDS]
        row = {"data": given.data, "epsilon": given.epsilon, "name": name, "rate": best}
        row |= {"validation": scores, "test": tests, "seconds": time.perf_counter() - start}
        with given.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)


if __name__ == "__main__":
    main()
