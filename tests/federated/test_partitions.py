"""Partitions: disjoint, as skewed as they say, the same for the same seed."""

from __future__ import annotations

import pytest
import torch

from equipoise.federated import dirichlet, iid, one_class, shards

LABELS = torch.arange(600) % 10


def disjoint(parts):
    joined = torch.cat(parts)
    return len(joined.unique()) == len(joined)


def test_iid():
    parts = iid(605, 6, seed=3)
    assert [len(part) for part in parts] == [100] * 6
    assert disjoint(parts)
    assert all(torch.equal(a, b) for a, b in zip(parts, iid(605, 6, seed=3), strict=True))
    assert not torch.equal(parts[0], iid(605, 6, seed=4)[0])


def test_dirichlet_deals_everything_and_small_alpha_is_skewed():
    largest = {}
    for alpha in (0.1, 1000.0):
        parts = dirichlet(LABELS, 5, alpha, seed=1)
        assert disjoint(parts)
        assert sum(map(len, parts)) == len(LABELS)
        shares = [LABELS[part].bincount(minlength=10).max().item() / len(part) for part in parts]
        largest[alpha] = sum(shares) / len(shares)
    assert largest[1000.0] < 0.13
    assert largest[0.1] > 0.25


def test_one_class():
    parts = one_class(LABELS, 20)
    assert disjoint(parts)
    assert all(len(LABELS[part].unique()) == 1 and len(part) == 30 for part in parts)
    assert {int(LABELS[part][0]) for part in parts} == set(range(10))
    assert len(one_class(LABELS, 3)) == 3


def test_shards():
    parts = shards(LABELS, 10, seed=2)
    assert disjoint(parts)
    assert [len(part) for part in parts] == [60] * 10
    assert max(len(LABELS[part].unique()) for part in parts) == 2
    assert sum(map(len, shards(LABELS[:595], 7, 3, seed=2))) == 28 * 21
    assert not torch.equal(parts[0], shards(LABELS, 10, seed=3)[0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: iid(5, 6), "clients=6"),
        (lambda: iid(5, 0), "clients=0"),
        (lambda: shards(LABELS, 5, 0), "each=0"),
        (lambda: shards(LABELS[:9], 5), "clients=10"),
        (lambda: dirichlet(LABELS, 5, alpha=0.0), "alpha=0.0"),
        (lambda: dirichlet(torch.zeros(5), 5, alpha=1e-3), "100 times"),
        (lambda: one_class(torch.tensor([0, 0, 1, 1, 1, 1, 1]), 6), "class 0"),
    ],
)
def test_what_cannot_be_dealt(make, words):
    with pytest.raises(ValueError, match=words):
        make()
