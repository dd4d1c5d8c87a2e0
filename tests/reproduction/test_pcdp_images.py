"""PCDP-SGD's table on images: its parts, and a training of every method on made-up images."""

from __future__ import annotations

import pytest
import torch

from equipoise.data import DataSet, Records
from reproduction.findings import Site
from reproduction.papers import pcdp_sgd_images
from reproduction.result_cache import ResultCache


def nothing(done, total, what):
    pass


def images(count, shape=(1, 28, 28), name="lines"):
    """Pictures with a line whose height is the class."""
    label = torch.arange(count) % 10
    pictures = torch.rand(count, *shape, generator=torch.Generator().manual_seed(0)) / 2
    pictures[torch.arange(count), :, label, :] = 1.0
    records = Records({"input": pictures, "label": label}, num_classes=10)
    return DataSet(name=name, train=records, test=records, population=count, num_classes=10)


@pytest.fixture
def small(monkeypatch):
    """Few made-up images in the place of all three sets."""
    shapes = {"mnist": (1, 28, 28), "fashion-mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
    monkeypatch.setattr(pcdp_sgd_images, "load", lambda name, folder: images(1600, shapes[name], name))
    monkeypatch.setattr(pcdp_sgd_images, "RECORDS", 1000)
    monkeypatch.setattr(pcdp_sgd_images, "HELD", 100)
    monkeypatch.setattr(pcdp_sgd_images, "BATCH", 100)
    pcdp_sgd_images._images.cache_clear()
    yield
    pcdp_sgd_images._images.cache_clear()


# ---- PCDP-SGD


def test_private_public_and_held_out_images_are_disjoint(small):
    parts = pcdp_sgd_images._parts("mnist", 0, None)
    assert [len(parts[name]["y"]) for name in ("private", "public", "held")] == [1000, 100, 100]
    every = torch.cat([parts[name]["x"].flatten(1) for name in parts])
    assert len(every.unique(dim=0)) == 1200


@pytest.mark.parametrize("cell", [pcdp_sgd_images.CELLS[0], pcdp_sgd_images.CELLS[-1]], ids=str)
def test_public_records_are_of_another_set_and_of_the_same_shape(small, cell):
    like = pcdp_sgd_images._parts(cell.data, 0, None)["private"]["x"].shape[1:]
    for source in ("same set", "other set", "drawn"):
        batch = pcdp_sgd_images._public(f"PCDP, {source}", cell.data, 0, None).batch
        assert batch["x"].shape == (100, *like)
        assert batch["x"].is_contiguous()


@pytest.mark.parametrize("arm", pcdp_sgd_images.ARMS)
def test_every_arm_trains_at_the_papers_true_epsilon(small, arm):
    found = pcdp_sgd_images.measure(pcdp_sgd_images.CELLS[2], arm, 1.0, 0, None, steps=48)
    assert len(found) == 9
    assert all(0 <= error <= 1 for error in found.values())


def test_the_same_command_goes_on_with_what_is_missing(small, monkeypatch):
    monkeypatch.setattr(pcdp_sgd_images, "STEPS", 8)
    monkeypatch.setattr(pcdp_sgd_images, "CELLS", pcdp_sgd_images.CELLS[:1])
    done = []

    def measure(cell, arm, rate, seed, folder):
        done.append((arm, rate, seed))
        return {"0": 0.9, "8": 0.5 if rate == 3 else 0.6}

    monkeypatch.setattr(pcdp_sgd_images, "measure", measure)
    site = Site(None, ResultCache(None))
    for _ in range(2):
        found = pcdp_sgd_images.EXPERIMENT.carry_out([0, 1], nothing, site)
    assert len(done) == len(set(done)) == len(pcdp_sgd_images.ARMS) * (len(pcdp_sgd_images.RATES) + 2)
    assert ("DP-SGD", 3.0, 1) in done
    assert ("DP-SGD", 1.0, 1) not in done
    assert found.table.rows[0][4:7] == ["DP-SGD", 3.0, 50.0]
