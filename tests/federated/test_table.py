"""Every line of the table trains: its two halves fit together."""

from __future__ import annotations

import pytest
from federated_problem import LOCAL_STEPS, client, records, same, start

import equipoise as eq
from equipoise.federated import simulate
from equipoise.federated.table import FEDERATED, Setup, find_federated

SETTINGS = [(name, recipe) for name, line in FEDERATED.items() for recipe in line.recipes]


@pytest.mark.parametrize(("name", "recipe"), [*SETTINGS, ("fedavg:dp-c4", "library")])
def test_a_line_trains_within_the_budget(name, recipe):
    line, budget = find_federated(name), eq.Budget(8.0, 1e-3)
    public = records(9, 20) if line.needs_public else None
    setup = Setup(
        rounds=2, clients=2, local_steps=LOCAL_STEPS, clip_norm=0.5, recipe=recipe, options=line.options,
        public=public,
    )  # fmt: skip
    clients = [client(line.method(setup), p, steps=2 * LOCAL_STEPS, budget=budget) for p in range(2)]
    history = simulate(line.strategy(setup), clients, start(), 2)
    assert [done.answered for done in history.rounds] == [(0, 1)] * 2
    assert not same(history.params, start())
    for one in clients:
        assert one.statement().guarantee == "proven"
        assert 0 < one.epsilon() <= 8
        assert one.rounds_left == 0


def test_an_unknown_method_is_named():
    for name in ("sgd", "fedavg:sgd", "fedprox:dp-sgd"):
        with pytest.raises(ValueError, match=name):
            find_federated(name)
