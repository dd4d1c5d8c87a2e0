"""Noise in prefix sums: noise over steps against fresh noise at the same epsilon, and against a binary tree.

    python benchmarks/noise_over_steps.py

Root mean squared noise of the prefix sums, relative to DP-SGD's with the same sampling of batches. Groups in
turn (`CyclicPoisson`) are held against Poisson sampling, the same slots in every epoch (`FixedEpochs`)
against fresh noise on them. Square root, and in brackets the coefficients of least error; in the last column
noise that takes back a share of the step before (`OneStepGaussian`), which keeps no copy of the model.
"""

from __future__ import annotations

import math

import numpy as np

from equipoise.methods import DPMF
from equipoise.methods.base import Setting
from equipoise.privacy import (
    BallsInBins,
    BandedGaussian,
    Budget,
    CyclicPoisson,
    OneStepGaussian,
    Poisson,
    PrivacyPlan,
    Release,
    Sampling,
    calibrate,
    optimal_coefficients,
    prefix_error,
    square_root_coefficients,
)
from equipoise.privacy.mechanisms.toeplitz import least_error_decay

DELTA = 1e-5
SETTINGS = ((60_000, 1024, 1200), (60_000, 512, 2400), (50_000, 500, 2000), (50_000, 4096, 2500))
EPSILONS = (1.0, 3.0, 8.0, 16.0)
SHUFFLED = ((60_000, 600, 1000), (50_000, 500, 3000), (2_000, 100, 400))
SLOTS = ((100, 10), (1160, 58), (2000, 100), (2000, 500))
STRATEGIES = (square_root_coefficients, optimal_coefficients)


def multiplier(sampling: Sampling, bands: int, epsilon: float) -> float:
    """z of noise over so many steps."""

    def plan(z: float) -> PrivacyPlan:
        return PrivacyPlan(
            [Release("gradient", 1.0, BandedGaussian([1.0] + [0.0] * (bands - 1), z))], sampling
        )

    return calibrate(plan, Budget(epsilon, DELTA))["gradient"].noise_multiplier


def coefficients(kind, bands: int, steps: int) -> tuple[float, ...]:
    return kind(bands, steps) if kind is optimal_coefficients else kind(bands)


def in_turn(population: int, size: int, steps: int, epsilon: float) -> list[tuple[float, int]]:
    """For each strategy the best ratio with two bands or more, and its number of bands."""
    fresh = multiplier(Poisson(size, population, steps), 1, epsilon) * prefix_error([1.0], steps)
    found: list[list[tuple[float, int]]] = [[] for _ in STRATEGIES]
    for bands in [2**k for k in range(1, int(population / size).bit_length())]:
        z = multiplier(CyclicPoisson(size, population, steps, bands), bands, epsilon)
        for kind, ratios in zip(STRATEGIES, found, strict=True):
            ratios.append((z * prefix_error(coefficients(kind, bands, steps), steps) / fresh, bands))
    return [min(ratios) for ratios in found]


def in_bins(population: int, size: int, steps: int, epsilon: float) -> float:
    """Noise in the sums of DP-MF on shuffled epochs, relative to that on Poisson samples in turn."""
    errors = []
    for sampling in (BallsInBins(size, population, steps), Poisson(size, population, steps)):
        setting = Setting(sampling=sampling, budget=Budget(epsilon, DELTA))
        mechanism = DPMF().plan(setting).releases["gradient"].mechanism
        errors.append(mechanism.noise_multiplier * mechanism.prefix_error(steps))
    return errors[0] / errors[1]


def in_slots(steps: int, draws_per_epoch: int) -> list[float]:
    """For each strategy the ratio with as many bands as an epoch has draws; epsilon cancels out."""
    fresh = prefix_error([1.0], steps)
    return [prefix_error(coefficients(kind, draws_per_epoch, steps), steps) / fresh for kind in STRATEGIES]


def one_step(steps: int, draws_per_epoch: int) -> float:
    """The same ratio of noise that takes back a share of the step before."""
    times = -(-steps // draws_per_epoch)
    noise = OneStepGaussian(least_error_decay(times, draws_per_epoch, steps), 1.0)
    longer = math.sqrt(noise.whitened_square(times, draws_per_epoch, steps) / times)
    return longer * noise.prefix_error(steps) / prefix_error([1.0], steps)


def tree_error(steps: int) -> float:
    """Root mean squared noise of prefix sums from a binary tree of all sums, read in the best way.

    Args:
        steps: a power of two.
    """
    levels = [np.kron(np.eye(steps // 2**k), np.ones(2**k)) for k in range(steps.bit_length())]
    tree = np.concatenate(levels)  # every step is in a node of each level
    read = np.tril(np.ones((steps, steps))) @ np.linalg.pinv(tree)
    return float(np.sqrt((read**2).sum() / steps) * math.sqrt(len(levels)))


def main() -> None:
    print("groups in turn, relative to DP-SGD with Poisson sampling")
    print("| N, B, T | " + " | ".join(f"ε = {epsilon:g}" for epsilon in EPSILONS) + " |")
    print("|---|" + "---|" * len(EPSILONS))
    for population, size, steps in SETTINGS:
        cells = []
        for epsilon in EPSILONS:
            (root, bands), (least, _) = in_turn(population, size, steps, epsilon)
            cells.append(f"{root:.2f} [{least:.2f}], {bands} bands")
        print(f"| {population:,}, {size:,}, {steps:,} | " + " | ".join(cells) + " |")
    print("\nshuffled epochs in groups, relative to Poisson samples in turn, as dp-mf chooses")
    for population, size, steps in SHUFFLED:
        ratios = [f"{in_bins(population, size, steps, epsilon):.3f}" for epsilon in EPSILONS]
        print(f"| {population:,}, {size:,}, {steps:,} | " + " | ".join(ratios) + " |")
    print("\nthe same slots in every epoch, relative to DP-SGD on them")
    print("| draws per epoch, T | ratio | one step |\n|---|---|---|")
    for steps, slots in SLOTS:
        root, least = in_slots(steps, slots)
        print(f"| {slots}, {steps:,} | {root:.2f} [{least:.2f}] | {one_step(steps, slots):.2f} |")
    print("\none epoch: the square root with as many bands as steps, and a binary tree")
    print("| T | square root | tree, read in the best way |\n|---|---|---|")
    for steps in (16, 256, 1024):
        root = prefix_error(square_root_coefficients(steps), steps)
        print(f"| {steps:,} | {root:.2f} | {tree_error(steps):.2f} |")


if __name__ == "__main__":
    main()
