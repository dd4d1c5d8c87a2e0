"""A pool opens and closes its clients, and nobody notices."""

from __future__ import annotations

import pytest
from federated_problem import LOCAL_STEPS, ROUNDS, client, same, start

from equipoise.federated import AdaptDPFedAvg, ServerRMS, simulate
from equipoise.federated.client_pool import ClientPool
from equipoise.methods.adaptive_rms.radius import RMSRadius


def follower():
    return ServerRMS(0.5, round_length=LOCAL_STEPS, noise_multiplier=1.0, radius_noise_multiplier=3.0)


def adaptive():
    return AdaptDPFedAvg(RMSRadius(0.5), rounds=ROUNDS, clients=3)


def test_one_open_client_at_a_time_is_as_good_as_all(tmp_path):
    built = []

    def build(number):
        built.append(number)
        return client(follower(), number, folder=tmp_path / str(number))

    with ClientPool(build, 3, most=1).closing() as pool:
        found = simulate(adaptive(), pool, start(), ROUNDS)
    assert built == [0, 1, 2] * (2 * ROUNDS)
    expected = simulate(adaptive(), [client(follower(), p) for p in range(3)], start(), ROUNDS)
    assert same(found.params, expected.params)
    again = client(follower(), 0, folder=tmp_path / "0")  # the pool has let go of the folder
    assert again.rounds_left == 0


def test_a_pool_holds_at_least_one():
    with pytest.raises(ValueError, match="most=0"):
        ClientPool(client, 3, most=0)
