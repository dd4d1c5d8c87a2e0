"""The laws of the clip rules, one table for all of them."""

from __future__ import annotations

import math

import pytest
import torch

from equipoise.methods.clip_rules import NSGD, PSAC, Abadi, AutoS, ClipRule, layers

# Every clip rule of the library with its own settings, and some with others.
RULES = [
    *(rule() for rule in ClipRule.kinds().values() if rule.__module__.startswith("equipoise")),
    AutoS(gamma=1.0),
    NSGD(regulariser=10.0),
    PSAC(regulariser=1e-4),
]
NORMS = [0.0, 1e-30, 1e-8, 1e-3, 0.3, 0.999999, 1.0, 1.000001, 7.0, 1e4, 1e18]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threshold", [1e-3, 300.0])
def test_the_laws(rule, dtype, threshold):
    norms = torch.tensor(NORMS, dtype=dtype)
    near = threshold * (1 + torch.randn(2000, dtype=dtype).abs() * 1e-6)
    norms = torch.cat([norms, near])
    weights = rule.weights(norms, threshold)
    assert torch.isfinite(weights).all()
    assert (weights >= 0).all()
    # in the wider type, so that the test's own rounding cannot hide an excess
    longest = (weights.double() * norms.double()).max().item()
    assert longest <= threshold * (1 + (1e-12 if dtype == torch.float64 else 1e-7))
    weights = rule.weights(torch.tensor([math.nan, math.inf, 1.0], dtype=dtype), threshold)
    assert weights[:2].tolist() == [0.0, 0.0]
    assert weights[2] > 0
    norms = torch.linspace(1e-6, 50, 999, dtype=dtype)
    weights = rule.weights(norms, threshold)
    if not isinstance(rule, PSAC):  # PSAC's weight first rises: that is its point
        assert (weights.diff() <= 0).all()
    assert ((weights * norms).diff() >= -1e-5 * threshold).all()
    norms, limits = torch.rand(5, 3, dtype=dtype) * 4, threshold * torch.tensor([1, 2, 3], dtype=dtype)
    both = rule.weights(norms, limits)  # of groups, each with its own threshold
    for column in range(3):
        torch.testing.assert_close(both[:, column], rule.weights(norms[:, column], limits[column].item()))
    assert rule.weights(torch.zeros(0, dtype=dtype), threshold).shape == (0,)


def test_the_formulas():
    n = torch.tensor([0.2, 3.0], dtype=torch.float64)
    expect = {
        Abadi(): [1.0, 2 / 3],
        AutoS(gamma=0.5): [2 / 0.7, 2 / 3.5],
        NSGD(regulariser=0.5): [2 / 0.7, 2 / 3.5],
        PSAC(regulariser=0.5): [2 / (0.2 + 0.5 / 0.7), 2 / (3 + 0.5 / 3.5)],
    }
    for rule, weights in expect.items():
        torch.testing.assert_close(
            rule.weights(n, 2.0), torch.tensor(weights, dtype=torch.float64), rtol=1e-12, atol=0
        )


def test_layers_follow_the_modules():
    names = ["body.0.weight", "body.0.bias", "token", "body.2.weight", "position"]
    assert layers(names) == (("body.0.weight", "body.0.bias"), ("token",), ("body.2.weight",), ("position",))
