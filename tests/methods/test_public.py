"""Public training alone and before a private one: what it computes, what it costs, what it refuses."""

from __future__ import annotations

import pytest
import torch
from table import loss, network, parameters, public_batch, training
from torch import nn

import equipoise as eq
from equipoise.methods import PublicRecords
from equipoise.methods.base import Setting
from equipoise.privacy import Poisson


def plain_sgd(steps: int, scale: float = 1.0) -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * scale)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, public_batch()).mean().backward()
        optimizer.step()
    return model


def test_public_only_is_sgd_on_the_public_records():
    model = network()
    run = training(eq.methods.PublicOnly(public=PublicRecords(public_batch())), model=model)
    list(run)
    torch.testing.assert_close(parameters(model), parameters(plain_sgd(6)), rtol=1e-9, atol=1e-12)
    assert (run.plan.releases, run.epsilon_so_far()) == ((), 0)
    statement = run.statement()
    assert statement.guarantee == "proven"
    assert any("20 records are public" in line for line in statement.assumptions)


def warm_start(inner, **options):
    return eq.methods.PublicWarmStart(public=PublicRecords(public_batch()), inner=inner, **options)


@pytest.mark.parametrize(("warm", "expected"), [("inner", 0.05), (0.05, 0.05)])
def test_public_gradients_are_clipped_as_the_private_ones_will_be(warm, expected):
    model, other = network(), network()
    method = warm_start(eq.DPSGD(clip_norm=0.05), warm_steps=1, warm_clip_norm=warm)
    run = training(method, model=model)
    before = parameters(model).clone()
    next(iter(run))
    rows = eq.per_sample_gradients(other, loss, public_batch())
    norms = rows.row_norms()
    assert bool((norms > 0.05).any()), "the test needs gradients that are clipped"
    weights = (expected / norms).clamp(max=1)
    mean = rows.weighted_sums(weights / len(norms))
    moved = torch.cat([-0.1 * mean[name].flatten() for name, _ in other.named_parameters()])
    torch.testing.assert_close(parameters(model) - before, moved, rtol=1e-6, atol=1e-9)


def test_a_warm_start_begins_with_public_steps():
    model = network()
    method = warm_start(eq.DPSGD(clip_norm=0.5), warm_steps=4, warm_clip_norm=None, warm_scale=0.5)
    run = training(method, model=model)
    for step in run:
        if step.step == 4:
            break
    torch.testing.assert_close(parameters(model), parameters(plain_sgd(4, 0.5)), rtol=1e-9, atol=1e-12)
    assert run.epsilon_so_far() == 0
    list(run)
    assert run.epsilon_so_far() > 0
    # The private steps alone are paid for.
    plain = eq.DPSGD().plan(Setting(sampling=Poisson(20, 60, 2), budget=eq.Budget(8.0, 1e-3))).releases
    assert run.plan.event() == plain.event()
