"""Partitions: disjoint, as skewed as they say, the same for the same seed."""

import pytest
import torch

from equipoise.federated import dirichlet, iid, one_class, shards

LABELS = torch.arange(600) % 10


DEALT = {
    "iid": lambda seed: iid(605, 6, seed=seed),
    "dirichlet": lambda seed: dirichlet(LABELS, 5, 0.1, seed=seed),
    "shards": lambda seed: shards(LABELS, 10, seed=seed),
    "one class": lambda seed: one_class(LABELS, 20),
}


@pytest.mark.parametrize("kind", DEALT)
def test_parts_are_disjoint_and_follow_the_seed(kind):
    parts, again, other = (DEALT[kind](seed) for seed in (3, 3, 4))
    assert len(torch.cat(parts).unique()) == sum(map(len, parts))
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    assert torch.equal(parts[0], other[0]) == (kind == "one class")
    sizes = {"iid": {100}, "shards": {60}, "one class": {30}}
    assert {*map(len, parts)} == sizes[kind] if kind in sizes else sum(map(len, parts)) == len(LABELS)


def test_parts_are_as_skewed_as_they_say():
    def most(parts):
        """The share of a part's commonest class, on average."""
        shares = [LABELS[part].bincount(minlength=10).max().item() / len(part) for part in parts]
        return sum(shares) / len(shares)

    assert most(dirichlet(LABELS, 5, 1000.0, seed=1)) < 0.13
    assert most(dirichlet(LABELS, 5, 0.1, seed=1)) > 0.25
    assert most(one_class(LABELS, 20)) == 1
    assert {int(LABELS[part][0]) for part in one_class(LABELS, 20)} == set(range(10))
    assert max(len(LABELS[part].unique()) for part in shards(LABELS, 10, seed=2)) == 2
    assert sum(map(len, shards(LABELS[:595], 7, 3, seed=2))) == 28 * 21


def test_what_cannot_be_dealt():
    for make, words in (
        (lambda: iid(5, 6), "clients=6"),
        (lambda: shards(LABELS, 5, 0), "each=0"),
        (lambda: shards(LABELS[:9], 5), "clients=10"),
        (lambda: dirichlet(LABELS, 5, alpha=0.0), "alpha=0.0"),
        (lambda: dirichlet(torch.zeros(5), 5, alpha=1e-3), "100 times"),
        (lambda: one_class(torch.tensor([0, 0, 1, 1, 1, 1, 1]), 6), "class 0"),
    ):
        with pytest.raises(ValueError, match=words):
            make()
