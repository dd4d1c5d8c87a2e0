"""Ten clients that one point fits: what the experiment says of its untuned lines."""

from __future__ import annotations

import pytest

import equipoise as eq
from equipoise.federated import ServerRMS
from equipoise.methods.base import Setting
from reproduction.papers import adaptive_rms_fl

SAMPLING = eq.Poisson(100, 1000, 300)


@pytest.mark.slow
def test_untuned_the_published_radius_ends_five_times_lower_at_least():
    fixed, published = (adaptive_rms_fl.losses(run, 0)[60] for run in adaptive_rms_fl.runs()[:2])
    assert fixed / published >= 5


def test_the_constants_of_epsilon_8():
    """1.286 without a query; 1.661 and 6.58 with half of the budget for the query of all records."""
    for method in (
        eq.DPSGD(clip_norm=1.0, noise_multiplier=1.286),
        ServerRMS(1.0, round_length=5, noise_multiplier=1.661, radius_noise_multiplier=6.58),
    ):
        plan = method.plan(Setting(sampling=SAMPLING)).releases
        assert plan.epsilon(1e-5).value == pytest.approx(8, rel=0.01)
    planned = (
        ServerRMS(1.0, round_length=5, radius_share=0.5)
        .plan(Setting(sampling=SAMPLING, budget=eq.Budget(8.0, 1e-5)))
        .releases
    )
    assert planned["gradient"].noise_multiplier == pytest.approx(1.661, rel=0.01)
    assert planned["squares"].noise_multiplier == pytest.approx(6.58, rel=0.01)
