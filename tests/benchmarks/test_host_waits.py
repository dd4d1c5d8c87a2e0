"""A step makes the host wait for a device no more often than it did, whatever its number of micro-batches."""

import pytest

from benchmarks import host_waits


@pytest.mark.parametrize("micro_batch_size", [300, 12])  # of a draw of about 100 records
def test_a_step_waits_no_more_often_than_it_did(tmp_path, micro_batch_size):
    waits = host_waits.waits_of_third_step(tmp_path / "run", micro_batch_size)
    assert 1 < waits.total() <= host_waits.WAITS  # the noise and the draw need the digest at least
    at_three_places, is_finite = sorted(waits, key=waits.__getitem__, reverse=True)
    assert (waits[at_three_places], waits[is_finite]) == (3, 1)
    assert at_three_places.startswith("_host.py")
    assert is_finite.startswith("training/context.py")
