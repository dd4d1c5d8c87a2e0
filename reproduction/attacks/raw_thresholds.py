"""DP-C4 and DP-C4+ as published: thresholds from raw gradients set the noise, which then betrays them.

Consistent least squares (N = 2000, d = 20), every record in every batch, Theorem 3's noise for the claimed
epsilon. In one world a record's label is off by a residual. The anchor threshold is c_2 times the norm of the
raw mean gradient: without that record it vanishes as training converges, and the noise with it; with it both
stay. The library's own code trains with the record, and an attacker replays the released values on the data
without it. Means and noise scales in either world given what was released before are then known, so that

    L = sum over releases log N(y; m', s'^2) - log N(y; m, s^2)

is the log-likelihood ratio of the whole transcript.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.audit.bounds import certify_known_law
from equipoise.audit.replay import RecordingLedger
from equipoise.methods.anchored import Every
from equipoise.privacy import Budget, FullBatch
from equipoise.privacy.mechanisms.base import Sums
from equipoise.published import DPC4, DPC4Plus
from equipoise.testing.rehearsal import InMemoryTraining
from equipoise.training import Record
from reproduction.attacks.finding import Finding

__all__ = ["attack_dp_c4", "attack_dp_c4_plus", "log_ratio"]


def _line(features: int) -> nn.Linear:
    """A linear model without bias, from zero."""
    model = nn.Linear(features, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return model


def attack_dp_c4(seed: int = 0, *, runs: int = 8, steps: int = 200, **options: Any) -> Finding:
    """The attack on DP-C4; `options` as for `attack_dp_c4_plus`."""
    return _attack(DPC4, "dp-c4", seed, runs, steps, **options)


def attack_dp_c4_plus(seed: int = 0, *, runs: int = 8, steps: int = 200, **options: Any) -> Finding:
    """Trainings with the odd record, replayed without it.

    Args:
        seed: of the data and the runs.
        runs: trainings.
        steps: T.
        options: epsilon, delta, confidence, residual (of the odd record).
    """
    return _attack(DPC4Plus, "dp-c4-plus", seed, runs, steps, **options)


def _attack(
    kind: type[DPC4] | type[DPC4Plus],
    name: str,
    seed: int,
    runs: int,
    steps: int,
    *,
    epsilon: float = 4.0,
    delta: float = 1e-5,
    confidence: float = 0.99,
    residual: float = 1.0,
    records: int = 2000,
    features: int = 20,
) -> Finding:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(records, features, generator=rng, dtype=torch.float64)
    solution = torch.randn(features, generator=rng, dtype=torch.float64)
    label = x @ (solution * 2 / solution.norm())
    odd = label.clone()
    odd[0] += residual
    ratios = []
    for run in range(runs):

        def train(y: Tensor, ledger: Callable[..., RecordingLedger], number: int = run) -> RecordingLedger:
            method = kind(
                clip_norm=20.0,
                coupled_scale=6.0,
                anchor_scale=6.0,
                schedule=Every(8),
                anchor_batch_size=records,
            )
            training = InMemoryTraining.open(
                method,
                _line(features),
                _half_square,
                {"x": x, "y": y},
                FullBatch(records, steps),
                Budget(epsilon, delta),
                seed=seed + 1000 * number,
                learning_rate=0.1,
                make_ledger=ledger,
                unit=Record(relation="replace_one"),
            )
            return training.run().ledger

        real = train(odd, RecordingLedger)
        other = train(label, partial(RecordingLedger, replayed=real.transcript))
        ratios.append(log_ratio(real.transcript, (real.sums, _stds(real)), (other.sums, _stds(other))))
    found = torch.tensor(ratios)
    return Finding(
        name=name,
        target=f"raw thresholds with Theorem 3's noise: N=|S|=|D|={records}, d={features}, T={steps}, "
        f"residual {residual:g}",
        claimed=epsilon,
        certificate=certify_known_law(found.numpy(), delta, confidence),
        details={
            "smallest_log_ratio": float(found.min()),
            "median_log_ratio": float(found.median()),
            "runs": float(runs),
        },
    )


def _half_square(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return 0.5 * (model(batch["x"]).squeeze(1) - batch["y"]).square()


World = tuple[Sequence[Sums], Sequence[Mapping[str, float]]]


def log_ratio(transcript: Sequence[Sums], with_record: World, without: World) -> float:
    """The log-likelihood ratio of released values between two worlds.

    Args:
        transcript: what was released.
        with_record, without: raw sums and noise deviations of all releases, given the same transcript.
    """
    total = 0.0
    for number, released in enumerate(transcript):
        for sums, stds, sign in ((*with_record, 1.0), (*without, -1.0)):
            for name, tensors in released.items():
                std = stds[number][name]
                for key, value in tensors.items():
                    gap = (value - sums[number][name][key]).double().square().sum().item()
                    total += sign * (-gap / (2 * std**2) - value.numel() * math.log(std))
    return total


def _stds(ledger: RecordingLedger) -> list[dict[str, float]]:
    """Standard deviations of the noise of every release."""
    plan = ledger.plan
    return [
        {name: plan[name].mechanism.standard_deviation(name, bound) for name, bound in bounds.items()}
        for bounds in ledger.bounds
    ]
