"""DC-DPSGD's table on long-tailed images: selections, and a training of every method on made-up images."""

from __future__ import annotations

import pytest
import torch

from equipoise.data import DataSet, Records
from reproduction.data.imbalance import imbalance_counts
from reproduction.papers import dc_dpsgd_images


def images(count):
    """Pictures with a line whose height is the class."""
    label = torch.arange(count) % 10
    pictures = torch.rand(count, 1, 28, 28, generator=torch.Generator().manual_seed(0)) / 2
    pictures[torch.arange(count), 0, label, :] = 1.0
    records = Records({"input": pictures, "label": label}, num_classes=10)
    return DataSet(name="lines", train=records, test=records, population=count, num_classes=10)


@pytest.fixture
def small(monkeypatch):
    """Few made-up images in the place of the sets."""
    monkeypatch.setattr(dc_dpsgd_images, "load", lambda name, folder: images(1600))
    monkeypatch.setattr(dc_dpsgd_images, "LARGEST", 140)
    monkeypatch.setattr(dc_dpsgd_images, "HELD", 20)
    monkeypatch.setattr(dc_dpsgd_images, "BATCH", 50)
    dc_dpsgd_images._features.cache_clear()
    yield
    dc_dpsgd_images._features.cache_clear()


def test_records_to_tune_on_are_none_of_the_selection(small):
    train = images(1600).train
    chosen, others = dc_dpsgd_images.held_out(train, 100)
    assert chosen.fields["label"].bincount().tolist() == imbalance_counts(112)
    assert others.fields["label"].bincount().tolist() == [20] * 10
    both = torch.cat([part.fields["input"].flatten(1) for part in (chosen, others)])
    assert len(both.unique(dim=0)) == len(both)


@pytest.mark.parametrize("arm", dc_dpsgd_images.ARMS)
def test_every_two_threshold_arm_trains_on_features(small, arm):
    found = dc_dpsgd_images.measure("mnist", arm, 1.0, 0, None, steps=16)
    assert len(found) == 8
    assert all(0 <= error <= 1 for error in found.values())


def test_the_table_has_the_papers_figures(small):
    run = {str(dc_dpsgd_images.STEPS): 0.4}
    found = dc_dpsgd_images.summarise({("cifar10", arm): (1.0, [run]) for arm in dc_dpsgd_images.ARMS})
    printed = {row[1]: row[6] for row in found.table.rows}
    assert printed["DP-SGD"] == 57.98
    assert printed["trace, p=0.1"] is None
    assert all(verdict.met for verdict in found.verdicts)
