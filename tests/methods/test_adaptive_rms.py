"""RMS-adaptive clipping: the rule, the paper's equation (1), the cost, and a small problem."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from stepping import Follower, Linear, consistent, half_square
from table import training as train

import equipoise as eq
from equipoise.gradients import DenseGradients
from equipoise.methods.adaptive_rms import Fused, MeanSquareRule, RMSRadius, Round, _squares
from equipoise.methods.base import Setting
from equipoise.privacy import Draw, PrivateRows
from equipoise.privacy.private import unwrap
from equipoise.published.adaptive_rms import AdaptiveRMS as PublishedAdaptiveRMS

DELTA = 1e-5


def planned(method, sampling, relation="add_or_remove_one", budget=None):
    return method.plan(Setting(sampling=sampling, budget=budget, relation=relation)).releases


def test_the_radius_of_three_norms():
    norms = torch.tensor([3.0, 4.0, 0.5])
    for g_hat, square, radius in ((2.0, 2.75, 2.0), (10.0, 8.416667, 4.102845)):
        rule = RMSRadius(g_hat=g_hat, offset="none")
        mean = float(norms.square().clamp(max=g_hat**2).mean())
        assert mean == pytest.approx(square, rel=1e-6)
        assert rule.update(rule.start(), mean, 0.0, 1)["clip_norm"] == pytest.approx(radius, rel=1e-6)


def test_the_mean_is_averaged_over_steps():
    rule = RMSRadius(g_hat=2.0, ema_beta=0.5, offset="none")
    state = rule.update(rule.update(rule.start(), 1.0, 0.0, 2), 2.0, 0.0, 2)
    assert state["clip_norm"] == pytest.approx(math.sqrt(2 * 1.5))


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


@pytest.mark.parametrize("variant", [Fused(), Round()])
def test_the_radius_follows_the_mean_square_of_the_draw(variant):
    """Over the expected size, and with noise of no size."""
    data, _ = consistent(40, 3)
    quiet = {"noise_multiplier": 1e-9, "radius_noise_multiplier": 1e-9}
    method = eq.AdaptiveRMS(clip_norm=50.0, variant=variant, **quiet)
    state = Follower(method, Linear(3), half_square, data, eq.FullBatch(40, 2)).run(1).states[0]
    squares = (data["y"][:, None] * data["x"]).square().sum(1)
    assert state["clip_norm"] == pytest.approx(float(2 * squares.mean()) ** 0.5, rel=1e-5)


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


@pytest.mark.parametrize(
    ("variant", "of_radius", "steps", "value"),
    [
        (Fused(), 4.47, 4680, 1.647),
        (Round(length=47, sampling_rate=1024 / 60_000), 4.0, 50 * 47, 1.110),
        (Round(length=47), 20.0, 50 * 47, 1.789),
    ],
)
def test_worked_epsilons(variant, of_radius, steps, value):
    method = eq.AdaptiveRMS(variant=variant, noise_multiplier=1.0, radius_noise_multiplier=of_radius)
    found = planned(method, eq.Poisson(256, 60_000, steps))
    assert found.epsilon(DELTA).value == pytest.approx(value, rel=5e-3)


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("given", [{"noise_multiplier": 2.0}, {}], ids=["given", "calibrated"])
def test_the_radius_has_its_share_of_a_joint_release(share, given):
    """Of the sum of both 1 / z^2, what one release of a joint Gaussian costs."""
    method, budget = eq.AdaptiveRMS(radius_share=share, **given), None if given else eq.Budget(2.0, DELTA)
    found = planned(method, eq.FullBatch(60, 20), budget=budget)
    z, of_squares = found["gradient"].noise_multiplier, found["squares"].noise_multiplier
    assert (z / of_squares) ** 2 == pytest.approx(share / (1 - share))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_record_without_a_finite_norm_counts_as_a_large_one(bad):
    rows = DenseGradients({"w": torch.tensor([[bad, 1.0], [0.3, 0.0], [bad, bad]])})
    found = _squares(PrivateRows(rows, Draw("radius", 0)), 0.25)
    assert float(unwrap(found.value["sum"])) == pytest.approx(2.36)
    assert (found.add_remove, found.replace) == (1.0, 1.0)


@pytest.mark.parametrize("variant", [Fused(), Round()])
def test_noise_follows_the_radius_and_the_squares_keep_theirs(variant):
    noise = {"noise_multiplier": 1.5, "radius_noise_multiplier": 2.0}
    run = train(eq.AdaptiveRMS(clip_norm=5.0, variant=variant, **noise), steps=4)
    steps = list(run)
    radii = [step.clip_norm for step in steps]
    assert len(set(radii)) > 1
    assert max(radii) <= 5.0
    for step in steps:
        assert step.noise_std == pytest.approx(1.5 * step.clip_norm)
    bounds = [e.bounds for e in run.ledger.journal.entries() if e.kind == "release"]
    assert all(b["squares"] == 1.0 for b in bounds if "squares" in b)
    assert sum("squares" in b for b in bounds) == 4


MU = 1.6660  # of epsilon 8 at delta 1e-5


def excess(method, learning_rate=10, noise=0.0):
    """The loss after 100 steps over that of the best fit, the median of five problems."""
    found = []
    for seed in range(5):
        rng = torch.Generator().manual_seed(seed)
        z = torch.randn(2000, 20, generator=rng, dtype=torch.float64) / math.sqrt(20)
        w = torch.randn(20, generator=rng, dtype=torch.float64)
        y = z @ (w * math.sqrt(20) / w.norm()) + noise * torch.randn(2000, generator=rng, dtype=torch.float64)
        run = Follower(
            method, Linear(20), half_square, {"x": z, "y": y}, eq.FullBatch(2000, 100),
            learning_rate=learning_rate, seed=seed,
        ).run()  # fmt: skip
        best = torch.linalg.lstsq(z, y[:, None]).solution[:, 0]
        found.append(float(0.5 * ((z @ run.vector - y).square() - (z @ best - y).square()).mean()))
    return statistics.median(found)


def adaptive(clip_norm, share, **options):
    z, radius_z = 10 / MU / math.sqrt(1 - share), 10 / MU / math.sqrt(share)
    return eq.AdaptiveRMS(
        clip_norm=clip_norm, variant=Round(), radius=MeanSquareRule(**options), noise_multiplier=z,
        radius_noise_multiplier=radius_z,
    )  # fmt: skip


@pytest.mark.slow
def test_without_noise_in_the_labels_it_stalls_later_and_self_scaled_not_at_all_and_with_it_gains_nothing():
    def fixed(clip_norm):
        return eq.DPSGD(clip_norm=clip_norm, noise_multiplier=10 / MU)

    assert 4 < excess(fixed(0.1)) / excess(adaptive(0.1, 0.5, offset="paper")) < 30
    assert excess(adaptive(1.0, 0.2, scale="self", kappa=4.0)) < 1e-20
    still = excess(fixed(1.0), 2, 0.5)
    assert 0.8 < excess(adaptive(1.0, 0.5, offset="paper"), 2, 0.5) / still < 3
    assert 0.6 < excess(adaptive(3.0, 0.2, scale="self", kappa=4.0), 2, 0.5) / still < 2.5
