"""The second way: what the comparison of rows sees where nothing is traced, and what it leaves alone."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import Net, backward, where

from equipoise.gradients import CoverageError, CrossRecordError, GradientEngine
from equipoise.gradients.compare import with_others
from equipoise.gradients.engine_inputs import num_records


def centred(x):
    return x - 0.5 * x.mean(0)


#: Kinds of mixtures; the comparison meets each of them.
WRONG = {
    "a mean": centred,
    "the record before": lambda x: x + 0.1 * x.roll(1, 0),
    "the record behind": lambda x: x + 0.1 * x.roll(-1, 0),
    "large values": where(lambda x: bool(x.abs().max() > 30), centred),
    "a blank record": where(lambda x: bool((x - x.mean(0)).abs().sum(1).min() == 0), centred),
    "not finite": where(lambda x: not bool(x.isfinite().all()), centred),
    "pairs": lambda x: x + 0.1 * x[(torch.arange(len(x)) ^ 1).clamp(max=len(x) - 1)],
    "order": lambda x: x * (1 + 0.1 * x.sum(1).argsort().argsort()[:, None]),
    "capacity": lambda x: x * ((x[:, :1] > 0).cumsum(0) < 3),
    "a coin of torch": where(lambda x: float(torch.rand(())) < 0.4, centred),
    "a coin of NumPy": where(lambda x: np.random.rand() < 0.4, centred),
    "a coin of Python": where(lambda x: random.random() < 0.4, centred),
    "a backward": backward(lambda g: g - g.mean(0)),
    "a backward, by a coin": backward(lambda g: g - g.mean(0) if random.random() < 0.4 else g),
    "a backward that guards": backward(lambda g: g if bool(g.isfinite().all()) else torch.zeros_like(g)),
    "a backward that clips": backward(lambda g: g / max(1.0, float(g.norm()) / 1e6)),
}
HONEST = {
    "each record": torch.tanh,
    "a branch per record": lambda x: torch.stack([row if bool(row.sum() > 0) else 2 * row for row in x]),
    "dropout": lambda x: F.dropout(x, 0.5),
    "noise": lambda x: x + 0.1 * torch.randn_like(x),
    "a coin for all": lambda x: x if random.random() < 0.5 else -x,
    "a backward per record": backward(lambda g: g / (1 + g.norm(dim=1, keepdim=True))),
    "numbers replaced": backward(lambda g: g.nan_to_num(0.0, 0.0, 0.0)),
}


def engine(layer, gate=False):
    def forward(self, x):
        x = self.first(x)
        assert not bool((x == 1234.5).any())  # a value is read: no trace can follow
        return self.head(layer(x))

    model = Net(forward, first=nn.Linear(4, 4), head=nn.Linear(4, 2))
    if gate:
        nn.init.zeros_(model.head.weight)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(7))
    return GradientEngine(model, lambda model, x: torch.sin(model(x)).sum(1), x)


@pytest.mark.few(16)
@pytest.mark.parametrize("gate", [False, True], ids=["", "behind zeros"])
@pytest.mark.parametrize("name", WRONG)
def test_mixtures_are_refused(name, gate):
    with pytest.raises((CoverageError, CrossRecordError)):
        engine(WRONG[name], gate)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", HONEST)
def test_the_honest_are_compared_and_say_why(name):
    found = engine(HONEST[name]).independence
    assert found.word == "compared"
    assert "test_compared_rows.py" in found.reason


@pytest.mark.parametrize("count", [2, 3, 7, 40])
def test_companies_keep_the_same_records_and_change_all_others(count):
    flag = torch.ones(count, 2, dtype=torch.bool)
    batch = {"x": torch.randn(count, 3), "y": torch.arange(count), "flag": flag}
    for changed, same in (form for forms in with_others(batch) for form in forms):
        assert num_records(changed) == count
        kept = torch.zeros(count, dtype=torch.bool).index_fill(0, torch.arange(count)[same], True)
        for name, before in batch.items():
            has_moved = (changed[name] != before).reshape(count, -1).any(1)
            assert not has_moved[kept].any()
            assert name == "flag" or has_moved[~kept].all()
