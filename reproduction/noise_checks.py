"""Checks of one step: what a sound step must look like, each with a statistic whose law is known.

Every check answers a standard score z, normal with mean 0 and deviation 1 where all is well (or a number
that never exceeds a limit there), and the limit beyond which it speaks of a fault:

==============  ======================================================================================
`sensitivity`   how far the attacker's measured shift of a canary goes beyond its bound
`same_scale`    deviation of what leaves, with a record and without, over each other, from 1
`repeats`       correlation of the noise of different releases
`echoes`        correlation of the noise of one release with itself, moved along
`batch_sizes`   variance of the sizes of draws over N q (1 - q), from 1
`pairs`         how often two given records are drawn together, against q^2
==============  ======================================================================================

`noise_scale`, the deviation of release minus raw sum, is in `equipoise.testing.checks`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equipoise.testing.checks import Check

__all__ = [
    "batch_sizes",
    "echoes",
    "pairs",
    "repeats",
    "same_scale",
    "sensitivity",
]


def sensitivity(shifts: Tensor, noise_std: float, bound: float) -> Check:
    """Does a record move the release further than its bound?

    Args:
        shifts: released numbers of canaries in the direction that each pulls, [n], one per canary.
        noise_std: of each.
        bound: as planned.
    """
    n = shifts.numel()
    return Check(
        "reach of a record", max(0.0, shifts.double().mean().item() - bound) / noise_std * math.sqrt(n)
    )


def same_scale(without: Tensor, with_record: Tensor) -> Check:
    """Is what leaves equally noisy with a record and without it?

    Args:
        without, with_record: coordinates that hold noise alone, [n] each, in two worlds.
    """
    logs = [values.double().square().mean().log().item() for values in (without, with_record)]
    spread = math.sqrt(2 / without.numel() + 2 / with_record.numel())
    return Check("noise with and without a record", (logs[1] - logs[0]) / spread)


def repeats(noises: Tensor) -> Check:
    """Is any noise like any other?

    Args:
        noises: [k, n], the noise of k releases.
    """
    rows = noises.double()
    rows = rows / rows.norm(dim=1, keepdim=True)
    products = (rows @ rows.T).fill_diagonal_(0.0) * math.sqrt(noises.shape[1])
    return Check("noise of two releases", products.abs().max().item())


def echoes(noise: Tensor) -> Check:
    """Does any stretch of a release's noise come again in the same release?

    Correlations of the noise with itself, moved round by every number of places from 1 to n / 2: noise that
    serves two tensors shows at their distance.

    Args:
        noise: [n], all tensors of a release one after another.

    Example:
        >>> rng = torch.Generator().manual_seed(0)
        >>> noise = torch.randn(5000, generator=rng)
        >>> echoes(noise).passes, echoes(torch.cat([noise, noise])).passes
        (True, False)
    """
    n = noise.numel()
    powers = torch.fft.rfft(noise.double()).abs().square()
    correlations = torch.fft.irfft(powers, n=n)
    scores = correlations[1 : n // 2 + 1] / correlations[0] * math.sqrt(n)
    if n % 2 == 0:  # half way round every product comes twice
        scores[-1] /= math.sqrt(2)
    return Check("noise within a release", scores.abs().max().item())


def batch_sizes(sizes: Tensor, records: int, rate: float) -> Check:
    """Do the sizes of draws vary as independent choices of records make them?

    Args:
        sizes: [T], records in each draw.
        records: N.
        rate: q.
    """
    expected = records * rate * (1 - rate)
    ratio = (sizes.double() - records * rate).square().mean().item() / expected
    # the variance of a binomial's squared deviation, relative to its variance squared
    spread = math.sqrt((2 + (1 - 6 * rate * (1 - rate)) / expected) / len(sizes))
    return Check("sizes of draws", (ratio - 1) / spread)


def pairs(drawn: Tensor, rate: float) -> Check:
    """Are records drawn together as often as independent choices make them?

    All pairs (2j, 2j + 1) of records are counted over all draws.

    Args:
        drawn: [T, N] bool, which draw took which record.
        rate: q.
    """
    count = drawn.shape[1] // 2
    together = (drawn[:, : 2 * count : 2] & drawn[:, 1 : 2 * count : 2]).sum().item()
    trials, chance = drawn.shape[0] * count, rate**2
    return Check("pairs in a draw", (together - trials * chance) / math.sqrt(trials * chance * (1 - chance)))
