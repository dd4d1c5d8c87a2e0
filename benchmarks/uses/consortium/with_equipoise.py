"""Four owners of a quarter of MNIST each train one model in rounds, with equipoise.

The folder of its files is the argument.
"""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.federated import Client, FedAvg, simulate

OWNERS, ROUNDS, LOCAL_STEPS, BATCH, RATE = 4, 12, 5, 300, 0.1


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


def record_losses(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def main(folder):
    x, y = read(folder, "train")
    clients = [
        Client(
            network(),
            record_losses,
            (x[p::OWNERS], y[p::OWNERS]),
            eq.Poisson(expected_batch_size=BATCH, population=15_000, steps=ROUNDS * LOCAL_STEPS),
            eq.DPSGD(clip_norm=1.0),
            local_steps=LOCAL_STEPS,
            budget=eq.Budget(epsilon=3.0, delta=1e-5),
            learning_rate=RATE,
        )
        for p in range(OWNERS)
    ]
    start = {name: p.detach() for name, p in network().named_parameters()}
    history = simulate(FedAvg(), clients, start, ROUNDS)
    model = network()
    model.load_state_dict(history.params)
    epsilon = max(client.epsilon() for client in clients)
    print(json.dumps({"accuracy": accuracy(model, *read(folder, "t10k")), "epsilon": epsilon}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
