"""Layers that get as many positions of a record as values say, and layers whose gradient is zero at first."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.gradients.capture.recorder import PlanMismatch

SIZE = 8


class Routed(nn.Module):
    """Each position goes to one of two experts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.router, self.head = nn.Linear(4, 2), nn.Linear(5, 3)
        self.experts = nn.ModuleList([nn.Linear(4, 5), nn.Linear(4, 5)])

    def forward(self, x):
        flat = x.flatten(0, 1)
        share = self.router(flat).softmax(1)
        chosen, out = share.argmax(1), flat.new_zeros(len(flat), 5)
        for number, expert in enumerate(self.experts):
            here = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, here, expert(flat[here]) * share[here, number : number + 1])
        return self.head(out.unflatten(0, x.shape[:2]).mean(1))


class Frames(nn.Module):
    """The positions come first, and the head starts at zero."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        hidden = torch.tanh(self.body(x.transpose(0, 1).flatten(0, 1)))
        return self.head(hidden.unflatten(0, (x.shape[1], len(x))).mean(0))


def loss(model, batch):
    return F.cross_entropy(model(batch["input"]), batch["label"], reduction="none")


def trained(model, seed=3):
    numbers = torch.Generator().manual_seed(seed)
    data = {
        "input": torch.randn(64, 3, 4, generator=numbers),
        "label": torch.randint(3, (64,), generator=numbers),
    }
    run = eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=loss,
        data=eq.Data(data, microbatch_size=SIZE),
        sampling=eq.Poisson(SIZE, 64, 5),
        method=eq.DPSGD(clip_norm=0.5, noise_multiplier=1.0),
    )
    return run, data


def test_rows_of_routed_positions_are_those_of_their_records():
    model = Routed()
    run, data = trained(model)
    numbers, planned = torch.Generator().manual_seed(5), 0
    for _ in range(8):
        some = torch.randint(64, (SIZE,), generator=numbers)
        batch = {name: values[some] for name, values in data.items()}
        try:
            rows = run.engine.by_plan(batch)
        except PlanMismatch:
            continue
        planned += 1
        for k in range(SIZE):
            alone = {name: values[k : k + 1] for name, values in batch.items()}
            for name, parameter in model.named_parameters():
                (expected,) = torch.autograd.grad(loss(model, alone).sum(), parameter)
                found = rows.weighted_sums(torch.eye(SIZE)[k])[name]
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert planned


def test_a_layer_whose_gradient_is_zero_at_first_is_no_mixture():
    run, _ = trained(Frames())
    assert run.independence.word == "proved"
