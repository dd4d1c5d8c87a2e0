"""Data sets of Hugging Face as they come: Arrow files mapped into memory, read by draw."""

from __future__ import annotations

import pytest
import torch
from small_problems import RECORDS, network, parameters, records, training

import equipoise as eq
from equipoise.training.assumptions import Assumption
from equipoise.training.record_source import RecordSource

datasets = pytest.importorskip("datasets")


@pytest.fixture
def stored(tmp_path):
    """The small problem as an Arrow file on the disk."""
    data = {name: values.tolist() for name, values in records().items()}
    datasets.Dataset.from_dict(data).save_to_disk(tmp_path / "arrow")
    return datasets.load_from_disk(tmp_path / "arrow").with_format("torch")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_with_torch_tensors_is_data(stored, workers):
    run, whole = training(data=stored, steps=5, workers=workers), training(steps=5)
    for each in (run, whole):
        list(each)
    assert torch.equal(parameters(run.model), parameters(whole.model))
    assert Assumption.TRUSTED in run.statement().assumptions
    run.close()


def test_parquet_files_are_mapped_once_they_are_converted(tmp_path):
    data = {name: values.tolist() for name, values in records().items()}
    datasets.Dataset.from_dict(data).to_parquet(tmp_path / "rows.parquet")
    rows = datasets.Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=tmp_path / "converted")
    assert rows.cache_files
    run, whole = training(data=rows.with_format("torch"), steps=5), training(steps=5)
    for each in (run, whole):
        list(each)
    assert torch.equal(parameters(run.model), parameters(whole.model))


def test_it_is_read_by_draw(stored, monkeypatch):
    asked = []
    getitems = datasets.Dataset.__getitems__
    monkeypatch.setattr(
        datasets.Dataset,
        "__getitems__",
        lambda self, numbers: asked.append(numbers) or getitems(self, numbers),
    )
    taken = RecordSource(stored).take(torch.tensor([3, 5, 8]), lambda kind: torch.Generator())
    assert asked == [[3, 5, 8]]
    assert torch.equal(taken["input"], records()["input"][[3, 5, 8]])


def test_transforms_and_selections(stored):
    doubled = stored.select(range(0, RECORDS, 2)).with_transform(
        lambda batch: {"input": [2 * torch.tensor(row) for row in batch["input"]], "label": batch["label"]}
    )
    taken = RecordSource(doubled).take(torch.tensor([1, 4]))
    assert torch.equal(taken["input"], 2 * records()["input"][[2, 8]])
    run = training(network(), data=doubled, population=RECORDS // 2, batch=6, steps=3)
    list(run)
    assert isinstance(run, eq.PrivateTraining)
