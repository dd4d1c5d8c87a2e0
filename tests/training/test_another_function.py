"""Hooks of parameters and losses by which a batch has another gradient than the sum of its records'.

Hooks and backward passes of layers stand in the zoo.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from small_problems import loss, network, training

from equipoise.gradients import CoverageError, CrossRecordError


def is_named(model, **options) -> bool:
    """Whether a start refuses, or warns of, parameters whose records train another function."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            training(model, **options)
        except (CoverageError, CrossRecordError):
            return True
    return any("ordinary autograd" in str(warning.message) for warning in found)


def test_a_hook_that_changes_a_parameters_gradient_is_named():
    model = network()
    model[0].weight.register_hook(lambda gradient: None)  # it only looks
    assert not is_named(model)
    model[0].weight.register_hook(lambda gradient: 0.1 * gradient)
    with pytest.warns(match=r"0\.weight.*register_step_pre_hook"):
        training(model)
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
