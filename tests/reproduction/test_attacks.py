"""Attacks succeed on methods as published, run by the library; planted bugs are found by their check."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from torch import nn

import equipoise as eq
from equipoise import published
from equipoise.audit.replay import RecordingLedger
from equipoise.privacy import gaussian_epsilon
from equipoise.testing.canaries import Rows, canary_loss
from equipoise.testing.checks import noise_scale
from equipoise.testing.rehearsal import InMemoryTraining
from reproduction.attacks import ATTACKS
from reproduction.attacks.dc_noise import widest_noise
from reproduction.attacks.dice_memory import attack_dice_sgd, hidden_state_epsilon, hidden_state_mu, update
from reproduction.attacks.private_directions import attack_pcdp_sgd
from reproduction.attacks.shuffled_rounds import attack_adaptive_rms
from reproduction.noise_checks import batch_sizes, echoes, pairs, repeats, same_scale, sensitivity
from reproduction.planted_bugs import BUGS


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


def test_attacks_in_short():
    """Directions from private records give them away, far records are fed back, and nothing is amplified."""
    found = attack_pcdp_sgd(canaries=60, trainings=2)
    assert found.unbounded
    assert found.succeeds
    assert found.details == {"moved_without": 0.0, "moved_with": 1.0}
    assert attack_dice_sgd(runs=2000).details["mean_shift_in_stds"] > 2.5
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
@pytest.mark.parametrize("name", ATTACKS)
def test_published_claims_fail(name):
    found = ATTACKS[name]()
    assert found.succeeds
    epsilon = found.certificate.epsilon if found.certificate else 0
    as_found = {
        "dice-sgd": lambda: found.claimed == 2 and epsilon > 4,
        "dp-c4": lambda: found.claimed == 4 and found.details["smallest_log_ratio"] > 50,
        "dp-c4-plus": lambda: found.claimed == 4 and found.details["smallest_log_ratio"] > 50,
        "dc-dpsgd": lambda: epsilon > 5 * found.claimed,
        "pcdp-sgd": lambda: found.unbounded,
        "adaptive-rms": lambda: found.details["true_epsilon"] == pytest.approx(5.3, abs=0.1),
    }
    assert as_found[name]()


def std_for(epsilon, mu_at_one):
    """The noise for which a mechanism of GDP parameter mu_at_one / noise has this epsilon at delta 1e-5."""
    return brentq(lambda std: gaussian_epsilon(mu_at_one / std, 1e-5) - epsilon, 1e-2, 1e5)


@pytest.mark.parametrize(("count", "epsilon", "std", "plain"), [(3, 2.0, 57, 34.5), (20, 1.0, 688, 167)])
def test_worked_numbers_of_the_hidden_state_bound(count, epsilon, std, plain):
    """C1 = 1, Ce = 10, in units of C1 / B; beside DP-SGD at radius Ce without amplification."""
    mu = hidden_state_mu(count, 1.0, clip_norm=1.0, residual_clip_norm=10.0, expected_batch_size=1)
    assert std_for(epsilon, mu) == pytest.approx(std, rel=0.01)
    assert std_for(epsilon, math.sqrt(count) * 10) == pytest.approx(plain, rel=0.01)


def test_participations_by_chance_cost_more_than_their_mean():
    settings = {"clip_norm": 1.0, "residual_clip_norm": 10.0, "expected_batch_size": 200}
    exact = gaussian_epsilon(hidden_state_mu(20, 688 / 200, **settings), 1e-5)
    assert exact == pytest.approx(1.0, rel=0.01)
    averaged = hidden_state_epsilon(688 / 200, 1e-5, **settings, sampling_rate=0.02, steps=1000)
    assert 1.2 * exact < averaged < 1.4
    # A record that takes part in every draw has no chance about it.
    certain = hidden_state_epsilon(688 / 200, 1e-5, **settings, sampling_rate=1.0, steps=20)
    assert certain == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("bug", BUGS)
def test_found_where_planted_and_only_there(bug):
    clean, planted = BUGS[bug](False, 1), BUGS[bug](True, 1)
    assert clean.passes, clean
    assert not planted.passes, planted


def test_scores_of_sound_steps_are_standard():
    def sound(seed):
        rng = torch.Generator().manual_seed(seed)
        drawn, noise = torch.rand(500, 20, generator=rng) < 0.25, torch.randn(3, 2000, generator=rng)
        found = noise_scale(noise[0], 1.0), same_scale(noise[0], noise[1])
        return [one.statistic for one in (*found, batch_sizes(drawn.sum(1), 20, 0.25), pairs(drawn, 0.25))]

    scores = torch.tensor([sound(seed) for seed in range(300)])
    assert (scores.mean(dim=0).abs() < 0.25).all()
    assert ((scores.std(dim=0) - 1).abs() < 0.2).all()
    noise = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    assert not any(noise_scale(factor * noise, 1.0).passes for factor in (0.9, 1.1))


def test_coordinates_that_repeat_and_reach_too_far():
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 5000, generator=rng)
    assert not repeats(torch.cat([noise, -noise])).passes
    assert repeats(torch.randn(2, 5000, generator=rng)).passes
    assert not echoes(torch.cat([noise[0], noise[0]])).passes
    assert not echoes(torch.cat([noise[0], -noise[0, :1000]])).passes
    assert sensitivity(1.0 + noise.flatten(), 1.0, 1.0).passes
    assert not sensitivity(1.2 + noise.flatten(), 1.0, 1.0).passes
    scores = [echoes(torch.randn(size, generator=rng)).statistic for size in (2000, 2001) for _ in range(50)]
    assert 3 < max(scores) < 6
