"""Filters over steps and scales of gradients, compared with DP-SGD at one budget, each at its best rate.

    python -m benchmarks.filtered_and_scaled [--data mnist] [--folder FOLDER] [--epsilon 3] [--out FILE]

The small network on 55,000 of the training records, 240 steps of 1,000, clip norm 0.3, SGD with a rate that
falls linearly to 0. The rate is the one of six, each twice the one before, with the best accuracy on the
other 5,000 training records, from one run with a seed of its own. Then three more seeds are trained at that
rate, and the test records are looked at once for each.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import equipoise as eq
from benchmarks.trained_contenders import Contender, Images, append, tuned
from equipoise.methods import AdaClip, DiSK, Doppler, DPAdamBC, JointWhitening, ScaleThenPrivatise

DRAWS = eq.Poisson(1_000, 55_000, 240)
RATES = tuple(2.0**k for k in range(2, 8))

CONTENDERS = {
    "dp-sgd": Contender(lambda: eq.DPSGD(clip_norm=0.3), DRAWS, RATES),
    "dp-sgd, momentum 0.9": Contender(
        lambda: eq.DPSGD(clip_norm=0.3), DRAWS, [rate / 10 for rate in RATES], momentum=0.9
    ),
    "disk": Contender(lambda: DiSK(clip_norm=0.3, kappa=0.7, gamma=0.5), DRAWS, RATES),
    "doppler": Contender(lambda: Doppler(clip_norm=0.3), DRAWS, RATES),
    "scale-then-privatise": Contender(lambda: ScaleThenPrivatise(clip_norm=0.3), DRAWS, RATES),
    "joint-whitening": Contender(lambda: JointWhitening(clip_norm=0.3), DRAWS, RATES),
    "adaclip": Contender(lambda: AdaClip(clip_norm=0.3), DRAWS, RATES),
    "dp-adam-bc": Contender(lambda: DPAdamBC(clip_norm=0.3), DRAWS, [rate / 2**12 for rate in RATES]),
}


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
    images = Images.load(given.data, given.folder, DRAWS.population)
    for name in given.methods:
        start = time.perf_counter()
        found = tuned(CONTENDERS[name], images, given.epsilon, seeds=(1, 2, 3))
        row = {"data": given.data, "epsilon": given.epsilon, "name": name, **found}
        append(given.out, {**row, "seconds": time.perf_counter() - start})


if __name__ == "__main__":
    main()
