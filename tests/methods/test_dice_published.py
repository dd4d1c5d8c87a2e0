"""DiceSGD as published and its references: limits, what the statement says, what stays private.

The algorithms themselves: `test_boxes_of_dice_and_dc.py`.
"""

from __future__ import annotations

import math

import pytest
import torch
from scripted import run
from table import training as train

import equipoise as eq
from equipoise.privacy import Private, gaussian_epsilon
from equipoise.privacy.private import PrivateError, unwrap
from equipoise.published import DiceSGD as PublishedDiceSGD
from equipoise.published import dice_sgd as formulas

TWO = torch.tensor([[3.0, 4.0], [0.0, 0.5]], dtype=torch.float64)
NOWHERE = torch.zeros(2).double()


def published(clip_norm=1.0, **options):
    return PublishedDiceSGD(clip_norm=clip_norm, noise_multiplier=1.0, **options)


def memories(out):
    return [unwrap(state["memory"]["x"]) for state in out.states]


def test_the_reference_without_noise_by_hand():
    out = run(eq.methods.EFSGD(), lambda x: TWO, NOWHERE, steps=3, rate=0.1)
    for estimate, expected in zip(out.estimates, [(0.3, 0.65), (0.9, 1.45), (0.9, 1.45)], strict=True):
        assert estimate == pytest.approx(torch.tensor(expected))
    for memory, expected in zip(memories(out), [(1.2, 1.6), (1.8, 2.4), (2.4, 3.2)], strict=True):
        assert memory == pytest.approx(torch.tensor(expected))
    assert out.xs[2] == pytest.approx(torch.tensor([-0.12, -0.21]))


def test_the_statement_has_the_worst_case_the_claim_and_the_hole():
    training = train(PublishedDiceSGD(clip_norm=0.1))
    assert len(list(training)) == 6
    statement = training.statement()
    assert statement.recipe == "as_published"
    assert statement.guarantee == "worst_case"
    assert statement.epsilon_claimed == pytest.approx(8.0)
    std = formulas.published_noise_std(8.0, 1e-3, clip_norm=0.1, radius=0.1, population=60, steps=6)
    multiplier = std / (0.1 / 20 + 2 * 0.1)
    assert statement.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(6) / multiplier, 1e-3), rel=1e-6)
    assert statement.epsilon > 100
    assert "memory" in statement.holes[0]["reason"]


def test_the_raw_memory_is_private_and_its_size_is_not_told():
    training = train(PublishedDiceSGD(clip_norm=0.1))
    training.take_step()
    memory = training.method_state["memory"]
    assert all(isinstance(value, Private) for value in memory.values())
    with pytest.raises(PrivateError):
        float(next(iter(memory.values())).norm())
    assert training.method.metrics(training.method_state) == {}
    ours = train(eq.DiceSGD(clip_norm=0.1))
    ours.take_step()
    norm = torch.cat([v.flatten() for v in ours.method_state["memory"].values()]).norm()
    assert ours.method.metrics(ours.method_state)["memory_norm"] == pytest.approx(float(norm))
