"""Audits of neighbouring data sets: silent where all is well, loud where records are mixed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.audit.canaries import Rows, canary_loss
from equipoise.audit.neighbours import SLACK, audit_neighbours
from equipoise.methods import Abadi, TopShare
from equipoise.privacy import clip
from equipoise.privacy.accounting.epsilon import gaussian_epsilon
from equipoise.privacy.ledger import replay
from equipoise.privacy.private import unwrap


def records(count=60):
    torch.manual_seed(0)
    return {"x": torch.randn(count, 5) + 1, "y": torch.randn(count)}


def loss(model, batch):
    return 0.5 * (model(batch["x"]).squeeze(1) - batch["y"]).square()


def network(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), *layers, nn.Linear(8, 1))


def audited(model=None, data=None, **options):
    return audit_neighbours(model or network(), loss, data or records(), positions=2, **options)


@pytest.mark.parametrize(
    ("model", "options", "draws_numbers"),
    [
        (network, {}, False),
        (network, {"sampling": eq.Poisson(20, 60, 2), "steps": 2}, False),
        (network, {"sampling": eq.FixedEpochs(20, 60, 100), "hardened": True}, False),
        (network, {"sampling": eq.WithoutReplacement(20, 60, 100), "relation": "replace_one"}, False),
        (
            network,
            {
                "method": eq.DiceSGD(clip_norm=1.0),
                "budget": eq.Budget(4, 1e-3),
                "steps": 2,
                "sampling": eq.FullBatch(60, 2),
            },
            False,
        ),
        (lambda: network(nn.Dropout(0.3)), {}, True),
    ],
    ids=["mlp", "Poisson", "FixedEpochs", "WithoutReplacement", "DiceSGD", "dropout"],
)
def test_one_record_moves_the_sum_by_its_bound_and_nothing_else_moves(model, options, draws_numbers):
    found = audited(model(), **options)
    assert found.holds
    assert found.draws_numbers is draws_numbers
    kinds = ("replace",) if "relation" in options else ("add", "remove", "replace", "silent")
    assert [pair.change for pair in found.pairs] == [*kinds, *kinds]
    if "method" not in options:  # DiceSGD's bound is that of two sums together
        assert max(pair.movement for pair in found.pairs if pair.change != "silent") > 0.3
    for pair in found.pairs:
        assert pair.epsilon <= pair.claimed * (1 + 1e-4)


def test_epsilon_is_that_of_the_movement():
    """One record of C at z = 1 is a Gaussian of mu = 1."""
    (found,) = audited(changes=("add",), threads=(2,)).pairs[:1]
    assert found.threads == 2
    assert found.claimed == gaussian_epsilon(1.0, 0.1 / 60)
    assert found.epsilon == pytest.approx(gaussian_epsilon(found.movement, 0.1 / 60))


class Late(nn.Module):
    """Centres the batch where it holds a certain record, which the first ones are not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 1)

    def forward(self, x):
        return self.linear(x - x.mean(0) * (x[:, 0] == 7.0).any())


def test_a_model_that_mixes_records_late_is_seen():
    """The start tries a few records, and the one in the middle is not among them."""
    data = records()
    data["x"][30, 0] = 7.0
    found = audited(Late(), data)
    assert not found.holds
    assert found.worst.change == "silent"
    assert found.worst.movement > 1000 * SLACK


def test_a_threshold_that_follows_from_the_records_is_seen():
    """Its noise would, too."""

    class Raw(eq.DPSGD):
        name = "raw-threshold"

        def step(self, context, state):
            def sums(rows, ids):
                records = len(unwrap(ids))  # what no method may look at
                return {"gradient": clip(rows, Abadi(), 1.0 - records / 1000)}

            draw = context.draw("batch")
            return context.ledger.release(draw, draw.query(sums))["gradient"], state

    found = audited(method=Raw(clip_norm=1.0, noise_multiplier=1.0))
    assert found.worst_of("add").movement == float("inf")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data": {"x": torch.zeros(1, 5), "y": torch.zeros(1)}}, "at least two"),
        ({"changes": ("swap",)}, "is unknown"),
        ({"sampling": eq.WithoutReplacement(20, 60, 4), "changes": ("add",)}, "replace-one alone"),
        ({"method": eq.published.DiceSGD(clip_norm=1.0, noise_multiplier=1.0)}, "without a proof"),
        ({"positions": 0}, "positions"),
    ],
)
def test_what_cannot_be_audited_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        audit_neighbours(network(), loss, **({"data": records(), "positions": 2} | options))


def test_model_and_data_stay_as_they_were():
    model, data = network(), records()
    before = [p.clone() for p in model.parameters()]
    audited(model, data, changes=("replace",), steps=2)
    assert all(map(torch.equal, before, model.parameters()))
    assert torch.equal(data["x"], records()["x"])


def against_the_edge_of_the_tail():
    """A record that enters the tail, and one of opposite gradient that it pushes out.

    Every record has a coordinate of its own but these two. Their norms fall from 100, so that the twelfth is
    the last of the tail: with a fifth of 60 it is in, and out when a record enters above it.
    """
    index, scale = torch.arange(60), torch.zeros(60, 1)
    order = [30, *(i for i in range(60) if i != 30)]
    scale[order, 0] = torch.tensor([100.0, *(60.0 - k for k in range(59))])
    edge = order[11]
    index[edge] = 30
    scale[edge] *= -1
    return {"index": index, "scale": scale}


def test_the_tail_of_a_whole_draw_moves_by_its_whole_bound(monkeypatch):
    """Entering takes c_1, pushing takes c_1 - c_2: no canary's certificate sees the two together.

    So sums of 1.25 times their length are seen here, which the audit of one step misses.
    """

    def audited_tail():
        return audit_neighbours(
            Rows(60),
            canary_loss(),
            against_the_edge_of_the_tail(),
            method=eq.DCDPSGD(variant=TopShare(), noise_multiplier=2.0),
            positions=1,
        )

    found = audited_tail()
    assert found.holds
    assert found.worst_of("add").movement == pytest.approx(1.0, abs=1e-5)
    assert found.worst_of("silent") is None  # its score belongs to the draw, and cannot be left out
    raw_sums = replay._raw_sums
    monkeypatch.setattr(
        replay,
        "_raw_sums",
        lambda sums: {n: {k: 1.25 * t for k, t in v.items()} for n, v in raw_sums(sums).items()},
    )
    assert audited_tail().worst.movement == pytest.approx(1.25, abs=1e-4)
    assert not audited_tail().holds
