"""Data that stand in files: mapped arrays, Arrow, Parquet and tar shards train like tensors in memory."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest
import torch
from small_problems import FEATURES, RECORDS, parameters, records, training

from equipoise.statements.assumptions import Assumption
from equipoise.training.record_source import RecordSource


def as_memmap(folder):
    """The small problem in two files."""
    data = records()
    out = {}
    for name, values in data.items():
        path = folder / f"{name}.bin"
        values.numpy().tofile(path)
        out[name] = np.memmap(path, values.numpy().dtype, "r", shape=tuple(values.shape))
    return out


def as_tensors(folder):
    data = as_memmap(folder)
    return {
        "input": torch.from_file(
            str(folder / "input.bin"), shared=True, size=RECORDS * FEATURES, dtype=torch.float32
        ).view(RECORDS, FEATURES),
        "label": torch.from_numpy(np.array(data["label"])),
    }


def as_arrow(folder):
    datasets = pytest.importorskip("datasets")
    data = {name: values.tolist() for name, values in records().items()}
    datasets.Dataset.from_dict(data).save_to_disk(folder / "arrow")
    return datasets.load_from_disk(folder / "arrow").with_format("torch")


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


def as_tar_shards(folder):
    """The small problem in four files."""
    data = records()
    paths = [folder / f"shard-{number}.tar" for number in range(4)]
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


MAPPED = {
    "memmap": as_memmap,
    "from_file": as_tensors,
    "part of a memmap": lambda folder: {name: rows[:] for name, rows in as_memmap(folder).items()},
}
MADE_ON_DEMAND = {"Arrow": as_arrow, "tar shards": as_tar_shards}
SOURCES = MAPPED | MADE_ON_DEMAND


@pytest.mark.parametrize(("form", "workers"), [(form, 0) for form in SOURCES] + [("tar shards", 2)])
def test_files_train_like_tensors_and_the_statement_says_what_was_not_looked_at(tmp_path, form, workers):
    run, whole = training(data=SOURCES[form](tmp_path), steps=5, workers=workers), training(steps=5)
    for each in (run, whole):
        list(each)
    assert torch.equal(parameters(run.model), parameters(whole.model))
    assert Assumption.TRUSTED in run.statement().assumptions
    assert Assumption.TRUSTED not in whole.statement().assumptions
    assert Assumption.SCANNED not in run.statement().assumptions
    run.close()


def test_a_hugging_face_data_set_is_read_by_draw(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []
    getitems = datasets.Dataset.__getitems__
    monkeypatch.setattr(
        datasets.Dataset,
        "__getitems__",
        lambda self, numbers: asked.append(numbers) or getitems(self, numbers),
    )
    source = RecordSource(as_arrow(tmp_path))
    taken = source.take(torch.tensor([3, 5, 8]), lambda kind: torch.Generator())
    assert asked == [[3, 5, 8]]
    assert torch.equal(taken["input"], records()["input"][[3, 5, 8]])
