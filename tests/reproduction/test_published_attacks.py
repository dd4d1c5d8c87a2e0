"""As published, the attacks succeed; and what they rest on is the library's own code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise import published
from equipoise.audit.replay import RecordingLedger
from equipoise.testing.canaries import Rows, canary_loss
from equipoise.testing.rehearsal import InMemoryTraining
from reproduction.attacks import ATTACKS
from reproduction.attacks.dc_noise import widest_noise
from reproduction.attacks.dice_memory import attack_dice_sgd, update
from reproduction.attacks.private_directions import attack_pcdp_sgd
from reproduction.attacks.shuffled_rounds import attack_adaptive_rms


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        return self.x - at


def test_the_vectorised_update_is_the_librarys():
    """Raw updates of `published.DiceSGD` over a training, and of the attack's formula."""
    bound, batch, steps = 50.0, 4.0, 12

    class Noting(RecordingLedger):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.ids = []

        def sample(self, draw, num_records):
            self.ids.append(super().sample(draw, num_records))
            return self.ids[-1]

    at = torch.zeros(20, dtype=torch.float64)
    at[0] = -1e6
    training = InMemoryTraining.open(
        published.DiceSGD(),
        Point(),
        lambda model, b: nn.functional.huber_loss(model(b["at"]), 0 * b["at"], reduction="none", delta=bound),
        {"at": at},
        eq.Poisson(batch, 20, steps),
        eq.Budget(2.0, 1e-5),
        seed=0,
        learning_rate=0.1,
        make_ledger=Noting,
    )
    x, memory = np.zeros(1), np.zeros(1)
    for step in range(steps):
        training.run(1)
        ids = training.ledger.ids[step]
        special = np.array([float((ids == 0).any())])
        others = np.array([float(len(ids))]) - special
        found, memory = update(x, memory, others, special, np.array([bound]), batch=batch, bound=bound)
        (raw,) = training.ledger.sums[step]["update"].values()
        assert raw.item() == pytest.approx(found.item(), rel=1e-6, abs=1e-9)
        x = training.parameters.numpy().copy()


def test_directions_from_private_records_give_them_away():
    found = attack_pcdp_sgd(canaries=60, trainings=2)
    assert found.unbounded
    assert found.succeeds
    assert found.details == {"moved_without": 0.0, "moved_with": 1.0}


def test_far_records_are_fed_back():
    found = attack_dice_sgd(runs=2000)
    assert found.details["mean_shift_in_stds"] > 2.5


def test_the_noise_of_equation_one_without_amplification():
    found = attack_adaptive_rms(population=200, batch=20, rounds=50, epsilon=8.0, canaries=200)
    assert found.details["releases_a_record"] == 5


def test_no_scale_of_the_authors_program_is_wider_than_the_public_one():
    """Whatever the batch, so that the certificate is one of the program's output alone."""
    scales = []

    class Scales(RecordingLedger):
        def release_unproven(self, draw, name, value, std, **options):
            scales.append(std)
            return super().release_unproven(draw, name, value, std, **options)

    sampling, budget = eq.Poisson(8, 200, 60), eq.Budget(8.0, 1e-5)
    method = published.DCDPSGD(variant="code")
    index = torch.arange(200) % 4
    data = {"index": index, "scale": torch.rand(200, 1)}
    InMemoryTraining.open(
        method, Rows(4), canary_loss(), data, sampling, budget, seed=0, make_ledger=Scales
    ).run()
    widest = widest_noise(method, budget, sampling)
    assert len(set(scales)) > 1
    assert 0.5 * widest < max(scales) <= widest


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ATTACKS))
def test_published_claims_fail(name):
    found = ATTACKS[name]()
    assert found.succeeds
    if name == "dice-sgd":
        assert found.claimed == 2
        assert found.certificate.epsilon > 4
    if name in ("dp-c4", "dp-c4-plus"):
        assert found.claimed == 4
        assert found.details["smallest_log_ratio"] > 50
    if name == "dc-dpsgd":
        assert found.certificate.epsilon > 5 * found.claimed
    if name == "pcdp-sgd":
        assert found.unbounded
    if name == "adaptive-rms":
        assert found.details["true_epsilon"] == pytest.approx(5.3, abs=0.1)
