"""The start of a training gets no longer unnoticed: how often it runs the model."""

from queue import SimpleQueue

import pytest
import torch
from torch import nn

import equipoise as eq

#: Forwards and records at most; how many sizes of a forward are tried follows the machine.
#: Of a loss that holds something unseen, so that it is compared: with random numbers under 64 seeds.
MOST = {"no random numbers": (112, 1200), "dropout": (480, 4700), "random numbers": (480, 4700)}


class Shifted(nn.Module):
    def forward(self, x):
        return x + torch.rand(len(x), 1)


@pytest.mark.parametrize("kind", MOST)
def test_a_start_runs_the_model_no_more_often_than_it_did(kind):
    inside = {"no random numbers": nn.ReLU(), "dropout": nn.Dropout(0.1), "random numbers": Shifted()}[kind]
    model = nn.Sequential(nn.Linear(4, 8), inside, nn.Linear(8, 2))
    runs: SimpleQueue[int] = SimpleQueue()  # a list would be put back

    def loss(model, batch):
        runs.put(len(batch["y"]))
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    torch.manual_seed(0)
    eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=loss,
        data=eq.Data({"x": torch.randn(64, 4), "y": torch.randint(0, 2, (64,))}, microbatch_size=14),
        sampling=eq.FullBatch(population=64, steps=10),
        method=eq.DPSGD(clip_norm=1.0, noise_multiplier=1.0),
    )
    found = [runs.get() for _ in range(runs.qsize())]
    forwards, records = MOST[kind]
    assert len(found) <= forwards, (len(found), sum(found))
    assert sum(found) <= records, sum(found)
