"""What a process holds of a sharded model falls with the number of processes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from sharded_memory import LAYERS, WIDTH, work

from tests.shared_fixtures import in_processes

WHOLE = 4 * LAYERS * WIDTH**2


@pytest.fixture(scope="module")
def by_count(tmp_path_factory):
    found = {}
    for count in (1, 2, 4):
        folder = tmp_path_factory.mktemp(f"of{count}")
        in_processes(partial(work, count), folder, count)
        found[count] = [torch.load(folder / f"found{rank}.pt") for rank in range(count)]
    return found


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("how", ["sharded", "cut"])
def test_every_process_holds_its_part_alone(how, count, by_count):
    part, records = WHOLE / count, 0.1 * WHOLE  # and what follows from their number alone
    for held in (found[how] for found in by_count[count]):
        assert held["parameters"] == held["sums"] == held["noised"] == part
        assert held["optimizer"] == 2 * part
        assert held["all between steps"] <= 3 * part + records
        assert held["all at the release"] <= 6 * part + records  # the sum is in double precision
