"""User-level federated learning on CIFAR-10 with noise for a larger cohort than is simulated.

    python benchmarks/user_level.py [--folder FOLDER] [--rounds 1500] [--minutes 60] [--out FILE]

The configuration of pfl-research's CIFAR-10 benchmark with central privacy (its `baseline.yaml`): 1,000 users
of 50 records each, cohorts of 50, one local epoch in batches of 10 at rate 0.1, updates clipped at 0.4,
server rate 1. The noise is what 1,500 rounds with cohorts of 1,000 out of a million users need for epsilon 2
at delta 1e-6, scaled to a cohort of 50. So the run shows the accuracy of the larger one. Its
statement claims the epsilon of the noise that it adds itself, which is large.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.federated import LocalUpdates
from equipoise.privacy import calibrate_noise_multiplier

USERS, RECORDS, COHORT, ROUNDS = 1_000, 50, 50, 1_500
POPULATION, NOISE_COHORT, EPSILON, DELTA = 1_000_000, 1_000, 2.0, 1e-6


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1_600, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["input"]), batch["label"], reduction="none")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default=None)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--minutes", type=float, default=60.0, help="of the processor")
    parser.add_argument("--out", type=Path, default=Path("user_level.jsonl"))
    given = parser.parse_args()
    found = eq.data.load("cifar10", given.folder)
    order = torch.randperm(USERS * RECORDS, generator=torch.Generator().manual_seed(0))
    users = {name: leaf.unflatten(0, (USERS, RECORDS)) for name, leaf in dict(found.train[order]).items()}
    test = dict(found.test[torch.arange(10_000)])

    large = eq.Poisson(NOISE_COHORT, POPULATION, ROUNDS)
    noise = calibrate_noise_multiplier(large, eq.Budget(EPSILON, DELTA))
    noise_multiplier = noise * COHORT / NOISE_COHORT

    model = network()
    training = eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        loss=LocalUpdates(loss, steps=RECORDS // 10, batch_size=10, learning_rate=0.1),
        data=eq.Data(users, microbatch_size=8),
        sampling=eq.Poisson(COHORT, USERS, given.rounds),
        method=eq.DPSGD(clip_norm=0.4, noise_multiplier=noise_multiplier),
        unit=eq.Users(torch.arange(USERS), rows="update", records_per_user=1),
    )
    print(f"noise multiplier {noise} for cohorts of {NOISE_COHORT:,}, here {noise_multiplier}", flush=True)
    begin = time.process_time()
    for step in training:
        if step.step % 10 == 0 or step.step == given.rounds:
            model.eval()
            with torch.no_grad():
                logits = torch.cat([model(part) for part in test["input"].split(1_000)])
            model.train()
            row = {
                "round": step.step,
                "accuracy": round(float((logits.argmax(1) == test["label"]).float().mean()) * 100, 2),
                "seconds": round(time.process_time() - begin),
            }
            print(row, flush=True)
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            if row["seconds"] > 60 * given.minutes:
                break
    statement = training.finish(stop_fixed_beforehand=False).statement
    print(f"the statement of this run: guarantee {statement.guarantee}, epsilon {statement.epsilon}")


if __name__ == "__main__":
    main()
