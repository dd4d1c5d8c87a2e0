"""Sums whose records are looked at once the whole draw is through: the same, thrown away or refused."""

import math

import pytest
import torch
from privacy_rows import Flat

from equipoise.gradients import DenseGradients
from equipoise.methods.two_threshold_sums import clip_channels, clip_either, clip_selected, top_share
from equipoise.privacy import Draw, JointGaussian, Private, PrivateRows, clip, clip_jointly, unbounded_sum
from equipoise.privacy.bounds.second_moments import moment_action, second_moment
from equipoise.privacy.private import unwrap

DRAW = Draw("batch", 0)
GROUPS = [["a"], ["b"]]
JOINT = JointGaussian(
    ("residual", "body"),
    [[4.0, 0.0], [0.5, 2.0]],
    lambda n: torch.stack([n.clamp(max=3.0), n.clamp(max=1.0)], dim=1),
    (1.0, 3.0),
)


def numbers(rows):
    return Private(torch.arange(len(rows._rows.matrix())), DRAW)


def labels(rows):
    return Private(torch.linspace(0, 1, len(rows._rows.matrix())), DRAW)


def top(rows):
    chosen = top_share(labels(rows), numbers(rows), 0.5)
    return clip_selected(rows, numbers(rows), chosen, 2.0, 0.5, Flat())


SUMS = {
    "clip": lambda rows: clip(rows, Flat(), 0.7),
    "clip a choice of rows": lambda rows: clip(rows.rows(torch.tensor([0, 1])), Flat(), 0.7),
    "clip per layer": lambda rows: clip(rows, Flat(), [0.3, 2.0], groups=GROUPS),
    "clip differences": lambda rows: clip(rows - private(torch.zeros(4, 4)), Flat(), 0.7),
    "unbounded": unbounded_sum,
    "unbounded, weighted": lambda rows: unbounded_sum(rows, torch.ones(len(rows._rows.matrix()))),
    "selected": top,
    "either": lambda rows: clip_either(rows, labels(rows), 2.0, 0.5, Flat()),
    "either, bool": lambda rows: clip_either(rows, labels(rows) > 0.3, 2.0, 0.5, Flat()),
    "channels": lambda rows: clip_channels(rows, labels(rows), 2.0, 0.5, Flat()),
    "jointly": lambda rows: clip_jointly(rows, JOINT)["residual"],
    "jointly per layer": lambda rows: clip_jointly(rows, JOINT, GROUPS)["body"],
    "second moment": lambda rows: second_moment(rows, Flat(), 1.0, GROUPS),
    "action": lambda rows: moment_action(rows, Flat(), 1.0, [{"a": torch.eye(2)}, {"b": torch.eye(2)}]),
}


def private(records, all_finite=None) -> PrivateRows:
    tensors = {"a": records[:, :2], "b": records[:, 2:]}
    return PrivateRows(DenseGradients(tensors), DRAW, _all_finite=all_finite)


def vector(bounded) -> torch.Tensor:
    return torch.cat([unwrap(t).double().flatten() for t in bounded.value.values()])


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_finite_records_are_the_same(name):
    records, all_finite = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), []
    assert torch.equal(vector(SUMS[name](private(records, all_finite))), vector(SUMS[name](private(records))))
    assert all_finite
    assert all(all_finite)


@pytest.mark.parametrize("bad", [[math.nan, 1, 1, 1], [1, 1, -math.inf, 1], [1e30, 1, 1, 1]])
@pytest.mark.parametrize("name", SUMS)
def test_a_record_that_is_not_finite_is_told_and_never_adds_a_number(name, bad):
    """Where its row is finite and its norm is not, nothing but its weight keeps it out."""
    records, all_finite = torch.ones(4, 4), []
    records[1] = torch.tensor(bad)
    found = vector(SUMS[name](private(records, all_finite)))
    assert not all(all_finite)
    assert not torch.isfinite(found).all() or torch.equal(found, vector(SUMS[name](private(records))))
