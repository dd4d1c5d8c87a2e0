"""The radius that the server sets: what makes no sense is refused, and costs nothing."""

from __future__ import annotations

import math

import pytest
import torch
from federated_problem import LOCAL_STEPS, ask, charges, client, follower, start, train

from equipoise.federated import AdaptDPFedAvg, Refused, Reply, simulate
from equipoise.federated.methods.server_radius import SQUARES, SQUARES_NOISE
from equipoise.methods.adaptive_rms import RMSRadius

ROUNDS = 3


def server(clients=2, clip_norm=0.5, **rule):
    return AdaptDPFedAvg(RMSRadius(clip_norm, **rule), ROUNDS, clients)


@pytest.mark.parametrize("limit", [None, math.nan, math.inf, 0.0, -1.0, 0.26, "1", True, 10**400])
def test_a_limit_that_is_none_is_refused_and_free(limit):
    one = client(follower())
    with pytest.raises(Refused, match="square_limit"):
        ask(one, 1, start(), limit)
    assert charges(one) == 0
    assert ask(one, 1, start(), 0.25)


@pytest.mark.parametrize("radius", [None, math.nan, 0.0, 1e-26, 0.6])
def test_a_radius_that_is_none_is_refused_and_free(radius):
    one = client(follower())
    with pytest.raises(Refused, match="clip_norm"):
        train(one, 1, start(), clip_norm=radius)
    with pytest.raises(Refused, match=r"'square_limit'.* is not supported"):
        train(one, 1, start(), clip_norm=0.5, square_limit=0.25)
    assert charges(one) == 0


def test_a_query_is_a_release_of_its_own():
    one = client(follower())
    simulate(server(1), [one], start(), ROUNDS)
    assert charges(one) == ROUNDS * (LOCAL_STEPS + 1)


MALFORMED = {
    "nothing": {},
    "one number": {SQUARES: 1.0},
    "noise without a mean": {SQUARES_NOISE: 1.0},
    "a list": {SQUARES: [1.0, 1.0], SQUARES_NOISE: 0.1},
    "a mean that is none": {SQUARES: math.nan, SQUARES_NOISE: 0.1},
    "noise below zero": {SQUARES: 0.5, SQUARES_NOISE: -0.1},
    "noise whose square overflows": {SQUARES: 0.5, SQUARES_NOISE: 1e200},
    "a mean beyond bounds": {SQUARES: 1e200, SQUARES_NOISE: 0.1},
    "a tensor": {SQUARES: torch.ones(()), SQUARES_NOISE: 0.1},
}


class Canned:
    """A client that answers with whatever it was given."""

    def __init__(self, reports):
        self._reports = reports

    def answer(self, request):
        ones = {name: torch.ones_like(value) for name, value in request.params.items()}
        return Reply(ones, self._reports)


@pytest.mark.parametrize("kind", MALFORMED)
def test_an_answer_without_usable_squares_counts_as_none(kind):
    wrong, good = Canned(MALFORMED[kind]), Canned({SQUARES: 0.01, SQUARES_NOISE: 0.0})
    history = simulate(server(3, offset="none"), [wrong, wrong, good], start(), 2)
    assert [done.answered for done in history.rounds] == [(2,), (2,)]
    assert history.rounds[1].metrics["radius"] == pytest.approx(0.5 * math.sqrt(2 * 0.01))


def test_a_server_whose_radius_may_collapse_warns_once():
    with pytest.warns(UserWarning, match="may collapse") as found:
        simulate(server(1, scale="self"), [Canned({SQUARES: 0.5, SQUARES_NOISE: 0.05})], start(), 3)
    assert len(found) == 1


def test_a_folder_of_an_earlier_form_is_refused_by_name():
    strategy = server()
    with pytest.raises(ValueError, match="variant='fused', which is no longer offered"):
        strategy.load_state_dict({**strategy.state_dict(), "variant": "fused"})


def test_a_client_of_an_earlier_version_goes_on():
    """Its settings in the folder name the form that is left."""
    assert {"variant": "round", "query_steps": "all"}.items() <= follower().config().items()


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: follower(round_length=0), "round_length=0"),
        (lambda: follower(radius_sampling_rate=1.5), "radius_sampling_rate=1.5"),
        (lambda: client(follower(round_length=3)), "round_length=3"),
    ],
)
def test_bad_settings_are_named(make_it, words):
    with pytest.raises(ValueError, match=words):
        make_it()
