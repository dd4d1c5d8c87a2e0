"""DiceSGD: numbers by hand, conservation, no bias; the joint noise; what is proved of it as published.

The published algorithms themselves: `test_boxes_of_dice_and_dc.py`.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from stepping import Follower, Noiseless
from table import loss, network, parameters, records, training
from torch import nn

import equipoise as eq
from equipoise.gradients import DenseGradients
from equipoise.methods import ErrorFeedback
from equipoise.methods.base import Setting
from equipoise.methods.dice_sgd import Automatic, Independent, Joint, joint_params
from equipoise.methods.named_tensors import norm_of
from equipoise.privacy import Draw, FullBatch, Poisson, Private, PrivateRows, clip_jointly, gaussian_epsilon
from equipoise.privacy.mechanisms.joint_gaussian import radial_grid
from equipoise.privacy.private import PrivateError, unwrap
from equipoise.published import DiceSGD as PublishedDiceSGD
from equipoise.published import dice_sgd as formulas


class Point(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(size).double())

    def forward(self, record):
        """Of gradient x - z, or of a constant one, c."""
        square = 0.5 * (self.x - record["z"]).square().sum(1) if "z" in record else 0.0
        return square + record["c"] @ self.x if "c" in record else square


def run(method, data, steps, rate):
    """Steps on all records from zero, without noise."""
    (rows,) = data.values()
    loss = lambda model, record: model(record)  # noqa: E731
    follower = Follower(
        method, Point(rows.shape[1]), loss, data, FullBatch(len(rows), steps), learning_rate=rate
    )
    follower.ledger = Noiseless(follower.plan, secrets=follower.ledger.secrets)
    follower.estimates = [follower.step()["x"] for _ in range(steps)]
    return follower


TWO = {"c": torch.tensor([[3.0, 4.0], [0.0, 0.5]]).double()}


def cloud(count: int = 40, d: int = 3, seed: int = 0):
    """Skewed records z_i, of gradients x - z_i, and their mean."""
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn(count, d, generator=rng, dtype=torch.float64)
    z[: count // 10] += 9
    return {"z": z}, z.mean(0)


def dice(clip_norm=1.0, **options):
    return eq.DiceSGD(clip_norm=clip_norm, noise_multiplier=1.0, **options)


def test_two_records_by_hand():
    out = run(dice(residual_clip_norm=3.0), TWO, steps=3, rate=0.1)
    first = out.ledger.transcript[0]
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
    data, _ = cloud()
    slow = ErrorFeedback(rate=0.3, clip_norm=2.0)
    for options in ({}, {"feedback": slow}, {"variant": Independent()}):
        method = dice(residual_clip_norm=4.0, **options)
        out = run(method, data, steps=30, rate=0.1)
        parts = ({"total"} & r.keys() or r.keys() for r in out.ledger.transcript)
        totals = sum(
            r[name]["x"] for r, names in zip(out.ledger.transcript, parts, strict=True) for name in names
        )
        memory = out.states[-1]["memory"]["x"]
        assert torch.allclose(sum(out.estimates) + memory, totals / 40, atol=1e-4)
        assert torch.allclose(out.vector - 0.1 * memory, -0.1 * totals / 40, atol=1e-4)


@pytest.mark.parametrize(
    ("variant", "clip_norm", "distance"),
    [(Joint(), 0.3, 1e-3), (Joint(), 3.0, 1e-3), (Independent(), 1.0, 1e-3), (Automatic(), 0.3, 0.1)],
)
def test_the_bias_goes_for_any_small_radius(variant, clip_norm, distance):
    data, mean = cloud()
    method = dice(clip_norm, residual_clip_norm=40.0, variant=variant)
    found = run(method, data, steps=300, rate=0.3).vector
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


def joint_noise(clip_norm, residual, kappa=1.0):
    return Joint(noise_inflation=kappa).of(clip_norm, residual)


def normalising_noise(clip_norm, residual, kappa=1.0, regulariser=0.0):
    return Automatic(noise_inflation=kappa, regulariser=regulariser).of(clip_norm, residual)


def whitened(noise, norms: torch.Tensor) -> torch.Tensor:
    lengths = noise.lengths(norms).double()
    factor = torch.tensor(noise.cholesky, dtype=torch.float64)
    return torch.linalg.solve_triangular(factor, lengths.T, upper=False).norm(dim=0)


@pytest.mark.parametrize(
    ("radii", "beta", "b", "body"),
    [
        ((1.0, 3.0, 1.0), 1 / 3, 0.707107, 1.224745),
        ((1.0, 10.0, 1.0), 0.1, 0.904534, 1.348400),
        ((1.0, 10.0, 1.2), 0.047145, 0.956181, 1.1110),
    ],
)
def test_worked_constants(radii, beta, b, body):
    assert joint_params(*radii) == pytest.approx((beta, b), abs=1e-6)
    noise = joint_noise(*radii)
    assert noise.standard_deviations == pytest.approx((body, radii[1] * radii[2]), abs=5e-5)


def test_the_supremum_is_one_for_random_radii():
    rng = np.random.default_rng(0)
    for _ in range(12):
        c1 = 10 ** rng.uniform(-3, 3)
        ce = c1 * 10 ** rng.uniform(0.01, 4)
        kappa = 1 + rng.exponential(0.5)
        grid = radial_grid((c1, ce))
        found = whitened(joint_noise(c1, ce, kappa), grid)
        assert float(found.max()) == pytest.approx(1, abs=1e-9)
        # reached at both radii: no noise is wasted
        assert whitened(joint_noise(c1, ce, kappa), torch.tensor([c1, ce]).double()) == pytest.approx(1)
        automatic = whitened(normalising_noise(c1, ce, kappa), grid)
        assert float(automatic.max()) <= 1 + 1e-9
        assert float(automatic.max()) == pytest.approx(1, abs=1e-3)


def test_soft_normalisation_needs_more_noise_and_gets_it():
    """With the constants of plain normalisation the supremum would lie above one."""
    plain, soft = normalising_noise(1.0, 10.0), normalising_noise(1.0, 10.0, regulariser=0.5)
    ratio = soft.cholesky[0][0] / plain.cholesky[0][0]
    assert 1.0001 < ratio < 1.01
    fine = torch.linspace(0, 40, 400_001, dtype=torch.float64)
    assert float(whitened(soft, fine).max()) <= 1
    assert float(whitened(soft, fine).max()) * ratio > 1


def contribution(noise, a, b, groups, shares) -> float:
    """The whitened length of one record with parts a and b."""
    rows = PrivateRows(DenseGradients({"a": a[None], "b": b[None]}), Draw("batch", 0))
    sums = clip_jointly(rows, noise, groups, shares)
    parts = ([unwrap(sums[name].value[key]) for key in ("a", "b")] for name in noise.names)
    stacked = torch.stack([torch.cat(part) for part in parts])
    factor = torch.tensor(noise.cholesky, dtype=stacked.dtype)
    return float(torch.linalg.solve_triangular(factor, stacked, upper=False).norm())


@pytest.mark.parametrize("shares", [None, (0.6, 0.8)])
@pytest.mark.parametrize(
    "noise",
    [joint_noise(1.0, 5.0), Independent().of(1.0, 5.0), normalising_noise(1.0, 5.0)],
    ids=["joint", "independent", "automatic"],
)
def test_groups_keep_the_whole_record_within_one(noise, shares):
    rng = torch.Generator().manual_seed(0)
    largest = 0.0
    for _ in range(100):
        size = 10 ** (4 * torch.rand(2, 1, generator=rng).double() - 2)
        a, b = torch.randn(2, 4, generator=rng, dtype=torch.float64) * size
        largest = max(largest, contribution(noise, a, b, [["a"], ["b"]], shares))
    assert 0.9 < largest <= 1 + 1e-9


CIFAR = {"population": 50_000, "steps": 150}
GPT2 = {"population": 42_000, "steps": 420}


@pytest.mark.parametrize(
    ("setting", "claim", "delta", "radius", "feedback", "scale", "worst"),
    [
        (CIFAR, 2, 1e-5, 1.0, 1.0, 4.07, 1.8e7),
        (CIFAR, 2, 1e-5, 1.0, 1e-3, 4.07, 78),
        (CIFAR, 2, 1e-5, 1000.0, 1.0, 3325, 57.8),
        (GPT2, 8, 8e-6, 1.0, 1.0, 2.05, 2.0e8),
        (GPT2, 8, 8e-6, 1000.0, 1.0, 1672, 406),
    ],
)
def test_published_noise_and_its_worst_case(setting, claim, delta, radius, feedback, scale, worst):
    """B = 1000, C1 = 1; radius C of the formula, feedback radius C2."""
    std = formulas.published_noise_std(claim, delta, clip_norm=1.0, radius=radius, **setting)
    assert std * 1000 == pytest.approx(scale, rel=5e-3)
    claimed = formulas.claimed_epsilon(std, delta, clip_norm=1.0, radius=radius, **setting)
    assert claimed == pytest.approx(claim)
    fed = {"feedback_clip_norm": feedback, "expected_batch_size": 1000}
    z = formulas.worst_case_multiplier(std, clip_norm=1.0, **fed)
    found = gaussian_epsilon(math.sqrt(setting["steps"]) / z, delta)
    assert found == pytest.approx(worst, rel=0.03 if worst > 1e6 else 5e-3)


def test_the_reference_without_noise_by_hand():
    out = run(eq.methods.EFSGD(), TWO, steps=3, rate=0.1)
    memories = [unwrap(state["memory"]["x"]) for state in out.states]
    for estimate, expected in zip(out.estimates, [(0.3, 0.65), (0.9, 1.45), (0.9, 1.45)], strict=True):
        assert estimate == pytest.approx(torch.tensor(expected))
    for memory, expected in zip(memories, [(1.2, 1.6), (1.8, 2.4), (2.4, 3.2)], strict=True):
        assert memory == pytest.approx(torch.tensor(expected))
    assert out.vector == pytest.approx(-0.1 * sum(out.estimates))


def test_the_statement_has_the_worst_case_the_claim_and_the_hole():
    run = training(PublishedDiceSGD(clip_norm=0.1))
    assert len(list(run)) == 6
    statement = run.statement()
    assert statement.recipe == "as_published"
    assert statement.guarantee == "worst_case"
    assert statement.epsilon_claimed == pytest.approx(8.0)
    std = formulas.published_noise_std(8.0, 1e-3, clip_norm=0.1, radius=0.1, population=60, steps=6)
    multiplier = std / (0.1 / 20 + 2 * 0.1)
    assert statement.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(6) / multiplier, 1e-3), rel=1e-6)
    assert statement.epsilon > 100
    assert "memory" in statement.holes[0]["reason"]


def test_the_raw_memory_is_private_and_its_size_is_not_told():
    run = training(PublishedDiceSGD(clip_norm=0.1))
    run.take_step()
    memory = run.method_state["memory"]
    assert all(isinstance(value, Private) for value in memory.values())
    with pytest.raises(PrivateError):
        float(next(iter(memory.values())).norm())
    assert run.method.metrics(run.method_state) == {}
    ours = training(eq.DiceSGD(clip_norm=0.1))
    ours.take_step()
    norm = torch.cat([v.flatten() for v in ours.method_state["memory"].values()]).norm()
    assert ours.method.metrics(ours.method_state)["memory_norm"] == pytest.approx(float(norm))
