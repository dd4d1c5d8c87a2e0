"""Noise in stages: what DP-SGD plans with it, that it resumes exactly, and that audits see its bugs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from table import RECORDS, training

import equipoise as eq
from equipoise.methods import NoiseStages
from equipoise.methods.base import Setting
from equipoise.privacy import Budget, FixedEpochs, Poisson

BUDGET = Budget(8.0, 1e-5)
FALLING = NoiseStages((1.0, 0.8, 0.5))


def planned(noise, sampling, **options):
    method = eq.DPSGD(noise_multiplier=noise, **options)
    return method.plan(Setting(sampling=sampling, budget=BUDGET)).releases


def test_stages_of_equal_length_spend_the_budget():
    plan = planned(FALLING, Poisson(512, 60_000, 1000))
    mechanism = plan["gradient"].mechanism
    assert (mechanism.starts, mechanism.factors) == ((0, 333, 667), (1.0, 0.8, 0.5))
    assert 0.99 * 8 <= plan.epsilon(1e-5).value <= 8
    flat = planned(None, Poisson(512, 60_000, 1000))["gradient"].noise_multiplier
    first = mechanism.noise_multiplier
    assert 0.5 * first < flat < first


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NoiseStages(0.5), "factors=0.5 holds no numbers"),
        (lambda: NoiseStages((1.0, -1.0)), "factors=-1.0"),
        (lambda: NoiseStages((1.0,), noise_multiplier=0.0), "noise_multiplier=0.0"),
        (lambda: planned(FALLING, Poisson(5, 100, 2)), "are 3 stages, and the run has 2 steps"),
        (lambda: planned(FALLING, FixedEpochs(10, 100, 20)), "the run has 2 epochs of 10 draws"),
        (lambda: eq.DPMF(noise_multiplier=FALLING), "changes over the run.*take dp-sgd"),
    ],
)
def test_what_cannot_be_planned_is_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_noise_that_the_method_knows_is_that_of_the_stage():
    """DP-AdamBC takes the noise's second moment out: with beta 0 it is that of the last step."""
    seen, noise = [], NoiseStages((1.0, 0.5), noise_multiplier=2.0)

    @dataclass(frozen=True, kw_only=True)
    class Watched(eq.methods.DPAdamBC):
        def direction(self, gradient, moments, std):
            seen.append(std)
            return super().direction(gradient, moments, std)

    watched = Watched(clip_norm=0.5, beta2=0.0, noise_multiplier=noise)
    list(training(watched, sampling=Poisson(20, RECORDS, 6), budget=None))
    assert seen == pytest.approx([2.0 * 0.5 / 20] * 3 + [0.5 / 20] * 3)
