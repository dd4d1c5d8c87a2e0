"""Accounting and sampling from small data to large: what is found, and how long it takes.

For each setting noise is calibrated to the budget at delta = 0.1 / population, and epsilon of that noise is
compared with the one of a finer grid, unless both are the largest. Then draws of 1,000 expected records are
timed.

    python benchmarks/accounting.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from equipoise.privacy import Budget, Poisson, Secrets, calibrate_noise_multiplier, epsilon
from equipoise.privacy.accounting.loss_distribution import SampledGaussians, composed_epsilon

SETTINGS = [
    (10**4, 256, 10**3),
    (60_000, 256, 4700),
    (10**5, 1024, 10**4),
    (10**6, 1024, 10**4),
    (10**6, 1024, 10**5),
    (10**7, 4096, 10**5),
    (10**8, 4096, 10**5),
    (10**9, 4096, 10**6),
]
"""Population, expected batch size, steps."""

TARGETS = (0.5, 2.0, 8.0)


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What the function answers, and its seconds."""
    start = time.perf_counter()
    return function(), time.perf_counter() - start


def finer(sampling: Poisson, noise_multiplier: float, delta: float) -> float:
    """Epsilon on the finest grid that the accountant would try."""
    steps = [SampledGaussians(noise_multiplier, sampling.sampling_rate, sampling.steps)]
    return max(composed_epsilon(steps, delta, direction, 128)[0] for direction in ("add", "remove"))


def main() -> None:
    """Print both tables."""
    columns = (
        "population, batch, steps, budget, noise, epsilon, above a finer grid's, epsilon in s, calibrate in s"
    )
    print("|", columns.replace(",", " |"), "|")
    print("|---|---|---|---|---|---|---|---|---|")
    for population, batch, steps in SETTINGS:
        sampling, delta = Poisson(batch, population, steps), 0.1 / population
        for target in TARGETS:
            noise, calibrating = timed(lambda: calibrate_noise_multiplier(sampling, Budget(target, delta)))  # noqa: B023
            # Another number for each: results are kept.
            event = sampling.event(noise * (1 + 1e-9), steps)
            found, accounting = timed(lambda: epsilon(event, delta, cross_check=False).value)  # noqa: B023
            above = found / finer(sampling, noise, delta) - 1
            print(
                f"| {population:,} | {batch:,} | {steps:,} | {target:g} | {noise:.4f} | {found:.4f} | "
                f"{above:.3%} | {accounting:.3f} | {calibrating:.2f} |",
                flush=True,
            )
    print("\n| population | a draw of 1,000, ms |\n|---|---|")
    secrets = Secrets(reproducible_seed=0)
    for population in (10**6, 10**7, 10**8, 10**9):
        sampling = Poisson(1000, population, 100)
        _, seconds = timed(lambda: [sampling.sample(secrets, i, population) for i in range(100)])  # noqa: B023
        print(f"| {population:,} | {10 * seconds:.2f} |")


if __name__ == "__main__":
    main()
