"""Data that do not fit in memory: what is drawn is read, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_problems import FEATURES, RECORDS, parameters, records, training
from test_data_sources import MAPPED, as_memmap, as_tensors

from equipoise.training.record_source import DataError, RecordSource


@pytest.mark.parametrize("form", MAPPED)
def test_a_mapped_file_is_read_where_it_is_drawn(tmp_path, form, monkeypatch):
    source = RecordSource(MAPPED[form](tmp_path))
    assert (source.is_scanned, source.has_rows, len(source)) == (False, True, RECORDS)
    assert (source.fingerprint(), source.batch()) == ("", None)
    taken = source.take(torch.tensor([3, 5]))
    assert torch.equal(taken["input"], records()["input"][[3, 5]])
    taken["input"].zero_()
    assert torch.equal(source.take(torch.tensor([3]))["input"], records()["input"][[3]])


def test_mapped_data_train_in_any_nest_and_a_record_that_is_not_finite_has_weight_zero(tmp_path):
    data = as_memmap(tmp_path)
    for nest in (list(data.values()), torch.utils.data.TensorDataset(*as_tensors(tmp_path).values())):
        assert not RecordSource(nest).is_scanned
    with pytest.raises(DataError, match="from_numpy"):  # what was computed from a file is in memory
        RecordSource(data | {"input": data["input"] * 2})
    written = np.memmap(tmp_path / "input.bin", np.float32, "r+", shape=(RECORDS, FEATURES))
    written[::7] = np.nan
    written.flush()
    run = training(data=data, steps=5)
    list(run)
    assert bool(torch.isfinite(parameters(run.model)).all())
