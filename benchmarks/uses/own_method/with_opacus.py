"""A method of one's own with Opacus: the sign of the estimates' moving average."""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

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


class SignOfAverage(DPOptimizer):
    """A step of constant length against the sign of the estimates' moving average."""

    decay = 0.9

    def pre_step(self, closure=None):
        ready = super().pre_step(closure)
        if ready:
            for p in self.params:
                average = self.state[p].get("average", torch.zeros_like(p))
                average = self.decay * average + (1 - self.decay) * p.grad
                self.state[p]["average"] = average
                p.grad = average.sign()
        return ready


def main(folder):
    model = network()
    loader = DataLoader(TensorDataset(*read(folder, "train")), BATCH, shuffle=True)
    engine = PrivacyEngine(accountant="prv")
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        data_loader=loader,
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=EPOCHS,
        max_grad_norm=1.0,
    )
    optimizer = SignOfAverage(
        optimizer.original_optimizer,
        noise_multiplier=optimizer.noise_multiplier,
        max_grad_norm=1.0,
        expected_batch_size=optimizer.expected_batch_size,
    )
    optimizer.attach_step_hook(engine.accountant.get_optimizer_hook_fn(sample_rate=1 / len(loader)))
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    found = accuracy(model, *read(folder, "t10k"))
    print(json.dumps({"accuracy": found, "epsilon": engine.get_epsilon(1e-5)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
