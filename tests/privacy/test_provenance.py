"""A private tensor knows whether each entry speaks of one record; sums without a bound are refused."""

from __future__ import annotations

import pytest
import torch
from privacy_rows import Flat, rows

from equipoise import privacy as ep
from equipoise.gradients import DenseGradients
from equipoise.methods.two_threshold_sums import clip_channels, clip_either, clip_selected, top_share
from equipoise.privacy import indicator
from equipoise.privacy.private import join, unwrap

DRAW = ep.Draw("batch", 0)
VALUES = torch.tensor([[3.0, 4.0, 0.5], [0.1, -2.0, 1.0], [5.0, 0.3, 0.2], [-1.0, 0.7, 2.5], [0.4, 9.0, 1.5]])


def written(x, change):
    x = x.clone()
    change(x)
    return x


# expressions of a Private [B, 3] tensor and whether each entry of the result speaks of one record
APART = {
    "scaled": lambda x: 2 * x + 1,
    "row norms": lambda x: x.norm(dim=1),
    "row sums": lambda x: (x * x).sum(dim=1) / x.abs().amax(dim=1),
    "column": lambda x: x[:, 1],
    "columns": lambda x: x[:, 1:],
    "public matrix": lambda x: x.double() @ torch.arange(6.0).double().reshape(3, 2),
    "public row": lambda x: x - torch.tensor([1.0, 2.0, 3.0]),
    "weighted rows": lambda x: x / x.norm(dim=1)[:, None].clamp(min=1e-3),
    "chosen": lambda x: torch.where(x[:, 0] > 1, x[:, 1], torch.zeros_like(x[:, 1])),
    "in place": lambda x: written(x, lambda x: x.mul_(2).clamp_(max=3)),
    "stacked": lambda x: torch.stack([x[:, 0], 2 * x[:, 1]], dim=1),
    "joined columns": lambda x: torch.cat([x, x * x], dim=-1),
    "integers": lambda x: (x[:, 0] * 100).long() * 3 >> 1 ^ 5,
}
MIXED = {
    "median": lambda x: (x[:, 0] > x[:, 0].median()).float(),
    "sorted": lambda x: x[:, 0].sort().values,
    "position": lambda x: x[:, 0] * torch.arange(len(x)),
    "flipped": lambda x: x.flip(0),
    "running sum": lambda x: x.cumsum(0),
    "gram": lambda x: x @ x.T,
    "softmax": lambda x: x.softmax(dim=0),
    "indexed": lambda x: x[torch.tensor([0, 0, 1, 2, 3])],
    "doubled": lambda x: torch.cat([x, x]),
    "stacked first": lambda x: torch.stack([x[:, 0], x[:, 1], x[:, 2]]),
    "stacked with mixed": lambda x: torch.stack([x[:, 0], x[:, 1].flip(0)], dim=1),
    "joined with positions": lambda x: torch.cat([x, torch.arange(5.0)[:, None]], dim=1),
    "noise": lambda x: x + torch.rand_like(x),
    "in place": lambda x: written(x, lambda x: x.sub_(x.mean(dim=0))),
    "through a view": lambda x: written(x, lambda x: x[:2].copy_(x[2:4] + x[:1])),
    "mixed with a mixture": lambda x: x[:, 0] * (x[:, 1] / x.max()),
}


@pytest.mark.parametrize("name", APART)
def test_apart(name):
    """Marked by record, and rightly so: every record alone gives its own entry."""
    out = APART[name](ep.Private(VALUES))
    assert out.by_record
    alone = torch.cat([unwrap(APART[name](ep.Private(row[None]))) for row in VALUES])
    torch.testing.assert_close(unwrap(out), alone)


@pytest.mark.parametrize("name", MIXED)
def test_mixed(name):
    assert not MIXED[name](ep.Private(VALUES)).by_record


def test_rows_answer_by_record_and_their_sums_do_not():
    g, order = (
        ep.PrivateRows(rows([3.0, 4.0], [1.0, 0.0], [0.5, 0.5]), DRAW),
        torch.tensor([3, 0, 1, 2, 4, 5]),
    )
    norms = g.row_norms()
    answers = g.inner(g), g.cross_gram(rows([1.0, 0.0])), g.matrix(), join([norms, norms], order)
    sums = g.cross_gram(g), g.weighted_sums(torch.ones(3))["w"], indicator(norms > 1).value["count"]
    assert all(one.by_record for one in (norms, g.row_norms([["w"]]), *answers))
    assert not any(one.by_record for one in (*sums, join([norms, norms.flip(0)], order)))


def numbers(count):
    return ep.Private(torch.arange(count), DRAW)


def median_mask(g):
    return g.row_norms() > g.row_norms().median()


REFUSED = {
    "either": lambda g: clip_either(g, median_mask(g), 1.0, 0.1, Flat()),
    "channels": lambda g: clip_channels(g, median_mask(g), 1.0, 0.1, Flat()),
    "top share": lambda g: top_share(g.row_norms() * g.row_norms().sum(), numbers(3), 0.5),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sums_without_a_bound_are_refused(name):
    with pytest.raises(ep.PrivateError, match="on its own"):
        REFUSED[name](ep.PrivateRows(rows([3.0, 4.0], [1.0, 0.0], [0.5, 0.5]), DRAW))


def combinable(count=3):
    return DenseGradients({"w": torch.randn(count, 2, generator=torch.Generator().manual_seed(2))})


FIRST = torch.tensor([True, True, False])
MISMATCHED = {
    "public rows": lambda g: g - combinable(),
    "another draw": lambda g: g + ep.PrivateRows(combinable(), ep.Draw("batch", 1)),
    "another order": lambda g: g - g.rows(torch.tensor([2, 0, 1])),
    "other places": lambda g: g.rows(torch.tensor([0, 1])) + g.rows(torch.tensor([1, 2])),
    "other places by mask": lambda g: g.rows(FIRST) + g.rows(FIRST.flip(0)),
}


@pytest.mark.parametrize("name", MISMATCHED)
def test_rows_of_other_records_never_meet(name):
    """Else a record would be in several rows, and the clipped sum would move by several thresholds."""
    with pytest.raises(ep.PrivateError, match="record by record"):
        MISMATCHED[name](ep.PrivateRows(combinable(), DRAW))


def test_rows_of_the_same_records_meet_and_what_scales_and_shifts_them_is_public():
    g, h, order = ep.PrivateRows(combinable(), DRAW), ep.PrivateRows(combinable(), DRAW), torch.tensor([2, 0])
    for found in (g + h, 0.5 * g + h * 1.5, g.rows(order) + h.rows(order), g.rows(order) - h.rows(order)):
        assert found.draw == DRAW
    torch.testing.assert_close(unwrap((g + h).row_norms()), 2 * unwrap(g.row_norms()))
    secret = ep.Private(torch.ones(2), DRAW)
    for diagonal in ({"w": secret}, {"w": (torch.ones(2), secret)}, secret):
        with pytest.raises(ep.PrivateError, match="diagonal"):
            g.scaled(diagonal)
    with pytest.raises(ep.PrivateError, match="added to all"):
        g.shifted({"w": secret})
    matrices = ep.PrivateRows(DenseGradients({"w": torch.ones(1, 1, 2)}), DRAW)
    with pytest.raises(ep.PrivateError, match="by which rows are multiplied"):
        matrices.multiplied({"w": ep.Private(torch.eye(2), DRAW)})
    assert matrices.multiplied({"w": torch.eye(2)}).draw == DRAW
    for factor in (secret, torch.ones(()), True):
        with pytest.raises(TypeError, match="public number"):
            factor * g if factor is True else g * factor
    assert g.scaled({"w": torch.ones(2)}).draw == g.shifted({"w": torch.ones(2)}).draw == DRAW


def test_a_selection_holds_for_its_draw_alone():
    g = ep.PrivateRows(rows([3.0, 4.0], [1.0, 0.0]), DRAW)
    ids = ep.Private(torch.tensor([7, 3]), DRAW)
    chosen = top_share(g.row_norms(), ids, 0.5)
    out = clip_selected(g, ids, chosen, 2.0, 0.5, Flat())
    assert torch.allclose(unwrap(out.value["w"]), torch.tensor([1.2 + 0.5, 1.6]))
    with pytest.raises(ValueError, match="selection is of"):
        clip_selected(ep.PrivateRows(rows([1.0], [2.0]), ep.Draw("batch", 1)), ids, chosen, 2.0, 0.5, Flat())
    tied = top_share(ep.Private(torch.ones(2), DRAW), ids, 0.5)
    assert unwrap(clip_selected(g, ids, tied, 2.0, 0.5, Flat()).value["w"])[0] == pytest.approx(0.3 + 1.0)


def test_a_rule_cannot_widen_the_step_between_the_thresholds():
    """A rule with weights of both signs: without the cut a demoted record would move by c_1 + c_2."""

    class Turning:
        def weights(self, norms, threshold):
            return 0 * norms + (1.0 if threshold > 1 else -1.0) * threshold

    g = ep.PrivateRows(rows([1.0, 0.0], [1.0, 0.0]), DRAW)
    ids = numbers(2)
    first, second = (top_share(ep.Private(torch.tensor(s), DRAW), ids, 0.5) for s in ([1.0, 0.0], [0.0, 1.0]))
    a, b = (clip_selected(g, ids, s, 2.0, 0.5, Turning()) for s in (first, second))
    assert (unwrap(a.value["w"]) - unwrap(b.value["w"])).norm() <= 2 * (2.0 - 0.5)
    assert unwrap(a.value["w"])[0] <= 2.0 + 1e-6
