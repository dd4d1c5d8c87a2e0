"""A loss whose gradients are all zero, or not finite: its steps would release noise alone."""

from __future__ import annotations

import warnings

import pytest
import torch
from small_problems import CLASSES, FEATURES, RECORDS, loss, network, training
from torch import nn

import equipoise as eq
from equipoise.training.record_source import DataError

SAMPLING = eq.FixedEpochs(12, RECORDS, 5)
other = network(seed=3)


def wrong(model, batch):
    """Whole numbers: 1 where the class is wrong."""
    return (model(batch["input"]).argmax(1) != batch["label"]).float()


CUT_OFF = {
    "detached": lambda model, batch: loss(model, batch).detach(),
    "whole numbers": wrong,
    "another model": lambda model, batch: loss(other, batch),
    "a constant": lambda model, batch: torch.zeros(len(batch["label"])),
}


@pytest.mark.parametrize("name", CUT_OFF)
def test_a_loss_without_a_gradient_is_refused_before_anything_is_spent(tmp_path, name):
    with pytest.raises(DataError, match=r"no gradient.*Nothing was spent"):
        training(loss=CUT_OFF[name], sampling=SAMPLING, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_method_that_takes_losses_alone_needs_no_gradient():
    run = training(loss=wrong, sampling=SAMPLING, method=eq.methods.DPZO(clip_norm=0.5, noise_multiplier=1.0))
    assert len(list(run)) == 5


def asleep():
    """All ReLUs are off at the start."""
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES).requires_grad_(False))
    nn.init.constant_(model[0].bias, -1000.0)
    return model


def hooked():
    """A hook divides by the standard deviation over the batch, which a single record does not have."""
    model = network()
    model[1].register_forward_hook(
        lambda module, args, out: out.register_hook(lambda g: g / (g.std(0) + 1e-3)) and None
    )
    return model


ZERO = {
    "a factor of zero": (network, lambda model, batch: 0 * loss(model, batch)),
    "rounding": (network, lambda model, batch: model(batch["input"]).round().sum(1)),
    "a hinge that all satisfy": (
        network,
        lambda model, batch: (model(batch["input"]).sum(1) - 1000).clamp(min=0),
    ),
    "dead units": (asleep, loss),
    "NaN for a record by itself": (hooked, loss),
}


@pytest.mark.parametrize("name", ZERO)
def test_gradients_that_are_all_zero_or_not_finite_are_named(name):
    make, own_loss = ZERO[name]
    with pytest.warns(UserWarning, match="noise alone"):
        training(make(), loss=own_loss, sampling=SAMPLING)


class LowRank(nn.Module):
    """An adapter whose second factor is zero at the start: the first one has no gradient then."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(FEATURES, CLASSES).requires_grad_(False)
        self.down, self.up = nn.Linear(FEATURES, 2, bias=False), nn.Linear(2, CLASSES, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_a_model_that_begins_at_zero_is_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training(LowRank(), sampling=SAMPLING)
