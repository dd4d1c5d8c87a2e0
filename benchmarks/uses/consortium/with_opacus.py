"""Four owners of a quarter of MNIST each train one model in rounds, by hand with Opacus.

The folder of its files is the argument.
"""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

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


class Owner:
    def __init__(self, x, y):
        model = network()
        self.engine = PrivacyEngine(accountant="prv")
        self.model, self.optimizer, self.loader = self.engine.make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
            data_loader=DataLoader(TensorDataset(x, y), BATCH, shuffle=True),
            target_epsilon=3.0,
            target_delta=1e-5,
            epochs=ROUNDS * LOCAL_STEPS * BATCH / len(x),
            max_grad_norm=1.0,
        )
        self.batches = iter(self.loader)

    def train(self, params):
        self.model._module.load_state_dict(params)
        for _ in range(LOCAL_STEPS):
            batch = next(self.batches, None)
            if batch is None:
                self.batches = iter(self.loader)
                batch = next(self.batches)
            x, y = batch
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
        return {name: value.clone() for name, value in self.model._module.state_dict().items()}


def main(folder):
    x, y = read(folder, "train")
    owners = [Owner(x[p::OWNERS], y[p::OWNERS]) for p in range(OWNERS)]
    params = network().state_dict()
    for _ in range(ROUNDS):
        answers = [owner.train(params) for owner in owners]
        params = {name: sum(a[name] for a in answers) / OWNERS for name in params}
    model = network()
    model.load_state_dict(params)
    epsilon = max(owner.engine.get_epsilon(1e-5) for owner in owners)
    print(json.dumps({"accuracy": accuracy(model, *read(folder, "t10k")), "epsilon": epsilon}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
