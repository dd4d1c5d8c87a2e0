"""Trainings that replay a trace end as those that do not, whatever the loop changes meanwhile."""

import numpy as np
import pytest
import torch
from small_problems import (
    loss,
    network,
    parameters,
    resumed,
    training,
    updates_of_users,
    weighted_loss,
    with_overflow,
)
from torch import nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.methods import JointWhitening


class Switched(nn.Module):
    """Does something else where the loop says so."""

    def __init__(self):
        super().__init__()
        self.net, self.scale = network(), 1.0

    def forward(self, x):
        return self.scale * self.net(x).tanh()


class Weighted:
    """A loss with a tensor that is no buffer."""

    def __init__(self):
        self.weights, self.numbers = torch.ones(3), np.ones(3)

    def __call__(self, model, batch):
        weights = (self.weights * torch.tensor(self.numbers.tolist()))[batch["label"]]
        return F.cross_entropy(model(batch["input"]), batch["label"], reduction="none") * weights


def end(monkeypatch, replays, change=lambda *_: None, **options):
    monkeypatch.setenv("EQUIPOISE_EAGER", str(int(not replays)))
    torch.manual_seed(0)
    model, of_loss = Switched(), Weighted()
    run = training(model, **({"loss": of_loss} | options), steps=4)
    for number, _ in enumerate(run):
        if number == 1:
            change(model, of_loss)
    return run, parameters(model)


CHANGES = {
    "scale": lambda model, of_loss: setattr(model, "scale", 3.0),
    "module": lambda model, of_loss: model.net.__setitem__(1, nn.Sigmoid()),
    "hook": lambda model, of_loss: model.net[0].register_forward_hook(lambda module, given, out: 2 * out),
    "written weights": lambda model, of_loss: of_loss.weights[:1].zero_(),
    "written array": lambda model, of_loss: of_loss.numbers.__setitem__(0, 0.0),
    "dropout": lambda model, of_loss: model.net.append(nn.Dropout(0.5)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_the_loop_changes_is_traced_anew(change, monkeypatch):
    (run, found), (_, expected) = (end(monkeypatch, replays, change) for replays in (True, False))
    assert torch.equal(found, expected)
    assert run.engine.traces == 2
    assert not torch.equal(found, end(monkeypatch, False)[1])


NOISE = {"noise_multiplier": 1.0}
TRAININGS = {
    "anchored": {"method": eq.DPC4(anchor_noise_multiplier=1.0, **NOISE)},
    "joint whitening": {"method": JointWhitening(**NOISE)},
    "by layer, one not finite": {
        "method": eq.DPSGD(clip_norm=0.5, per_layer=True, **NOISE), "data": with_overflow(),
        "loss": weighted_loss,
    },
    "users": updates_of_users(),
}  # fmt: skip


@pytest.mark.parametrize("options", TRAININGS.values(), ids=TRAININGS)
def test_a_training_ends_as_without_replay(options, monkeypatch):
    (run, found), (_, expected) = (end(monkeypatch, replays, **options) for replays in (True, False))
    assert run.engine.traces == 1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


#: Its clipping norm is that of no row, so that the loss's scale shows.
UNCLIPPED = eq.DPSGD(clip_norm=100.0, noise_multiplier=1e-3)


def warmed(model, batch, step):
    return loss(model, batch) * torch.clamp(step / 3, max=1.0)


def test_a_loss_follows_the_number_of_the_step(monkeypatch, tmp_path):
    def by_hand(model, batch):
        return loss(model, batch) * min(1.0, hand[0] / 3)

    def begun(of_loss, **options):
        return training(network(), loss=of_loss, steps=5, method=UNCLIPPED, **options)

    hand, found = [1], {}
    for replays in (False, True):
        monkeypatch.setenv("EQUIPOISE_EAGER", str(int(not replays)))
        run = begun(warmed)
        run.run(progress=False)
        assert run.engine.traces == replays
        found[replays] = parameters(run.model)
    assert torch.equal(found[False], found[True])
    run = begun(by_hand)
    for hand[0] in range(1, 6):
        run.take_step()
    assert torch.equal(parameters(run.model), found[True])
    run = begun(warmed, folder=tmp_path / "cut")
    for _ in range(2):
        run.take_step()
    run.close()
    again = resumed(tmp_path / "cut", loss=warmed)
    again.run(progress=False)
    assert torch.equal(parameters(again.model), found[True])


def test_a_loss_that_branches_on_the_step_is_refused():
    def branching(model, batch, step):
        out = model(batch["input"])
        if step > 2:
            out = out - out.mean(0)
        return F.cross_entropy(out, batch["label"], reduction="none")

    with pytest.raises(ValueError, match="step"):
        training(network(), loss=branching)
