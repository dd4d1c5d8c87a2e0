"""Train a small network on Fashion-MNIST. The folder of its four files is the argument."""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

EPOCHS, BATCH, RATE = 2, 256, 0.1


def read(path, skipped, shape):
    data = np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=skipped)
    return torch.from_numpy(data.reshape(shape).copy())


class Images(Dataset):
    """Images, moved by up to two pixels and mirrored where they are to be trained on."""

    def __init__(self, folder, part, augment):
        self.images = read(folder / f"{part}-images-idx3-ubyte.gz", 16, (-1, 1, 28, 28))
        self.labels = read(folder / f"{part}-labels-idx1-ubyte.gz", 8, (-1,)).long()
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i] / 127.5 - 1
        if self.augment:
            down, right = torch.randint(5, (2,)).tolist()
            image = F.pad(image, (2, 2, 2, 2), value=-1.0)[:, down : down + 28, right : right + 28]
            if torch.rand(()) < 0.5:
                image = image.flip(2)
        return image, self.labels[i]


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


def accuracy(model, data):
    model.eval()
    with torch.no_grad():
        hits = sum((model(x).argmax(1) == y).sum().item() for x, y in DataLoader(data, 1000))
    model.train()
    return hits / len(data)


def main(folder):
    torch.manual_seed(0)
    train_set = Images(folder, "train", augment=True)
    test_set = Images(folder, "t10k", augment=False)
    loader = DataLoader(train_set, BATCH, shuffle=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for epoch in range(EPOCHS):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: accuracy {accuracy(model, test_set):.4f}")
    print(json.dumps({"accuracy": accuracy(model, test_set)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
