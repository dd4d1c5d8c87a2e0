"""DC-DPSGD as its authors' program runs: noise for the mean norm of a clipped gradient, not for one record.

One record with a huge gradient, all others with tiny ones in other coordinates. The far record lands in the
tail and adds c_1 to the sum whenever it is drawn, where the noise is about 0.1345 sigma c_1. In its
coordinate the release is N(0, s_t^2) without it. The scale

    s_t = sigma f(ph),    f(ph) = ((ph c_1)^2 + ((1 - ph) c_2)^2)^(1/2),    ph the realised tail fraction,

follows from the batch and is not told, so the certificate must not use it. But ph lies between 0 and p, since
at most int(p |batch|) scores lie above the sorted score at that index, and f is convex: s_t is at most
S = sigma max(f(0), f(p)), a public number. So with q the sampling rate and y_t what leaves

    L = sum_t log(1 - q + q exp((y_t c_1 - c_1^2 / 2) / S^2))

is a function of the program's output alone, and has E[e^L] <= 1 without the record: given the past and the
batch, E exp(y_t c_1 / S^2) = exp(s_t^2 c_1^2 / (2 S^4)) <= exp(c_1^2 / (2 S^2)).
The library's `published.DCDPSGD(variant="code")` trains.
"""

from __future__ import annotations

import math

import torch

from equipoise.audit.bounds import certify_known_law
from equipoise.privacy import Budget, Poisson
from equipoise.published.dc_dpsgd import DCDPSGD, average_noise, share_multipliers
from equipoise.testing.canaries import FAR, Rows, canary_loss
from equipoise.testing.rehearsal import InMemoryTraining
from reproduction.attacks.finding import Finding

__all__ = ["attack_dc_dpsgd", "widest_noise"]


def _program() -> DCDPSGD:
    return DCDPSGD(variant="code")


def attack_dc_dpsgd(
    seed: int = 0,
    *,
    runs: int = 12,
    epsilon: float = 8.0,
    delta: float = 1e-5,
    confidence: float = 0.99,
    population: int = 2000,
    batch: int = 40,
    steps: int = 150,
) -> Finding:
    """Trainings with the far record.

    Args:
        seed: of the runs.
        runs: trainings.
        epsilon, delta: as claimed.
        confidence: of the certificate.
        population, batch, steps: N, B, T.
    """
    rate, rows = batch / population, 4
    index = torch.arange(population) % (rows - 1) + 1
    index[0] = 0
    scale = torch.full((population, 1), 1e-3)
    scale[0] = -FAR  # a gradient along -1, so that the parameter moves up
    budget, sampling = Budget(epsilon, delta), Poisson(batch, population, steps)
    widest, ratios = widest_noise(_program(), budget, sampling), []
    for run in range(runs):
        training = InMemoryTraining.open(
            _program(),
            Rows(rows),
            canary_loss(),
            {"index": index, "scale": scale},
            sampling,
            budget,
            seed=seed + 1000 * run,
        ).run()
        total = 0.0
        for released in training.ledger.transcript:
            (value,) = released["gradient"].values()
            total += _mixture(rate, (-float(value.flatten()[0]) - 0.5) / widest**2)
        ratios.append(total)
    found = torch.tensor(ratios)
    return Finding(
        name="dc-dpsgd",
        target=f"the authors' program: N={population}, B={batch}, T={steps}, c1=1, c2=0.1, p=0.1",
        claimed=epsilon,
        certificate=certify_known_law(found.numpy(), delta, confidence),
        details={
            "smallest_log_ratio": float(found.min()),
            "median_log_ratio": float(found.median()),
            "largest_noise_over_c1": widest,
        },
    )


def widest_noise(method: DCDPSGD, budget: Budget, sampling: Poisson) -> float:
    """S, the largest deviation that the noise on a sum can have."""
    sigma, _ = share_multipliers(budget, sampling, method.trace_share)
    tail, body = method.clip_norm, method.body
    return max(average_noise(sigma, tail, body, share) for share in (0.0, method.tail_fraction))


def _mixture(rate: float, exponent: float) -> float:
    """log(1 - q + q e^x)."""
    high = max(math.log1p(-rate), math.log(rate) + exponent)
    return high + math.log(math.exp(math.log1p(-rate) - high) + math.exp(math.log(rate) + exponent - high))
