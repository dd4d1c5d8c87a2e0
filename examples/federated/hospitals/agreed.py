"""What owners and server agree on beforehand: model, loss, sizes. All of it is public."""

import torch
from torch import nn
from torch.nn import functional as F

import equipoise as eq
from equipoise import data

RECORDS = 700  # public size of an owner's data set
CLIP_NORM = 0.1
BUDGET = eq.Budget(epsilon=8.0, delta=1e-4)


def make_model():
    """The same network everywhere, from a public seed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def loss(model, batch):
    """One number per record, [B]."""
    return F.cross_entropy(model(batch["input"]), batch["label"], reduction="none")


def records(owner):
    """An owner's records: here a share of the digits that come with scikit-learn."""
    share = torch.arange(RECORDS) + owner * RECORDS
    return data.load("digits").train.subset(share)


def accuracy(params):
    """On public test records."""
    model, test = make_model(), data.load("digits").test
    model.load_state_dict(dict(params))
    with torch.no_grad():
        right = model(test.fields["input"]).argmax(1) == test.fields["label"]
    return {"accuracy": float(right.double().mean())}
