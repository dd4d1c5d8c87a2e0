"""Planted bugs are found by the check that suits them, and nothing is found where there is none."""

from __future__ import annotations

import pytest
import torch

from equipoise.testing.checks import noise_scale
from reproduction.noise_checks import batch_sizes, echoes, pairs, repeats, same_scale, sensitivity
from reproduction.planted_bugs import BUGS


@pytest.mark.parametrize("bug", BUGS)
def test_found_where_planted_and_only_there(bug):
    clean, planted = BUGS[bug](False, 1), BUGS[bug](True, 1)
    assert clean.passes, clean
    assert not planted.passes, planted


def _sound(seed: int) -> list[float]:
    rng = torch.Generator().manual_seed(seed)
    drawn = torch.rand(500, 20, generator=rng) < 0.25
    noise = torch.randn(3, 2000, generator=rng)
    return [
        noise_scale(noise[0], 1.0).statistic,
        same_scale(noise[0], noise[1]).statistic,
        batch_sizes(drawn.sum(dim=1), 20, 0.25).statistic,
        pairs(drawn, 0.25).statistic,
    ]


def test_scores_of_sound_steps_are_standard():
    scores = torch.tensor([_sound(seed) for seed in range(300)])
    assert (scores.mean(dim=0).abs() < 0.25).all()
    assert ((scores.std(dim=0) - 1).abs() < 0.2).all()


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_tenth_of_the_noise_is_seen(factor):
    noise = factor * torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    assert not noise_scale(noise, 1.0).passes


def test_coordinates_that_repeat_and_reach_too_far():
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 5000, generator=rng)
    assert not repeats(torch.cat([noise, -noise])).passes
    assert repeats(torch.randn(2, 5000, generator=rng)).passes
    assert not echoes(torch.cat([noise[0], noise[0]])).passes
    assert not echoes(torch.cat([noise[0], -noise[0, :1000]])).passes
    assert sensitivity(1.0 + noise.flatten(), 1.0, 1.0).passes
    assert not sensitivity(1.2 + noise.flatten(), 1.0, 1.0).passes


def test_sound_noise_has_no_echo():
    rng = torch.Generator().manual_seed(0)
    scores = [echoes(torch.randn(size, generator=rng)).statistic for size in (2000, 2001) for _ in range(50)]
    assert 3 < max(scores) < 6
