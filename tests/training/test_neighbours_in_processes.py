"""Two processes on neighbouring data: one record's row moves, and nothing else."""

import pytest
from neighbour_ranks import CASES, HOW, sums, work

IN_TWO_PROCESSES = work


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", CASES)
def test_one_record_less_moves_its_own_row_and_no_noise(name, how, by_rank):
    alone = [sums(name, "whole", missing) for missing in (False, True)]
    for found in by_rank:
        for one, other, first, second in zip(
            *(found[name, how, missing] for missing in (False, True)), *alone, strict=True
        ):
            row = one["raw"] - other["raw"]
            assert 1e-3 < row.norm() <= one["bound"] * (1 + 1e-9)
            assert (one["noise"] - other["noise"]).norm() <= 1e-10 * one["noise"].norm()
            if name != "shared numbers":  # which places there are follows how many processes there are
                assert (row - (first["raw"] - second["raw"])).norm() <= 1e-10 * one["bound"]


@pytest.mark.parametrize("how", HOW)
def test_processes_with_other_data_are_refused(how, by_rank):
    for found in by_rank:
        for said in found["refused", how].values():
            assert said.startswith("RuntimeError: the processes do not agree on ")


def test_all_processes_that_hold_parts_decide_by_what_any_of_them_found(by_rank):
    for found in by_rank:
        assert found["any", "sharded"] == found["any", "cut"] == {"a name": "a reason"}
