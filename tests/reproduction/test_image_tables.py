"""DC-DPSGD's and PCDP-SGD's tables on images: their parts, and every method trained on made-up images."""

from __future__ import annotations

import pytest
import torch

from equipoise.data import DataSet, Records
from reproduction.findings import reported
from reproduction.papers import (
    dc_dpsgd_ablations,
    dc_dpsgd_images,
    dc_dpsgd_whole,
    pcdp_sgd_images,
    pcdp_sgd_printed,
)
from reproduction.papers.dc_dpsgd_ablations import ALGORITHM, PROGRAM, Arm

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
        (pcdp_sgd_printed, {"RECORDS": 1000, "BATCH": 100}),
        (dc_dpsgd_ablations, {"RECORDS": {"images": 1600}, "STEPS": {"images": 4}, "BATCH": {"images": 40}}),
        (dc_dpsgd_whole, {}),
    ):
        if module is not pcdp_sgd_printed:  # which has the images of the other one
            monkeypatch.setattr(module, "load", lambda name, folder: images(1600, SHAPES[name], name))
        for name, value in numbers.items():
            monkeypatch.setattr(module, name, value)
    caches = (
        dc_dpsgd_images._features,
        pcdp_sgd_images.images,
        dc_dpsgd_ablations._images,
        dc_dpsgd_whole._problem,
    )
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


@pytest.mark.filterwarnings("ignore:the subspace captures")
@pytest.mark.parametrize("arm", pcdp_sgd_printed.ARMS)
def test_every_arm_trains_in_its_own_schedule(arm):
    found = pcdp_sgd_printed.measure(pcdp_sgd_images.CELLS[0], arm, 0, None, steps=8)
    assert len(found) == 9
    assert found["0"] != found["8"]


@pytest.mark.filterwarnings("ignore:the subspace captures")
@pytest.mark.parametrize(
    ("arm", "low", "high"), [("DP-SGD", 0, 0.1), ("PDP", 0.99, 1.01), ("PCDP", 0.99, 1.01)]
)
def test_only_a_projected_step_lies_in_the_public_span(arm, low, high):
    (share,) = pcdp_sgd_printed.inside(pcdp_sgd_images.CELLS[0], arm, 0, None).values()
    assert low <= share <= high


@pytest.mark.parametrize(
    "arm",
    [
        Arm("images", ALGORITHM, "k", "100"),
        Arm("images", PROGRAM, "split", "2+6"),
        Arm("images", PROGRAM, "k", "none"),
    ],
    ids=str,
)
def test_an_ablation_trains(arm):
    assert 0 <= dc_dpsgd_ablations.measure(arm, 0.1, 0, None)["result"] <= 100


def test_what_is_proved_of_a_step():
    assert dc_dpsgd_whole.proven().items() <= reported("dc-dpsgd-whole").items()


@pytest.mark.parametrize("arm", dc_dpsgd_whole.METHODS)
def test_the_table_at_full_size_trains(arm):
    found = dc_dpsgd_whole.measure("mnist", arm, 0.1, 0, None, passes=1)
    assert list(found)[-1] == str(round(1600 / 128))
