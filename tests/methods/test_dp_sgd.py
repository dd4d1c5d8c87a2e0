"""DP-SGD as a method: clip rules, thresholds, noise in stages, and what a step makes of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from table import RECORDS, training

import equipoise as eq
from equipoise.methods import NoiseStages
from equipoise.methods.base import Setting
from equipoise.methods.clip_rules import NSGD, PSAC, Abadi, AutoS, ClipRule, layers
from equipoise.methods.thresholds import (
    ExponentialDecay,
    Fixed,
    LinearDecay,
    ReleasedQuantile,
    resolve_threshold,
)
from equipoise.privacy import Budget, FixedEpochs, Poisson

# Every clip rule of the library with its own settings, and some with others.
RULES = [
    *(rule() for rule in ClipRule.kinds().values() if rule.__module__.startswith("equipoise")),
    AutoS(gamma=1.0),
    NSGD(regulariser=10.0),
    PSAC(regulariser=1e-4),
]
NORMS = [0.0, 1e-30, 1e-8, 1e-3, 0.3, 0.999999, 1.0, 1.000001, 7.0, 1e4, 1e18]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threshold", [1e-3, 300.0])
def test_the_laws(rule, dtype, threshold):
    norms = torch.tensor(NORMS, dtype=dtype)
    near = threshold * (1 + torch.randn(2000, dtype=dtype).abs() * 1e-6)
    norms = torch.cat([norms, near])
    weights = rule.weights(norms, threshold)
    assert torch.isfinite(weights).all()
    assert (weights >= 0).all()
    # in the wider type, so that the test's own rounding cannot hide an excess
    longest = (weights.double() * norms.double()).max().item()
    assert longest <= threshold * (1 + (1e-12 if dtype == torch.float64 else 1e-7))
    weights = rule.weights(torch.tensor([math.nan, math.inf, 1.0], dtype=dtype), threshold)
    assert weights[:2].tolist() == [0.0, 0.0]
    assert weights[2] > 0
    norms = torch.linspace(1e-6, 50, 999, dtype=dtype)
    weights = rule.weights(norms, threshold)
    if not isinstance(rule, PSAC):  # PSAC's weight first rises: that is its point
        assert (weights.diff() <= 0).all()
    assert ((weights * norms).diff() >= -1e-5 * threshold).all()
    norms, limits = torch.rand(5, 3, dtype=dtype) * 4, threshold * torch.tensor([1, 2, 3], dtype=dtype)
    both = rule.weights(norms, limits)  # of groups, each with its own threshold
    for column in range(3):
        torch.testing.assert_close(both[:, column], rule.weights(norms[:, column], limits[column].item()))
    assert rule.weights(torch.zeros(0, dtype=dtype), threshold).shape == (0,)


def test_the_formulas():
    n = torch.tensor([0.2, 3.0], dtype=torch.float64)
    expect = {
        Abadi(): [1.0, 2 / 3],
        AutoS(gamma=0.5): [2 / 0.7, 2 / 3.5],
        NSGD(regulariser=0.5): [2 / 0.7, 2 / 3.5],
        PSAC(regulariser=0.5): [2 / (0.2 + 0.5 / 0.7), 2 / (3 + 0.5 / 3.5)],
    }
    for rule, weights in expect.items():
        torch.testing.assert_close(
            rule.weights(n, 2.0), torch.tensor(weights, dtype=torch.float64), rtol=1e-12, atol=0
        )


def test_layers_follow_the_modules():
    names = ["body.0.weight", "body.0.bias", "token", "body.2.weight", "position"]
    assert layers(names) == (("body.0.weight", "body.0.bias"), ("token",), ("body.2.weight",), ("position",))


def test_fixed_and_schedules():
    assert Fixed(0.5).upper(10) == Fixed(0.5).at(3, 9.0) == 0.5
    decay = ExponentialDecay(2.0, rate=0.5, floor=0.3)
    assert [decay.at(t, 0.0) for t in range(5)] == [2.0, 1.0, 0.5, 0.3, 0.3]
    assert decay.upper(5) == 2.0
    rise = LinearDecay(1.0, final=3.0, steps=3)
    assert [rise.at(t, 0.0) for t in range(4)] == [1.0, 2.0, 3.0, 3.0]
    assert rise.upper(3) == 3.0
    assert ExponentialDecay(1.0, rate=0.5).at(10_000, 0.0) > 0


def test_the_limits_of_a_threshold_and_what_users_may_write():
    rule = ReleasedQuantile(initial=1.0, minimum=0.5, maximum=2.0)
    assert rule.update(1.0, 1e9, 10) >= 0.5
    assert rule.update(1.9, -1e9, 10) <= 2.0
    assert rule.upper(7) == 2.0
    assert resolve_threshold(2) == Fixed(2.0)
    assert resolve_threshold(lambda t: 1.0 / (t + 1)).at(3, 0.0) == 0.25
    assert resolve_threshold(rule) is rule
    for wrong in ("1.0", None, True):
        with pytest.raises(TypeError, match="clip_norm="):
            resolve_threshold(wrong)


FALLING = NoiseStages((1.0, 0.8, 0.5))


def planned(noise, sampling, **options):
    method = eq.DPSGD(noise_multiplier=noise, **options)
    return method.plan(Setting(sampling=sampling, budget=Budget(8.0, 1e-5))).releases


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
