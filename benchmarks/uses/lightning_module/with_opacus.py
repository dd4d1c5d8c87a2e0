"""Train a small network on MNIST with Lightning, privately with Opacus.

The folder of its four files is the argument.
"""

import gzip
import json
import sys
from pathlib import Path

import lightning
import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.data_loader import DPDataLoader
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, RATE = 2, 256, 0.5


def read(folder, part):
    pixels = np.frombuffer(
        gzip.decompress((folder / f"{part}-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16
    )
    labels = np.frombuffer(
        gzip.decompress((folder / f"{part}-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8
    )
    images = torch.tensor(pixels).reshape(-1, 1, 28, 28) / 127.5 - 1
    return TensorDataset(images, torch.tensor(labels).long())


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 8, 4), nn.Tanh(), nn.Flatten(), nn.Linear(576, 64), nn.Tanh(), nn.Linear(64, 10)
        )

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=RATE)
        self.trainer.fit_loop.setup_data()
        self.engine = PrivacyEngine(accountant="prv")
        _, optimizer, _ = self.engine.make_private_with_epsilon(
            module=self,
            optimizer=optimizer,
            data_loader=self.trainer.train_dataloader,
            target_epsilon=3.0,
            target_delta=1e-5,
            epochs=EPOCHS,
            max_grad_norm=1.0,
        )
        return optimizer


def main(folder):
    lightning.seed_everything(0)
    train_set, test_set = read(folder, "train"), read(folder, "t10k")
    module = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    loader = DPDataLoader.from_data_loader(DataLoader(train_set, BATCH))
    trainer.fit(module, loader, DataLoader(test_set, 1000))
    print(
        json.dumps(
            {
                "accuracy": trainer.callback_metrics["accuracy"].item(),
                "epsilon": module.engine.get_epsilon(1e-5),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
