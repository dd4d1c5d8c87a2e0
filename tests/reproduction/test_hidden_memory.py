"""The bound for DiceSGD with a hidden memory of bounded residuals."""

import math

import pytest

from equipoise.privacy import gaussian_epsilon
from reproduction.attacks.dice_memory import hidden_state_epsilon, hidden_state_mu


def std_for(epsilon: float, mu_at_one: float, delta: float = 1e-5) -> float:
    """The noise for which a mechanism of GDP parameter mu_at_one / noise has this epsilon."""
    low, high = 1e-3, 1e5
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gaussian_epsilon(mu_at_one / middle, delta) > epsilon else (low, middle)
    return high


@pytest.mark.parametrize(("count", "epsilon", "std", "plain"), [(3, 2.0, 57, 34.5), (20, 1.0, 688, 167)])
def test_worked_numbers_of_the_hidden_state_bound(count, epsilon, std, plain):
    """C1 = 1, Ce = 10, in units of C1 / B; beside DP-SGD at radius Ce without amplification."""
    mu = hidden_state_mu(count, 1.0, clip_norm=1.0, residual_clip_norm=10.0, expected_batch_size=1)
    assert std_for(epsilon, mu) == pytest.approx(std, rel=0.01)
    assert std_for(epsilon, math.sqrt(count) * 10) == pytest.approx(plain, rel=0.01)


def test_participations_by_chance_cost_more_than_their_mean():
    settings = {"clip_norm": 1.0, "residual_clip_norm": 10.0, "expected_batch_size": 200}
    exact = gaussian_epsilon(hidden_state_mu(20, 688 / 200, **settings), 1e-5)
    assert exact == pytest.approx(1.0, rel=0.01)
    averaged = hidden_state_epsilon(688 / 200, 1e-5, **settings, sampling_rate=0.02, steps=1000)
    assert 1.2 * exact < averaged < 1.4
    # A record that takes part in every draw has no chance about it.
    certain = hidden_state_epsilon(688 / 200, 1e-5, **settings, sampling_rate=1.0, steps=20)
    assert certain == pytest.approx(exact, rel=1e-6)
