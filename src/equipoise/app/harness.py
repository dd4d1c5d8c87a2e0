"""The one way to compare: tune a rate, run seeds, and say who is told apart from whom.

With the centre rate r and K trials the grid is

    r * 4^(i - (K - 1) / 2),    i = 0, ..., K - 1.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

TUNING_SEED = 1000
"""Of trials: results have the seeds 0, 1, ..., so no result is a run that was chosen for being good."""

GRID_FACTOR = 4.0

R = TypeVar("R")


def tuning_grid(centre: float, trials: int) -> tuple[float, ...]:
    """The learning rates that are tried around a method's own.

    >>> tuning_grid(1.0, 3), tuning_grid(0.5, 1)
    ((0.25, 1.0, 4.0), (0.5,))
    """
    return tuple(float(f"{centre * GRID_FACTOR ** (i - (trials - 1) / 2):.6g}") for i in range(trials))


class Tuned(NamedTuple, Generic[R]):
    """The rate that was taken, the trial of each rate, and the result of each seed."""

    rate: float
    trials: dict[float, R]
    results: list[R]


def tuned(
    trial: Callable[[float, int], R],
    result: Callable[[float, int], R],
    score: Callable[[R], float],
    rates: Sequence[float],
    seeds: Sequence[int],
    tuning_seed: int = TUNING_SEED,
) -> Tuned[R]:
    """Try every rate, and run every seed at the one with the highest score; of equals at the first.

    Args:
        trial, result: run(rate, seed); a trial is judged on other records than a result.
        score: of a trial; more is better.
        rates: one alone is taken without a trial.
        seeds: of the results.

    >>> tuned(lambda rate, seed: -(rate - 2) ** 2, lambda rate, seed: rate + seed, float, (1, 2, 4), (0, 1))
    Tuned(rate=2, trials={1: -1, 2: 0, 4: -4}, results=[2, 3])
    """
    trials = {rate: trial(rate, tuning_seed) for rate in rates} if len(rates) > 1 else {}
    best = max(trials, key=lambda rate: score(trials[rate]), default=rates[0])
    return Tuned(best, trials, [result(best, seed) for seed in seeds])


def sampling_error(score: Callable[[Tensor], float], count: int) -> float:
    """The standard error of a score that comes from which records happen to be test records.

    By the bootstrap, which holds for every score. Of 50 resamples it is itself known to about 10%.

    Args:
        score: of the test records with these numbers.
        count: of the test records.
    """
    draws = torch.Generator().manual_seed(0)
    return statistics.stdev(score(torch.randint(count, (count,), generator=draws)) for _ in range(50))
