"""DC-DPSGD: its limits in DP-SGD, its bounds under attack, its thresholds and its price."""

from __future__ import annotations

import math

import pytest
import torch
from dp_accounting import pld
from table import parameters, records, training

import equipoise as eq
from equipoise.gradients import DenseGradients
from equipoise.methods import find
from equipoise.methods.base import Setting
from equipoise.methods.two_threshold_sums import clip_selected, top_share
from equipoise.methods.two_thresholds import AdaptiveTail, PerSample, Random, TopShare, Trace, TwoChannel
from equipoise.privacy import Draw, Poisson, Private, PrivateRows
from equipoise.privacy.private import unwrap
from equipoise.published.dc_dpsgd import DCDPSGD as PublishedDCDPSGD
from equipoise.published.dc_dpsgd import printed_multiplier

DRAW, RADII = Draw("batch", 0), {"clip_norm": 0.5, "body_clip_norm": 0.05}


def train(method, steps=4, **options):
    run = training(method, steps=steps + 1, budget=None, **options)
    return run, [run.take_step() for _ in range(steps)]


def weights(run):
    return parameters(run.model)


def plan(method, sampling=None, budget=None, relation="add_or_remove_one"):
    return method.plan(
        Setting(sampling=sampling or Poisson(30, 120, 10), budget=budget, relation=relation)
    ).releases


def test_two_channels_add_up_to_one_sum():
    """With hardly any noise both forms are the same sum; weight zero leaves the body alone."""
    quiet = {**RADII, "tail_threshold": 0.3, "noise_multiplier": 1e-7}
    both, _ = train(eq.DCDPSGD(**quiet, variant=TwoChannel()))
    one, _ = train(eq.DCDPSGD(**quiet))
    torch.testing.assert_close(weights(both), weights(one), rtol=1e-5, atol=1e-6)
    body, _ = train(eq.DCDPSGD(**quiet, variant=TwoChannel(tail_weight=0.0)))
    assert (weights(body) - weights(one)).norm() > 1e-3


def selected_sum(scores, values, fraction):
    rows = PrivateRows(DenseGradients({"w": torch.tensor(values, dtype=torch.float64)[:, None]}), DRAW)
    ids = Private(torch.arange(len(values)), DRAW)
    chosen = top_share(Private(torch.tensor(scores, dtype=torch.float64), DRAW), ids, fraction)
    out = clip_selected(rows, ids, chosen, 1.0, 0.1, find("dp-sgd")().clip_rule)
    assert (out.add_remove, out.replace) == (1.9, 2.0)
    return float(unwrap(out.value["w"]))


def test_the_top_share_attains_its_bounds():
    assert selected_sum([0.9, 0.8, 0.7, 0.6], [2.0] * 4, 0.25) == pytest.approx(1.3)
    assert selected_sum([0.9, 0.8, 0.7, 0.6, 0.95], [2.0] * 4 + [-2.0], 0.25) == pytest.approx(-0.6)
    assert selected_sum([0.9, 0.8], [2.0, -2.0], 0.5) == pytest.approx(0.9)
    assert selected_sum([0.1, 0.8], [-2.0, -2.0], 0.5) == pytest.approx(-1.1)


def test_the_noise_follows_the_bound_and_nothing_else():
    for variant, bound in ((PerSample(), 1.0), (TwoChannel(), 1.0), (TopShare(), 1.9)):
        method = eq.DCDPSGD(clip_norm=1.0, body_clip_norm=0.1, variant=variant, noise_multiplier=0.7)
        _, steps = train(method, steps=2)
        assert [step.noise_std for step in steps] == pytest.approx([0.7 * bound] * 2)


WORKED = Poisson(256, 60_000, 4687)


@pytest.mark.parametrize(
    ("options", "noise", "value"),
    [
        ({"variant": TwoChannel(), "tail_threshold": 1.0}, 1.0, 1.568),
        ({"score": Random()}, 1.0, 1.568),  # c_1 for every record, whatever its lot
        ({"tail_threshold": AdaptiveTail(count_noise=0.1)}, 1.0, 1.571),
        ({"tail_threshold": AdaptiveTail(count_noise=0.05)}, 1.0, 1.578),
        # the top share under noise meant for c_1 alone: sigma c_1 / (2 c_1 - c_2)
        ({"variant": TopShare()}, 1 / 1.9, 10.31),
    ],
)
def test_worked_prices(options, noise, value):
    method = eq.DCDPSGD(clip_norm=1.0, body_clip_norm=0.1, noise_multiplier=noise, **options)
    assert plan(method, WORKED).epsilon(1e-5).value == pytest.approx(value, rel=5e-3)


@pytest.mark.slow
def test_labels_by_lot_are_charged_without_their_amplification():
    """Exactly, with p = 0.1 (body 0.1, tail 1), the price is 0.206; one threshold of 0.19 costs 0.182."""
    method = eq.DCDPSGD(
        clip_norm=1.0, body_clip_norm=0.1, score=Random(), tail_fraction=0.1, noise_multiplier=1.0
    )
    q, p = WORKED.sampling_rate, method.tail_fraction
    one = pld.privacy_loss_distribution.from_mixture_gaussian_mechanism(
        1.0, [0, 0.1, 1], [1 - q, q * (1 - p), q * p], value_discretization_interval=1e-4
    )
    exact = one.self_compose(WORKED.steps).get_epsilon_for_delta(1e-5)
    assert exact == pytest.approx(0.206, rel=5e-3)
    assert exact < plan(method, WORKED).epsilon(1e-5).value
    single = eq.DPSGD(clip_norm=0.19, noise_multiplier=1 / 0.19)
    assert plan(single, WORKED).epsilon(1e-5).value == pytest.approx(0.182, rel=5e-3)


def test_the_threshold_settles_at_the_wanted_share():
    """Constant law of norms, batch of 250, count noise of 25: mean share within 0.03 of p."""
    rule = AdaptiveTail(initial=1.0)
    rng = torch.Generator().manual_seed(0)
    threshold, realised = 1.0, []
    for step in range(400):
        norms = 7 * torch.randn(250, generator=rng).abs()
        fraction = float((norms > threshold).double().mean())
        moved = rule.moved(threshold, fraction + 0.1 * float(torch.randn((), generator=rng)), 0.2)
        assert abs(math.log(moved / threshold)) <= 0.9 + 1e-9
        threshold = moved
        if step >= 100:
            realised.append(fraction)
    assert abs(sum(realised) / len(realised) - 0.2) < 0.03
    assert rule.moved(1.0, 1e9, 0.2) == pytest.approx(math.exp(0.9))
    assert rule.moved(1.0, -1e9, 0.2) == pytest.approx(math.exp(-0.9))


def published(**options):
    given = {"trace": Trace(dimension=3, structure="dense"), **options}
    return PublishedDCDPSGD(clip_norm=1.0, body_clip_norm=0.1, **given)


def test_only_the_noise_of_the_program_betrays_the_batch():
    """Its scale follows the realised tail count; that of Algorithm 1 is public, whatever the batch."""
    _, steps = train(published(variant="code", noise_multiplier=2.0), steps=6)
    assert len({step.noise_std for step in steps}) > 1
    multiplier = printed_multiplier(2.0, 1.0, 0.1, 0.1, 20)
    for count in (60, 30):
        _, steps = train(published(noise_multiplier=2.0), steps=2, data=records(count=count))
        assert [step.noise_std for step in steps] == pytest.approx([multiplier * 1.9] * 2)
