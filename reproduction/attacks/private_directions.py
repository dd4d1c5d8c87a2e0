"""PCDP-SGD with private rows in place of public ones: the span of the update tells who is there.

The authors' leftover code takes directions from the private batch. A record whose gradient points where no
other's does brings that direction into the span: the update, noise included, lies in the span, so that its
component there is exactly zero without the record and (almost surely) not with it. No epsilon holds.

The library takes directions from public records, from releases, or pays for private ones; that public records
are public is an assumption that the statement names. Here the private records themselves are given as public.
"""

from __future__ import annotations

import warnings

import torch

from equipoise.audit.bounds import certify_thresholds
from equipoise.methods import PCDPSGD, PublicRecords, PublicSubspace
from equipoise.privacy import Budget, FullBatch
from equipoise.testing.canaries import CanaryLayout, Rows, canary_loss
from equipoise.testing.rehearsal import InMemoryTraining
from reproduction.attacks.finding import Finding

__all__ = ["attack_pcdp_sgd"]


def attack_pcdp_sgd(
    seed: int = 0,
    *,
    canaries: int = 200,
    trainings: int = 20,
    epsilon: float = 1.0,
    delta: float = 1e-5,
    confidence: float = 0.99,
) -> Finding:
    """Trainings of canaries by toss of a coin, with directions from the records that are there.

    Args:
        seed: of the runs.
        canaries: a training.
        trainings: how many.
        epsilon, delta: as claimed.
        confidence: of the certificate.
    """
    without, with_record = [], []
    for run in range(trainings):
        number = seed + 1000 * run
        present = torch.rand(canaries, generator=torch.Generator().manual_seed(number)) < 0.5
        data = CanaryLayout().records(torch.arange(canaries)[present])
        # a field more, or the copies would be found and refused
        public = data | {"public": torch.ones(len(data["index"]))}
        with warnings.catch_warnings():
            # no public gradient is held out here to see what the subspace captures
            warnings.simplefilter("ignore", UserWarning)
            training = InMemoryTraining.open(
                PCDPSGD(
                    source=PublicSubspace(PublicRecords(public), dimension=int(present.sum())), clip_norm=1.0
                ),
                Rows(canaries),
                canary_loss(),
                data,
                FullBatch(canaries, 1),
                Budget(epsilon, delta),
                seed=number,
                learning_rate=float(canaries),
            ).run()
        moved = training.parameters.abs()
        without.append(moved[~present])
        with_record.append(moved[present])
    absent, there = torch.cat(without), torch.cat(with_record)
    return Finding(
        name="pcdp-sgd",
        target="one step with directions from the private records",
        claimed=epsilon,
        certificate=certify_thresholds(absent.numpy(), there.numpy(), delta, confidence),
        unbounded=bool((absent == 0).all() and (there > 0).any()),
        details={
            "moved_without": float((absent > 0).double().mean()),
            "moved_with": float((there > 0).double().mean()),
        },
    )
