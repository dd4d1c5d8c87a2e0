"""The fused radius in a federation: squares beside the parameters, a radius of the next round, no query."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from federated_problem import (
    LOCAL_STEPS,
    NOISE,
    RECORDS,
    ask,
    charges,
    client,
    follower,
    loss,
    network,
    records,
    released,
    same,
    start,
    train,
)

import equipoise as eq
from equipoise.federated import (
    AdaptDPFedAvg,
    FedAvg,
    Proximal,
    PublishedServerRMS,
    Refused,
    Reply,
    ServerRMS,
    simulate,
)
from equipoise.federated.methods.server_radius import SQUARES, SQUARES_NOISE
from equipoise.methods.adaptive_rms import Fused, MeanSquareRule, RMSRadius
from equipoise.methods.base import Setting

ROUNDS, BATCH = 3, 20


def fused(*given, **options):
    return follower(*given, variant="fused", **options)


def server(clients=2, clip_norm=0.5, initial_clip_norm=None, rounds=ROUNDS, **rule):
    radius = RMSRadius(clip_norm, **rule)
    return AdaptDPFedAvg(radius, rounds, clients, variant="fused", initial_clip_norm=initial_clip_norm)


class Away:
    """A client that cannot be reached in some rounds, and answers too late in others."""

    def __init__(self, inner, rounds=(), late=()):
        self.inner, self.rounds, self.late = inner, rounds, late

    def answer(self, request):
        if request.round in self.rounds:
            raise ConnectionError("away")
        answer = self.inner.answer(request)
        if request.round in self.late:
            raise TimeoutError("too slow")
        return answer


# ---- laws


@pytest.mark.parametrize(
    ("rule", "initial"),
    [
        ({}, None),
        ({"offset": "paper", "tau": 0.3}, 0.1),
        ({"scale": "self", "kappa": 4.0, "offset": "none"}, None),
        ({"scale": "self", "kappa": 8.0, "ema_beta": 0.7}, 2.0),
    ],
)
def test_one_client_and_one_step_a_round_are_central_training_bit_for_bit(rule, initial):
    model = network()
    training = eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.3),
        loss=loss,
        data=records(),
        sampling=eq.Poisson(BATCH, RECORDS, 6),
        method=eq.AdaptiveRMS(
            clip_norm=4.0, variant=Fused(initial_clip_norm=initial), radius=MeanSquareRule(**rule), **NOISE
        ),
        run=eq.Run(reproducible=True),
    )
    central = [step.clip_norm for step in training]
    one = client(fused(4.0, 1), sampling=eq.Poisson(BATCH, RECORDS, 6), local_steps=1)
    found = simulate(server(1, 4.0, initial, rounds=6, **rule), [one], start(), 6)
    assert same(found.params, {name: p.detach() for name, p in model.named_parameters()})
    assert [done.metrics["radius"] for done in found.rounds] == central
    assert len(set(central)) > 3


def test_at_its_limit_it_is_dp_fedavg_bit_for_bit():
    adaptive = simulate(server(tau=1e12), [client(fused(), p) for p in range(2)], start(), ROUNDS)
    fixed = simulate(FedAvg(), [client(None, p) for p in range(2)], start(), ROUNDS)
    assert same(adaptive.params, fixed.params)
    assert [done.metrics["radius"] for done in adaptive.rounds] == [0.5] * ROUNDS


@pytest.mark.parametrize(("z", "epsilon"), [(1.0, 1.647), (1.026, 1.571)])
def test_a_step_is_one_event_of_the_joint_multiplier(z, epsilon):
    """That of the centralised method, whatever K; epsilon as worked out for these numbers."""
    method = fused(noise_multiplier=z, radius_noise_multiplier=4.47)
    sampling = eq.Poisson(256, 60_000, 4680)
    plan = method.plan(Setting(sampling=sampling)).releases
    alone = eq.DPSGD(noise_multiplier=(z**-2 + 4.47**-2) ** -0.5)
    expected = alone.plan(Setting(sampling=sampling)).releases
    assert plan.epsilon(1e-5).value == pytest.approx(expected.epsilon(1e-5).value, rel=1e-6)
    assert plan.epsilon(1e-5).value == pytest.approx(epsilon, rel=5e-3)
    one = client(fused())
    simulate(server(1), [one], start(), ROUNDS)
    assert charges(one) == ROUNDS * LOCAL_STEPS
    assert one.training.method.passes_over("batch") == 1


@pytest.mark.parametrize("scale", ["g_hat", "self"])
def test_the_radius_is_a_function_of_what_was_released(scale):
    rule = RMSRadius(5.0, scale=scale, kappa=4.0 if scale == "self" else None)
    clients = [client(fused(5.0), p) for p in range(2)]
    heard = [released(one) for one in clients]
    strategy = AdaptDPFedAvg(rule, ROUNDS, 2, variant="fused", initial_clip_norm=3.0)
    history = simulate(strategy, clients, start(), ROUNDS)
    state = rule.start(3.0)
    for number, done in enumerate(history.rounds):
        assert done.metrics["radius"] == pytest.approx(state["clip_norm"])
        steps = slice(number * LOCAL_STEPS, (number + 1) * LOCAL_STEPS)
        means = [sum(values[steps]) / LOCAL_STEPS / BATCH for values in heard]
        limit = state["square_limit"]
        noise = limit * 3.0 / BATCH / math.sqrt(LOCAL_STEPS * 2)  # z_C U / (B sqrt(K P))
        state = rule.update(state, limit * sum(means) / 2, noise, ROUNDS * 2)
    bounds = [e.bounds for e in clients[0].training.ledger.journal.entries() if e.kind == "release"]
    used = [done.metrics["radius"] for done in history.rounds for _ in range(LOCAL_STEPS)]
    assert [b["gradient"] for b in bounds] == pytest.approx(used)
    assert {b["squares"] for b in bounds} == {1.0}
    assert len(set(used)) == ROUNDS


def test_the_noise_of_the_answer_is_what_it_says():
    """Gradients of zero leave the noise alone, averaged over the steps."""
    flat = {"loss_function": lambda model, batch: 0 * loss(model, batch), "steps": 80, "local_steps": 4}
    one = client(fused(round_length=4), **flat)
    asked = {"clip_norm": 0.5, "square_limit": 0.25}
    sent = [train(one, r, start(), **asked).reports for r in range(1, 21)]
    means = [reports[SQUARES] for reports in sent]
    assert all(reports[SQUARES_NOISE] == 3.0 / BATCH / 2 for reports in sent)
    assert statistics.stdev(means) == pytest.approx(3.0 / BATCH / 2, rel=0.4)  # without sqrt(K) off by 2
    assert abs(statistics.mean(means)) < 4 * 3.0 / BATCH / 2 / math.sqrt(20)


def test_norms_that_are_no_numbers_count_as_large():
    """The server's model of zeros has a finite loss and no gradient; squares of the second step are large."""

    def kinked(model, batch):
        return loss(model, batch) + model(batch["input"]).square().sum(1).sqrt()

    quiet = fused(noise_multiplier=1e-9, radius_noise_multiplier=1e-9)
    one = client(quiet, loss_function=kinked, sampling=eq.FullBatch(RECORDS, LOCAL_STEPS))
    zeros = {name: torch.zeros_like(value) for name, value in start().items()}
    sent = train(one, 1, zeros, clip_norm=0.1, square_limit=1e-20)
    assert sent.reports[SQUARES] == pytest.approx(1.0, abs=1e-6)


# ---- rounds


@pytest.mark.parametrize("scale", ["g_hat", "self"])
def test_clients_that_miss_rounds_go_on_in_the_units_of_the_server(scale):
    kappa = 1.0 if scale == "self" else None
    inner = [client(fused(5.0, radius_noise_multiplier=0.3), p) for p in range(3)]
    clients = [inner[0], Away(inner[1], rounds=(2,)), Away(inner[2], late=(2,))]
    strategy, asked = server(3, 5.0, scale=scale, kappa=kappa), []

    def note(done):
        asked.append((strategy.state_dict()["square_limit"], done.answered))

    history = simulate(strategy, clients, start(), ROUNDS, on_round=note)
    assert [who for _, who in asked] == [(0, 1, 2), (0,), (0, 1, 2)]
    assert [charges(one) for one in inner] == [c * LOCAL_STEPS for c in (3, 2, 3)]
    for one in inner:  # the limit of round 3, made after round 2
        assert one.training.method_state["square_limit"] == asked[1][0]
        assert one.training.method_state["clip_norm"] == history.rounds[2].metrics["radius"]
    assert len({limit for limit, _ in asked}) == (3 if scale == "self" else 1)


def test_nobody_answers_and_the_radius_stays():
    history = simulate(server(1), [Away(client(fused()), rounds=(1, 2))], start(), 2)
    assert [done.metrics["radius"] for done in history.rounds] == [0.5, 0.5]


def test_a_client_lost_in_the_middle_of_a_round_sends_the_squares_of_whole_steps(tmp_path, monkeypatch):
    one = client(fused(), folder=tmp_path)
    asked = {"clip_norm": 0.5, "square_limit": 0.25}
    first = train(one, 1, start(), **asked)
    take, calls = one.training.take_step, []

    def dying():
        calls.append(1)
        if len(calls) == LOCAL_STEPS:
            raise KeyboardInterrupt
        return take()

    monkeypatch.setattr(one.training, "take_step", dying)
    with pytest.raises(KeyboardInterrupt):
        train(one, 2, start(), **asked)
    one.close()
    one = client(fused(), folder=tmp_path)
    heard = released(one)
    sent = train(one, 2, start(), **asked)
    assert len(heard) == LOCAL_STEPS
    assert sent.reports[SQUARES] == pytest.approx(sum(heard) / LOCAL_STEPS / BATCH)
    again = client(fused(), folder=(one.close(), tmp_path)[1])
    before = charges(again)
    assert same(train(again, 2, start(), **asked), sent)
    assert charges(again) == before
    assert not same(first, sent)


@pytest.mark.parametrize("beta", [0.0, 0.7])
def test_a_server_that_restarts_goes_on(tmp_path, beta):
    options = {"clip_norm": 5.0, "scale": "self", "kappa": 1.0, "ema_beta": beta}

    def made():
        return [client(fused(5.0, radius_noise_multiplier=0.3), p) for p in range(2)]

    whole, clients = simulate(server(**options), made(), start(), ROUNDS), made()
    simulate(server(**options), clients, start(), 1, folder=tmp_path)
    found = simulate(server(**options), clients, start(), ROUNDS, folder=tmp_path)
    assert same(found.params, whole.params)
    assert found.rounds == whole.rounds


@pytest.mark.parametrize("variants", [("round", "fused"), ("fused", "round")])
def test_a_folder_of_the_other_variant_is_refused(tmp_path, variants):
    def strategy(variant):
        return AdaptDPFedAvg(RMSRadius(0.5), ROUNDS, 1, variant=variant)

    def one(variant):
        return client(follower(variant=variant))

    begun, other = variants
    simulate(strategy(begun), [one(begun)], start(), 1, folder=tmp_path)
    late = one(other)
    with pytest.raises(ValueError, match=f"variant='{other}': the state is of variant='{begun}'"):
        simulate(strategy(other), [late], start(), ROUNDS, folder=tmp_path)
    assert charges(late) == 0


def test_bytes_of_a_round():
    size = sum(value.numel() * 8 for value in start().values())
    (done,) = simulate(server(), [client(fused(), p) for p in range(2)], start(), 1).rounds
    assert done.bytes_up == 2 * (size + 16)
    assert done.bytes_down == 2 * (size + 16)


def test_around_it_the_server_is_followed():
    clients = [client(Proximal(fused(5.0), 0.0), p) for p in range(2)]
    found = simulate(server(clip_norm=5.0), clients, start(), ROUNDS)
    plain = simulate(server(clip_norm=5.0), [client(fused(5.0), p) for p in range(2)], start(), ROUNDS)
    assert same(found.params, plain.params)
    assert found.rounds == plain.rounds


# ---- what makes no sense


@pytest.mark.parametrize("limit", [None, math.nan, math.inf, 0.0, -1.0, 0.26, "1", True, 10**400])
def test_a_limit_that_is_none_is_refused_and_free(limit):
    one = client(fused())
    with pytest.raises(Refused, match="square_limit"):
        train(one, 1, start(), clip_norm=0.5, square_limit=limit)
    assert charges(one) == 0
    assert train(one, 1, start(), clip_norm=0.5, square_limit=0.25)


@pytest.mark.parametrize("radius", [None, math.nan, 0.0, 1e-26, 0.6])
def test_a_radius_that_is_none_is_refused_and_free(radius):
    one = client(fused())
    with pytest.raises(Refused, match="clip_norm"):
        train(one, 1, start(), clip_norm=radius, square_limit=0.25)
    assert charges(one) == 0


def test_the_two_forms_do_not_mix():
    """Clients of another form than the server's are refused, or out of the round, and spend nothing."""
    one = client(fused())
    with pytest.raises(Refused, match="answers no request of kind 'query'"):
        ask(one, 1, start(), 0.25)
    other = client(follower())
    with pytest.raises(Refused, match=r"'square_limit'.* is not supported"):
        train(other, 1, start(), clip_norm=0.5, square_limit=0.25)
    assert charges(one) == charges(other) == 0


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


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: fused(radius_sampling_rate=0.5), "radius_sampling_rate=0.5 belongs to variant='round'"),
        (lambda: fused(round_length=0), "round_length=0"),
        (lambda: ServerRMS(variant="both"), "variant='both'"),
        (lambda: server(initial_clip_norm=0.6), "initial_clip_norm=0.6 is above"),
        (lambda: server(initial_clip_norm=-1.0), "initial_clip_norm=-1.0"),
        (lambda: AdaptDPFedAvg(RMSRadius(1.0), 3, 2, variant="both"), "variant='both'"),
        (lambda: AdaptDPFedAvg(RMSRadius(1.0), 3, 2, initial_clip_norm=0.5), "belongs to variant='fused'"),
        (lambda: client(fused(round_length=3)), "round_length=3"),
    ],
)
def test_bad_settings_are_named(make_it, words):
    with pytest.raises(ValueError, match=words):
        make_it()


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: fused(initial_clip_norm=0.1), "initial_clip_norm"),  # the server begins
        (lambda: PublishedServerRMS(variant="fused"), "variant"),
        (lambda: PublishedServerRMS(query_steps="first"), "query_steps"),
    ],
)
def test_a_form_has_no_settings_of_another(make_it, words):
    with pytest.raises(TypeError, match=words):
        make_it()
