"""Whose random numbers a model takes, and a forward that needs no backward."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import Net

from equipoise.gradients import GradientEngine
from equipoise.gradients.capture.random_numbers import random_numbers_constant, use_of_random_numbers
from equipoise.gradients.capture.recorder import PlanMismatch
from equipoise.gradients.forward_only import LossEngine

OWN = torch.Generator()


def forked(x):
    with torch.random.fork_rng(devices=[]):
        return x + torch.rand(())


def attention(share):
    def attended(x):
        q = x.reshape(len(x), 1, 2, 2)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=share).reshape(len(x), 4)

    return attended


#: What the forward does, and whose random numbers it takes.
FORWARDS = {
    "none": (torch.tanh, "none"),
    "dropout": (lambda x: F.dropout(x, 0.5), "own"),
    "dropout of nothing": (lambda x: F.dropout(x, 0.0), "none"),
    "dropout in evaluation": (lambda x: F.dropout(x, 0.5, training=False), "none"),
    "torch's own dropout": (lambda x: torch.dropout(x, 0.5, train=True), "own"),
    "torch's own dropout in evaluation": (lambda x: torch.dropout(x, 0.5, train=False), "none"),
    "dropout beneath the functions": (lambda x: torch.ops.aten.native_dropout(x, 0.5, True)[0], "own"),
    "torch": (lambda x: x + torch.rand(()), "shared"),
    "torch, put back": (forked, "shared"),
    "torch, of its own": (lambda x: x + torch.rand((), generator=OWN.manual_seed(0)), "shared"),
    "NumPy": (lambda x: x + np.random.rand(), "shared"),
    "Python": (lambda x: x + random.random(), "shared"),
    "attention": (attention(0.0), "none"),
    "attention with dropout": (attention(0.5), "own"),
    "attention layer": (nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True), "own"),
    "recurrent layer": (nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True), "own"),
}


def losses(model, x):
    return model(x).square().sum(1)


@pytest.mark.parametrize("name", FORWARDS)
def test_whose_numbers_a_model_takes(name):
    behind, whose = FORWARDS[name]

    def forward(self, x):
        x = self.layer(x)
        if not isinstance(behind, nn.Module):
            return behind(x)
        return behind(*([x[:, None]] * (3 if isinstance(behind, nn.MultiheadAttention) else 1)))[0][:, 0]

    x, parts = torch.randn(4, 4), {"behind": behind} if isinstance(behind, nn.Module) else {}
    model = Net(forward, layer=nn.Linear(4, 4), **parts)

    def run(count, weights):
        found = losses(model, x[:count])
        return found, torch.autograd.grad(found, [*model.layer.parameters()], weights)

    assert use_of_random_numbers(run, 2, 4) == whose


@pytest.mark.parametrize("is_large", [False, True])
def test_a_forward_alone_tells_whether_records_follow_the_plan(is_large):
    """Large values go through one more layer."""

    def forward(self, x):
        return self.low(x) if x.max() < 9 else self.high(self.low(x))

    model, x = Net(forward, low=nn.Linear(4, 4), high=nn.Linear(4, 4)), torch.rand(3, 4)
    planned, other = (10 * x + 9, x) if is_large else (x, 10 * x + 9)
    for kind in (GradientEngine, LossEngine):
        tried = kind(model, losses, planned, check=False)
        assert torch.equal(tried.by_plan(planned).losses, losses(model, planned))
        with pytest.raises(PlanMismatch):
            tried.by_plan(other)


@pytest.mark.parametrize("drop", [F.dropout, F.dropout1d, F.alpha_dropout])
def test_numbers_held_constant_leave_something_of_a_dropout_of_many(drop):
    with random_numbers_constant():
        one, other = (drop(fill(2, 3, 4), 0.9, training=True) for fill in (torch.ones, torch.zeros))
    assert not torch.equal(one, other)
