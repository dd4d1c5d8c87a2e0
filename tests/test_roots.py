"""The root finder: both sides of the crossing, from any start, for functions that jump or are infinite."""

from __future__ import annotations

import math

import pytest

from equipoise._roots import NoCrossing, crossing

FUNCTIONS = {
    "smooth": (lambda x: 3.7 - x, 3.7),
    "steep": (lambda x: math.exp(min(700.0, 20 * (3.7 - x))) - 1, 3.7),
    "flat": (lambda x: (3.7 - x) ** 3, 3.7),
    "a condition": (lambda x: 1.0 if x < 3.7 else -1.0, 3.7),
    "infinite": (lambda x: math.inf if x < 2 else 3.7 - x, 3.7),
    "minus infinity": (lambda x: 3.7 - x if x < 5 else -math.inf, 3.7),
}


@pytest.mark.parametrize("start", [-1000.0, 0.0, 3.7, 4.0, 1000.0])
@pytest.mark.parametrize(("function", "at"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_both_sides_of_the_crossing(function, at, start):
    x, y = crossing(function, start, 1.0, tolerance=1e-6)
    assert function(x) > 0 >= function(y)
    assert 0 < y - x <= 3e-6
    if function is not FUNCTIONS["flat"][0]:
        assert x - 3e-6 <= at <= y + 3e-6


def test_a_relative_tolerance_asks_for_few_evaluations():
    asked = []

    def function(x):
        asked.append(x)
        return 1e9 - x

    x, y = crossing(function, 1.0, 1.0, tolerance=0.0, relative=1e-6)
    assert x < 1e9 <= y <= x * (1 + 3e-6)
    assert len(asked) == len(set(asked)) < 60


@pytest.mark.parametrize(("value", "above"), [(1.0, True), (-1.0, False)])
def test_no_crossing_between_the_limits(value, above):
    with pytest.raises(NoCrossing) as found:
        crossing(lambda x: value, 0.0, 1.0, least=-10.0, most=10.0, tolerance=1e-6)
    assert found.value.above is above
