"""DP-C4 and DP-C4+: thresholds, what they may depend on, clipped differences, and what was published."""

from __future__ import annotations

import math

import pytest
import torch
from stepping import Follower, Linear, consistent, half_square
from table import EXAMPLES, scales_under_replay
from table import training as train

import equipoise as eq
from equipoise import published
from equipoise.methods.anchored import Every
from equipoise.methods.base import Setting
from equipoise.methods.dp_c4 import Constant, Distance, Quantile, Released, ReleasedNorm
from equipoise.methods.thresholds import Schedule
from equipoise.privacy import Budget, FullBatch, Poisson
from equipoise.statements import statement_of

SMALL = {"noise_multiplier": 1.0, "anchor_noise_multiplier": 2.0}


# ---- threshold rules


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
    distances = []
    for _ in range(8):
        x = follower.vector.clone()
        follower.step()
        anchor = follower.states[-2]["anchor"]["weight"] if len(follower.states) > 1 else x
        distances.append(float((x - anchor).norm()))
    found = bounds_of(follower, "coupled")
    assert found == pytest.approx([smoothness * r for r in distances[1:]], rel=1e-12)
    x, y = data["x"], data["y"]
    sums = [answer["coupled"]["weight"] for answer in follower.ledger.sums if "coupled" in answer]
    again = Follower(method, Linear(4), half_square, data, FullBatch(80, 8))
    for k in range(8):
        point = again.vector.clone()
        again.step()
        if k:
            anchor = again.states[-2]["anchor"]["weight"]
            unclipped = ((x @ point - y)[:, None] * x - (x @ anchor - y)[:, None] * x).sum(0)
            torch.testing.assert_close(sums[k - 1], unclipped, rtol=1e-9, atol=1e-12)


def test_no_threshold_falls_to_zero():
    """A step size of zero leaves x at the anchor: the threshold is at its floor and training goes on."""
    data, _ = consistent(40, 3)
    follower = Follower(
        eq.DPC4Plus(schedule=Every(2), **SMALL),
        Linear(3),
        half_square,
        data,
        Poisson(10, 40, 5),
        learning_rate=0,
    ).run()
    assert set(bounds_of(follower, "coupled")) == {1e-30}


def test_a_released_norm_is_rid_of_the_noise_of_its_mean():
    data, _ = consistent(60, 3)
    method = eq.DPC4Plus(clip_norm=5.0, anchor=ReleasedNorm(shrink_limit=0.01), schedule=Every(2), **SMALL)
    state = Follower(method, Linear(3), half_square, data, FullBatch(60, 3)).run(1).states[0]
    norm, std = float(state["gradient"]["weight"].norm()), 2.0 * 5.0 / 60
    assert state["next_anchor_clip_norm"] == pytest.approx((norm**2 - 3 * std**2) ** 0.5)


# ---- what thresholds may depend on


@pytest.mark.parametrize(
    "name", [name for name in EXAMPLES if name.startswith("dp-c4") and "published" in name]
)
def test_raw_thresholds_betray_the_data(name, monkeypatch):
    """The law that library recipes keep fails here, as it must."""
    first, second = scales_under_replay(EXAMPLES[name], monkeypatch)
    assert first != second


def test_published_thresholds_are_those_of_the_paper():
    """DP-C4: this anchor's own norm. DP-C4+: the norm at the anchor before, and the cap at first."""
    data, _ = consistent(50, 3)
    x, y = data["x"], data["y"]
    options = {"schedule": Every(2), "anchor_batch_size": 50, "anchor_scale": 0.5}
    found = {}
    for kind in (published.DPC4, published.DPC4Plus):
        follower = Follower(
            kind(clip_norm=20.0, coupled_scale=2.0, **options, **SMALL),
            Linear(3),
            half_square,
            data,
            FullBatch(50, 7),
            learning_rate=0.02,
        )
        norms, coupled = [], []
        for _ in range(7):
            before, state = follower.vector.clone(), follower.state
            follower.step()
            anchor = before if state is None else state["anchor"]["weight"]
            rows = (x @ anchor - y)[:, None] * x
            if state is None or state["gradient"] is None:
                norms.append(float(rows.mean(0).norm()))
            if state is not None:
                coupled.append(float(((x @ before - y)[:, None] * x - rows).mean(0).norm()))
        found[kind] = bounds_of(follower, "anchor")
        expected = [min(20.0, 0.5 * norm) for norm in norms]
        if kind is published.DPC4Plus:
            expected = [20.0, *expected[:-1]]
        else:
            assert bounds_of(follower, "coupled") == pytest.approx([2 * value for value in coupled], rel=1e-9)
        assert found[kind] == pytest.approx(expected, rel=1e-9)
        statement = statement_of(follower.ledger, delta=1e-5)
        assert statement.guarantee == "none"
        assert statement.epsilon is None
        assert len(statement.holes) == (2 if kind is published.DPC4 else 1)


# ---- Theorem 3


def test_the_published_recipe_claims_its_target_and_guarantees_nothing():
    run = train(published.DPC4Plus(clip_norm=0.5))
    list(run)
    statement = run.statement()
    assert (statement.guarantee, statement.epsilon) == ("none", None)
    assert statement.epsilon_claimed == pytest.approx(8.0)
    assert eq.DPC4Plus().claimed_epsilon(run.method_plan, 1e-5) is None


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
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
