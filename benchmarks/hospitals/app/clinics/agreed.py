"""What the hospitals agree on, and the records that each of them has: a part of PneumoniaMNIST."""

import os
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import equipoise as eq
from benchmarks.data import pneumoniamnist
from equipoise.federated import Client

HOSPITALS, IMAGES = ("ulm", "bonn", "kiel", "hof", "trier"), (1100, 1000, 950, 850, 808)
VISITS, K, ROUNDS, EPSILON, DELTA = 3, 5, 12, 8.0, 1e-4
LATE, LEAVES, KILLED = 2, 4, 1  # from round 5; after round 8; in round 6


@cache
def images(part):
    """Inputs [n, 1, 28, 28] and labels, in a public order."""
    held = getattr(pneumoniamnist(os.environ["CLINICS_DATA"]), part).fields
    order = torch.randperm(len(held["label"]), generator=torch.Generator().manual_seed(0))
    return held["input"].reshape(-1, 1, 28, 28)[order], held["label"][order]


def records(number):
    """A hospital's images under its own instrument, and whose they are: one to three of a patient."""
    mine = slice(sum(IMAGES[:number]), sum(IMAGES[: number + 1]))
    x, y = (values[mine] for values in images("train"))
    visits = torch.randint(1, VISITS + 1, (len(x),), generator=torch.Generator().manual_seed(number))
    owner = torch.repeat_interleave(torch.arange(len(x)), visits)[: len(x)]
    return {"input": instrument(x, number), "label": y}, owner


def instrument(x, number):
    return (1 + number / 4) * x + 0.25 * (number - 2)


class Network(nn.Module):
    """Of 1,666 parameters that are shared; the norms are each hospital's own."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.norm = nn.GroupNorm(1, 1)
            self.first, self.first_norm = nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.GroupNorm(4, 8)
            self.second, self.second_norm = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16)
            self.head = nn.Linear(16 * 9, 2)

    def forward(self, x):
        x = torch.tanh(self.first_norm(self.first(self.norm(x))))
        x = torch.tanh(self.second_norm(self.second(x)))
        return self.head(F.avg_pool2d(x, 2).flatten(1))


def loss(model, batch):
    """Of each image, [B]."""
    return F.cross_entropy(model(batch["input"]), batch["label"], reduction="none")


def shared(network):
    return {name: p.detach() for name, p in network.named_parameters() if "norm" not in name}


def settings(data, owner):
    """A fifth of the patients a step."""
    patients = int(owner.max()) + 1
    return {
        "data": data,
        "sampling": eq.Poisson(patients / 5, patients, ROUNDS * K),
        "method": eq.DPSGD(clip_norm=0.5),
        "budget": eq.Budget(EPSILON, DELTA),
        "unit": eq.Users(owner, records_per_user=VISITS, rows="mean"),
    }


def opened(number, run=None, rate=1.0):
    """The client of a hospital."""
    return Client(
        Network(), loss, local_steps=K, learning_rate=rate, local=["*norm*"],
        run=None if run is None else Path(run) / HOSPITALS[number], **settings(*records(number)),
    )  # fmt: skip


def members(number):
    return [p for p in range(5) if not (p == LATE and number < 5) and not (p == LEAVES and number > 8)]


def accuracy(networks):
    """On test images, each hospital's under its instrument, in percent; the mean of the five."""
    x, y = images("test")
    with torch.no_grad():
        found = [(net(instrument(x, p)).argmax(1) == y).float().mean() for p, net in enumerate(networks)]
    return 100 * float(sum(found)) / len(found)
