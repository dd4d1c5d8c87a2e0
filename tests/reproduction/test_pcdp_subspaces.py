"""What directions are worth: the problem of the experiment, its bars, and (slowly) whether they hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from reproduction.papers import pcdp_sgd_subspaces as subspaces
from reproduction.papers.pcdp_sgd import span

pytestmark = pytest.mark.filterwarnings("ignore:the subspace captures")


@pytest.mark.parametrize("k", [1, 10, 50])
def test_widened_directions_begin_with_the_true_ones(k):
    found = subspaces.widened(0, k)["x"]
    torch.testing.assert_close(found @ found.t(), torch.eye(k), rtol=0, atol=1e-5)
    torch.testing.assert_close(found[:10], span(0)[:k], rtol=0, atol=1e-6)


def test_public_records_have_the_law_of_the_private_ones_and_are_none_of_them():
    public, private = (
        subspaces.public_records(0, 2000)["x"],
        subspaces.means(0, 2000).data["x"],
    )
    for x in (public, private):
        inside = (x @ span(0).t()).mean(0)
        torch.testing.assert_close(inside[:2], torch.tensor([0.7, 0.3]), rtol=0, atol=0.05)
        assert float((x.norm(dim=1) > 5).double().mean()) == pytest.approx(0.3, abs=0.05)
    assert float((public @ private.t()).max()) < 50  # a record and itself: above 100 for the long ones


def test_arms_are_there_once_and_have_a_method():
    lines = subspaces.arms()
    assert len({(arm.part, arm.label) for arm in lines}) == len(lines)
    assert {arm.make(0).name for arm in lines} == {"dp-sgd", "pcdp-sgd", "pdp", "rpdp", "gep"}


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, []),
        ({"tilt/PCDP, 10 degrees": 0.045}, ["10 degrees off, PCDP is ahead"]),
        ({"tilt/PCDP, 20 degrees": 0.029}, ["20 degrees off, PCDP is behind"]),
        ({"public/raw, m = 400, k = 10": 0.0149}, ["normalised public gradients are ahead"]),
        ({"random/PCDP": 0.2}, ["random directions: PCDP stays"]),
        (
            {"epsilon 0.5/released": 0.02, "epsilon 2/second moment": 0.01},
            ["beat DP-SGD (best, released, ratio)", "beat DP-SGD (best, second moment, ratio)"],
        ),
    ],
)
def test_a_bar_can_be_missed(changed, missed):
    recorded = json.loads((Path(__file__).parent / "recorded" / "pcdp-sgd-subspaces.json").read_text())
    ends = {(part, label): value for part, label, value in recorded["numbers"]}
    assert set(ends) == {(arm.part, arm.label) for arm in subspaces.arms()}
    ends |= {tuple(key.split("/")): value for key, value in changed.items()}
    said = [verdict.sentence for verdict in subspaces.verdicts(ends) if not verdict.met]
    assert all(any(words in sentence for sentence in said) for words in missed)
    assert bool(said) == bool(missed)


@pytest.mark.slow
def test_the_bars_are_met_over_three_seeds():
    found = subspaces.EXPERIMENT.run(range(3), lambda done, total, what: None)
    assert all(verdict.met for verdict in found.verdicts)
