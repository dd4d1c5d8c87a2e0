"""Thresholds: public schedules and the released quantile."""

from __future__ import annotations

import pytest
import torch

from equipoise.methods.thresholds import (
    ExponentialDecay,
    Fixed,
    LinearDecay,
    ReleasedQuantile,
    resolve_threshold,
)


def test_fixed_and_schedules():
    assert Fixed(0.5).upper(10) == Fixed(0.5).at(3, 9.0) == 0.5
    decay = ExponentialDecay(2.0, rate=0.5, floor=0.3)
    assert [decay.at(t, 0.0) for t in range(5)] == [2.0, 1.0, 0.5, 0.3, 0.3]
    assert decay.upper(5) == 2.0
    rise = LinearDecay(1.0, final=3.0, steps=3)
    assert [rise.at(t, 0.0) for t in range(4)] == [1.0, 2.0, 3.0, 3.0]
    assert rise.upper(3) == 3.0
    assert ExponentialDecay(1.0, rate=0.5).at(10_000, 0.0) > 0


def test_a_quantile_settles_from_above_and_from_below():
    """The direction of the feedback: norms with median 1, thresholds that start far on either side."""
    torch.manual_seed(0)
    for start in (0.01, 100.0):
        rule = ReleasedQuantile(initial=start, quantile=0.5)
        learned = rule.start()
        for _ in range(150):
            norms = torch.exp(0.5 * torch.randn(400))
            count = float((norms <= learned).double().sum() - 200) + 20 * float(torch.randn(()))
            learned = rule.update(learned, count, expected_batch_size=400)
        assert 0.8 < learned < 1.25


def test_the_limits_of_a_threshold_and_what_users_may_write():
    rule = ReleasedQuantile(initial=1.0, minimum=0.5, maximum=2.0)
    assert rule.update(1.0, 1e9, 10) >= 0.5
    assert rule.update(1.9, -1e9, 10) <= 2.0
    assert rule.upper(7) == 2.0
    assert resolve_threshold(2) == Fixed(2.0)
    assert resolve_threshold(lambda t: 1.0 / (t + 1)).at(3, 0.0) == 0.25
    assert resolve_threshold(rule) is rule
    for wrong in ("1.0", None, True):
        with pytest.raises(TypeError, match="clip_norm="):
            resolve_threshold(wrong)
