"""Correlated releases: whitened length, covariance, and the ledger's checks."""

import math

import pytest
import torch
from privacy_rows import Flat, rows

from equipoise import privacy as ep
from equipoise.gradients import DenseGradients
from equipoise.privacy import clip, clip_jointly, radial_sensitivity
from equipoise.privacy.private import unwrap


def dice(c1: float, ce: float, kappa: float = 1.0) -> ep.JointGaussian:
    """The joint form of DiceSGD for kappa = 1: residual (radius ce) and body (radius c1)."""
    beta, b = c1 / ce, c1 * math.sqrt((ce - c1) / (ce + c1))

    def weights(n):
        return torch.stack([n.clamp(max=ce), n.clamp(max=c1)], dim=1)

    return ep.JointGaussian(
        ("residual", "body"), [[kappa * ce, 0.0], [beta * kappa * ce, b]], weights, (c1, ce)
    )


def test_too_little_noise_is_refused():
    with pytest.raises(ValueError, match="above 1"):
        ep.JointGaussian(("a",), [[0.9]], lambda n: n.clamp(max=1.0)[:, None], (1.0,))
    with pytest.raises(ValueError, match="lower triangular"):
        ep.JointGaussian(("a", "b"), [[1.0, 1.0], [0.0, 1.0]], lambda n: n[:, None].expand(-1, 2), (1.0,))
    with pytest.raises(ValueError, match="Release such sums once"):
        ep.JointGaussian(
            ("a", "b"), [[1.0, 0.0]] * 2, lambda n: n.clamp(max=1.0)[:, None].expand(-1, 2), (1.0,)
        )
    assert radial_sensitivity(lambda n: -n.clamp(max=1)[:, None], [[1.0]], (1.0,)) == math.inf


@pytest.mark.parametrize("scale", [1e-30, 1e20])
def test_shared_noise_keeps_its_scale_over_the_range_of_floats(scale):
    noise = dice(scale, 3 * scale)
    ledger, draw, zero = make(noise, bound=10 * scale)
    out = ledger.release(draw, clip_jointly(zero, noise))
    for name, std in zip(noise.names, noise.standard_deviations, strict=True):
        assert float(out[name]["w"].double().std()) == pytest.approx(2 * std, rel=0.02)


def test_shared_noise_that_float32_cannot_carry_is_refused():
    noise = ep.JointGaussian(
        ("residual", "body"),
        [[2.0, 0.0], [0.0, 2e-40]],
        lambda n: torch.stack([n.clamp(max=1.0), 1e-40 * n.clamp(max=1.0)], dim=1),
        (1.0,),
    )
    ledger, draw, zero = make(noise, size=2)
    with pytest.raises(ep.LedgerError, match=r"body.*cannot carry"):
        ledger.release(draw, clip_jointly(zero, noise))
    assert ledger.spent(1e-5).value == 0


def test_radial_weights_that_look_at_other_records_are_refused():
    noise = ep.JointGaussian(
        ("a",), [[2.0]], lambda n: (n.clamp(max=1.0) * n.amin() / 3)[:, None], (0.5, 1.0)
    )
    with pytest.raises(ep.PrivateError, match="radial_weights"):
        clip_jointly(ep.PrivateRows(rows([3.0], [3.0], [3.0])), noise)


def make(noise, seed=3, size=60_000, bound=10.0):
    releases = [ep.Release(name, bound, noise.scaled(2.0)) for name in noise.names]
    plan = ep.PrivacyPlan(releases, ep.FullBatch(10, 5))
    ledger = ep.Ledger(plan, secrets=ep.Secrets(reproducible_seed=seed))
    draw = ledger.open()
    return ledger, draw, ep.PrivateRows(rows([0.0] * size), draw)


def test_covariance_and_event():
    noise = dice(1.0, 10.0)
    ledger, draw, g = make(noise)
    out = ledger.release(draw, clip_jointly(g, noise))
    e, b = out["residual"]["w"], out["body"]["w"]
    assert float((e * b).mean()) == pytest.approx(4 * 10, rel=0.05)  # sigma^2 C1 Ce
    assert float(b.var()) == pytest.approx(4 * 1.81818, rel=0.03)
    assert float(e.var()) == pytest.approx(4 * 100, rel=0.03)
    noise, g = dice(1.0, 3.0), ep.PrivateRows(rows([3.0, 4.0], [0.0, 0.5], [0.0, 0.0]), None)
    sums = clip_jointly(g, noise)
    assert torch.allclose(unwrap(sums["body"].value["w"]), torch.tensor([0.6, 1.3]))
    assert torch.allclose(unwrap(sums["residual"].value["w"]), torch.tensor([1.8, 2.9]))


def spiky(place: float):
    """Weights with a spike far narrower than the grid's meshes, and a whitened length of 5 on it."""

    def weights(n):
        flat = torch.stack([n.clamp(max=10.0), n.clamp(max=1.0)], dim=1)
        spike = ((n - place).abs() < 1e-7).to(n.dtype)[:, None]
        return flat * (1 + 4 * spike)

    return ep.JointGaussian(dice(1.0, 10.0).names, dice(1.0, 10.0).cholesky, weights, (1.0, 10.0))


@pytest.mark.parametrize("groups", [None, [["w"]]])
@pytest.mark.parametrize("place", [0.77777777, 3.33333333, 123.456789])
def test_a_record_between_the_points_of_the_grid_keeps_to_the_noise(place, groups):
    noise = spiky(place)
    assert noise.sensitivity == pytest.approx(1.0, abs=1e-9)  # the grid does not see it
    g = ep.PrivateRows(DenseGradients({"w": torch.tensor([[place, 0.0]], dtype=torch.float64)}), None)
    sums = clip_jointly(g, noise, groups)
    alone = torch.stack([unwrap(sums[name].value["w"])[0] for name in noise.names])
    factor = torch.tensor(noise.cholesky, dtype=torch.float64)
    whitened = torch.linalg.solve_triangular(factor, alone[:, None], upper=False)
    assert float(whitened.norm()) <= 1 + 1e-6
    for length, bound in zip(alone.tolist(), noise.bounds, strict=True):
        assert abs(length) <= bound * (1 + 1e-6)
    assert float(alone[0]) > 0.5 * min(place, 10.0)  # and it still counts


def test_ledger_keeps_joint_and_plain_apart():
    noise = dice(1.0, 10.0)
    ledger, draw, g = make(noise, size=3)
    joint = clip_jointly(g, noise)
    with pytest.raises(ep.LedgerError, match="made for"):
        ledger.release(draw, {"residual": clip(g, Flat(), 1.0), "body": clip(g, Flat(), 1.0)})
    with pytest.raises(ep.LedgerError, match="together"):
        ledger.release(draw, {"body": joint["body"]})
    with pytest.raises(ep.LedgerError, match="made for"):
        ledger.release(draw, clip_jointly(g, dice(1.0, 5.0)))
    plain = ep.Ledger(
        ep.PrivacyPlan([ep.Release(n, 10.0, ep.Gaussian(2.0)) for n in noise.names], ep.FullBatch(10, 5))
    )
    with pytest.raises(ep.LedgerError, match="made for"):
        plain.release(here := plain.open(), clip_jointly(ep.PrivateRows(rows([0.0]), here), noise))
    assert ledger.releases_left == {"batch": 5}


def test_a_plan_gives_shared_noise_to_the_releases_that_it_names():
    noise = dice(1.0, 10.0)
    residual, body = (ep.Release(name, 10.0, noise) for name in noise.names)
    for releases, message in (
        ([residual], "exactly these"),
        ([residual, body, ep.Release("third", 10.0, noise)], "exactly these"),
        ([residual, ep.Release("body", 10.0, noise.scaled(2.0))], "exactly these"),
        ([residual, ep.Release("body", 10.0, noise, count=2)], "same draw"),
    ):
        with pytest.raises(ep.PlanError, match=message):
            ep.PrivacyPlan(releases, ep.FullBatch(10, 5))
