"""A step makes the host wait for a device no more often than it did."""

from benchmarks import host_waits


def test_a_step_waits_no_more_often_than_it_did():
    waits = host_waits.waits_of_third_step()
    assert 1 < waits.total() <= host_waits.WAITS  # the noise and the draw need the digest at least
    several = host_waits.waits_of_third_step(micro_batch_size=12)  # a draw has at least five times as many
    assert waits.total() + 4 <= several.total()
    assert {place for place, count in several.items() if count > 3} == {
        place for place in several if "clipping.py" in place
    }
