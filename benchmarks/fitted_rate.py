"""A learning rate that is fitted privately, beside DP-SGD at each rate of a grid, on small networks.

    OMP_NUM_THREADS=1 python benchmarks/fitted_rate.py DATA --out rates.csv   # 12 minutes

20,000 training records of MNIST or Fashion-MNIST, 300 steps of 512, a network of 64 hidden units; accuracy on
5,000 other training records. `FittedRate` is trained once. DP-SGD has clip norm 0.1 and momentum 0.9, and its
best rate is the best on these same records: no epsilon covers that choice.
"""

from __future__ import annotations

import argparse
import csv
import time
import warnings

import torch

import equipoise as eq
from benchmarks.trained_contenders import DELTA, Fields, accuracy, loss, small_network

RECORDS, STEPS, SIZE, RATES = 20_000, 300, 512, (0.3, 1.0, 3.0, 9.0)


def trained(records: Fields, judges: Fields, epsilon: float, rate: float | None, seed: int) -> float:
    """Accuracy in percent; a rate of None is fitted."""
    model = small_network(seed)
    momentum = 0.0 if rate is None else 0.9
    method = eq.methods.FittedRate() if rate is None else eq.DPSGD(clip_norm=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = eq.PrivateTraining(
            model,
            torch.optim.SGD(model.parameters(), lr=rate or 1.0, momentum=momentum),
            loss=loss,
            data=dict(records),
            sampling=eq.Poisson(SIZE, RECORDS, STEPS),
            method=method,
            budget=eq.Budget(epsilon, DELTA),
            run=eq.Run(reproducible=True, seed=seed, ema_decay=0.99),
        )
        training.run(progress=False)
    return accuracy(model, judges)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--out", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    with open(given.out, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("data", "epsilon", "rate", "seed", "accuracy", "seconds"))
        for data in ("mnist", "fashion-mnist"):
            found = eq.data.load(data, given.folder)
            order = torch.randperm(60_000, generator=torch.Generator().manual_seed(0))
            records, judges = found.train[order[:RECORDS]], found.train[order[55_000:]]
            for epsilon in (1.0, 3.0, 8.0):
                for rate in (None, *RATES):
                    for seed in range(given.seeds):
                        began = time.process_time()
                        share = trained(records, judges, epsilon, rate, seed)
                        seconds = round(time.process_time() - began, 1)
                        rows.writerow((data, epsilon, rate or "fitted", seed, f"{share:.2f}", seconds))
                        file.flush()


if __name__ == "__main__":
    main()
