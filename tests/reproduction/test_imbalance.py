"""Long-tailed selections have the published counts."""

from __future__ import annotations

import torch

from equipoise.data import Records
from reproduction.data.imbalance import imbalance_counts, imbalanced

CIFAR10 = [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
IMAGENETTE = [946, 567, 340, 204, 122, 73, 43, 26, 15, 9]


def test_the_published_counts():
    assert imbalance_counts(5000) == CIFAR10
    assert sum(CIFAR10) == 12_406
    assert imbalance_counts(946.9) == IMAGENETTE
    assert sum(IMAGENETTE) == 2_345


def test_a_selection_has_these_counts_and_is_the_same_again():
    label = torch.randint(10, (9469,), generator=torch.Generator().manual_seed(0))
    label[:9000] = torch.arange(9000) % 10
    whole = Records({"input": torch.arange(9469.0)[:, None], "label": label}, num_classes=10)
    first, again, other = (imbalanced(whole, 800, seed=seed) for seed in (0, 0, 1))
    batch = first[torch.arange(len(first))]
    assert batch["label"].bincount().tolist() == imbalance_counts(800)
    assert torch.equal(label[batch["input"][:, 0].long()], batch["label"])
    assert len(batch["input"].unique()) == len(first)
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    assert len(imbalanced(whole)) == sum(imbalance_counts(946.9))
