"""FittedRate: the rate is that of the parabola through the losses, and moves with evidence alone."""

import itertools
import warnings

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.methods import Abadi
from equipoise.methods.fitted_rate import GROWTH, REACH


def rates(curvature, steps, *, noise=0.0, first_rate=0.1, learning_rate=1.0, rule=None):
    """The rates of a training whose loss is a parabola about points near a corner."""
    torch.manual_seed(0)
    model = nn.Linear(1, 4, bias=False).double()
    points = 3 + torch.randn(200, 4, dtype=torch.float64)
    method = eq.methods.FittedRate(
        clip_norm=1e3, clip_rule=rule or Abadi(), noise_multiplier=noise or 1e-9, first_rate=first_rate
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = eq.PrivateTraining(
            model,
            torch.optim.SGD(model.parameters(), lr=learning_rate),
            loss=lambda model, batch: curvature / 2 * (model(batch["one"]) - batch["point"]).square().sum(1),
            data={"point": points, "one": torch.ones(200, 1, dtype=torch.float64)},
            sampling=eq.FullBatch(200, steps),
            method=method,
            run=eq.Run(reproducible=True),
        )
        found = []
        for _ in training:
            found.append(training.method_state["rate"])
    return found


@pytest.mark.parametrize("curvature", [0.02, 0.5, 10.0])
@pytest.mark.parametrize("learning_rate", [1.0, 0.25])
def test_the_rate_of_a_parabola_is_found_from_below_and_from_above(curvature, learning_rate):
    wanted = REACH / curvature / learning_rate
    for first in (wanted / 20, wanted * 3):
        found = rates(curvature, 40, first_rate=first, learning_rate=learning_rate)
        assert found[-1] == pytest.approx(wanted, rel=0.25)


def test_noise_alone_moves_no_rate_far():
    """Losses that no move changes tell nothing: the rate stays within some steps of growth."""
    found = rates(1e-12, 60, noise=50.0)
    assert max(found) <= 0.1 * GROWTH**12
    assert all(1 / GROWTH - 1e-9 <= b / a <= GROWTH + 1e-9 for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("errors", [(0.2, 0.0), (0.0, 0.2)], ids=["of the slope", "of the bend"])
def test_the_rate_stays_within_half_an_error_of_the_parabola(errors):
    """A parabola with slope -1 and bend 1 of these standard errors: 1.5 is its rate."""
    low, high = (1.35, 1.65) if errors[0] else (1.5 / 1.1, 1.5 / 0.9)
    found = {"slope": -1.0, "bend": 1.0, "slope_error": errors[0] ** 2, "bend_error": errors[1] ** 2}
    for rate, wanted in ((low - 0.03, low), (low, low), (1.5, 1.5), (high, high), (high + 0.03, high)):
        moved = eq.methods.FittedRate()._rate({**found, "rate": rate, "measured_at": rate})
        assert moved == pytest.approx(wanted)


class Own(eq.methods.FittedRate):
    """One of the user's own."""


@pytest.mark.parametrize("method", [eq.methods.FittedRate, Own, eq.methods.DPAdamBC])
def test_an_optimizer_with_steps_of_its_own_length_is_refused(method):
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"optimizer is an Adam.*SGD"):
        eq.PrivateTraining(
            model,
            torch.optim.Adam(model.parameters()),
            loss=lambda model, batch: model(batch["x"]).square().sum(1),
            data={"x": torch.ones(20, 1)},
            sampling=eq.FullBatch(20, 2),
            method=method(noise_multiplier=1.0),
        )
