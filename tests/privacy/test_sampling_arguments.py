"""Poisson sampling by batch size and epochs, as people say it."""

from __future__ import annotations

import pytest

from equipoise.privacy import Poisson
from equipoise.privacy.sampling import sampling_from


def test_epochs_are_the_fewest_steps_that_reach_them():
    found = Poisson(batch_size=256, population=60_000, epochs=20)
    assert found == Poisson(256, 60_000, 4688)
    assert sampling_from(found.describe()) == found
    assert Poisson(batch_size=718.5, population=1437, epochs=2).steps == 4  # rounding makes no fifth
    assert Poisson(batch_size=100, population=1000, epochs=0.01).steps == 1


@pytest.mark.parametrize(
    "given",
    [
        {"population": 10, "steps": 3},
        {"batch_size": 5, "expected_batch_size": 5, "population": 10, "steps": 3},
        {"batch_size": 5, "population": 10},
        {"batch_size": 5, "population": 10, "steps": 2, "epochs": 3.0},
    ],
)
def test_one_size_and_one_length_are_given(given):
    with pytest.raises(TypeError, match="give one of"):
        Poisson(**given)


@pytest.mark.parametrize("epochs", [float("nan"), 0, -1.0, float("inf")])
def test_epochs_are_a_number_above_zero(epochs):
    with pytest.raises(ValueError, match="epochs"):
        Poisson(batch_size=5, population=10, epochs=epochs)
