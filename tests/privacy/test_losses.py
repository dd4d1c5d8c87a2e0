"""Loss distributions equal dp-accounting's own, which inverts the loss cell by cell."""

import dp_accounting as dp
import pytest
from dp_accounting.pld import privacy_loss_distribution

from equipoise.privacy import epsilon
from equipoise.privacy.accounting.epsilon import RELATIONS, sampled_gaussian

CASES = [
    (1.0, 0.004, 1e-3),
    (6.3, 0.5, 1e-3),
    (0.3, 0.02, 1e-2),
    (0.02, 0.5, 0.1),  # losses of thousands: nothing overflows
    (30.0, 0.01, 1e-5),
    (1.0, 0.999, 1e-3),
    (2.0, 1e-7, 1e-4),
    (2.0, 1.0, 1e-3),
]


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(("sigma", "rate", "interval"), CASES)
def test_equal_to_the_library_loop(sigma, rate, interval, relation):
    ours = sampled_gaussian(sigma, rate, relation, interval)
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        sigma,
        value_discretization_interval=interval,
        sampling_prob=rate,
        neighboring_relation=RELATIONS[relation],
    )
    grid = [0.0, 1e-3, 0.05, 0.5, 3.0, 30.0, 300.0]
    assert ours.get_delta_for_epsilon(grid) == pytest.approx(theirs.get_delta_for_epsilon(grid), abs=1e-13)
    both = [d.self_compose(7).get_epsilon_for_delta(1e-5) for d in (ours, theirs)]
    assert both[0] == pytest.approx(both[1], rel=1e-8, abs=1e-12)


def test_the_cross_check_equals_all_orders_and_is_silent(capfd):
    """Integer orders, then tenths beside the best, find what the whole list of orders finds."""
    for rate, z, steps in ((0.5, 6.3, 30), (0.02, 20.0, 30)):  # best at 10.2 and at an integer
        event = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z)), steps)
        cross = epsilon(event, 1e-5).cross_check
        assert capfd.readouterr().err == ""
        full = dp.rdp.RdpAccountant()
        full.compose(event)
        assert cross == pytest.approx(full.get_epsilon(1e-5), rel=1e-12)
        capfd.readouterr()
