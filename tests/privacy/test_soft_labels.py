"""Labels between 0 and 1: continuous in the score, and no sum of theirs passes its bound."""

from __future__ import annotations

import math

import pytest
import torch
from privacy_rows import Flat, rows

from equipoise.gradients import DenseGradients
from equipoise.methods.two_threshold_sums import clip_channels, clip_either
from equipoise.privacy import Draw, Private, PrivateError, PrivateRows
from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.bounds.counts import RAMP, capped, centred_indicator, indicator, soft_indicator
from equipoise.privacy.private import unwrap

DRAW = Draw("batch", 0)


def labels(scores, threshold, side="above", **options):
    return unwrap(soft_indicator(Private(torch.as_tensor(scores)), threshold, side, **options))


def test_the_ramp():
    scores = [0.0, 0.94, 0.95, 1.0, 1.025, 1.05, 1.06, 1e30]
    expected = torch.tensor([0.0, 0.0, 0.0, 0.5, 0.75, 1.0, 1.0, 1.0])
    torch.testing.assert_close(labels(scores, 1.0), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(labels(scores, 1.0, "below"), 1 - expected, atol=1e-6, rtol=0)
    assert labels([0.9, 1.1], 1.0, width=0.2).tolist() == pytest.approx([0.25, 0.75])
    scores, slope = torch.logspace(-2, 2, 20_001, dtype=torch.float64), (1 + RAMP) / (2 * RAMP)
    for change in (1e-7, 1e-3):  # a rounded score moves its label by no more than the slope
        moved = (labels(scores * (1 + change), 1.0) - labels(scores, 1.0)).abs()
        assert 5 * change < moved.max() <= slope * change * (1 + 1e-6)


@pytest.mark.parametrize("side", ["above", "below"])
def test_limits_of_the_threshold_and_of_the_scores(side):
    scores = [0.0, 1e-30, 1.0, 3e38, math.inf, math.nan]
    above = 1.0 if side == "above" else 0.0
    assert labels(scores, 0.0, side).tolist() == [above] * 4 + [0, 0]
    assert labels(scores, math.inf, side).tolist() == [1 - above] * 4 + [0, 0]
    assert labels([0.0, 1e-30, 2e-30], 1e-30, side).tolist() == pytest.approx([1 - above, 0.5, above])


def test_what_a_ramp_refuses():
    norms = Private(torch.ones(3))
    with pytest.raises(PrivateError, match="public"):
        soft_indicator(norms, norms.max(), "above")
    for threshold in (-1.0, math.nan):
        with pytest.raises(ValueError, match="threshold="):
            soft_indicator(norms, threshold, "above")
    with pytest.raises(ValueError, match="width="):
        soft_indicator(norms, 1.0, "above", width=0.0)


def test_soft_counts_keep_the_bounds_of_counts():
    wild = Private(torch.tensor([-1.0, 0.25, 7.0, math.nan]))
    assert float(unwrap(capped(wild, 1.0).value["sum"])) == 1.25
    found = centred_indicator(wild)
    assert (found.add_remove, found.replace) == (0.5, 1.0)
    assert float(unwrap(found.value["count"])) == -0.5 - 0.25 + 0.5 - 0.5
    mask = Private(torch.tensor([True, True, False]))
    assert float(unwrap(centred_indicator(mask).value["count"])) == 0.5
    assert float(unwrap(indicator(mask).value["count"])) == 2


class Scaled:
    """Every length c n / (n + 1/10)."""

    def weights(self, norms, threshold):
        return threshold / (norms + 0.1)


def vector(bounded: Bounded) -> torch.Tensor:
    return torch.cat([unwrap(value).double().flatten() for value in bounded.value.values()])


@pytest.mark.parametrize("rule", [Flat(), Scaled()], ids=["flat", "scaled"])
@pytest.mark.parametrize("lower", [0.01, 0.1, 0.9, 1.0])
def test_a_record_is_clipped_between_the_thresholds_by_its_label(rule, lower):
    label = torch.linspace(0, 1, 41)
    for norm in (0.0, 1e-20, 0.05, 0.95, 5.0, 1e6):
        # A record an axis: entry i of the sum is what record i contributes.
        g, tail = PrivateRows(DenseGradients({"w": norm * torch.eye(41)}), DRAW), Private(label)
        one, two = clip_either(g, tail, 1.0, lower, rule), clip_channels(g, tail, 1.0, lower, rule)
        assert (two.add_remove, two.replace) == (one.add_remove, one.replace) == (1.0, 2.0)
        lengths = unwrap(one.value["w"])
        assert (lengths <= (lower + label * (1 - lower)) * (1 + 1e-5)).all()
        pair = unwrap(two.value["tail/w"]), unwrap(two.value["body/w"])
        assert torch.hypot(*pair).max() <= 1 + 1e-5
        torch.testing.assert_close(pair[0] + lower * pair[1], lengths, rtol=1e-5, atol=1e-7)
        assert (lengths.diff() >= -1e-6).all()
        assert lengths.diff().max() <= (1 - lower) / 40 + 1e-5  # no jump, at the ends either


@pytest.mark.parametrize("clip", [clip_either, clip_channels])
def test_masks_are_labels_of_zero_and_one(clip):
    g = PrivateRows(rows([3.0, 4.0], [0.3, 0.4], [0.0, 0.05]), DRAW)
    mask = torch.tensor([True, False, True])
    as_mask = clip(g, Private(mask), 1.0, 0.1, Flat())
    assert torch.equal(vector(as_mask), vector(clip(g, Private(mask.float()), 1.0, 0.1, Flat())))
    with pytest.raises(TypeError, match="soft_indicator"):
        clip(g, Private(mask.long()), 1.0, 0.1, Flat())
