"""Tar shards with an index are a map-style data set like any other: read by draw, also by workers."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest
import torch
from small_problems import RECORDS, parameters, records, training

from equipoise.training.record_source import RecordSource


class TarShards(torch.utils.data.Dataset):
    """As in docs/how-to/own-data.md."""

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
        with open(path, "rb") as shard:

            def content(kind):
                start, size = files[kind]
                shard.seek(start)
                return shard.read(size)

            features = torch.from_numpy(np.load(io.BytesIO(content("npy"))))
            return {"input": features, "label": int(content("cls"))}


@pytest.fixture
def shards(tmp_path):
    """The small problem in four files."""
    data = records()
    paths = [tmp_path / f"shard-{number}.tar" for number in range(4)]
    for path, ids in zip(paths, torch.arange(RECORDS).chunk(4), strict=True):
        with tarfile.open(path, "w") as shard:
            for i in ids.tolist():
                features = io.BytesIO()
                np.save(features, data["input"][i].numpy())
                for kind, content in (
                    ("npy", features.getvalue()),
                    ("cls", str(int(data["label"][i])).encode()),
                ):
                    header = tarfile.TarInfo(f"{i:06}.{kind}")
                    header.size = len(content)
                    shard.addfile(header, io.BytesIO(content))
    return TarShards(paths)


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_train_like_tensors(shards, workers):
    run, whole = training(data=shards, steps=5, workers=workers), training(steps=5)
    for each in (run, whole):
        list(each)
    assert torch.equal(parameters(run.model), parameters(whole.model))
    run.close()


def test_a_record_is_read_where_its_shard_holds_it(shards):
    taken = RecordSource(shards).take(torch.tensor([3, 20, 59]))
    assert torch.equal(taken["input"], records()["input"][[3, 20, 59]])
    assert torch.equal(taken["label"], records()["label"][[3, 20, 59]])
