"""Hooks, backward passes and losses by which a batch has another gradient than the sum of its records'."""

from __future__ import annotations

import warnings

import pytest
import torch
from small_problems import loss, network, training
from torch import nn

from equipoise.gradients import CoverageError, CrossRecordError


def with_hook(change):
    """A network whose second layer's gradient is changed, by a hook on the tensor."""
    model = network()
    model[1].register_forward_hook(lambda module, args, out: out.register_hook(change) and None)
    return model


def with_module_hook(change):
    model = network()
    model[1].register_full_backward_hook(lambda module, into, out: (change(into[0]),))
    return model


def with_function(change):
    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return change(gradient)

    class Layer(nn.Module):
        def forward(self, x):
            return Changed.apply(x)

    return nn.Sequential(*network(), Layer())


def with_parameter_hook(change):
    model = network()
    model[0].weight.register_hook(change)
    return model


OF_THE_BATCH = {
    "norm": lambda g: g / g.norm(),
    "clipped by the norm": lambda g: g * min(1.0, 0.05 / float(g.norm())),
    "a quantile": lambda g: g.clamp(max=float(g.abs().quantile(0.3))),
    "length": lambda g: g / len(g),
    "order": lambda g: g.flip(0),
}
OF_EACH_RECORD = {
    "own norm": lambda g: g / g.norm(dim=-1, keepdim=True).clamp(min=1e-6),
    "sign": torch.sign,
    "reversal": lambda g: -0.3 * g,
}


def is_named(model, **options) -> bool:
    """Whether a start refuses, or warns of, parameters whose records train another function."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            training(model, **options)
        except (CoverageError, CrossRecordError):
            return True
    return any("ordinary autograd" in str(warning.message) for warning in found)


MAKE = [with_hook, with_module_hook, with_function]
NAMED = [(MAKE[place % 3], change) for place, change in enumerate(OF_THE_BATCH)]
TRAINS = [(MAKE[place % 3], change) for place, change in enumerate(OF_EACH_RECORD)]


@pytest.mark.parametrize(("make", "change"), NAMED)
def test_a_gradient_that_follows_the_batch_is_named(make, change):
    assert is_named(make(OF_THE_BATCH[change]))


@pytest.mark.parametrize(("make", "change"), TRAINS)
def test_one_that_follows_its_own_record_trains(make, change):
    assert not is_named(make(OF_EACH_RECORD[change]))


@pytest.mark.parametrize("change", [lambda g: 0.1 * g])
def test_a_hook_that_changes_a_parameters_gradient_is_named(change):
    with pytest.warns(match=r"0\.weight.*register_step_pre_hook"):
        training(with_parameter_hook(change))
    assert not is_named(with_parameter_hook(lambda gradient: None))  # it only looks
    model = network()
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.clamp_(max=0))
    with pytest.warns(match=r"0\.weight.*register_step_pre_hook"):
        training(model)


BY_PLACE = {
    "ramp": lambda count: torch.linspace(0, 2, count),
    "all but the first": lambda count: (torch.arange(count) > 0).float(),
    "the first five": lambda count: (torch.arange(count) < 5).float(),
    "one far behind": lambda count: 1 + (torch.arange(count) == 9).float(),
    "number of records": lambda count: torch.full((count,), 1 / count),
}


@pytest.mark.parametrize("weights", BY_PLACE)
def test_a_loss_that_follows_a_records_place_is_named(weights):
    def by_place(model, batch):
        return loss(model, batch) * BY_PLACE[weights](len(batch["label"]))

    assert is_named(network(), loss=by_place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_whose_later_places_differ_is_refused(dtype):
    """Its rows in a batch are those of a rule, and would follow who else is drawn."""
    with pytest.raises(CrossRecordError, match="place"):
        training(
            network().to(dtype),
            loss=lambda m, b: (
                loss(m, {**b, "input": b["input"].to(dtype)}) * (torch.arange(len(b["label"])) < 5)
            ),
        )
