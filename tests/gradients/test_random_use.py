"""Whose random numbers a model takes, and a forward that needs no backward."""

import random
from threading import Thread

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

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


def as_layer(layer):
    def run(x):
        out = layer(*([x[:, None]] * (3 if isinstance(layer, nn.MultiheadAttention) else 1)))
        return out[0][:, 0]

    return run


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


class Runs(nn.Module):
    """A layer and a forward behind it."""

    def __init__(self, forward):
        super().__init__()
        self.layer, self.behind = nn.Linear(4, 4), forward if isinstance(forward, nn.Module) else None
        self.run = as_layer(forward) if isinstance(forward, nn.Module) else forward

    def forward(self, x):
        return self.run(self.layer(x))


def losses(model, x):
    return model(x).square().sum(1)


@pytest.mark.parametrize("name", FORWARDS)
def test_whose_numbers_a_model_takes(name):
    forward, whose = FORWARDS[name]
    model, x = Runs(forward), torch.randn(4, 4)

    def run(count, weights):
        found = losses(model, x[:count])
        return found, torch.autograd.grad(found, [*model.layer.parameters()], weights)

    assert use_of_random_numbers(run, 2, 4) == whose


@pytest.mark.parametrize("times", [1, 10])
def test_only_a_model_that_asks_each_time_has_no_trace(times):
    """Another thread may ask while a trace runs: a heartbeat of Flower's does."""
    beats = iter(range(times))  # a list would be put back

    def heard(model, x):
        if is_on and next(beats, None) is not None:
            thread = Thread(target=random.random)
            thread.start()
            thread.join()
        return losses(model, x)

    x, is_on = torch.randn(4, 4), False
    engine = GradientEngine(Runs(torch.tanh), heard, x, check=False)
    is_on = True
    if times == 1:
        assert engine.line(x).rows.graph is not None
    else:
        with pytest.raises(RuntimeError, match="the model asks Python for random numbers"):
            engine.line(x)


class Longer(nn.Module):
    """Large values go through one more layer."""

    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.low(x) if x.max() < 9 else self.high(self.low(x))


@pytest.mark.parametrize("is_large", [False, True])
def test_a_forward_alone_tells_whether_records_follow_the_plan(is_large):
    model, x = Longer(), torch.rand(3, 4)
    planned, other = (10 * x + 9, x) if is_large else (x, 10 * x + 9)
    engine = GradientEngine(model, losses, planned, check=False)
    for tried in (engine, LossEngine(model, losses, planned, check=False)):
        assert torch.equal(tried.by_plan(planned).losses, losses(model, planned))
        with pytest.raises(PlanMismatch):
            tried.by_plan(other)


@pytest.mark.parametrize("drop", [F.dropout, F.dropout1d, F.alpha_dropout])
def test_numbers_held_constant_leave_something_of_a_dropout_of_many(drop):
    with random_numbers_constant():
        one, other = (
            drop(values, 0.9, training=True) for values in (torch.ones(2, 3, 4), torch.zeros(2, 3, 4))
        )
    assert not torch.equal(one, other)
