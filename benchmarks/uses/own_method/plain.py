"""A method of one's own without privacy: the sign of the estimates' moving average."""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import torch
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


def main(folder):
    model = network()
    loader = DataLoader(TensorDataset(*read(folder, "train")), BATCH, shuffle=True)
    average = {p: torch.zeros_like(p) for p in model.parameters()}
    for _ in range(EPOCHS):
        for x, y in loader:
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for p, old in average.items():
                average[p] = 0.9 * old + 0.1 * p.grad
                p.data -= RATE * average[p].sign()
    print(json.dumps({"accuracy": accuracy(model, *read(folder, "t10k"))}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
