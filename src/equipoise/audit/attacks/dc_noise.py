"""DC-DPSGD as its authors' program runs: noise for the mean norm of a clipped gradient, not for one record.

One record with a huge gradient, all others with tiny ones in other coordinates. The far record lands in the
tail and adds c_1 to the sum whenever it is drawn, where the noise is about 0.1345 sigma c_1. In its
coordinate the release is N(0, s_t^2) without it, whatever the scale s_t; so with q the sampling rate

    L = sum_t log(1 - q + q exp((y_t c_1 - c_1^2 / 2) / s_t^2))

has E[e^L] = 1 without the record. The scale s_t follows from the realised batch and counts as disclosed here.
The library's `DCDPSGD(recipe="as_published", variant="code")` trains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from equipoise.audit.attacks.finding import Finding
from equipoise.audit.bounds import certify_known_law
from equipoise.audit.canaries import FAR, Rows, canary_loss
from equipoise.audit.rehearsal import Watching, open_stage
from equipoise.methods import DCDPSGD
from equipoise.privacy import Budget, Draw, Poisson, PrivacyPlan, Private

__all__ = ["attack_dc_dpsgd"]


class Scales(Watching):
    """Keeps the noise scales of unproven releases too."""

    def __init__(self, plan: PrivacyPlan, *args: Any, **kwargs: Any) -> None:
        super().__init__(plan, *args, **kwargs)
        self.scales: list[float] = []

    def release_unproven(
        self, draw: Draw, name: str, value: Mapping[str, Private], std: float, **options: Any
    ) -> dict[str, torch.Tensor]:
        """As `Ledger.release_unproven`, with its scale kept."""
        self.scales.append(std)
        return super().release_unproven(draw, name, value, std, **options)


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
    ratios, scales = [], []
    for run in range(runs):
        stage = open_stage(
            DCDPSGD(1.0, recipe="as_published", variant="code"),
            Rows(rows),
            canary_loss(),
            {"index": index, "scale": scale},
            Poisson(batch, population, steps),
            Budget(epsilon, delta),
            seed=seed + 1000 * run,
            make_ledger=Scales,
        ).run()
        ledger = stage.desk.ledger
        assert isinstance(ledger, Scales)
        total = 0.0
        scales += ledger.scales
        for released, std in zip(ledger.transcript, ledger.scales, strict=True):
            (value,) = released["gradient"].values()
            total += _mixture(rate, (-float(value.flatten()[0]) - 0.5) / std**2)
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
            "median_noise_over_c1": sorted(scales)[len(scales) // 2],
        },
    )


def _mixture(rate: float, exponent: float) -> float:
    """log(1 - q + q e^x)."""
    high = max(math.log1p(-rate), math.log(rate) + exponent)
    return high + math.log(math.exp(math.log1p(-rate) - high) + math.exp(math.log(rate) + exponent - high))
