"""RMS-adaptive clipping with the published accounting and a shuffled loader.

Equation (1) of the paper grants every step the amplification of a fresh subset. A loader that shuffles once
an epoch uses each record exactly once an epoch: whoever knows the permutation knows in which of the n / b
steps, and sees as many plain Gaussians as there were epochs. With K = 1, n = 10,000, b = 100, R = 2,000 that
is 20 releases of multiplier z, replace-one: mu = 2 sqrt(20) / z.

Canaries train by the library's DP-SGD step (the radius is the cap, where it is largest and tells nothing)
with the noise of equation (1), in slices of an epoch (`FixedEpochs`); one world's record pulls one way, the
other's the other way.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from equipoise.audit.bounds import certify_thresholds
from equipoise.audit.replay import RecordingLedger
from equipoise.methods import DPSGD
from equipoise.privacy import Draw, FixedEpochs, PrivacyPlan, gaussian_epsilon
from equipoise.published.adaptive_rms import published_noise
from equipoise.testing.canaries import CanaryLayout, Rows, canary_loss
from equipoise.testing.rehearsal import InMemoryTraining
from equipoise.training import Record
from reproduction.attacks.finding import Finding

__all__ = ["attack_adaptive_rms"]


class Permutation(RecordingLedger):
    """Keeps which records a draw took, as one who knows the permutation does; keeps nothing else."""

    def __init__(self, plan: PrivacyPlan, *args: Any, **kwargs: Any) -> None:
        super().__init__(plan, *args, **kwargs)
        self.statistic: Tensor | None = None
        self._ids = torch.zeros(0, dtype=torch.long)

    def sample(self, draw: Draw, num_records: int) -> Tensor:
        """As `Ledger.sample`, remembered until the release."""
        self._ids = super().sample(draw, num_records)
        return self._ids

    def release(self, draw: Draw, sums: Any, checks: Any = ()) -> Any:
        """As `Ledger.release`; adds up what was released of the records of the draw."""
        out = super().release(draw, sums, checks)
        (value,) = out["gradient"].values()
        flat = value.flatten().double()
        if self.statistic is None:
            self.statistic = torch.zeros_like(flat)
        self.statistic[self._ids] += flat[self._ids]
        self.transcript.clear()
        self.sums.clear()
        return out


def attack_adaptive_rms(
    seed: int = 0,
    *,
    epsilon: float = 2.0,
    delta: float = 1e-5,
    confidence: float = 0.99,
    population: int = 10_000,
    batch: int = 100,
    rounds: int = 2000,
    canaries: int = 40_000,
) -> Finding:
    """One training.

    Args:
        seed: of the run.
        epsilon, delta: as claimed by equation (1).
        confidence: of the certificate.
        population, batch, rounds: n, b and R, with K = 1 step a round.
        canaries: records that are really there; each of them meets the same draws and noise as one of n.
    """
    sigma = published_noise(epsilon, delta, population=population, batch=batch, steps=rounds)
    multiplier = sigma * batch
    sampling = FixedEpochs(batch, population, rounds)
    present = torch.rand(canaries, generator=torch.Generator().manual_seed(seed)) < 0.5
    data = CanaryLayout().records(torch.arange(canaries))
    data["scale"][~present] *= -1
    training = InMemoryTraining.open(
        DPSGD(clip_norm=1.0, noise_multiplier=multiplier),
        Rows(canaries),
        canary_loss(),
        data,
        sampling,
        None,
        seed=seed,
        make_ledger=Permutation,
        unit=Record(relation="replace_one"),
    ).run()
    ledger = training.ledger
    assert isinstance(ledger, Permutation)
    assert ledger.statistic is not None
    epochs = math.ceil(rounds / sampling.draws_per_epoch)
    return Finding(
        name="adaptive-rms",
        target=f"equation (1) with a shuffled loader: n={population}, b={batch}, R={rounds}, K=1",
        claimed=epsilon,
        certificate=certify_thresholds(
            ledger.statistic[~present].numpy(), ledger.statistic[present].numpy(), delta, confidence
        ),
        details={
            "noise_multiplier": multiplier,
            "releases_a_record": float(epochs),
            "true_epsilon": gaussian_epsilon(2 * math.sqrt(epochs) / multiplier, delta),
        },
    )
