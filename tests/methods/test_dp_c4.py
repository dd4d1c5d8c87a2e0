"""DP-C4 and DP-C4+: thresholds, what they may depend on, clipped differences, and what was published."""

from __future__ import annotations

import math

import pytest
import torch
from stepping import Follower, Linear, consistent, half_square
from table import EXAMPLES, noise_scales, under_replay
from table import training as train

import equipoise as eq
from equipoise import published
from equipoise.methods.anchored import Every
from equipoise.methods.base import Setting
from equipoise.methods.dp_c4 import Constant, Distance, Quantile, Released, ReleasedNorm
from equipoise.methods.thresholds import Schedule
from equipoise.privacy import Budget, FullBatch, Poisson

SMALL = {"noise_multiplier": 1.0, "anchor_noise_multiplier": 2.0}


def after(rule, clip_norm=1.0, *, norm=0.0, d=100, std=0.02, count=None, size=100.0, cap=1.0):
    return rule.following(clip_norm, Released(norm, d, std, count, size), cap)


def test_released_thresholds_follow_the_norm_without_its_noise():
    assert Released(0.5, 100, 0.02, None, 1).debiased == pytest.approx(0.458258, rel=1e-6)
    assert after(ReleasedNorm(), norm=0.5) == 0.5
    assert after(ReleasedNorm(shrink_limit=0.25), norm=0.5) == pytest.approx(0.458258, rel=1e-6)
    assert Released(0.1, 100, 0.02, None, 1).debiased == 0.0
    assert after(ReleasedNorm(shrink_limit=0.25), norm=0.1) == 0.25
    assert after(ReleasedNorm(scale=4.0), norm=9.0) == 1.0  # the cap
    assert after(ReleasedNorm(shrink_limit=0.25, minimum=0.3), norm=0.1) == 0.3


def test_the_quantile_moves_by_the_share_inside():
    rule = Quantile()
    assert after(rule, 0.7, count=30.0) == pytest.approx(0.7)  # 80 of 100 inside: 80 * 1/2 - 20 * 1/2
    assert after(rule, 0.7, count=50.0) == pytest.approx(0.7 * math.exp(-0.6))
    assert after(rule, 0.07, count=-50.0) == pytest.approx(0.07 * math.exp(2.4))
    assert after(rule, 0.7, count=-50.0) == 1.0
    assert after(Quantile(minimum=0.5), 0.51, count=50.0) == 0.5
    assert after(Constant(), 0.7, cap=1.5) == 1.5


def bounds_of(follower, name):
    lines = [entry for entry in follower.ledger.journal.entries() if entry.kind == "release"]
    return [entry.bounds[name] for entry in lines if name in entry.bounds]


def test_the_coupled_threshold_follows_the_distance_and_clips_nobody_above_the_smoothness():
    """L-smooth losses: |g_i(x) - g_i(w)| <= L |x - w|, so that a scale of L clips no row."""
    data, _ = consistent(80, 4)
    smoothness = float(data["x"].square().sum(1).max())
    method = eq.DPC4Plus(
        clip_norm=1e6, coupled=Distance(smoothness), schedule=Every(3), noise_multiplier=1e-9,
        anchor_noise_multiplier=1e-9, anchor=Constant(), anchor_batch_size=80,
    )  # fmt: skip
    follower = Follower(method, Linear(4), half_square, data, FullBatch(80, 8))
    points = []
    for _ in range(8):
        x = follower.vector.clone()
        follower.step()
        points.append((x, follower.states[-2]["anchor"]["weight"] if len(follower.states) > 1 else x))
    found = bounds_of(follower, "coupled")
    assert found == pytest.approx([smoothness * float((x - w).norm()) for x, w in points[1:]], rel=1e-12)
    x, y = data["x"], data["y"]
    sums = [answer["coupled"]["weight"] for answer in follower.ledger.sums if "coupled" in answer]
    for found, (point, anchor) in zip(sums, points[1:], strict=True):
        unclipped = ((x @ point - y)[:, None] * x - (x @ anchor - y)[:, None] * x).sum(0)
        torch.testing.assert_close(found, unclipped, rtol=1e-9, atol=1e-12)


def test_no_threshold_falls_to_zero():
    """A step size of zero leaves x at the anchor: the threshold is at its floor and training goes on."""
    data, _ = consistent(40, 3)
    method, sampling = eq.DPC4Plus(schedule=Every(2), **SMALL), Poisson(10, 40, 5)
    follower = Follower(method, Linear(3), half_square, data, sampling, learning_rate=0).run()
    assert set(bounds_of(follower, "coupled")) == {1e-30}


@pytest.mark.parametrize(
    "name", [name for name in EXAMPLES if name.startswith("dp-c4") and "published" in name]
)
def test_raw_thresholds_betray_the_data(name, monkeypatch):
    """The law that library recipes keep fails here, as it must."""
    first, second = map(noise_scales, under_replay(EXAMPLES[name], monkeypatch))
    assert first != second


def test_the_published_recipe_claims_its_target_and_guarantees_nothing():
    run = train(published.DPC4Plus(clip_norm=0.5))
    list(run)
    statement = run.statement()
    assert (statement.guarantee, statement.epsilon) == ("none", None)
    assert statement.epsilon_claimed == pytest.approx(8.0)
    assert eq.DPC4Plus().claimed_epsilon(run.method_plan, 1e-5) is None


@pytest.mark.parametrize("value", [0.0, math.nan])
@pytest.mark.parametrize(
    "make",
    [
        lambda scale: eq.DPC4Plus(coupled=Distance(scale=scale)),
        lambda scale: eq.DPC4Plus(anchor=ReleasedNorm(scale=scale)),
        lambda scale: published.DPC4Plus(anchor_scale=scale),
    ],
)
def test_a_schedule_that_ends_at_no_number_is_refused_before_the_start(make, value):
    method = make(Schedule(lambda step: 1.0 if step < 5 else value))
    with pytest.raises(ValueError, match="5"):
        method.plan(Setting(sampling=Poisson(64, 2000, 100), budget=Budget(4.0, 1e-5)))


def test_a_released_norm_is_rid_of_the_noise_of_its_mean():
    data, _ = consistent(60, 3)
    method = eq.DPC4Plus(clip_norm=5.0, anchor=ReleasedNorm(shrink_limit=0.01), schedule=Every(2), **SMALL)
    state = Follower(method, Linear(3), half_square, data, FullBatch(60, 3)).run(1).states[0]
    norm, std = float(state["gradient"]["weight"].norm()), 2.0 * 5.0 / 60
    assert state["next_anchor_clip_norm"] == pytest.approx((norm**2 - 3 * std**2) ** 0.5)
