"""RMS-adaptive clipping: the rule, the paper's equation (1), the cost, and a small problem."""

from __future__ import annotations

import math

import pytest
import torch
from stepping import Follower, Linear, consistent, half_square
from table import training as train

import equipoise as eq
from equipoise.gradients import DenseGradients
from equipoise.methods.adaptive_rms import Fused, RMSRadius, Round, _squares
from equipoise.methods.base import Setting
from equipoise.privacy import Draw, Private, PrivateRows
from equipoise.privacy.bounds.counts import capped
from equipoise.privacy.private import unwrap
from equipoise.published.adaptive_rms import AdaptiveRMS as PublishedAdaptiveRMS

DELTA = 1e-5


def planned(method, sampling, relation="add_or_remove_one", budget=None):
    return method.plan(Setting(sampling=sampling, budget=budget, relation=relation)).releases


# ---- the rule


def test_the_radius_of_three_norms():
    norms = torch.tensor([3.0, 4.0, 0.5])
    for g_hat, square, radius in ((2.0, 2.75, 2.0), (10.0, 8.416667, 4.102845)):
        rule = RMSRadius(g_hat=g_hat, offset="none")
        mean = float(norms.square().clamp(max=g_hat**2).mean())
        assert mean == pytest.approx(square, rel=1e-6)
        assert rule.update(rule.start(), mean, 0.0, 1)["clip_norm"] == pytest.approx(radius, rel=1e-6)


@pytest.mark.parametrize("scale", ["g_hat", "self"])
def test_the_radius_stays_above_zero_and_below_its_limit(scale):
    rule, rng = RMSRadius(g_hat=2.0, scale=scale), torch.Generator().manual_seed(0)
    state = rule.start()
    for _ in range(300):
        mean = float(3 * torch.randn((), generator=rng))
        before, noise = state["square_limit"], 0.2 * state["square_limit"]
        state = rule.update(state, mean, noise, 1)
        assert 0 < state["clip_norm"] <= 2
        if scale == "self":
            kappa = rule.growth(noise / before)
            assert state["clip_norm"] ** 2 >= before / (4 * kappa) * (1 - 1e-9)
            assert state["square_limit"] == min(4.0, kappa * state["clip_norm"] ** 2)


def test_without_noise_a_constant_norm_gives_its_double_square():
    for start in (1.0, 1e-4):
        rule = RMSRadius(g_hat=1.0, scale="self", kappa=4.0, offset="none")
        state = {**rule.start(start), "square_limit": min(1.0, 4 * start**2)}
        for _ in range(60):
            state = rule.update(state, min(0.01**2, state["square_limit"]), 0.0, 1)
        assert state["clip_norm"] == pytest.approx(math.sqrt(2) * 0.01)


@pytest.mark.parametrize("variant", [Fused(), Round()])
def test_the_radius_follows_the_mean_square_of_the_draw(variant):
    """Over the expected size, and with noise of no size."""
    data, _ = consistent(40, 3)
    method = eq.AdaptiveRMS(
        clip_norm=50.0, variant=variant, noise_multiplier=1e-9, radius_noise_multiplier=1e-9
    )
    state = Follower(method, Linear(3), half_square, data, eq.FullBatch(40, 2)).run(1).states[0]
    squares = (data["y"][:, None] * data["x"]).square().sum(1)
    assert state["clip_norm"] == pytest.approx(float(2 * squares.mean()) ** 0.5, rel=1e-5)


# ---- equation (1)


def test_as_published_the_ledgers_epsilon_is_far_below_the_papers():
    """At epsilon 8 the paper's noise really costs 4.9 (RDP, without replacement, true sensitivities)."""
    method = PublishedAdaptiveRMS(round_length=20)
    sampling = eq.WithoutReplacement(100, 10_000, 2000)
    made = method.plan(Setting(sampling=sampling, budget=eq.Budget(8.0, DELTA), relation="replace_one"))
    plan = made.releases
    assert plan["gradient"].noise_multiplier == pytest.approx(2.134, rel=1e-3)
    assert plan["squares"].noise_multiplier == pytest.approx(1.289, rel=1e-3)
    assert method.claimed_epsilon(made, DELTA) == pytest.approx(8, rel=1e-3)
    assert plan.epsilon(DELTA).value == pytest.approx(4.9, abs=0.1)


# ---- what it costs

FIFTY_ROUNDS = eq.Poisson(256, 60_000, 50 * 47)


@pytest.mark.parametrize(
    ("method", "sampling", "value"),
    [
        (lambda: eq.AdaptiveRMS(noise_multiplier=1.0, radius_noise_multiplier=4.47), None, 1.647),
        (
            lambda: eq.AdaptiveRMS(
                variant=Round(length=47, sampling_rate=1024 / 60_000),
                noise_multiplier=1.0, radius_noise_multiplier=4.0,
            ),
            FIFTY_ROUNDS,
            1.110,
        ),
        (
            lambda: eq.AdaptiveRMS(
                variant=Round(length=47), noise_multiplier=1.0, radius_noise_multiplier=20.0
            ),
            FIFTY_ROUNDS,
            1.789,
        ),
    ],
)  # fmt: skip
def test_worked_epsilons(method, sampling, value):
    found = planned(method(), sampling or eq.Poisson(256, 60_000, 4680))
    assert found.epsilon(DELTA).value == pytest.approx(value, rel=5e-3)


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("given", [{"noise_multiplier": 2.0}, {}], ids=["given", "calibrated"])
def test_the_radius_has_its_share_of_a_joint_release(share, given):
    """Of the sum of both 1 / z^2, what one release of a joint Gaussian costs."""
    method, budget = eq.AdaptiveRMS(radius_share=share, **given), None if given else eq.Budget(2.0, DELTA)
    found = planned(method, eq.FullBatch(60, 20), budget=budget)
    z, of_squares = found["gradient"].noise_multiplier, found["squares"].noise_multiplier
    assert (z / of_squares) ** 2 == pytest.approx(share / (1 - share))


def test_replacing_a_record_moves_the_squares_by_their_cap_and_no_more():
    """The plan's ratio of 1: under replace-one with all records, the squares cost what they cost before."""
    method = eq.AdaptiveRMS(variant=Round(), noise_multiplier=1e4, radius_noise_multiplier=5.0)
    found = planned(method, eq.FullBatch(100, 1), "replace_one")
    (multiplier,) = [found.combined_multiplier(p.names) for p in found.patterns() if p.draw == "radius"]
    assert multiplier == pytest.approx(5.0)
    values = Private(torch.tensor([0.0, 7.0]), Draw("radius", 0))
    assert capped(values, 1.0).replace == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_record_without_a_finite_norm_counts_as_a_large_one(bad):
    rows = DenseGradients({"w": torch.tensor([[bad, 1.0], [0.3, 0.0], [bad, bad]])})
    found = _squares(PrivateRows(rows, Draw("radius", 0)), 0.25)
    assert float(unwrap(found.value["sum"])) == pytest.approx(2.36)
    assert (found.add_remove, found.replace) == (1.0, 1.0)


# ---- in a training


@pytest.mark.parametrize("variant", [Fused(), Round()])
def test_noise_follows_the_radius_and_the_squares_keep_theirs(variant):
    run = train(
        eq.AdaptiveRMS(clip_norm=5.0, variant=variant, noise_multiplier=1.5, radius_noise_multiplier=2.0),
        steps=4,
    )
    steps = list(run)
    radii = [step.clip_norm for step in steps]
    assert len(set(radii)) > 1
    assert max(radii) <= 5.0
    for step in steps:
        assert step.noise_std == pytest.approx(1.5 * step.clip_norm)
    bounds = [e.bounds for e in run.ledger.journal.entries() if e.kind == "release"]
    assert all(b["squares"] == 1.0 for b in bounds if "squares" in b)
    assert sum("squares" in b for b in bounds) == 4


def test_larger_losses_change_only_the_scale():
    """Losses times a, G times a, rate over a: the same path, the radius times a."""
    data, _ = consistent(60, 4)
    paths = []
    for factor in (1.0, 8.0):
        method = eq.AdaptiveRMS(clip_norm=50.0 * factor, noise_multiplier=1.0, radius_noise_multiplier=3.0)
        run = Follower(
            method,
            Linear(4),
            lambda model, batch, factor=factor: factor * half_square(model, batch),
            data,
            eq.Poisson(20, 60, 10),
            learning_rate=0.1 / factor,
        ).run()
        paths.append((run.vector, [state["clip_norm"] / factor for state in run.states]))
    assert torch.allclose(paths[0][0], paths[1][0], rtol=1e-12)
    assert paths[0][1] == pytest.approx(paths[1][1], rel=1e-12)
    assert len(set(paths[0][1])) > 1


# ---- the small experiment: interpolation, 2,000 records, all of them at each of 100 steps, epsilon 8
