"""The accountant's epsilon against a contour integral that shares nothing with it."""

import pytest

from benchmarks.accounting import exact_epsilon
from equipoise.privacy import Poisson, epsilon


@pytest.mark.parametrize(
    ("population", "batch", "steps", "noise_multiplier"),
    [
        (60_000, 256, 4_700, 0.9371),
        (10**8, 4096, 10**5, 0.5736),
        pytest.param(10**9, 4096, 10**6, 0.5138, marks=pytest.mark.slow),
    ],
)
def test_epsilon_is_an_upper_bound_within_a_thousandth(population, batch, steps, noise_multiplier):
    sampling, delta = Poisson(batch, population, steps), 0.1 / population
    exact = exact_epsilon(sampling, noise_multiplier, delta)
    found = epsilon(sampling.event(noise_multiplier, steps), delta, cross_check=False).value
    assert exact <= found <= 1.001 * exact
