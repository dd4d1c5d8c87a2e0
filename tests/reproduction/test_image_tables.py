"""DC-DPSGD's and PCDP-SGD's tables on images: their parts, and every method trained on made-up images."""

from __future__ import annotations

import pytest
import torch

from equipoise.data import DataSet, Records
from reproduction.data.imbalance import imbalance_counts
from reproduction.findings import Site
from reproduction.papers import dc_dpsgd_images, pcdp_sgd_images
from reproduction.result_cache import ResultCache

SHAPES = {"mnist": (1, 28, 28), "fashion-mnist": (1, 28, 28), "cifar10": (3, 32, 32)}


def images(count, shape, name):
    """Pictures with a line whose height is the class."""
    label = torch.arange(count) % 10
    pictures = torch.rand(count, *shape, generator=torch.Generator().manual_seed(0)) / 2
    pictures[torch.arange(count), :, label, :] = 1.0
    records = Records({"input": pictures, "label": label}, num_classes=10)
    return DataSet(name=name, train=records, test=records, population=count, num_classes=10)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few made-up images in the place of the sets."""
    for module, numbers in (
        (dc_dpsgd_images, {"LARGEST": 140, "HELD": 20, "BATCH": 50}),
        (pcdp_sgd_images, {"RECORDS": 1000, "HELD": 100, "BATCH": 100}),
    ):
        monkeypatch.setattr(module, "load", lambda name, folder: images(1600, SHAPES[name], name))
        for name, value in numbers.items():
            monkeypatch.setattr(module, name, value)
    caches = (dc_dpsgd_images._features, pcdp_sgd_images._images)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


TRAININGS = [
    *((dc_dpsgd_images, "mnist", arm, 16) for arm in dc_dpsgd_images.ARMS),
    *((pcdp_sgd_images, pcdp_sgd_images.CELLS[2], arm, 48) for arm in pcdp_sgd_images.ARMS),
]


@pytest.mark.parametrize(("module", "part", "arm", "steps"), TRAININGS, ids=[t[2] for t in TRAININGS])
def test_every_arm_trains(module, part, arm, steps):
    found = module.measure(part, arm, 1.0, 0, None, steps=steps)
    assert len(found) in (8, 9)
    assert all(0 <= error <= 1 for error in found.values())


# ---- DC-DPSGD


def test_records_to_tune_on_are_none_of_the_selection():
    train = images(1600, SHAPES["mnist"], "mnist").train
    chosen, others = dc_dpsgd_images.held_out(train, 100)
    assert chosen.fields["label"].bincount().tolist() == imbalance_counts(112)
    assert others.fields["label"].bincount().tolist() == [20] * 10
    both = torch.cat([part.fields["input"].flatten(1) for part in (chosen, others)])
    assert len(both.unique(dim=0)) == len(both)


def test_the_table_has_the_papers_figures():
    run = {str(dc_dpsgd_images.STEPS): 0.4}
    found = dc_dpsgd_images.summarise({("cifar10", arm): (1.0, [run]) for arm in dc_dpsgd_images.ARMS})
    printed = {row[1]: row[6] for row in found.table.rows}
    assert printed["DP-SGD"] == 57.98
    assert printed["trace, p=0.1"] is None
    assert all(verdict.met for verdict in found.verdicts)


# ---- PCDP-SGD


def test_private_public_and_held_out_images_are_disjoint():
    parts = pcdp_sgd_images._parts("mnist", 0, None)
    assert [len(parts[name]["y"]) for name in ("private", "public", "held")] == [1000, 100, 100]
    every = torch.cat([parts[name]["x"].flatten(1) for name in parts])
    assert len(every.unique(dim=0)) == 1200


@pytest.mark.parametrize("cell", [pcdp_sgd_images.CELLS[0], pcdp_sgd_images.CELLS[-1]], ids=str)
def test_public_records_are_of_another_set_and_of_the_same_shape(cell):
    like = pcdp_sgd_images._parts(cell.data, 0, None)["private"]["x"].shape[1:]
    for source in ("same set", "other set", "drawn"):
        batch = pcdp_sgd_images._public(f"PCDP, {source}", cell.data, 0, None).batch
        assert batch["x"].shape == (100, *like)
        assert batch["x"].is_contiguous()


# ---- both


TABLES = [
    (dc_dpsgd_images, "NAMES", {"mnist": "MNIST-HT"}),
    (pcdp_sgd_images, "CELLS", pcdp_sgd_images.CELLS[:1]),
]


@pytest.mark.parametrize(("module", "parts", "first"), TABLES, ids=["dc-dpsgd", "pcdp-sgd"])
def test_the_same_command_goes_on_with_what_is_missing(monkeypatch, module, parts, first):
    monkeypatch.setattr(module, "STEPS", 8)
    monkeypatch.setattr(module, parts, first)
    done = []

    def measure(part, arm, rate, seed, folder):
        done.append((arm, rate, seed))
        return {"0": 0.9, "8": 0.5 if rate == module.RATES[1] else 0.6}

    monkeypatch.setattr(module, "measure", measure)
    site = Site(None, ResultCache(None))
    for _ in range(2):
        found = module.EXPERIMENT.carry_out([0, 1], lambda done, total, what: None, site)
    assert len(done) == len(set(done)) == len(module.ARMS) * (len(module.RATES) + 2)
    assert ("DP-SGD", module.RATES[1], 1) in done
    assert ("DP-SGD", module.RATES[0], 1) not in done
    row = found.table.rows[0]
    at = row.index("DP-SGD")
    assert row[at : at + 3] == ["DP-SGD", module.RATES[1], 50.0]
