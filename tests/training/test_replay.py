"""Trainings that replay a trace end as those that do not, whatever the loop changes meanwhile."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from small_problems import (
    RECORDS,
    loss,
    network,
    parameters,
    records,
    training,
    updates_of_users,
    with_overflow,
)
from torch import nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.data import PadTo
from equipoise.gradients import CrossRecordError
from equipoise.methods import AutoS, JointWhitening
from equipoise.statements.assumptions import TRACED


def weighted(model, batch):
    return loss(model, batch) * batch["weight"]


class Switched(nn.Module):
    """Does something else where the loop says so."""

    def __init__(self):
        super().__init__()
        self.net, self.scale, self.parts = network(), 1.0, [nn.Tanh()]

    def forward(self, x):
        return self.scale * self.parts[0](self.net(x))


class Weighted:
    """A loss with a tensor that is no buffer."""

    def __init__(self):
        self.weights, self.numbers, self.power = torch.ones(3), np.ones(3), torch.ones(())

    def __call__(self, model, batch):
        weights = (self.weights * torch.tensor(self.numbers.tolist()) * self.power.tolist())[batch["label"]]
        return F.cross_entropy(model(batch["input"]), batch["label"], reduction="none") * weights


def change_scale(model, of_loss):
    model.scale = 3.0


def swap_a_module(model, of_loss):
    model.net[1] = nn.Sigmoid()


def swap_in_a_list(model, of_loss):
    model.parts[0] = nn.Sigmoid()


def add_a_hook(model, of_loss):
    model.net[0].register_forward_hook(lambda module, given, out: 2 * out)


def other_weights(model, of_loss):
    of_loss.weights = torch.tensor([0.5, 1.0, 0.1])


def write_to_weights(model, of_loss):
    of_loss.weights[0] = 0.0


def write_to_an_array(model, of_loss):
    of_loss.numbers[0] = 0.0


def write_to_a_number(model, of_loss):
    of_loss.power.fill_(0.1)


def add_dropout(model, of_loss):
    model.net.append(nn.Dropout(0.5))


def end(monkeypatch, replays, change=lambda *_: None, **options):
    monkeypatch.setenv("EQUIPOISE_EAGER", str(int(not replays)))
    torch.manual_seed(0)
    model, of_loss = Switched(), Weighted()
    run = training(model, **({"loss": of_loss} | options), steps=4)
    for number, _ in enumerate(run):
        if number == 1:
            change(model, of_loss)
    return run, parameters(model)


@pytest.mark.parametrize(
    "change",
    [
        change_scale,
        swap_a_module,
        swap_in_a_list,
        add_a_hook,
        other_weights,
        write_to_weights,
        write_to_an_array,
        write_to_a_number,
        add_dropout,
    ],
)
def test_what_the_loop_changes_is_traced_anew(change, monkeypatch):
    (run, found), (_, expected) = (end(monkeypatch, replays, change) for replays in (True, False))
    assert torch.equal(found, expected)
    assert run.engine.traces == 2
    assert not torch.equal(found, end(monkeypatch, False)[1])


#: Its clipping norm is that of no row, so that the loss's scale shows.
UNCLIPPED = eq.DPSGD(clip_norm=100.0, noise_multiplier=1e-3)

METHODS = {
    "DP-SGD": eq.DPSGD(clip_norm=0.5, noise_multiplier=1.0),
    "automatic clipping": eq.DPSGD(clip_norm=0.5, noise_multiplier=1.0, clip_rule=AutoS()),
    "by layer": eq.DPSGD(clip_norm=0.5, noise_multiplier=1.0, per_layer=True),
    "anchored": eq.DPC4(noise_multiplier=1.0, anchor_noise_multiplier=1.0),
    "two thresholds": eq.DCDPSGD(noise_multiplier=1.0),
    "joint whitening": JointWhitening(noise_multiplier=1.0),
}
DATA = {
    "all finite": {},
    "one not finite": {"data": with_overflow(), "loss": weighted},
    "users": updates_of_users(),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("options", DATA.values(), ids=DATA)
def test_a_training_ends_as_without_replay(method, options, monkeypatch):
    (run, found), (_, expected) = (
        end(monkeypatch, replays, method=method, **options) for replays in (True, False)
    )
    assert run.engine.traces == 1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def warmed(model, batch, step):
    return loss(model, batch) * torch.clamp(step / 3, max=1.0)


def test_a_loss_follows_the_number_of_the_step(monkeypatch):
    def by_hand(model, batch):
        return loss(model, batch) * min(1.0, hand[0] / 3)

    hand, found = [1], {}
    for replays in (False, True):
        monkeypatch.setenv("EQUIPOISE_EAGER", str(int(not replays)))
        run = training(network(), loss=warmed, steps=5, method=UNCLIPPED)
        run.run(progress=False)
        assert run.engine.traces == replays
        found[replays] = parameters(run.model)
    assert torch.equal(found[False], found[True])
    run = training(network(), loss=by_hand, steps=5, method=UNCLIPPED)
    for hand[0] in range(1, 6):
        run.take_step()
    assert torch.equal(parameters(run.model), found[True])


def test_a_loss_that_branches_on_the_step_is_refused():
    def branching(model, batch, step):
        out = model(batch["input"])
        if step > 2:
            out = out - out.mean(0)
        return F.cross_entropy(out, batch["label"], reduction="none")

    with pytest.raises(ValueError, match="step"):
        training(network(), loss=branching)


def test_a_resumed_run_goes_on_with_the_step(tmp_path):
    whole = training(network(), loss=warmed, steps=6, folder=tmp_path / "whole")
    whole.run(progress=False)
    run = training(network(), loss=warmed, steps=6, folder=tmp_path / "cut")
    for _ in range(2):
        run.take_step()
    run.close()
    model = network()
    again = eq.PrivateTraining.resume(
        tmp_path / "cut", model, torch.optim.SGD(model.parameters(), lr=0.3), loss=warmed, data=records()
    )
    again.run(progress=False)
    assert torch.equal(parameters(again.model), parameters(whole.model))


class Texts(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(1, 21, (RECORDS,), generator=generator).tolist()
        self.texts = [torch.randint(1, 9, (length,), generator=generator) for length in lengths]

    def __len__(self):
        return RECORDS

    def __getitem__(self, i):
        return self.texts[i]


def joined(items):
    return {"ids": torch.nn.utils.rnn.pad_sequence(items, batch_first=True)}


class MeanOfText(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)

    def forward(self, ids):
        there = (ids > 0)[..., None]
        return self.head((self.table(ids) * there).sum(1) / there.sum(1))


def first_word(model, batch):
    return F.cross_entropy(model(batch["ids"]), batch["ids"][:, 0], reduction="none")


def test_batches_of_a_few_lengths_need_as_many_traces(monkeypatch):
    found = []
    for collate, most in ((PadTo(joined, (8, 16, 24), {"ids": 0}), 3), (joined, 99)):
        torch.manual_seed(0)
        run = training(MeanOfText(), data=Texts(), collate=collate, loss=first_word, steps=12, batch=3)
        run.run(progress=False)
        assert run.engine.traces <= most
        found.append(parameters(run.model))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(("shape", "axis"), [((2, 3), 1), ((2, 3, 4), 1), ((2, 4, 3), 2), ((2, 4, 3), -1)])
def test_padding_is_behind_the_records(shape, axis):
    batch = PadTo(lambda items: {"x": torch.ones(shape), "y": 1}, (2, 5), {"x": 7}, axis)([])
    assert batch["y"] == 1
    assert batch["x"].narrow(axis, 0, 3).eq(1).all()
    assert batch["x"].narrow(axis, 3, 2).eq(7).all()
    assert batch["x"].numel() == math.prod(shape) // 3 * 5


def test_a_longer_batch_than_the_last_length_is_an_error():
    with pytest.raises(ValueError, match="lengths"):
        PadTo(lambda items: {"x": torch.ones(1, 9)}, (4, 8), {"x": 0})([])
    with pytest.raises(ValueError, match="lengths"):
        PadTo(joined, (8, 4), {"ids": 0})
    with pytest.raises(ValueError, match="values"):
        PadTo(joined, (4, 8), {})


class WarmedModule(nn.Module):
    def forward(self, model, batch, step):
        return warmed(model, batch, step)


def test_a_loss_with_a_step_is_looked_into():
    """What it holds is put back and named, and a switch of it is tried again, as of a loss without."""
    seen, switch = [], {"centres": False}

    def watching(model, batch, step):
        out = model(batch["input"])
        seen.append(out.detach())
        out = out - out.mean(0) if switch["centres"] else out
        return F.cross_entropy(out, batch["label"], reduction="none") * torch.clamp(step / 3, max=1.0)

    with pytest.warns(UserWarning, match="seen"):
        run = training(network(), loss=watching)
    run.take_step()
    assert seen == []
    switch["centres"] = True
    with pytest.raises(CrossRecordError, match="switch"):
        run.take_step()


def test_a_module_may_take_the_step():
    found = []
    for of_step in (warmed, WarmedModule()):
        run = training(network(), loss=of_step, steps=3, method=UNCLIPPED)
        run.run(progress=False)
        found.append(parameters(run.model))
    assert torch.equal(*found)


def test_a_statement_counts_the_traces(monkeypatch, tmp_path):
    monkeypatch.setenv("EQUIPOISE_REPLAY", "1")
    model, of_loss = Switched(), Weighted()
    run = training(model, loss=of_loss, steps=3, folder=tmp_path / "run")
    run.take_step()
    of_loss.power.fill_(0.1)
    run.run(progress=False)
    (said,) = (text for text in run.statement().assumptions if text.startswith(TRACED))
    assert said == f"{TRACED}{run.engine.traces}"
    assert eq.verify_run(tmp_path / "run").consistent
