"""What the optimiser cannot go on with is refused when it is loaded."""

from __future__ import annotations

import copy

import pytest
import torch
from small_problems import network, training

import equipoise as eq
from equipoise.training.folder.checkpoint import collect_state, restore_state


def pieces():
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", True),
        ("momentum", "0.9"),
        ("lr", float("nan")),
        ("nesterov", 1),
    ],
)
def test_a_setting_of_another_kind_is_refused(name, value):
    state = copy.deepcopy(collect_state(*pieces(), None))
    state["optimizer"]["param_groups"][0].update(lr=1, weight_decay=0.5)  # whole and broken numbers are alike
    restore_state(state, *pieces(), None)
    state["optimizer"]["param_groups"][0][name] = value
    with pytest.raises(ValueError, match=f"the optimizer's {name} is"):
        restore_state(state, *pieces(), None)


def lower_by_plateau(optimizer, losses):
    torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0).step(losses.mean())
    optimizer.param_groups[0]["weight_decay"] = float(losses.detach().max())


def scale_momentum(optimizer, losses):
    for state in optimizer.state.values():
        state["momentum_buffer"].mul_(losses.detach().mean())


@pytest.mark.parametrize("change", [lower_by_plateau, scale_momentum])
def test_a_loss_that_sets_a_rate_by_its_records_is_refused(change):
    model, optimizer = pieces()
    if change is scale_momentum:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def loss(model, x):
        losses = model(x).square().mean(1)
        change(optimizer, losses)
        return losses

    with pytest.raises(ValueError, match="of optimizer or scheduler"):
        training(
            model,
            optimizer=lambda *_, lr: optimizer,
            loss=loss,
            data=torch.randn(20, 2),
            sampling=eq.Poisson(8, 20, 2),
            starts_from="public",
        )
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["weight_decay"] == 0


class Counting(torch.optim.SGD):
    """Keeps a number of all parameters beside the state of each, as MADGRAD does."""

    def step(self, closure=None):
        self.state.setdefault("k", torch.tensor([0])).add_(1)
        return super().step(closure)


class Wrapper(torch.optim.Optimizer):
    """Hands on to an optimizer and has no hooks of its own, as accelerate's has none."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self, closure=None):
        return self.optimizer.step(closure)


class Halving:
    """A schedule without a state."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.param_groups[0]["lr"] /= 2


@pytest.mark.parametrize("kind", ["state of all", "no hooks", "schedule without a state"])
def test_optimizers_and_schedules_of_unusual_kinds_train(kind):
    model = network()
    model.register_buffer("fixed", torch.ones(2))
    optimizer = (Counting if kind == "state of all" else torch.optim.SGD)(model.parameters(), lr=0.1)
    wrapped = Wrapper(optimizer) if kind == "no hooks" else optimizer
    schedule = Halving(optimizer) if kind == "schedule without a state" else None
    run = training(model, optimizer=lambda *_, **__: wrapped, scheduler=schedule, steps=3)
    assert run.run(progress=False).steps == 3
