"""A step makes the host wait for a device no more often than it did, whatever its number of micro-batches."""

import pytest

from benchmarks import host_waits


@pytest.mark.parametrize("micro_batch_size", [300, 12])  # of a draw of about 100 records
def test_a_step_waits_no_more_often_than_it_did(tmp_path, micro_batch_size):
    waits = host_waits.waits_of_a_step(tmp_path / "run", micro_batch_size)
    assert waits.total() == host_waits.WAITS  # the draw, the noise and the optimizer need a digest each
    assert all(place.startswith("_host.py") for place in waits)
