"""The timers around the parts of a step meet every part, and each moment counts once."""

from __future__ import annotations

import time

import pytest

from benchmarks import step_parts


def test_every_part_of_a_step_is_met():
    shares = step_parts.shares("mlp-16", steps=3)
    assert set(shares) == {*step_parts.PARTS, step_parts.REST}
    assert min(shares.values()) > 0
    assert sum(shares.values()) == pytest.approx(1)


def test_a_part_counts_without_the_parts_within_it():
    clock = step_parts.Clock()
    inner = clock.timed("inner", lambda: time.sleep(0.05))
    clock.timed("outer", inner)()
    assert clock.seconds["inner"] >= 0.05 > clock.seconds["outer"]
