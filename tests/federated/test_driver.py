"""Rounds in one process: who takes part, who drops out, what the server makes of the answers."""

import json
import math
from contextlib import closing

import dp_accounting
import pytest
import torch
from federated_problem import (
    LOCAL_STEPS,
    ROUNDS,
    adaptive,
    away,
    charges,
    client,
    follower,
    loss,
    records,
    same,
    start,
)

import equipoise as eq
from baselines.scaffold import ScaffoldAverage
from equipoise.federated import FedAvg, Refused, Reply, Request, simulate
from equipoise.federated.client_pool import ClientPool
from equipoise.federated.methods.server_quantile import SHARE, QuantileFedAvg
from equipoise.federated.methods.server_radius import SQUARES, SQUARES_NOISE
from equipoise.methods import ReleasedQuantile
from equipoise.methods.named_tensors import copied
from equipoise.privacy.errors import ChangedQueryError

WHOLE = ROUNDS * LOCAL_STEPS


def quantile(clients):
    return QuantileFedAvg(ReleasedQuantile(0.5))


def scaffold(clients):
    return ScaffoldAverage(clients, local_steps=1, learning_rate=1e-3)


def test_a_client_whose_ledger_is_broken_is_out_of_the_round_and_named(monkeypatch, caplog):
    """The others go on; what its ledger says is for its own log, and not for the server."""
    clients = [client(number=p) for p in range(3)]

    def fail(*args, **options):
        raise ChangedQueryError("line 17, the record of Smith")

    def breaks(done):
        if done.number == 1:  # until the step is given up, and the ledger goes back to where it began
            ledger = clients[1].training.ledger
            rewind = ledger.rewind

            def mended(position):
                monkeypatch.undo()
                rewind(position)

            monkeypatch.setattr(ledger, "release", fail)
            monkeypatch.setattr(ledger, "rewind", mended)

    found = simulate(FedAvg(), clients, start(), ROUNDS, on_round=breaks)
    assert [done.answered for done in found.rounds] == [(0, 1, 2), (0, 2), (0, 1, 2)]
    words = found.rounds[1].absent[1]
    assert words.startswith("ChangedQueryError: the client's ledger or folder is broken")
    assert "Smith" not in words
    assert "Smith" in caplog.text
    assert [charges(one) for one in clients] == [WHOLE, WHOLE - LOCAL_STEPS, WHOLE]
    others = [client(number=0), away(client(number=1), "train", 2), client(number=2)]
    assert same(found.params, simulate(FedAvg(), others, start(), ROUNDS).params)


@pytest.mark.parametrize("scale", ["g_hat", "self"])
def test_larger_losses_change_only_the_scale(scale):
    """Losses times a, G times a, rate over a, the same seeds: the same path, the radius times a."""

    def found(a):
        options = {"loss_function": lambda model, batch: a * loss(model, batch), "learning_rate": 0.3 / a}
        clients = [client(follower(50.0 * a), p, **options) for p in range(2)]
        history = simulate(adaptive(2, 50.0 * a, scale=scale), clients, start(), ROUNDS)
        return history.params, [done.metrics["radius"] / a for done in history.rounds]

    (params, radii), (others, other_radii) = found(1.0), found(8.0)
    for name, value in params.items():
        torch.testing.assert_close(value, others[name], rtol=1e-9, atol=1e-12)
    assert radii == pytest.approx(other_radii, rel=1e-9)
    assert max(radii) < 50.0


def test_clients_that_drop_out_in_a_round():
    """One is away for a round, one between query and training: the others go on, every ledger is right."""
    clients = [client(follower(), p) for p in range(3)]
    away(clients[1], "query", 2)
    away(clients[2], "train", 2)
    history = simulate(adaptive(3), clients, start(), ROUNDS)
    assert [done.answered for done in history.rounds] == [(0, 1, 2), (0,), (0, 1, 2)]
    assert set(history.rounds[1].absent) == {1, 2}
    whole = 1 + LOCAL_STEPS
    assert [charges(one) for one in clients] == [3 * whole, 2 * whole, 2 * whole + 1]
    fewer = simulate(FedAvg(), [client()], start(), 1).params
    alone = simulate(FedAvg(), [client(), away(client(None, 1), "train", 1)], start(), 1).params
    assert same(alone, fewer)


class Canned:
    """A client that answers with whatever it was given."""

    def __init__(self, reports=None, fill=1.0, mean=0.5, noise=0.1):
        self._reports, self._fill = reports or {}, fill
        self._squares = {SQUARES: mean, SQUARES_NOISE: noise}
        self._squares = {name: value for name, value in self._squares.items() if value is not None}

    def answer(self, request):
        if request.kind == "query":
            return Reply(reports=self._squares)
        filled = {name: torch.ones_like(value) * self._fill for name, value in request.params.items()}
        return Reply(filled, self._reports)


MALFORMED = {
    "two shares": (quantile, {"reports": {SHARE: [1.0, 1.0]}}),
    "no share": (quantile, {}),
    "a share that is no number": (quantile, {"reports": {SHARE: math.nan}}),
    "a mean that is no number": (adaptive, {"mean": math.nan}),
    "a mean without its noise": (adaptive, {"noise": None}),
    "noise without a mean": (adaptive, {"mean": None}),
    "means": (adaptive, {"mean": [0.5, 0.5]}),
    "noise below zero": (adaptive, {"noise": -0.1}),
    "noise whose square overflows": (adaptive, {"noise": 1e200}),
    "a mean that overflows in a sum": (adaptive, {"mean": 1.7e308}),
    "complex parameters": (lambda clients: FedAvg(), {"fill": 1j}),
    "parameters that overflow in a sum": (lambda clients: FedAvg(), {"fill": 1.7e308}),
    "parameters that overflow in a control": (scaffold, {"fill": 1.7e308}),
}


def test_a_malformed_answer_counts_as_none_and_the_others_go_on():
    for kind, (strategy, wrong) in MALFORMED.items():
        good = {"reports": {SHARE: 0.5}} if strategy is quantile else {}
        clients = [Canned(**wrong), Canned(**wrong), Canned(**good)]
        history = simulate(strategy(3), clients, start(), 2)
        assert [done.answered for done in history.rounds] == [(2,), (2,)], kind
        assert all(bool((value == 1).all()) for value in history.params.values())
        assert all(math.isfinite(v) for done in history.rounds for v in done.metrics.values())


def test_a_client_whose_budget_is_used_stays_away():
    clients = [client(steps=LOCAL_STEPS), client(None, 1)]
    history = simulate(FedAvg(), clients, start(), 2)
    assert [done.answered for done in history.rounds] == [(0, 1), (1,)]
    assert "budget is used" in history.rounds[1].absent[0]


def test_partial_participation_charges_those_that_took_part():
    def rounds():
        clients = [client(None, p) for p in range(4)]
        options = {"clients_per_round": 2, "seed": 5}
        return clients, simulate(FedAvg(), clients, start(), ROUNDS, **options)

    clients, history = rounds()
    taken = [sum(p in done.asked for done in history.rounds) for p in range(4)]
    assert all(len(done.asked) == 2 for done in history.rounds)
    assert len({done.asked for done in history.rounds}) > 1
    assert [charges(one) for one in clients] == [LOCAL_STEPS * t for t in taken]
    assert same(rounds()[1].params, history.params)


def test_one_open_client_at_a_time_is_as_good_as_all(tmp_path):
    built = []

    def build(number):
        built.append(number)
        return client(follower(), number, folder=tmp_path / str(number))

    with closing(ClientPool(build, 3, most=1)) as pool:
        found = simulate(adaptive(), pool, start(), ROUNDS)
    assert built == [0, 1, 2] * (2 * ROUNDS)
    expected = simulate(adaptive(), [client(follower(), p) for p in range(3)], start(), ROUNDS)
    assert same(found.params, expected.params)
    assert client(follower(), 0, folder=tmp_path / "0").rounds_left == 0  # the pool has let go of the folder


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"clients_per_round": 3}, {"first_round": 0}])
def test_bad_settings_are_named(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        simulate(FedAvg(), [], start(), **({"rounds": 1} | wrong))


def scored(number, times=10, **options):
    """A client that holds a share of its records apart."""
    score = eq.Score("accuracy", share=0.3, times=times)
    data, budget = eq.Data(records(number), score=score), eq.Budget(8.0, 1e-3)
    sampling = eq.Poisson(20, 42, WHOLE)  # of those that are trained on
    method = eq.DPSGD(clip_norm=0.5)
    return client(method, number, data=data, budget=budget, sampling=sampling, **options)


def test_scores_of_sites_are_booked_repeated_and_sent_once_each_round(tmp_path):
    """A client without a score, and one whose plan has no further one, are left out of the scores alone."""
    clients = [scored(0, folder=tmp_path / "0"), client(None, 1), scored(2, times=1)]
    history = simulate(FedAvg(), clients, start(), ROUNDS, score_every=2, folder=tmp_path / "server")
    assert [set(done.scores) for done in history.rounds] == [set(), {0, 2}, {0}]
    assert all(done.answered == (0, 1, 2) for done in history.rounds)
    last = history.rounds[-1].scores[0]
    assert 0 <= last["private_accuracy"] <= 1
    # the same question costs nothing and changes nothing, also of another process
    releases, request = charges(clients[0]), Request(ROUNDS, history.params, kind="score")
    before = copied(clients[0].training.parameters)
    assert clients[0].answer(request).reports == last
    assert (charges(clients[0]), same(clients[0].training.parameters, before)) == (releases, True)
    name = "evaluation.private_accuracy"
    log = [json.loads(row) for row in (tmp_path / "0" / "metrics.jsonl").read_text().splitlines()]
    assert [row[name] for row in log if name in row] == [
        done.scores[0]["private_accuracy"] for done in history.rounds if done.scores
    ]
    clients[0].close()
    clients[0] = scored(0, folder=tmp_path / "0")
    assert clients[0].answer(request).reports == last
    with pytest.raises(Refused, match="asked for already"):
        clients[0].answer(Request(1, history.params, kind="score"))
    again = simulate(FedAvg(), clients, start(), ROUNDS, score_every=2, folder=tmp_path / "server")
    assert again.rounds == history.rounds


def test_a_score_costs_by_its_own_side_alone():
    """By dp_accounting: a record is trained on or scored, and either side meets the whole budget."""
    one = scored(0, times=ROUNDS)
    simulate(FedAvg(), [one], start(), ROUNDS, score_every=1)
    method, score = (
        dp_accounting.GaussianDpEvent(one.mechanism.noise_multiplier) for one in one.training.plan.releases
    )
    exact = []
    for event, count in ((dp_accounting.PoissonSampledDpEvent(20 / 42, method), WHOLE), (score, ROUNDS)):
        accountant = dp_accounting.pld.PLDAccountant()
        exact.append(accountant.compose(event, count).get_epsilon(1e-3))
    assert max(exact) == pytest.approx(one.statement().epsilon, rel=1e-3)
    assert min(exact) == pytest.approx(max(exact), rel=0.02)


def test_clients_join_and_leave(tmp_path):
    clients = [client(None, p) for p in range(3)]
    there = {1: [0], 2: [2, 0], 3: [1, 2]}
    history = simulate(FedAvg(), clients, start(), ROUNDS, members=there.__getitem__)
    assert [done.asked for done in history.rounds] == [(0,), (0, 2), (1, 2)]
    assert [one.rounds_done for one in clients] == [2, 1, 2]
    with pytest.raises(ValueError, match=r"members\(1\)"):
        simulate(FedAvg(), clients, start(), 1, members=lambda number: [3])


def test_a_servers_folder_goes_on_with_a_client_more_and_without_one_that_left(tmp_path):
    clients = [client(None, p) for p in range(3)]
    for count, rounds in ((2, 1), (3, 2), (3, 3)):
        if rounds == 3:
            clients[0].finish()
        history = simulate(FedAvg(), clients[:count], start(), rounds, folder=tmp_path / "server")
    assert [done.answered for done in history.rounds] == [(0, 1), (0, 1, 2), (1, 2)]
    assert "has finished" in history.rounds[-1].absent[0]
    with pytest.raises(ValueError, match="holds rounds under"):
        simulate(FedAvg(), clients, start(), 3, folder=tmp_path / "server", seed=1)
    with pytest.raises(ValueError, match=r"now model="):
        simulate(FedAvg(), clients, {"w": start()["0.bias"]}, 3, folder=tmp_path / "server")
