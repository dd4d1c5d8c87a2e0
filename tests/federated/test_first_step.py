"""Squares that join the first local step of a round alone, the one at the global model."""

from __future__ import annotations

import math
import statistics

import dp_accounting as dp
import pytest
from federated_problem import (
    RECORDS,
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
from equipoise.federated import AdaptDPFedAvg, Proximal, Refused, ServerRMS, simulate
from equipoise.federated.methods.server_radius import SQUARES, SQUARES_NOISE
from equipoise.methods.adaptive_rms import RMSRadius
from equipoise.methods.base import Setting
from equipoise.privacy import epsilon

ROUNDS, STEPS, BATCH = 4, 3, 20
ASKED = {"clip_norm": 0.5, "square_limit": 0.25}


def first(clip_norm=0.5, round_length=STEPS, **options):
    return follower(clip_norm, round_length, variant="fused", query_steps="first", **options)


def one_of(method=None, number=0, **options):
    return client(method or first(), number, **({"steps": ROUNDS * STEPS, "local_steps": STEPS} | options))


def plan_of(method, sampling, budget=None):
    return method.plan(Setting(sampling=sampling, budget=budget)).releases


def booked(one):
    """What each release held, in order."""
    lines = one.training.ledger.journal.entries()
    return ["squares" in line.bounds for line in lines if line.kind == "release"]


ROUND = [True] + [False] * (STEPS - 1)


# ---- accounting


def test_the_plan_composes_both_kinds_of_steps():
    sampling = eq.Poisson(256, 60_000, 50 * 47)
    plan = plan_of(first(round_length=47, noise_multiplier=0.9), sampling)
    rate, joint = 256 / 60_000, (0.9**-2 + 3.0**-2) ** -0.5
    by_hand = [
        dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z)), count)
        for z, count in ((joint, 50), (0.9, 50 * 46))
    ]
    expected = epsilon(dp.ComposedDpEvent(by_hand), 1e-5).value
    assert plan.epsilon(1e-5).value == pytest.approx(expected, rel=1e-7)
    every = plan_of(follower(round_length=47, variant="fused", noise_multiplier=0.9), sampling)
    none = plan_of(eq.DPSGD(noise_multiplier=0.9), sampling)
    assert none.epsilon(1e-5).value < plan.epsilon(1e-5).value < every.epsilon(1e-5).value


def test_a_client_pays_for_the_rounds_that_it_took():
    one = one_of(budget=eq.Budget(50.0, 1e-5))
    for number in (1, 3):
        train(one, number, start(), **ASKED)
    assert booked(one) == 2 * ROUND
    taken = plan_of(first(), eq.Poisson(BATCH, RECORDS, 2 * STEPS))
    assert one.epsilon() == pytest.approx(taken.epsilon(1e-5).value, rel=1e-9)
    assert one.statement().guarantee == "proven"


def test_one_step_a_round_is_one_kind_of_step():
    both = [follower(4.0, 1, variant="fused", query_steps=which) for which in ("all", "first")]
    sampling = eq.Poisson(BATCH, RECORDS, ROUNDS)
    assert plan_of(both[0], sampling).fingerprint() == plan_of(both[1], sampling).fingerprint()
    found = [
        simulate(server(4.0), [one_of(method, local_steps=1, steps=ROUNDS)], start(), ROUNDS)
        for method in both
    ]
    assert same(found[0].params, found[1].params)
    assert found[0].rounds == found[1].rounds


COSTS = {  # (query_steps, radius_share): z, and the noise of a client's answer in units of U
    ("all", 0.2): (2.177, 0.136),
    ("first", 0.2): (1.997, 0.279),
    ("first", 0.5): (2.171, 0.152),
    ("first", 0.58): (2.267, 0.135),
}


@pytest.mark.parametrize(("which", "share"), COSTS)
def test_what_both_forms_cost_at_one_epsilon(which, share):
    """The plan of digits: 143 records, a tenth a step, 30 rounds of 5 steps, epsilon 3 at delta 1e-5."""
    method = ServerRMS(round_length=5, variant="fused", query_steps=which, radius_share=share)
    setting = Setting(sampling=eq.Poisson(14.3, 143, 150), budget=eq.Budget(3.0, 1e-5))
    plan = method.plan(setting)
    found = plan.releases["gradient"].noise_multiplier, method.radius_noise(plan)
    assert found == pytest.approx(COSTS[which, share], rel=5e-3)


# ---- laws


def server(clip_norm=0.5, clients=1, initial_clip_norm=None, **rule):
    radius = RMSRadius(clip_norm, **rule)
    return AdaptDPFedAvg(radius, ROUNDS, clients, variant="fused", initial_clip_norm=initial_clip_norm)


@pytest.mark.parametrize("scale", ["g_hat", "self"])
@pytest.mark.parametrize("around", [lambda method: method, lambda method: Proximal(method, 0.0)])
def test_the_radius_is_a_function_of_what_was_released(scale, around):
    rule = RMSRadius(5.0, scale=scale, kappa=4.0 if scale == "self" else None)
    clients = [one_of(around(first(5.0, radius_noise_multiplier=0.3)), p) for p in range(2)]
    heard = [released(one) for one in clients]
    strategy = AdaptDPFedAvg(rule, ROUNDS, 2, variant="fused", initial_clip_norm=3.0)
    history = simulate(strategy, clients, start(), ROUNDS)
    state = rule.start(3.0)
    for number, done in enumerate(history.rounds):
        assert done.metrics["radius"] == pytest.approx(state["clip_norm"])
        limit = state["square_limit"]
        noise = limit * 0.3 / BATCH / math.sqrt(2)  # z_C U / (B sqrt(P))
        mean = limit * sum(values[number] for values in heard) / BATCH / 2
        state = rule.update(state, mean, noise, ROUNDS * 2)
    assert [len(values) for values in heard] == [ROUNDS] * 2
    assert booked(clients[0]) == ROUNDS * ROUND


def test_the_squares_are_those_of_the_global_model():
    """By hand, at the model that the server sent, however far the steps lead."""
    quiet = first(3.0, noise_multiplier=1e-9, radius_noise_multiplier=1e-9)
    one = one_of(quiet, sampling=eq.FullBatch(RECORDS, STEPS), learning_rate=3.0)
    sent = train(one, 1, start(), clip_norm=3.0, square_limit=1.0)
    model, data, squares = network(), records(), []
    for i in range(RECORDS):
        model.zero_grad()
        loss(model, {name: value[i : i + 1] for name, value in data.items()}).sum().backward()
        squares.append(min(1.0, sum(float(p.grad.square().sum()) for p in model.parameters())))
    assert sent.reports[SQUARES] == pytest.approx(sum(squares) / RECORDS, abs=1e-6)
    assert not same(sent, start())


def test_the_noise_of_the_answer_is_what_it_says():
    """Gradients of zero leave the noise alone: one draw of it a round."""
    one = one_of(loss_function=lambda model, batch: 0 * loss(model, batch), steps=24 * STEPS)
    sent = [train(one, r, start(), **ASKED).reports for r in range(1, 25)]
    assert all(reports[SQUARES_NOISE] == 3.0 / BATCH for reports in sent)
    spread = statistics.stdev(reports[SQUARES] for reports in sent)
    assert spread == pytest.approx(3.0 / BATCH, rel=0.35)  # over three steps: off by 1.7


# ---- lost in the middle of a round


def lose(one, number, steps, params=None):
    """The client is lost in this round after so many of its steps."""
    take, calls = one.training.take_step, []

    def dying():
        if len(calls) == steps:
            raise KeyboardInterrupt
        calls.append(1)
        return take()

    one.training.take_step = dying
    with pytest.raises(KeyboardInterrupt):
        train(one, number, start() if params is None else params, **ASKED)
    one.close()


@pytest.mark.parametrize("steps", range(STEPS))
def test_asked_the_same_again_it_answers_as_if_nothing_had_happened(tmp_path, steps):
    undisturbed, one = one_of(), one_of(folder=tmp_path)
    expected = [train(undisturbed, number, start(), **ASKED) for number in (1, 2, 3)]
    assert same(train(one, 1, start(), **ASKED), expected[0])
    lose(one, 2, steps)
    one = one_of(folder=tmp_path)
    assert all(same(train(one, number, start(), **ASKED), expected[number - 1]) for number in (2, 3))
    assert booked(one) == 3 * ROUND


@pytest.mark.parametrize("steps", range(STEPS))
def test_gone_on_without_it_the_next_round_begins_with_squares(tmp_path, steps):
    one = one_of(folder=tmp_path)
    train(one, 1, start(), **ASKED)
    lose(one, 2, steps)
    one = one_of(folder=tmp_path)
    moved = {name: value + 0.1 for name, value in start().items()}
    heard = released(one)
    sent = train(one, 3, moved, **ASKED)
    assert sent.reports[SQUARES] == pytest.approx(heard[0] / BATCH)
    assert len(heard) == 1
    assert booked(one) == ROUND + ROUND[:steps] + ROUND


def test_rounds_that_broke_use_up_the_squares_and_the_rest_is_refused(tmp_path):
    for number in (1, 2, 3):
        elsewhere = {name: value + number for name, value in start().items()}
        lose(one_of(folder=tmp_path), number, 1, elsewhere)
    one = one_of(folder=tmp_path)
    train(one, 4, start(), **ASKED)
    before = booked(one)
    assert before == 3 * [True] + ROUND
    with pytest.raises(Refused, match="no release left"):
        train(one, 5, start(), **ASKED)
    assert booked(one) == before
    assert charges(one) < ROUNDS * STEPS


def test_a_folder_of_the_other_form_is_refused(tmp_path):
    one = one_of(folder=tmp_path)
    train(one, 1, start(), **ASKED)
    one.close()
    other = follower(round_length=STEPS, variant="fused")
    with pytest.raises(ValueError, match="query_steps"):
        one_of(other, folder=tmp_path)


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: ServerRMS(query_steps="first"), "belongs to variant='fused'"),
        (lambda: ServerRMS(variant="fused", query_steps="last"), "query_steps='last'"),
        (lambda: one_of(sampling=eq.FixedEpochs(BATCH, RECORDS, ROUNDS * STEPS)), "Give query_steps='all'"),
    ],
)
def test_bad_settings_are_named(make_it, words):
    with pytest.raises(ValueError, match=words):
        make_it()
