"""Training on each kind of device that this machine has: as on the processor, and with the same guards.

Where there is no CUDA device its cases skip, and those of the processor hold the tests themselves.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_problems import (
    network,
    parameters,
    resumed,
    saved,
    training,
    weighted_loss,
    with_overflow,
)
from torch import nn

import equipoise as eq
from equipoise.gradients import per_sample_gradients
from equipoise.privacy.noise.streams import NormalStream

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]
pytestmark = pytest.mark.parametrize("device", DEVICES)

NETWORKS = {
    "linear": lambda: (nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(7, 6)),
    "convolution": lambda: (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 3)),
        torch.randn(7, 2, 6, 6),
    ),
    "look-up": lambda: (
        nn.Sequential(nn.Embedding(11, 4), nn.Flatten(), nn.Linear(20, 3)),
        torch.randint(11, (7, 5)),
    ),
    "sequence": lambda: (
        nn.Sequential(nn.Linear(6, 5), nn.Flatten(), nn.Linear(25, 3)),
        torch.randn(7, 5, 6),
    ),
}


def losses(model, batch):
    return nn.functional.cross_entropy(model(batch["input"]), batch["label"], reduction="none")


@pytest.mark.parametrize("name", NETWORKS)
def test_norms_and_weighted_sums_are_those_of_each_record_alone(device, name):
    torch.manual_seed(0)
    model, inputs = NETWORKS[name]()
    model = model.to(device)
    batch = {"input": inputs.to(device), "label": torch.arange(7, device=device) % 3}
    alone = []
    for i in range(7):
        value = losses(model, {key: part[i : i + 1] for key, part in batch.items()}).sum()
        alone.append(torch.autograd.grad(value, list(model.parameters())))
    gradients = per_sample_gradients(model, losses, batch)
    norms = torch.stack([torch.cat([g.flatten() for g in row]).norm() for row in alone])
    torch.testing.assert_close(gradients.row_norms(), norms, rtol=1e-4, atol=1e-6)
    weights = torch.linspace(0.1, 1.0, 7, device=device)
    sums = gradients.weighted_sums(weights)
    for place, key in enumerate(dict(model.named_parameters())):
        want = sum(w * row[place] for w, row in zip(weights, alone, strict=True))
        torch.testing.assert_close(sums[key], want, rtol=1e-4, atol=1e-5)


def test_with_hardly_any_noise_a_training_ends_where_the_processor_does(device):
    """The noise itself follows from the digests of a device, so its numbers differ."""
    ends = []
    for where in ("cpu", device):
        method = eq.DPSGD(clip_norm=0.5, noise_multiplier=1e-6)
        run = training(
            network().to(where), steps=5, method=method, device=where, sampling=eq.FullBatch(60, 5)
        )
        run.run(progress=False)
        ends.append(parameters(run.model).cpu())
    assert (ends[1] - ends[0]).norm() <= 1e-4 * ends[0].norm()


def test_a_resumed_training_ends_where_the_whole_one_does(device, tmp_path):
    whole = training(network().to(device), steps=6, device=device, folder=tmp_path / "whole")
    whole.run(progress=False)
    begun = training(network().to(device), steps=6, device=device, folder=tmp_path / "run")
    saved(begun, steps=3)
    again = resumed(tmp_path / "run", network(seed=2).to(device), device=device)
    again.run(progress=False)
    assert parameters(again.model).device.type == device
    got, want = parameters(again.model), parameters(whole.model)
    assert (got - want).norm() <= 1e-4 * want.norm()


def test_noise_is_made_there_and_has_its_scale(device):
    drawn = NormalStream(b"k" * 32).draw(200_000, 3.0, device=device)
    assert drawn.device.type == device
    # four standard errors; a scale that is 1% off is rejected
    assert abs(float(drawn.std()) / 3.0 - 1) < 4 / (2 * 200_000) ** 0.5
    assert abs(float(drawn.mean())) < 4 * 3.0 / 200_000**0.5
    again = NormalStream(b"k" * 32).draw_ranges(200_000, 3.0, [(1_000, 1_010)], device=device)
    assert torch.equal(again, drawn[1_000:1_010])


def test_a_run_on_another_kind_of_device_repeats_no_noise(device):
    """Its noise has other numbers, so what it releases is charged anew."""
    setup = training(network().to(device), device=device)._setup
    other = torch.device("meta" if device == "cpu" else "cpu")
    assert replace(setup, device=other).kernels() != setup.kernels()


def test_a_record_whose_gradient_is_not_finite_is_left_out(device):
    data, sampling = with_overflow(), eq.FullBatch(60, 3)
    run = training(network().to(device), data=data, loss=weighted_loss, device=device, sampling=sampling)
    run.run(progress=False)
    assert torch.isfinite(parameters(run.model)).all()
