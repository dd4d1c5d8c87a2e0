"""Each number of the core says where it comes from."""

from __future__ import annotations

from benchmarks import source_sizes


def test_each_number_of_the_core_is_explained():
    assert source_sizes.unexplained() == []
