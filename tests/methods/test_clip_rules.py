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
@pytest.mark.parametrize("threshold", [1e-3, 0.1, 1.0, 300.0])
class TestLaws:
    def test_the_weighted_norm_never_passes_the_threshold(self, rule, dtype, threshold):
        norms = torch.cat(
            [torch.tensor(NORMS, dtype=dtype), threshold * (1 + torch.randn(2000, dtype=dtype).abs() * 1e-6)]
        )
        weights = rule.weights(norms, threshold)
        # in the wider type, so that the test's own rounding cannot hide an excess
        assert (weights.double() * norms.double()).max().item() <= threshold * (
            1 + 1e-12
        ) or dtype == torch.float32
        assert (weights.double() * norms.double()).max().item() <= threshold * (1 + 1e-7)

    def test_weights_are_finite_and_not_negative(self, rule, dtype, threshold):
        weights = rule.weights(torch.tensor(NORMS, dtype=dtype), threshold)
        assert torch.isfinite(weights).all()
        assert (weights >= 0).all()

    def test_bad_records_get_exactly_zero(self, rule, dtype, threshold):
        weights = rule.weights(torch.tensor([math.nan, math.inf, 1.0], dtype=dtype), threshold)
        assert weights[:2].tolist() == [0.0, 0.0]
        assert weights[2] > 0

    def test_weights_fall_and_weighted_norms_rise_with_the_norm(self, rule, dtype, threshold):
        norms = torch.linspace(1e-6, 50, 999, dtype=dtype)
        weights = rule.weights(norms, threshold)
        if not isinstance(rule, PSAC):  # PSAC's weight first rises: that is its point
            assert (weights.diff() <= 0).all()
        assert ((weights * norms).diff() >= -1e-5 * threshold).all()

    def test_groups_use_their_own_threshold(self, rule, dtype, threshold):
        norms = torch.rand(5, 3, dtype=dtype) * 4
        limits = torch.tensor([threshold, 2 * threshold, 3 * threshold], dtype=dtype)
        both = rule.weights(norms, limits)
        for column in range(3):
            torch.testing.assert_close(both[:, column], rule.weights(norms[:, column], limits[column].item()))

    def test_no_records(self, rule, dtype, threshold):
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


def test_a_wrong_rule_would_be_caught():
    """The bound law is able to fail: dividing by the norm minus a constant passes the threshold."""

    class Wrong(ClipRule):
        def _weights(self, norms, threshold):
            return threshold / (0.9 * norms + 1e-3)

    norms = torch.tensor([1.0, 5.0], dtype=torch.float64)
    assert (Wrong().weights(norms, 1.0) * norms).max() > 1 + 1e-5


def test_layers_follow_the_modules():
    names = ["body.0.weight", "body.0.bias", "token", "body.2.weight", "position"]
    assert layers(names) == (("body.0.weight", "body.0.bias"), ("token",), ("body.2.weight",), ("position",))
