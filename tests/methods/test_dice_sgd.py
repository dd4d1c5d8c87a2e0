"""DiceSGD in the library's recipe: numbers by hand, limits that are DP-SGD or SGD, conservation, no bias."""

from __future__ import annotations

import math

import pytest
import torch
from scripted import run
from table import loss, network, parameters, records, training

import equipoise as eq
from equipoise.methods import ErrorFeedback
from equipoise.methods.base import Setting
from equipoise.methods.dice_sgd import Automatic, Independent, Joint
from equipoise.methods.named_tensors import norm_of
from equipoise.privacy import Poisson


def constant(*rows: list[float]):
    """Gradients that do not depend on x."""
    held = torch.tensor(rows, dtype=torch.float64)
    return lambda x: held


TWO = constant([3.0, 4.0], [0.0, 0.5])


def cloud(count: int = 40, d: int = 3, seed: int = 0):
    """Skewed records z_i with gradients x - z_i, and their mean."""
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn(count, d, generator=rng, dtype=torch.float64)
    z[: count // 10] += 9
    return (lambda x: x - z), z.mean(0)


def dice(clip_norm=1.0, **options):
    return eq.DiceSGD(clip_norm=clip_norm, noise_multiplier=1.0, **options)


def test_two_records_by_hand():
    out = run(dice(residual_clip_norm=3.0), TWO, torch.zeros(2).double(), steps=3, rate=0.1)
    first = out.ledger.released[0]
    assert first["body"]["x"] / 2 == pytest.approx(torch.tensor([0.3, 0.65]))
    assert first["total"]["x"] / 2 == pytest.approx(torch.tensor([0.9, 1.45]))
    assert out.estimates[0] == pytest.approx(torch.tensor([0.3, 0.65]))
    for estimate in out.estimates[1:]:
        assert estimate == pytest.approx(torch.tensor([0.9, 1.45]))
    for state in out.states:
        assert state["memory"]["x"] == pytest.approx(torch.tensor([0.6, 0.8]))
        assert state["memory_norm"] == pytest.approx(1.0)


def test_nothing_is_lost():
    """The estimates and the memory at the end add up to the totals; so do the parameters."""
    gradients, _ = cloud()
    slow = ErrorFeedback(rate=0.3, clip_norm=2.0)
    for options in ({}, {"feedback": slow}, {"variant": Independent()}):
        method = dice(residual_clip_norm=4.0, **options)
        out = run(method, gradients, torch.ones(3).double(), steps=30, rate=0.1)
        parts = ({"total"} & r.keys() or r.keys() for r in out.ledger.released)
        totals = sum(
            r[name]["x"] for r, names in zip(out.ledger.released, parts, strict=True) for name in names
        )
        memory = out.states[-1]["memory"]["x"]
        assert torch.allclose(sum(out.estimates) + memory, totals / 40, atol=1e-4)
        assert torch.allclose(out.xs[-1] - 0.1 * memory, out.xs[0] - 0.1 * totals / 40, atol=1e-4)


@pytest.mark.parametrize(
    ("variant", "clip_norm", "distance"),
    [(Joint(), 0.3, 1e-3), (Joint(), 3.0, 1e-3), (Independent(), 1.0, 1e-3), (Automatic(), 0.3, 0.1)],
)
def test_the_bias_goes_for_any_small_radius(variant, clip_norm, distance):
    gradients, mean = cloud()
    method = dice(clip_norm, residual_clip_norm=40.0, variant=variant)
    found = run(method, gradients, torch.zeros(3).double(), steps=300, rate=0.3).xs[-1]
    assert float((found - mean).norm()) < distance


def test_the_plan_is_dp_sgds_whatever_the_radii():
    sampling = Poisson(30, 120, 10)
    budget = eq.Budget(4.0, 1e-4)

    def plan(method, budget=budget):
        return method.plan(Setting(sampling=sampling, budget=budget)).releases

    alone = plan(eq.DPSGD())
    for options in (
        {},
        {"clip_norm": 7.0, "residual_clip_norm": 8.0},
        {"feedback": ErrorFeedback(clip_norm=0.0, rate=0.1), "variant": Joint(noise_inflation=1.3)},
        {"variant": Independent()},
        {"variant": Automatic(), "feedback": ErrorFeedback(memory_clip_norm=50.0)},
        {"residual_clip_norm": 1.0},
    ):
        found = plan(eq.DiceSGD(**options))
        assert found.event() == alone.event()
        assert 0.99 * 4 <= found.epsilon(1e-4).value <= 4
    with pytest.raises(ValueError, match="budget is missing"):
        plan(eq.DiceSGD(), None)


def test_the_training_releases_what_the_oracle_says():
    """One step of the real engine with noise of no size, against rows formed one by one."""
    method = eq.DiceSGD(clip_norm=0.2, residual_clip_norm=0.6, noise_multiplier=1e-9)
    rows = eq.gradients.dense_gradients(network(), loss, records()).matrix()
    norms = rows.norm(dim=1)
    body, total = (rows.T @ (radius / norms.clamp(min=radius)) / 60 for radius in (0.2, 0.6))
    run = training(method, sampling=eq.FullBatch(60, 1), budget=None)
    run.take_step()
    memory = torch.cat([v.flatten() for v in run.method_state["memory"].values()])
    torch.testing.assert_close(memory, total - body, rtol=1e-6, atol=1e-8)
    moved = parameters(network()) - 0.1 * body
    torch.testing.assert_close(parameters(run.model), moved, rtol=1e-6, atol=1e-8)


def test_the_memory_is_clipped_whole_or_layer_by_layer():
    memory = {"0.weight": torch.tensor([3.0, 4.0]), "0.bias": torch.zeros(1), "2.weight": torch.tensor([0.1])}
    whole = ErrorFeedback().of(memory, 1.0)
    assert float(norm_of(whole)) == pytest.approx(1.0)
    equal = ErrorFeedback(per_layer=True, rate=0.5).of(memory, 1.0)
    assert equal["0.weight"] == pytest.approx(torch.tensor([0.6, 0.8]) / math.sqrt(2))
    assert float(equal["2.weight"]) == pytest.approx(0.05)  # inside its part of the radius
    shares = ErrorFeedback(per_layer=True).of(memory, 1.0, per_layer={"0": 16.0, "2": 9.0})
    assert float(shares["0.weight"].norm()) == pytest.approx(0.8)
    assert float(shares["2.weight"]) == pytest.approx(0.1)
