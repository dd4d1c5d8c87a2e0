"""A prototype: DP-SGD whose inputs are whitened by their second moment, released jointly with the gradients.

    python -m benchmarks.joint_whitening --folder DATA [--data mushroom mnist] [--epsilons 1 3] [--out FILE]

A bare loop over a linear model on the features of `benchmarks.whole_data`, which holds no ledger and no
secret noise. `docs/measurements/joint-whitening.md` derives the method. Both methods have a momentum of 0.9
and take the best of the same learning rates on the part of the training records that is held out. Then five
further seeds train on all private training records, and the test records judge.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import equipoise as eq
from benchmarks.trained_contenders import DELTA, append
from benchmarks.whole_data.cells import SEEDS, TUNING_SEEDS
from benchmarks.whole_data.contenders import MOMENTUM
from benchmarks.whole_data.problems import DESIGNS, Problem, Split
from equipoise.privacy.accounting.calibrate import calibrate_noise_multiplier

RATES = (0.4, 1.6, 6.4, 25.6)
CLIP_NORM = 1.0
LEAST_DAMPING = 1e-4


@dataclass(frozen=True)
class Whitening:
    """Second moments of the inputs, from noised sums, and the root of their inverse.

    Attributes:
        share: of 1 / z^2 that the second moments take; 0 releases none, and is DP-SGD.
    """

    share: float

    def gradient_noise(self, multiplier: float) -> float:
        return multiplier / math.sqrt(1 - self.share)

    def moment_noise(self, multiplier: float) -> float:
        return multiplier / math.sqrt(self.share)

    def root(self, moment: Tensor, std: float) -> Tensor:
        """(R + damping)^(-1/2), scaled so that an average row keeps its length.

        Args:
            moment: R, the mean of the released sums.
            std: of the noise in each entry of R on the diagonal.
        """
        values, vectors = torch.linalg.eigh(moment)
        values = values.clamp(min=0)
        # What lies below the norm of the noise cannot be told from it.
        damping = max(LEAST_DAMPING, std * math.sqrt(2 * len(values)))
        half = (values + damping).rsqrt()
        half *= (values.sum() / (half.square() * values).sum()).sqrt()
        return (vectors * half) @ vectors.T


def train(problem: Problem, epsilon: float, share: float, split: Split, rate: float, seed: int) -> float:
    """The accuracy, in percent."""
    records, judges = problem.parts(split)
    inputs, labels = records["input"], records["label"]
    population, width = inputs.shape
    size = population / problem.draws
    sampling = eq.Poisson(size, population, problem.steps)
    multiplier = calibrate_noise_multiplier(sampling, eq.Budget(epsilon, DELTA))
    whitening = Whitening(share)
    generator = torch.Generator().manual_seed(seed)
    model = problem.model()
    weight, bias = (torch.zeros_like(p) for p in model.parameters())
    moves = [torch.zeros_like(weight), torch.zeros_like(bias)]
    moment, root = torch.zeros(width, width), None

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    for step in range(problem.steps):
        drawn = torch.rand(population, generator=generator) < size / population
        x, y = inputs[drawn], labels[drawn]
        errors = (x @ weight.T + bias).softmax(1) - F.one_hot(y, len(bias))
        seen = x if root is None else x @ root
        norms = errors.norm(dim=1) * (seen.square().sum(1) + 1).sqrt()
        errors *= (CLIP_NORM / norms.clamp(min=1e-12)).clamp(max=1)[:, None]
        scale = whitening.gradient_noise(multiplier) * CLIP_NORM
        gradients = [
            (errors.T @ seen + scale * noise(*weight.shape)) / size,
            (errors.sum(0) + scale * noise(len(bias))) / size,
        ]
        if root is not None:
            gradients[0] = gradients[0] @ root
        if share:
            std = whitening.moment_noise(multiplier)
            unit = x / x.norm(dim=1, keepdim=True).clamp(min=1e-12)
            drawn_noise = noise(width, width)
            moment += (unit.T @ unit + std * (drawn_noise + drawn_noise.T) / 2) / size
            if (step + 1) & step == 0:  # after 1, 2, 4, ... steps
                root = whitening.root(moment / (step + 1), std / size / math.sqrt(step + 1))
        moves = [MOMENTUM * move + gradient for move, gradient in zip(moves, gradients, strict=True)]
        now = rate * (1 - step / problem.steps)
        weight -= now * moves[0]
        bias -= now * moves[1]
    right = (judges["input"] @ weight.T + bias).argmax(1) == judges["label"]
    return float(right.double().mean()) * 100


def tuned(run: Callable[[Split, float, int], float]) -> tuple[float, list[float]]:
    """The rate that is best while tuning, and the test accuracies of the seeds there."""
    scores = {rate: sum(run("tuning", rate, seed) for seed in TUNING_SEEDS) for rate in RATES}
    best = max(scores, key=lambda rate: scores[rate])
    return best, [run("test", best, seed) for seed in SEEDS]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("data"), help="of the data sets")
    parser.add_argument("--data", nargs="+", choices=DESIGNS, default=list(DESIGNS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 3.0])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.0, 0.2])
    parser.add_argument("--out", type=Path, default=Path("joint_whitening.jsonl"), help="one line per cell")
    given = parser.parse_args()
    for name in given.data:
        problem = Problem.load(name, given.folder)
        for epsilon in given.epsilons:
            for share in given.shares:
                began = time.process_time()
                rate, found = tuned(partial(train, problem, epsilon, share))
                row = {"data": name, "epsilon": epsilon, "share": share, "rate": rate}
                row |= {"median": round(statistics.median(found), 2)}
                row |= {"lowest": round(min(found), 2), "highest": round(max(found), 2)}
                append(given.out, row | {"cpu_seconds": round(time.process_time() - began, 1)})


if __name__ == "__main__":
    main()
