"""A method of one's own with equipoise: the sign of the estimates' moving average."""

import gzip
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import equipoise as eq

EPOCHS, BATCH, RATE = 2, 256, 0.001


def read(folder, part):
    pixels = np.frombuffer(
        gzip.decompress((folder / f"{part}-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16
    )
    labels = np.frombuffer(
        gzip.decompress((folder / f"{part}-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8
    )
    return torch.tensor(pixels).reshape(-1, 784) / 127.5 - 1, torch.tensor(labels).long()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, 10))


def accuracy(model, x, y):
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


@dataclass(frozen=True, kw_only=True)
class SignOfAverage(eq.DPSGD):
    """A step of constant length against the sign of the estimates' moving average."""

    name = "sign-of-average"
    decay: float = 0.9

    def init(self, context):
        return {
            **super().init(context),
            "average": {k: torch.zeros_like(p) for k, p in context.params.items()},
        }

    def step(self, context, state):
        estimate, kept = super().step(context, state)
        average = {
            k: self.decay * old + (1 - self.decay) * estimate[k] for k, old in state["average"].items()
        }
        return {k: value.sign() for k, value in average.items()}, {**kept, "average": average}


def record_losses(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def main(folder):
    model = network()
    training = eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=RATE),
        loss=record_losses,
        data=read(folder, "train"),
        sampling=eq.Poisson(expected_batch_size=BATCH, population=60_000, steps=EPOCHS * 60_000 // BATCH),
        method=SignOfAverage(clip_norm=1.0),
        budget=eq.Budget(epsilon=3.0, delta=1e-5),
    )
    training.run()
    found = accuracy(model, *read(folder, "t10k"))
    print(json.dumps({"accuracy": found, "epsilon": training.statement().epsilon}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
