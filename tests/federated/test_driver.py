"""Rounds in one process: who takes part, who drops out, what the server makes of the answers."""

from __future__ import annotations

import json
import math

import dp_accounting
import pytest
import torch
from federated_problem import (
    LOCAL_STEPS,
    RECORDS,
    ROUNDS,
    adaptive,
    charges,
    client,
    follower,
    loss,
    network,
    records,
    same,
    start,
    train,
)

import equipoise as eq
from baselines.fedprox import Proximal
from baselines.scaffold import ScaffoldAverage
from equipoise.federated import AdaptDPFedAvg, FedAvg, Refused, Reply, Request, simulate
from equipoise.federated.client_pool import ClientPool
from equipoise.federated.methods.server_quantile import SHARE, QuantileFedAvg
from equipoise.federated.methods.server_radius import SQUARES, SQUARES_NOISE
from equipoise.methods import AutoS, ReleasedQuantile
from equipoise.methods.adaptive_rms import RMSRadius
from equipoise.methods.named_tensors import copied
from equipoise.privacy.errors import ChangedQueryError, JournalError, LedgerError
from equipoise.training.folder.checkpoint import CheckpointError

WHOLE = ROUNDS * LOCAL_STEPS


def quantile(clients):
    return QuantileFedAvg(ReleasedQuantile(0.5))


def scaffold(clients):
    return ScaffoldAverage(clients, local_steps=1, learning_rate=1e-3)


class Flaky:
    """A client that is away in some rounds: before it is asked, or between the query and the training."""

    def __init__(self, inner, asking=(), training=()):
        self.inner, self.asking, self.training = inner, asking, training

    def answer(self, request):
        if request.kind == "query" and request.round in self.asking:
            raise ConnectionError("away")
        if request.kind == "train" and request.round in self.training:
            raise TimeoutError("too slow")
        return self.inner.answer(request)


@pytest.mark.parametrize("error", [LedgerError, ChangedQueryError, JournalError, CheckpointError])
def test_a_client_whose_ledger_is_broken_is_out_of_the_round_and_named(monkeypatch, caplog, error):
    """The others go on; what its ledger says is for its own log, and not for the server."""
    clients = [client(number=p) for p in range(3)]

    def fail(*args, **options):
        raise error("line 17, the record of Smith")

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
    assert words.startswith(f"{error.__name__}: the client's ledger or folder is broken")
    assert "Smith" not in words
    assert "Smith" in caplog.text
    assert [charges(one) for one in clients] == [WHOLE, WHOLE - LOCAL_STEPS, WHOLE]
    away = [client(number=0), Flaky(client(number=1), training=(2,)), client(number=2)]
    assert same(found.params, simulate(FedAvg(), away, start(), ROUNDS).params)


def test_the_mean_has_equal_weights_whatever_the_sizes():
    sizes = (20, 60)
    clients = [
        client(
            eq.methods.ClipSGD(clip_norm=math.inf),
            p,
            data=records(p, n),
            sampling=eq.FullBatch(n, 1),
            local_steps=1,
        )
        for p, n in enumerate(sizes)
    ]
    found = simulate(FedAvg(), clients, start(), 1).params
    answers = [train(one, 1, start()).params for one in clients]  # the same request: the same answers
    for name, value in found.items():
        torch.testing.assert_close(value, (answers[0][name] + answers[1][name]) / 2, rtol=0, atol=0)


@pytest.mark.parametrize("scale", ["g_hat", "self"])
def test_larger_losses_change_only_the_scale(scale):
    """Losses times a, G times a, rate over a, the same seeds: the same path, the radius times a."""
    found = []
    for factor in (1.0, 8.0):
        clients = [
            client(
                follower(50.0 * factor),
                p,
                loss_function=lambda model, batch, factor=factor: factor * loss(model, batch),
                learning_rate=0.3 / factor,
            )
            for p in range(2)
        ]
        rule = RMSRadius(50.0 * factor, scale=scale)
        server = AdaptDPFedAvg(rule, ROUNDS, 2)
        history = simulate(server, clients, start(), ROUNDS)
        found.append((history.params, [done.metrics["radius"] / factor for done in history.rounds]))
    for name, value in found[0][0].items():
        torch.testing.assert_close(value, found[1][0][name], rtol=1e-9, atol=1e-12)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-9)
    assert max(found[0][1]) < 50.0


def sending(requests, request):
    """The rest of a round whose next request is known."""
    while True:
        try:
            request = requests.send((yield request))
        except StopIteration as finished:
            return finished.value


def test_the_radius_is_a_function_of_what_was_released():
    heard = []

    class Listening(AdaptDPFedAvg):
        def round(self, number, params):
            requests = super().round(number, params)
            query = next(requests)
            heard.append((query.extras["square_limit"], (yield query)))
            return (yield from sending(requests, requests.send(heard[-1][1])))

    strategy = Listening(RMSRadius(5.0, scale="self", kappa=4.0), rounds=ROUNDS, clients=2)
    clients = [client(follower(5.0), p) for p in range(2)]
    history = simulate(strategy, clients, start(), ROUNDS)
    rule = RMSRadius(5.0, scale="self", kappa=4.0)
    state = rule.start()
    for (limit, replies), done in zip(heard, history.rounds, strict=True):
        assert limit == state["square_limit"]
        mean = limit * sum(r.reports[SQUARES] for r in replies) / 2
        noise = limit * (3.0 / RECORDS) / math.sqrt(2)  # z_C U / (n sqrt(P))
        state = rule.update(state, mean, noise, 1)
        assert done.metrics["radius"] == pytest.approx(state["clip_norm"])
    assert len({done.metrics["radius"] for done in history.rounds}) == ROUNDS
    entries = clients[0].training.ledger.journal.entries()
    bounds = [entry.bounds for entry in entries if entry.kind == "release"]
    used = [b["gradient"] for b in bounds if "gradient" in b]
    expected = [done.metrics["radius"] for done in history.rounds for _ in range(LOCAL_STEPS)]
    assert used == pytest.approx(expected)


def test_clients_that_drop_out_in_a_round():
    """One is away for a round, one between query and training: the others go on, every ledger is right."""
    inner = [client(follower(), p) for p in range(3)]
    clients = [inner[0], Flaky(inner[1], asking=(2,)), Flaky(inner[2], training=(2,))]
    history = simulate(adaptive(3), clients, start(), ROUNDS)
    assert [done.answered for done in history.rounds] == [(0, 1, 2), (0,), (0, 1, 2)]
    assert set(history.rounds[1].absent) == {1, 2}
    whole = 1 + LOCAL_STEPS
    assert [charges(one) for one in inner] == [3 * whole, 2 * whole, 2 * whole + 1]
    fewer = simulate(FedAvg(), [client()], start(), 1).params
    alone = simulate(FedAvg(), [client(), Flaky(client(None, 1), training=(1,))], start(), 1).params
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


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_answer_counts_as_none_and_the_others_go_on(kind):
    strategy, wrong = MALFORMED[kind]
    good = {"reports": {SHARE: 0.5}} if strategy is quantile else {}
    clients = [Canned(**wrong), Canned(**wrong), Canned(**good)]
    history = simulate(strategy(3), clients, start(), 2)
    assert [done.answered for done in history.rounds] == [(2,), (2,)]
    assert all(bool((value == 1).all()) for value in history.params.values())
    assert all(math.isfinite(v) for done in history.rounds for v in done.metrics.values())


def test_a_client_whose_budget_is_used_stays_away():
    clients = [client(steps=LOCAL_STEPS), client(None, 1)]
    history = simulate(FedAvg(), clients, start(), 2)
    assert [done.answered for done in history.rounds] == [(0, 1), (1,)]
    assert "budget is used" in history.rounds[1].absent[0]


def test_partial_participation_charges_those_that_took_part():
    clients = [client(None, p) for p in range(4)]
    history = simulate(FedAvg(), clients, start(), ROUNDS, clients_per_round=2, seed=5)
    taken = [sum(p in done.asked for done in history.rounds) for p in range(4)]
    assert all(len(done.asked) == 2 for done in history.rounds)
    assert len({done.asked for done in history.rounds}) > 1
    assert [charges(one) for one in clients] == [LOCAL_STEPS * t for t in taken]
    again = simulate(
        FedAvg(), [client(None, p) for p in range(4)], start(), ROUNDS, clients_per_round=2, seed=5
    )
    assert same(again.params, history.params)


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
    assert client(follower(), 0, folder=tmp_path / "0").rounds_left == 0  # the pool has let go of the folder


@pytest.mark.parametrize("begin", [0.1, 10.0])
def test_the_clip_norm_goes_to_the_quantile(begin):
    """40 clients whose norms have the median 1; Flower's own wrapper runs away from it."""
    norms = torch.linspace(0.5, 1.5, 40)
    server = QuantileFedAvg(ReleasedQuantile(begin, quantile=0.5, learning_rate=0.2))
    for _ in range(60):
        clip_norm = server.extras()["clip_norm"]
        share = float((norms <= clip_norm).double().mean())
        server.aggregate({"w": torch.zeros(1)}, [Reply({"w": torch.zeros(1)}, {SHARE: share})])
    assert 0.9 < clip_norm < 1.1


@pytest.mark.parametrize(
    "method",
    [
        lambda: eq.DPSGD(clip_norm=0.5, noise_multiplier=0.5),
        lambda: eq.DPSGD(clip_norm=eq.methods.ReleasedQuantile(0.5, count_noise=0.3), noise_multiplier=0.5),
        lambda: eq.DPSGD(clip_norm=0.5, clip_rule=AutoS(), noise_multiplier=0.5),
        lambda: Proximal(eq.DPSGD(clip_norm=0.5, noise_multiplier=0.5), strength=0.1),
    ],
    ids=["fixed", "quantile", "normalised", "fedprox"],
)
def test_baselines_learn(method):
    """Five rounds of two clients bring the loss on their records down."""
    clients = [client(method(), p, steps=5 * LOCAL_STEPS) for p in range(2)]
    model = network()

    def measure(params):
        data = records(7)
        values = torch.func.functional_call(model, dict(params), (data["input"],))
        return {"loss": float(torch.nn.functional.cross_entropy(values, data["label"]))}

    history = simulate(FedAvg(), clients, start(), 5, evaluate=measure)
    assert history.rounds[-1].metrics["loss"] < 0.9 * measure(start())["loss"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rounds": 0}, "rounds=0"),
        ({"rounds": 1, "clients_per_round": 3}, "clients_per_round=3"),
        ({"rounds": 1, "first_round": 0}, "first_round=0"),
    ],
)
def test_bad_settings_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        simulate(FedAvg(), [], start(), **options)


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
    of_method, of_score = one.training.plan.releases
    sides = [
        dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(
                20 / 42, dp_accounting.GaussianDpEvent(of_method.mechanism.noise_multiplier)
            ),
            WHOLE,
        ),
        dp_accounting.SelfComposedDpEvent(
            dp_accounting.GaussianDpEvent(of_score.mechanism.noise_multiplier), ROUNDS
        ),
    ]
    exact = [dp_accounting.pld.PLDAccountant().compose(side).get_epsilon(1e-3) for side in sides]
    assert max(exact) == pytest.approx(one.statement().epsilon, rel=1e-3)
    assert min(exact) == pytest.approx(max(exact), rel=0.02)


def test_clients_join_and_leave():
    """The mean of a round is that of the members; a server's folder goes on with one client more."""
    clients = [client(None, p) for p in range(3)]
    there = {1: [0], 2: [2, 0], 3: [1, 2]}
    history = simulate(FedAvg(), clients, start(), ROUNDS, members=there.__getitem__)
    assert [done.asked for done in history.rounds] == [(0,), (0, 2), (1, 2)]
    assert [one.rounds_done for one in clients] == [2, 1, 2]
    with pytest.raises(ValueError, match=r"members\(1\)"):
        simulate(FedAvg(), clients, start(), 1, members=lambda number: [3])


def test_a_servers_folder_goes_on_with_a_client_more_and_without_one_that_left(tmp_path):
    clients = [client(None, p) for p in range(3)]
    for count, rounds in ((2, 1), (3, 2)):
        history = simulate(FedAvg(), clients[:count], start(), rounds, folder=tmp_path / "server")
    clients[0].finish()
    history = simulate(FedAvg(), clients, start(), 3, folder=tmp_path / "server")
    assert [done.answered for done in history.rounds] == [(0, 1), (0, 1, 2), (1, 2)]
    assert "has finished" in history.rounds[-1].absent[0]
