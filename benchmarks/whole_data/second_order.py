"""Second-order heads: steps through a released curvature, on the bench's features and records.

    python -m benchmarks.whole_data.second_order --folder DATA [--data mnist] [--heads covariance newton]

H. Mehta et al., "Differentially private image classification from features", TMLR 2023, call them DP-FC and
DP-Newton. A record's row x is cut to length 1, gets a constant and is scaled so that |x| <= 1; no gradient is
clipped. All records take part in each step of softmax regression:

    g = sum (p - y) x^T + noise,    W = W - rate (A + ridge I)^-1 g

`covariance` releases A = sum x x^T once, before all steps. `newton`, for two classes, releases the curvature
A = sum p (1 - p) x x^T anew with each step. Adding or removing a record moves g by 2^(1/2) at most, x x^T by
1 and p (1 - p) x x^T by 1/4. So all releases are Gaussian mechanisms over all records, whose inverse squared
noise multipliers add up to that of one release at the budget; A has `SHARE` of it. Ridge and rate are chosen
by the bench's walk, on held-out training records.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import equipoise as eq
from benchmarks.trained_contenders import DELTA
from benchmarks.whole_data.cells import SEEDS, Point, walk
from benchmarks.whole_data.least_squares import rows
from benchmarks.whole_data.problems import LINEAR, Fields, Problem
from equipoise.privacy.accounting.calibrate import calibrate_noise_multiplier

STEPS = {"covariance": 32, "newton": 8}
SHARE, LENGTH = 0.2, 1.0
RATE = 0.25
"""The walk moves the ridge, in units of the spectral radius of the curvature's noise, and four rates."""


def deviations(head: str, noise_multiplier: float) -> tuple[float, float]:
    """Of the noise of a curvature x x^T and of a gradient; of p (1 - p) x x^T it is a quarter of the first.

    Args:
        noise_multiplier: of one release that has the whole budget.
    """
    curvatures = STEPS[head] if head == "newton" else 1
    of_curvature = noise_multiplier * math.sqrt(curvatures / SHARE)
    return of_curvature, noise_multiplier * math.sqrt(2 * STEPS[head] / (1 - SHARE))


def fit(head: str, x: Tensor, y: Tensor, noise_multiplier: float, point: Point, seed: int) -> Tensor:
    """Weights ``[d, classes]`` of rows ``[n, d]`` no longer than 1 and one-hot labels ``[n, classes]``.

    Args:
        noise_multiplier: of one release that has the whole budget.
        point: the ridge, and the rate over `RATE`.
    """
    ridge, rate = point[0], RATE * point[1]
    generator = torch.Generator().manual_seed(seed)

    def solved(curvature: Tensor, deviation: float, right: Tensor) -> Tensor:
        noise = deviation * torch.randn(curvature.shape, generator=generator, dtype=torch.float64)
        values, vectors = torch.linalg.eigh(curvature.double() + (noise + noise.T) / 2)
        damped = values.clamp_min(0) + ridge * deviation * math.sqrt(2 * len(values))
        return (vectors * rate / damped) @ (vectors.T @ right)

    of_curvature, of_gradients = deviations(head, noise_multiplier)
    weights = torch.zeros(x.shape[1], y.shape[1], dtype=torch.float64)
    identity = torch.eye(x.shape[1], dtype=torch.float64)
    inverse = solved(x.T @ x, of_curvature, identity) if head == "covariance" else None
    for _ in range(STEPS[head]):
        chances = (x @ weights.to(x)).softmax(1)
        gradient = (x.T @ (chances - y)).double()
        gradient += of_gradients * torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
        if inverse is None:
            spread = (chances[:, :1] * chances[:, 1:]) * x
            weights -= solved(x.T @ spread, of_curvature / 4, gradient)
        else:
            weights -= inverse @ gradient
    return weights


def score(
    head: str, epsilon: float, classes: int, parts: tuple[Fields, Fields], point: Point, seed: int
) -> float:
    """Train on the first part; the accuracy on the second in percent."""
    train, judges = parts
    every_record = eq.Poisson(len(train["label"]), len(train["label"]), 1)
    noise = calibrate_noise_multiplier(every_record, eq.Budget(epsilon, DELTA))
    labels = torch.nn.functional.one_hot(train["label"], classes).float()
    weights = fit(head, rows(train["input"], LENGTH).float(), labels, noise, point, seed)
    hits = (rows(judges["input"], LENGTH) @ weights).argmax(1) == judges["label"]
    return 100 * float(hits.double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("data"), help="of the data sets")
    parser.add_argument("--data", nargs="+", choices=LINEAR, default=LINEAR)
    parser.add_argument("--heads", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 3.0, 8.0])
    given = parser.parse_args()
    print("| data | head | epsilon | ridge, rate | median [lowest, highest] of five seeds | CPU s |")
    print("|---|---|---|---|---|---|")
    for name in given.data:
        problem = Problem.load(name, given.folder)
        model = problem.model()
        assert isinstance(model, torch.nn.Linear)
        classes = model.out_features
        for head in given.heads:
            if head == "newton" and classes > 2:
                continue
            for epsilon in given.epsilons:
                of = partial(score, head, epsilon, classes)
                chosen = walk(partial(of, problem.parts("tuning")))
                began = time.process_time()
                found = sorted(of(problem.parts("test"), chosen, seed) for seed in SEEDS)
                seconds = (time.process_time() - began) / len(SEEDS)
                print(
                    f"| {name} | {head} | {epsilon:g} | {chosen[0]:g}, {RATE * chosen[1]:g} | "
                    f"{found[2]:.2f} [{found[0]:.2f}, {found[-1]:.2f}] | {seconds:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
