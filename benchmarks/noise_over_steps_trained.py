"""Trained at one budget with five kinds of noise and draws, each at its best learning rate.

    python -m benchmarks.noise_over_steps_trained --data mnist [--folder FOLDER] [--epsilon 8 3 1] [--out F]

The small network on 55,000 of the training records, 400 steps of 1,100, clip norm 0.3, SGD with a rate that
falls linearly to 0. The rate is the one of 2, 4, 8, ... 64 with the best accuracy on the other 5,000 training
records, from one run with a seed of its own. Then three more seeds are trained at that rate, and the test
records are looked at once for each.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import equipoise as eq
from benchmarks.trained_contenders import Contender, Images, append, tuned
from equipoise.methods import OneStep

POISSON = eq.Poisson(1_100, 55_000, 400)
EPOCHS = eq.FixedEpochs(1_100, 55_000, 400)
RATES = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
EPSILONS = (8.0, 3.0, 1.0)

CONTENDERS = {
    "dp-sgd, Poisson": Contender(lambda: eq.DPSGD(clip_norm=0.3), POISSON, RATES),
    "dp-mf, groups in turn": Contender(lambda: eq.DPMF(clip_norm=0.3), POISSON, RATES),
    "dp-mf, no sampling assumed": Contender(lambda: eq.DPMF(clip_norm=0.3), EPOCHS, RATES),
    "dp-mf of one step, no sampling assumed": Contender(
        lambda: eq.DPMF(clip_norm=0.3, strategy=OneStep()), EPOCHS, RATES
    ),
    "dp-sgd, no sampling assumed": Contender(lambda: eq.DPSGD(clip_norm=0.3), EPOCHS, RATES),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=("mnist", "fashion-mnist"), required=True)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--epsilon", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--out", type=Path, default=Path("noise_over_steps.jsonl"))
    given = parser.parse_args()
    images = Images.load(given.data, given.folder, POISSON.population)
    for epsilon in given.epsilon:
        for name in given.only:
            found = tuned(CONTENDERS[name], images, epsilon, seeds=(1, 2, 3))
            append(given.out, {"data": given.data, "epsilon": epsilon, "name": name, **found})


if __name__ == "__main__":
    main()
