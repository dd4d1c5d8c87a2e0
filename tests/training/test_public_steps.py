"""The owner moves the parameters between steps, or after each, by public or released numbers alone."""

from __future__ import annotations

import pytest
import torch
from small_problems import network, parameters, resumed, training
from torch import nn

from equipoise.statements.verify import verify_run

BOUND = 1 / 16


def clip_weights(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-BOUND, BOUND)


def largest(model):
    return float(parameters(model).abs().max())


def named(run, name):
    return [text for text in run.statement().assumptions if name in text]


def test_weights_are_clipped_between_steps_and_the_statement_says_so(tmp_path):
    run = training(folder=tmp_path / "run", steps=3, ema_decay=0.5)

    def clip():
        clip_weights(run.model)
        return largest(run.model)

    for _ in run:
        spent = run.ledger.releases_left
        assert run.public_step(clip) <= BOUND < 10 * BOUND
        assert run.ledger.releases_left == spent
    (words,) = named(run, "clip")
    assert "moved the parameters 3 times" in words
    run.finish()
    assert all(finding.ok is not False for finding in verify_run(tmp_path / "run").findings)
    with pytest.raises(RuntimeError, match="has ended"):
        run.public_step(clip)


def test_a_resumed_run_counts_on(tmp_path):
    def back(run):
        def clip():
            clip_weights(run.model)

        run.public_step(clip)

    run = training(folder=tmp_path / "run", steps=4)
    run.take_step()
    back(run)
    run.save_checkpoint()
    run.close()
    with pytest.raises(RuntimeError, match="closed"):
        back(run)
    again = resumed(tmp_path / "run")
    assert largest(again.model) <= BOUND
    back(again)
    (words,) = named(again, "clip")
    assert " 2 times" in words
    again.run(progress=False)
    assert named(again, "clip") == [words]


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.frozen = network(), nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return self.frozen(self.inner(x)) * self.scale


def test_buffers_and_frozen_parameters_may_change_in_a_public_step_only():
    def change():
        model.scale.mul_(2)
        nn.init.eye_(model.frozen.weight)

    model = Shifted()
    run = training(model)
    run.public_step(change)
    run.take_step()
    run.public_step(change)
    run.evaluate(lambda model: 0.0)
    assert model.scale.tolist() == [4.0] * 3
    clip_weights(model)
    with pytest.raises(RuntimeError, match="public_step"):
        run.public_step(change)  # something else had moved the parameters before
    assert model.scale.tolist() == [4.0] * 3


def test_what_a_failed_public_step_changed_is_refused():
    def half():
        clip_weights(run.model)
        raise ValueError("half way")

    run = training()
    run.take_step()
    with pytest.raises(ValueError, match="half way"):
        run.public_step(half)
    assert not named(run, "half")
    with pytest.raises(RuntimeError, match="register_step_post_hook"):
        run.take_step()
