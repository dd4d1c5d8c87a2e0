"""Train on the records of tar shards (WebDataset): an index of the headers, and a file opened per record."""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import equipoise as eq


class TarShards(torch.utils.data.Dataset):
    """Records of tar files; the files of a record have one name, up to the first dot."""

    def __init__(self, paths):
        found = {}
        for path in paths:
            with tarfile.open(path) as shard:
                for file in shard:
                    name, _, kind = file.name.partition(".")
                    found.setdefault((path, name), {})[kind] = (file.offset_data, file.size)
        self.records = list(found.items())

    def __len__(self):
        return len(self.records)

    def __getitem__(self, i):
        (path, _), files = self.records[i]
        with open(path, "rb") as shard:  # opened for each record: worker processes share no place in it

            def content(kind):
                start, size = files[kind]
                shard.seek(start)
                return shard.read(size)

            image = torch.from_numpy(np.load(io.BytesIO(content("npy"))))
            return {"input": image, "label": int(content("cls"))}


def write_shard(path, records):
    """A shard of pairs of an array and a class."""
    with tarfile.open(path, "w") as shard:
        for i, (image, label) in enumerate(records):
            array = io.BytesIO()
            np.save(array, image)
            for kind, content in (("npy", array.getvalue()), ("cls", str(label).encode())):
                header = tarfile.TarInfo(f"{i:06}.{kind}")
                header.size = len(content)
                shard.addfile(header, io.BytesIO(content))


def main(workers=2):
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"shard-{number}.tar" for number in range(3)]
        for path in paths:
            write_shard(path, [(np.full(8, i % 2, np.float32), i % 2) for i in range(100)])
        model = torch.nn.Linear(8, 2)
        training = eq.PrivateTraining(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss=lambda model, batch: cross_entropy(model(batch["input"]), batch["label"], reduction="none"),
            data=eq.Data(TarShards(paths), workers=workers),
            sampling=eq.Poisson(expected_batch_size=30, population=300, steps=5),
            budget=eq.Budget(epsilon=4.0, delta=1e-3),
        )
        return training.run(progress=False).statement


if __name__ == "__main__":
    print(main())
