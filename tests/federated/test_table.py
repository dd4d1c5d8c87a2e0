"""Every entry of the table trains: its two halves fit together, and its server goes on after a restart."""

import pytest
import torch
from federated_problem import LOCAL_STEPS, charges, client, loss, network, records, same, start

import equipoise as eq
from equipoise.federated import simulate
from equipoise.federated.registry import FEDERATED, FederationSetup, find_federated
from equipoise.federated.round_protocol import protocol_of

SETTINGS = [(name, recipe, {}) for name, entry in FEDERATED.items() for recipe in entry.recipes]
SCAFFOLD = "baselines.scaffold:SCAFFOLD"
BESIDE = [
    "baselines.fedprox:FEDPROX", SCAFFOLD, "baselines.moon:MOON", "baselines.fedlrs:FEDLRS",
    "baselines.projected_upload:PROJECTED_UPLOAD", "baselines.averaged_iterate:ADAPTDP",
]  # fmt: skip
SMALL = {"dimension": 6, "quantile": 0.5}


def setup_of(name, recipe="library", rounds=2, client_records=None, **given):
    entry = find_federated(name)
    return FederationSetup(
        rounds=rounds, clients=2, clients_per_round=2, local_steps=LOCAL_STEPS, learning_rate=0.3,
        model=network(), loss=loss, clip_norm=0.5, recipe=recipe,
        options={key: (SMALL | given).get(key, value) for key, value in entry.options.items()},
        public=records(9, 20) if entry.needs_public else None, client_records=client_records,
    )  # fmt: skip


def federation(name, recipe="library", rounds=2, **given):
    """The entry's strategy and two clients, made anew."""
    entry, setup = find_federated(name), setup_of(name, recipe, rounds, **given)
    clients = []
    for p in range(2):
        method = entry.method(setup)
        own_loss = protocol_of(method).client_loss or loss
        budget = eq.Budget(8.0, 1e-3)
        clients.append(client(method, p, steps=rounds * LOCAL_STEPS, budget=budget, loss_function=own_loss))
    return entry.strategy(setup), clients


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "recipe", "given"),
    [
        *SETTINGS,
        *((name, "library", {}) for name in BESIDE),
        ("fedavg:dp-c4", "library", {}),
    ],
)
def test_an_entry_trains_within_the_budget_and_goes_on(tmp_path, name, recipe, given):
    strategy, clients = federation(name, recipe, **given)
    whole = simulate(strategy, clients, start(), 2)
    assert [done.answered for done in whole.rounds] == [(0, 1)] * 2
    assert not same(whole.params, start())
    for one in clients:
        assert one.statement().guarantee == "proven"
        assert 0 < one.epsilon() <= 8
        assert one.rounds_left == 0
        of_others = 2 * name.endswith(("adaptdp-fedavg", "ADAPTDP")) + (name == "fedavg:dp-c4")  # an anchor
        assert charges(one) == 2 * LOCAL_STEPS + of_others
        public = any("20 records are public" in text for text in one.method.assumptions())
        assert public is find_federated(name).needs_public
    strategy, clients = federation(name, recipe, **given)
    simulate(strategy, clients, start(), 1, folder=tmp_path)
    another, _ = federation(name, recipe, **given)
    found = simulate(another, clients, start(), 2, folder=tmp_path)
    for key, value in whole.params.items():
        torch.testing.assert_close(found.params[key], value, rtol=1e-9, atol=1e-12)


def test_a_state_of_another_strategy_is_refused():
    for name in ("dp-fedavg", "adaptdp-fedavg", SCAFFOLD, "dp-fedavg-quantile"):
        strategy, _ = federation(name)
        with pytest.raises(ValueError, match="state has"):
            strategy.load_state_dict({"something": 1.0})


def test_an_unknown_method_is_named():
    for name in ("nobody", "fedavg:nobody", "fedprox:dp-sgd", "baselines.moon:Moon", "fedprox"):
        with pytest.raises(ValueError, match=name):
            find_federated(name)
