"""The joint release's constants, sensitivity and covariance; what is proved of the published noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from equipoise.gradients import DenseGradients
from equipoise.methods import dice_sgd as dn
from equipoise.privacy import Draw, PrivateRows, clip_jointly, gaussian_epsilon
from equipoise.privacy.mechanisms.joint_gaussian import radial_grid
from equipoise.privacy.private import unwrap
from equipoise.published import dice_sgd as published


def joint_noise(clip_norm, residual, kappa=1.0):
    return dn.Joint(noise_inflation=kappa).of(clip_norm, residual)


def normalising_noise(clip_norm, residual, kappa=1.0, regulariser=0.0):
    return dn.Automatic(noise_inflation=kappa, regulariser=regulariser).of(clip_norm, residual)


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
    assert dn.joint_params(*radii) == pytest.approx((beta, b), abs=1e-6)
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
    [joint_noise(1.0, 5.0), dn.Independent().of(1.0, 5.0), normalising_noise(1.0, 5.0)],
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
        (GPT2, 8, 8e-6, 1.0, 1e-3, 2.05, 580),
        (GPT2, 8, 8e-6, 1000.0, 1.0, 1672, 406),
    ],
)
def test_published_noise_and_its_worst_case(setting, claim, delta, radius, feedback, scale, worst):
    """B = 1000, C1 = 1; radius C of the formula, feedback radius C2."""
    std = published.published_noise_std(claim, delta, clip_norm=1.0, radius=radius, **setting)
    assert std * 1000 == pytest.approx(scale, rel=5e-3)
    claimed = published.claimed_epsilon(std, delta, clip_norm=1.0, radius=radius, **setting)
    assert claimed == pytest.approx(claim)
    fed = {"feedback_clip_norm": feedback, "expected_batch_size": 1000}
    z = published.worst_case_multiplier(std, clip_norm=1.0, **fed)
    found = gaussian_epsilon(math.sqrt(setting["steps"]) / z, delta)
    assert found == pytest.approx(worst, rel=0.03 if worst > 1e6 else 5e-3)
