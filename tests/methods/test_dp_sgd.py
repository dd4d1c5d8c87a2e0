"""DP-SGD as a method: its plan, its thresholds in a training, its settings as plain values."""

from __future__ import annotations

import math

import pytest
from table import training

import equipoise as eq
from equipoise.methods.base import Setting
from equipoise.privacy import Poisson


def test_a_learned_threshold_costs_what_the_joint_gaussian_costs():
    quantile = eq.methods.ReleasedQuantile(initial=0.3, count_noise=0.05)
    method = eq.DPSGD(clip_norm=quantile, noise_multiplier=1.0)
    found = method.plan(Setting(sampling=Poisson(30, 120, 10))).releases
    (pattern,) = found.patterns()
    joint = found.combined_multiplier(pattern.names)
    sigma = 0.05 * 30
    assert joint == pytest.approx((1 + (2 * sigma) ** -2) ** -0.5)


def train(method, steps=10):
    run = training(method, sampling=eq.FixedEpochs(20, 60, steps), budget=None)
    return run, list(run)


def test_a_learned_threshold_moves_towards_the_median_from_both_sides():
    for start, direction in ((0.01, 1), (100.0, -1)):
        threshold = eq.methods.ReleasedQuantile(initial=start, learning_rate=0.5)
        _, steps = train(eq.DPSGD(clip_norm=threshold, noise_multiplier=0.5), steps=8)
        norms = [step.clip_norm for step in steps]
        assert [step.noise_std for step in steps] == pytest.approx([0.5 * norm for norm in norms])
        assert norms[0] == start
        assert math.copysign(1, norms[-1] - norms[0]) == direction


@pytest.mark.parametrize("per_layer", [True, {"0": 1.0, "2": 3.0}])
def test_per_layer_clipping_keeps_the_bound_of_the_whole(per_layer):
    run, steps = train(eq.DPSGD(clip_norm=0.4, noise_multiplier=1.0, per_layer=per_layer), steps=2)
    assert [step.clip_norm for step in steps] == pytest.approx([0.4, 0.4])
    groups, limits = run.method._groups(dict(run.parameters), 0.4)
    assert [group[0] for group in groups] == ["0.weight", "2.weight"]
    assert math.hypot(*limits) == pytest.approx(0.4)
