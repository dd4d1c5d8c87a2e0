"""Data that do not fit in memory: what is drawn is read, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not show its advice")
@pytest.mark.parametrize("form", MAPPED)
def test_a_system_is_told_that_records_are_drawn_from_anywhere(tmp_path, form):
    data = MAPPED[form](tmp_path)
    before = advice_of(tmp_path / "input.bin")
    RecordSource(data)
    assert [("rr" in flags) for flags in (before, advice_of(tmp_path / "input.bin"))] == [False, True]


def advice_of(file):
    """The flags of the file's mapping; rr stands for random reads."""
    areas = Path("/proc/self/smaps").read_text().split("VmFlags:")
    (place,) = [number for number, area in enumerate(areas[:-1]) if str(file) in area]
    return areas[place + 1].split("\n")[0].split()


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


LARGE = """
import json, sys
import numpy as np
import torch
import equipoise as eq

file, count, width, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
with open(file, "wb") as empty:
    empty.truncate(4 * count * width)
if kind == "memmap":
    inputs = np.memmap(file, np.float32, "r", shape=(count, width))
else:
    inputs = torch.from_file(file, shared=True, size=count * width, dtype=torch.float32).view(count, width)
data = {"input": inputs, "label": torch.arange(count) % 2}
model = torch.nn.Linear(width, 2)
run = eq.PrivateTraining(
    model, torch.optim.SGD(model.parameters(), lr=0.1), data=data,
    loss=lambda model, batch: torch.nn.functional.cross_entropy(
        model(batch["input"]), batch["label"], reduction="none"
    ),
    sampling=eq.Poisson(128, count, 10), method=eq.DPSGD(clip_norm=1.0, noise_multiplier=1.0),
)
assert run.run(progress=False).steps == 10
status = open("/proc/self/status").read().splitlines()
print(max(int(line.split()[1]) for line in status if line.startswith("VmHWM")) // 1024)
"""


def trained_on(folder, gigabytes, kind):
    """MB that a training of ten steps takes on a file of that size, which has holes only."""
    width = 12_500
    count = gigabytes * 10**9 // (4 * width)
    command = [sys.executable, "-c", LARGE, str(folder / "large.bin"), str(count), str(width), kind]
    out = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(out.stdout)


@pytest.mark.wide
def test_a_file_of_four_gigabytes_is_trained_on_in_one(tmp_path):
    assert trained_on(tmp_path, 4, "memmap") < 1000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memmap", "from_file"])
def test_a_file_of_fifty_gigabytes_is_trained_on_in_two(tmp_path, kind):
    assert trained_on(tmp_path, 50, kind) < 2000
