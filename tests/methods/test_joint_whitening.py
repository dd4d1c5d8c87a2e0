"""Joint whitening: its formulas on formed rows, its bounds, its noise, and what it is without a root."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from stepping import Follower
from table import FEATURES, loss, network, parameters, records
from table import training as train

import equipoise as eq
from equipoise.gradients import DenseGradients, FactoredGradients, dense_gradients
from equipoise.gradients.factors import OuterFactor
from equipoise.methods import JointWhitening, scaled
from equipoise.methods.base import Setting
from equipoise.privacy import Draw, PrivateRows, input_moments
from equipoise.privacy.private import unwrap

ALL = eq.FullBatch(60, 6)
WEIGHTS = {"0.weight": FEATURES, "2.weight": 5}


def follow(method: eq.Method, sampling: eq.privacy.Sampling = ALL, data=None, rate: float = 0.1) -> Follower:
    return Follower(method, network(), loss, data or records(), sampling, learning_rate=rate)


def identity(moment: torch.Tensor, std: float) -> torch.Tensor:
    """In the place of a root."""
    return torch.eye(len(moment)).double()


def silent():
    """Records without gradients: all that is released is noise."""
    data = records()
    data["weight"].zero_()
    return data


def test_it_is_its_formulas_on_formed_rows():
    """The oracle: every gradient formed, every root by a decomposition of its own."""
    method = JointWhitening(clip_norm=0.5, share=0.3, noise_multiplier=1e-9)
    follower = follow(method)
    x = {name: value.detach().clone() for name, value in follower.params.items()}
    roots = {name: torch.eye(width, dtype=torch.float64) for name, width in WEIGHTS.items()}
    sums = {name: 0 * root for name, root in roots.items()}
    for t in range(1, 6):
        rows = dense_gradients(network(), loss, records(), params=x).tensors
        seen = {name: value @ roots[name] if name in roots else value for name, value in rows.items()}
        weights = (0.5 / DenseGradients(seen).row_norms()).clamp(max=1)
        estimate = {name: torch.tensordot(weights, value, 1) / 60 for name, value in seen.items()}
        for name, root in roots.items():
            estimate[name] = estimate[name] @ root
            unit = rows[name] / rows[name].flatten(1).norm(dim=1)[:, None, None]
            sums[name] = sums[name] + (unit.mT @ unit).sum(0)
        for name, value in follower.step().items():
            torch.testing.assert_close(value, estimate[name], rtol=1e-6, atol=1e-7)
        if t in (1, 2, 4):
            for name, total in sums.items():
                moment = total / (60 * t)
                vectors, values, _ = torch.linalg.svd(moment)  # positive semidefinite: no noise to speak of
                root = vectors @ torch.diag((values + 1e-4) ** -0.5) @ vectors.mT
                roots[name] = root * (moment.trace() / (root @ moment @ root).trace()).sqrt()
        x = {name: x[name] - 0.1 * value for name, value in estimate.items()}
    assert (roots["0.weight"] - torch.eye(FEATURES)).abs().max() > 0.1


def test_the_moment_of_a_linear_layer_is_that_of_its_inputs():
    """x x^T / |x|^2, whatever the error that came back to the layer."""
    rng = torch.Generator().manual_seed(0)
    x, error = (torch.randn(9, 1, width, generator=rng, dtype=torch.float64) for width in (4, 3))
    rows = PrivateRows(FactoredGradients({"w": (OuterFactor(x, error),)}), Draw("batch", 0))
    found = unwrap(input_moments(rows, ["w"]).value["w"])
    unit = x[:, 0] / x[:, 0].norm(dim=1, keepdim=True)
    torch.testing.assert_close(found, unit.T @ unit)


def test_a_root_that_is_the_identity_changes_no_bit_of_dp_sgd(monkeypatch):
    quiet = {"clip_norm": 0.5, "noise_multiplier": 1e-30}  # below what a sum can hold
    monkeypatch.setattr(scaled, "whitening_root", identity)
    ends = []
    for method in (JointWhitening(**quiet), eq.DPSGD(**quiet)):
        run = train(method, sampling=ALL, budget=None)
        list(run)
        ends.append(parameters(run.model))
    assert torch.equal(*ends)


@pytest.mark.parametrize("share", [0.2, 0.7])
def test_both_releases_are_one_gaussian_of_the_multiplier(share):
    plan = JointWhitening(noise_multiplier=1.3, share=share).plan(Setting(sampling=ALL)).releases
    assert plan.combined_multiplier(frozenset({"gradient", "input_moments"})) == pytest.approx(1.3)
    assert plan["input_moments"].max_bound == 1.0
    same = eq.DPSGD(noise_multiplier=1.3).plan(Setting(sampling=ALL)).releases
    assert plan.epsilon(1e-5).value == pytest.approx(same.epsilon(1e-5).value)


def moments_of(rows: dict[str, torch.Tensor], names: list[str]) -> torch.Tensor:
    found = input_moments(PrivateRows(DenseGradients(rows), Draw("batch", 0)), names)
    assert (found.add_remove, found.replace) == (1.0, math.sqrt(2))
    return torch.cat([unwrap(value).double().flatten() for value in found.value.values()])


def test_a_bad_record_leaves_the_second_moments():
    rng = torch.Generator().manual_seed(2)
    good = {"a": torch.randn(4, 2, 3, generator=rng), "b": torch.randn(4, 1, 2, generator=rng)}
    bad = {name: torch.cat([value, torch.full_like(value[:1], math.nan)]) for name, value in good.items()}
    assert torch.equal(moments_of(good, ["a", "b"]), moments_of(bad, ["a", "b"]))


@pytest.mark.parametrize(("share", "layers"), [(0.5, 2), pytest.param(0.2, 1, marks=pytest.mark.wide)])
def test_the_noise_of_moments_and_gradients_is_what_it_says(share, layers):
    """Where there is nothing but noise: z (1 - s)^(-1/2) C, and z (L / s)^(1/2) on the diagonal."""
    steps = 300
    method = JointWhitening(
        clip_norm=0.5, share=share, noise_multiplier=1.5, most_inputs=6 if layers == 2 else 5
    )
    follower = follow(method, eq.FullBatch(60, steps), silent(), rate=0.0)
    # The roots mix the gradients' noise, and the biases keep it as it is.
    biases = [torch.cat([step["0.bias"], step["2.bias"]]) for step in (follower.step() for _ in range(steps))]
    assert 60 * float(torch.stack(biases).std()) == pytest.approx(0.75 / (1 - share) ** 0.5, rel=0.05)
    assert set(follower.state["moments"]) == set(list(WEIGHTS)[2 - layers :])
    kept = [state["moments"] for state in follower.states]
    diagonal, rest = [], []
    for before, after in itertools.pairwise(kept):
        for name, total in after.items():
            noise = total - before[name]
            assert torch.equal(noise, noise.T)
            diagonal.append(noise.diagonal())
            rest.append(noise[0, 1:])
    expected = 1.5 * (layers / share) ** 0.5
    assert float(torch.cat(diagonal).std()) == pytest.approx(expected, rel=0.05)
    assert float(torch.cat(rest).std()) == pytest.approx(expected / 2**0.5, rel=0.05)


def test_the_damping_knows_the_noise(monkeypatch):
    """The deviation that a root is told is that of the mean moment's diagonal."""
    told = []
    root = lambda moment, std: told.append((moment, std)) or identity(moment, std)  # noqa: E731
    monkeypatch.setattr(scaled, "whitening_root", root)
    method = JointWhitening(noise_multiplier=2.0, share=0.5)
    follow(method, eq.FullBatch(60, 128), silent(), rate=0.0).run(128)
    assert len(told) == 2 * 8  # after 1, 2, 4, ... 128 steps
    scores = torch.cat([moment.diagonal() / std for moment, std in told])
    assert float(scores.square().mean()) == pytest.approx(1, rel=0.35)  # 88 numbers that hang together
    assert told[0][1] == pytest.approx(2.0 * (2 / 0.5) ** 0.5 / 60)
