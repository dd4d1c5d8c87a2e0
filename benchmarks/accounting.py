"""Accounting and sampling from small data to large: what is found, and how long it takes.

For each setting noise is calibrated to the budget at delta = 0.1 / population, and epsilon of that noise is
compared with `exact_epsilon`, which has no grid of losses. Then draws of 1,000 expected records are timed.

    python benchmarks/accounting.py
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import optimize

from equipoise.privacy import Budget, Poisson, Secrets, calibrate_noise_multiplier, epsilon

Array = np.ndarray

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


def exact_epsilon(sampling: Poisson, noise_multiplier: float, delta: float) -> float:
    """Epsilon of a Poisson-sampled Gaussian by a contour integral, up to rounding, the larger direction's.

    With M the moment generating function of one loss, of T steps, on any line Re z = t > 0,

        delta(epsilon) = 1 / (2 pi i) * integral of M(z)^T e^(-z epsilon) / (z (z + 1)) dz.

    M is an integral over the release. Both integrands are analytic, so that the trapezoidal rule converges
    faster than any power of its step.
    """
    return max(_exact(sampling, noise_multiplier, delta, direction) for direction in ("add", "remove"))


def _exact(sampling: Poisson, sigma: float, delta: float, direction: str) -> float:
    rate, count = sampling.sampling_rate, sampling.steps

    def cumulants(z: Array, step: float) -> Array:
        """T log E[R^s], R = 1 + q u the ratio of the laws, under the one in which nothing moves."""
        powers = z + 1 if direction == "remove" else -z
        x = np.arange(-14 * sigma, 14 * sigma + max(1.0, float(powers.real.max())), step)
        log_weights = -((x / sigma) ** 2) / 2 + math.log(step / sigma / math.sqrt(2 * math.pi))
        exponents = (2 * x - 1) / (2 * sigma**2)
        weights, moved = np.exp(log_weights), rate * np.expm1(exponents)
        losses, near = np.log1p(moved), moved < 0.1
        linear = rate * (np.exp(exponents + log_weights) - weights)  # its integral is zero
        # Without it what is left is of the size of its square, which is far below one.
        left = np.empty(len(powers), dtype=powers.dtype)
        for i, s in enumerate(powers):
            left[i] = (np.expm1(s * losses[near]) - s * moved[near]) @ weights[near]
            far = np.exp(s * losses[~near] + log_weights[~near]) - weights[~near] - s * linear[~near]
            left[i] += far.sum()
        return count * np.log1p(left)

    # On whatever line, the integral is the same. Its terms cancel least where the epsilon at which the
    # integrand on the axis is delta is least. Further out the ratio overflows, and its inverse does not.
    most = 600 * sigma**2 - 14 * sigma - 1 if direction == "remove" else 1e4
    lines = np.geomspace(0.05, most, 200)
    with np.errstate(over="ignore", invalid="ignore"):
        logarithms = cumulants(lines, sigma / 100) - np.log(lines) - np.log1p(lines) - math.log(delta)
    best = int(np.nanargmin(logarithms / lines))
    t, about = float(lines[best]), float(logarithms[best] / lines[best])
    low, middle, high = cumulants(t * np.array([0.99, 1.0, 1.01]), sigma / 100)
    deviation = math.sqrt((low - 2 * middle + high) / (0.01 * t) ** 2)
    step = 2 * math.pi / max(40 * deviation, 40 / t)
    values = [cumulants(np.array([complex(t)]), sigma / 100)]
    # Until the integrand has vanished.
    while values[-1][-1].real - values[0][0].real > -40:
        start = sum(map(len, values))
        frequencies = step * np.arange(start, start + 64)
        # The phase turns by at most frequency / sigma^2.
        values.append(cumulants(t + 1j * frequencies, min(sigma / 100, sigma**2 / frequencies[-1])))
    found = np.concatenate(values)
    z = t + 1j * step * np.arange(len(found))

    def log_ratio(epsilon: float) -> float:
        """log(delta(epsilon) / delta)."""
        terms = np.exp(found - found[0].real - 1j * z.imag * epsilon) / (z * (z + 1))
        integral = step / math.pi * (terms.real.sum() - terms[0].real / 2)
        return math.log(integral) + found[0].real - t * epsilon - math.log(delta)

    low = about
    while log_ratio(low) < 0:
        low -= 1 / t
    return float(optimize.brentq(log_ratio, low, about + 10 / t, xtol=1e-9))


def main() -> None:
    """Print both tables."""
    columns = (
        "population, batch, steps, budget, noise, epsilon, above the exact one, epsilon in s, calibrate in s"
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
            above = found / exact_epsilon(sampling, noise, delta) - 1
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
