"""A pool opens and closes its clients, and nobody notices."""

from __future__ import annotations

import pytest
from federated_problem import ROUNDS, adaptive, client, follower, same, start

from equipoise.federated import simulate
from equipoise.federated.client_pool import ClientPool


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
