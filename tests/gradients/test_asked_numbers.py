"""What spares trials of a model: that it asks for no random numbers, and a forward that needs no backward."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equipoise.gradients import GradientEngine
from equipoise.gradients.capture.isolation import undisturbed
from equipoise.gradients.capture.random_numbers import RARE, use_of_random_numbers
from equipoise.gradients.capture.recorder import PlanMismatch
from equipoise.gradients.checks.errors import CrossRecordError
from equipoise.gradients.checks.record_trials import FREE, HELD, RecordTrials

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


#: What the forward does, and whether it asks for numbers, and for dropout.
FORWARDS = {
    "none": (torch.tanh, False, False),
    "dropout": (lambda x: F.dropout(x, 0.5), False, True),
    "dropout of nothing": (lambda x: F.dropout(x, 0.0), False, False),
    "dropout in evaluation": (lambda x: F.dropout(x, 0.5, training=False), False, False),
    "torch's own dropout": (lambda x: torch.dropout(x, 0.5, train=True), False, True),
    "torch's own dropout in evaluation": (lambda x: torch.dropout(x, 0.5, train=False), False, False),
    "dropout beneath the functions": (lambda x: torch.ops.aten.native_dropout(x, 0.5, True)[0], True, False),
    "torch": (lambda x: x + torch.rand(()), True, False),
    "torch, put back": (forked, True, False),
    "torch, of its own": (lambda x: x + torch.rand((), generator=OWN.manual_seed(0)), True, False),
    "NumPy": (lambda x: x + np.random.rand(), True, False),
    "Python": (lambda x: x + random.random(), True, False),
    "attention": (attention(0.0), False, False),
    "attention with dropout": (attention(0.5), False, True),
    "attention layer": (nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True), False, True),
    "recurrent layer": (nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True), False, True),
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
def test_what_is_asked_is_seen(name):
    forward, numbers, dropout = FORWARDS[name]
    model, x = Runs(forward), torch.randn(3, 4)
    with undisturbed(model) as asked:
        losses(model, x)
    assert (asked.numbers, asked.dropout) == (numbers, dropout)


@pytest.mark.parametrize("name", FORWARDS)
def test_records_are_compared_under_the_numbers_that_matter(name):
    forward, numbers, dropout = FORWARDS[name]
    model, x = Runs(forward), torch.randn(3, 4)
    trials = RecordTrials(model, losses, x)
    found = [one for one, _ in trials._random_numbers(x)]
    if not numbers and not dropout:
        assert found[1:] == []
    elif not numbers:  # nothing but dropout: one trial with it
        assert found[1:] == [FREE[0]]
    elif name != "torch, of its own":  # its numbers are the same each time
        assert {*found} >= {*HELD[:2], *FREE} or name == "dropout beneath the functions"


def test_what_is_not_watched_counts_as_asked_for():
    model = Runs(torch.tanh)
    for options in ({"dropout": True}, {"level": RARE}):
        with undisturbed(model, **options) as asked:
            losses(model, torch.randn(3, 4))
        assert asked.numbers
        assert asked.dropout


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
    assert torch.equal(engine.planned_losses(planned), losses(model, planned))
    assert engine.planned_losses(other) is None
    with pytest.raises(PlanMismatch):
        engine.by_plan(other)


@pytest.mark.parametrize(("share", "whose"), [(0.0, "none"), (0.5, "shared")])
def test_attention_without_dropout_takes_no_random_numbers(share, whose):
    x = torch.randn(4, 4)

    def run(count, weights):
        return attention(share)(x[:count]).sum(1) * weights, [weights]

    found = use_of_random_numbers(run, 2, 4)
    assert (found == "none") is (whose == "none")


def put_back():
    """A number of NumPy's that leaves no trace, as in a context that puts generators back."""
    state = np.random.get_state()
    number = np.random.rand()
    np.random.set_state(state)
    return number


def copied():
    generator = random.Random()
    generator.setstate(random.getstate())
    return generator.random()


class Centres(nn.Module):
    """Takes the mean of the batch off, by a coin."""

    def __init__(self, coin, share, dropout):
        super().__init__()
        self.coin, self.share = coin, share
        self.dropout, self.layer = nn.Dropout(dropout), nn.Linear(4, 4)

    def forward(self, x):
        x = self.dropout(x)
        return self.layer(x - x.mean(0) if self.coin() < self.share else x)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("share", [0.5, 0.1, 0.002])
@pytest.mark.parametrize("coin", [put_back, copied])
def test_numbers_that_nobody_sees_are_tried(coin, share, dropout):
    with pytest.raises(CrossRecordError):
        GradientEngine(Centres(coin, share, dropout), losses, torch.randn(5, 4))


class Flips(nn.Module):
    """The same sign for all records of a forward, by a coin."""

    def __init__(self, coin):
        super().__init__()
        self.coin, self.layer = coin, nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) * (1 if self.coin() < 0.5 else -1) - 1


@pytest.mark.parametrize(("coin", "follows"), [(put_back, True), (copied, True), (lambda: 0.1, False)])
def test_a_number_that_nobody_sees_is_known_as_such(coin, follows):
    x = torch.randn(3, 4)
    assert RecordTrials(Flips(coin), losses, x).follow_unseen_numbers(x) is follows
