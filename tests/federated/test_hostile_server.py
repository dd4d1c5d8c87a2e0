"""A server that tries everything: what it learns stays within each client's plan, whatever it asks."""

from __future__ import annotations

import math
import random

import pytest
import torch
from federated_problem import LOCAL_STEPS, RECORDS, ROUNDS, ask, client, loss, records, same, start, train

import equipoise as eq
from equipoise.federated import Refused, Request, ServerRMS

BUDGET, G = eq.Budget(4.0, 1e-3), 0.5


def follower():
    return ServerRMS(G, round_length=LOCAL_STEPS)


def victim(**options):
    return client(follower(), budget=BUDGET, **options)


def entries(one):
    return one.training.ledger.journal.entries()


def booked(one):
    return [entry for entry in entries(one) if entry.kind == "release"]


def parameters(kind, rng):
    """Global models that a server may send: the start, moved, repeated, huge, tiny, broken."""
    scale = {"start": 0.0, "moved": 1.0, "huge": 1e30, "tiny": 1e-300, "NaN": math.nan}[kind]
    noise = torch.Generator().manual_seed(rng.randrange(3))
    return {
        name: value + scale * torch.randn(value.shape, generator=noise, dtype=value.dtype)
        for name, value in start().items()
    }


@pytest.mark.parametrize("reproducible", [True, False])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_any_sequence_of_requests_stays_within_the_plan(tmp_path, seed, reproducible):
    """Random requests, restarts in between: refusals book nothing, answers are bounded, epsilon keeps."""
    rng = random.Random(seed)
    options = {"folder": tmp_path, "reproducible": reproducible}
    one, answers = victim(**options), {}
    for _ in range(80):
        if rng.random() < 0.03:
            one.close()
            one = victim(**options)
        number = rng.choice([1, 1, 2, 2, 3, 4, 5, 0, -7, 2**62])
        kind = rng.choice(["start", "start", "moved", "huge", "tiny", "NaN"])
        radius = rng.choice([G, 1e-12, 0.1, 0.25, 1e9, -1.0, math.inf, math.nan, 5e-324])
        params, before = parameters(kind, rng), len(entries(one))
        key = (rng.choice(["ask", "train"]), number, kind, radius, float(params["0.bias"][0]))
        try:
            found = {"ask": ask, "train": train}[key[0]](one, number, params, radius)
        except Refused:
            continue
        assert number >= 1
        assert 0 < radius <= G
        assert kind != "NaN"
        if key in answers:  # asked before: the same answer, and nothing new in the ledger
            known = answers[key]
            assert found == known if key[0] == "ask" else same(found, known)
            assert len(entries(one)) == before
        answers[key] = found
    indices = [entry.draw.index for entry in booked(one)]
    assert len(set(indices)) == len(indices) <= ROUNDS * (1 + LOCAL_STEPS)
    for entry in booked(one):
        assert all(0 < bound <= max(G, 1.0) for bound in entry.bounds.values())
    assert one.epsilon() <= BUDGET.epsilon
    assert answers


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_refusal_leaves_the_journal_as_it_was(tmp_path, reproducible):
    one = victim(folder=tmp_path, reproducible=reproducible)
    ask(one, 1, start(), 0.25)
    train(one, 1, start(), 0.1)
    journal = tmp_path / "private" / "journal.jsonl"
    before = journal.read_bytes(), one.rounds_left
    moved = {name: value + 1 for name, value in start().items()}
    for request in (
        lambda: train(one, 1, moved, 0.1),
        lambda: train(one, 1, start(), 0.2),
        lambda: train(one, 2, start(), 1e9),
        lambda: train(one, 2, start(), None),
        lambda: train(one, 2, start(), 0.1, start()),
        lambda: ask(one, 1, moved, 0.25),
        lambda: ask(one, 2, start(), math.inf),
    ):
        with pytest.raises(Refused):
            request()
    assert (journal.read_bytes(), one.rounds_left) == before


@pytest.mark.parametrize("reproducible", [True, False])
def test_averaging_the_noise_away_is_paid_for_each_time(reproducible):
    """The same model in every round: every round has noise of its own and is charged; then it is over."""
    one = victim(reproducible=reproducible)
    means = [ask(one, number, start(), 0.25) for number in range(1, ROUNDS + 1)]
    spent = []
    for number in range(ROUNDS + 1, 2 * ROUNDS + 1):
        train(one, number, start(), 0.1)
        spent.append(one.epsilon())
    assert len(set(means)) == ROUNDS
    assert spent == sorted(set(spent))
    assert spent[-1] <= BUDGET.epsilon
    for request in (lambda: train(one, 99, start(), 0.1), lambda: ask(one, 99, start(), 0.25)):
        with pytest.raises(Refused):
            request()
    assert one.epsilon() == spent[-1]


def test_a_server_cannot_jump_over_the_end():
    """A round number beyond all others wastes the rounds before it, and buys nothing."""
    one = victim()
    train(one, 2**62, start(), 0.1)
    with pytest.raises(Refused, match="was asked for already"):
        train(one, 1, start(), 0.1)
    assert len(booked(one)) == LOCAL_STEPS


@pytest.mark.parametrize("radius", [5e-324, 1e-300, 0.9e-25])
def test_a_radius_whose_noise_could_vanish_is_refused_and_free(radius):
    one = victim()
    with pytest.raises(Refused, match="nothing was spent"):
        train(one, 1, start(), radius)
    assert booked(one) == []


@pytest.mark.parametrize("radius", [1e-25, 1e-12])
def test_the_smallest_radii_release_no_more_than_noise_of_their_size(radius):
    """The noise shrinks with the radius, and so does what a record can do: the answer is near the start."""
    one = victim()
    found = train(one, 1, start(), radius).params
    for name, value in start().items():
        assert bool(torch.isfinite(found[name]).all())
        assert float((found[name] - value).abs().max()) <= 1e3 * max(radius, 1e-15)
    assert len(booked(one)) == LOCAL_STEPS


def test_a_model_that_overflows_is_answered_with_noise():
    """No record has a finite gradient there: sums of zero are noised and charged as any others."""
    one = victim()
    huge = {name: torch.full_like(value, 1e200) for name, value in start().items()}
    found = train(one, 1, huge, 0.1).params
    assert all(bool(torch.isfinite(value).all()) for value in found.values())
    assert len(booked(one)) == LOCAL_STEPS


def failing_loss(limit):
    """A loss that raises where an output is beyond a limit, as `binary_cross_entropy` does."""

    def fails(model, batch):
        if bool((model(batch["input"]) > limit).any()):
            raise RuntimeError("all elements of input should be between 0 and 1")
        return loss(model, batch)

    return fails


@pytest.mark.parametrize("hit", ["the first record", "every record"])
def test_records_that_the_servers_parameters_make_fail_never_stop_a_step(hit):
    """A step that failed would be a test of a record of the server's choice, without noise and unbooked."""
    data = records()
    data["input"][0] = 100.0
    params = start()
    params["0.weight"].zero_()
    params["0.bias"].fill_(-10.0 if hit == "the first record" else 10.0)
    params["0.weight"][:, 0] = 1.0 if hit == "the first record" else 0.0
    params["2.weight"].fill_(100.0)
    one = victim(data=data, loss_function=failing_loss(400.0), sampling=eq.FullBatch(RECORDS, 6))
    train(one, 1, params, 0.25)
    assert len(booked(one)) == LOCAL_STEPS
    assert one.rounds_left == ROUNDS - 1


def test_a_loss_that_never_works_is_reported_before_the_first_request(tmp_path):
    with pytest.raises(ValueError, match="fails on"):
        victim(loss_function=failing_loss(-math.inf), folder=tmp_path / "client")
    assert not (tmp_path / "client").exists()


def broken(value):
    """The start with something else in the place of its first tensor."""
    first, *rest = start().items()
    return {first[0]: value, **dict(rest)}


NONSENSE = {
    "mixed names": lambda: {**start(), 1: torch.zeros(1)},
    "no values": lambda: broken(torch.zeros(5, 6, dtype=torch.float64, device="meta")),
    "nested": lambda: broken(torch.nested.nested_tensor([torch.zeros(3)])),
    "sparse": lambda: broken(torch.zeros(5, 6).to_sparse()),
    "words": lambda: broken("0.5"),
    "no mapping": lambda: [1, 2],
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", NONSENSE)
def test_a_model_that_is_none_is_refused_and_free(kind):
    one, model = victim(), NONSENSE[kind]()
    for request in (lambda: train(one, 1, model, 0.1), lambda: ask(one, 1, model, 0.1)):
        with pytest.raises(Refused, match="othing was spent"):
            request()
    assert booked(one) == []


NUMBERS = (10**400, 10**5000, -(10**5000), "1", None, [0.5], object(), True)


@pytest.mark.parametrize("number", NUMBERS, ids=range(len(NUMBERS)))
def test_a_number_that_is_none_is_refused_and_free(number):
    one = victim()
    for request in (
        lambda: train(one, 1, start(), number),
        lambda: ask(one, 1, start(), number),
        lambda: train(one, number, start(), 0.1),
        lambda: ask(one, number, start(), 0.1),
    ):
        with pytest.raises(Refused):
            request()
    assert booked(one) == []


REQUESTS = {
    "extras that are a list": lambda: Request(1, start(), [("clip_norm", 0.1)]),
    "an extra without a name": lambda: Request(1, start(), {"clip_norm": 0.1, 3: 0.1}),
    "an extra too many": lambda: Request(1, start(), {"clip_norm": 0.1, "learning_rate": 10.0}),
    "an extra that is None": lambda: Request(1, start(), {"clip_norm": None}),
    "a tensor for a number": lambda: Request(1, start(), {"clip_norm": torch.tensor(0.1)}),
    "tensors for a number": lambda: Request(1, start(), {"clip_norm": start()}),
    "the extras of a query": lambda: Request(1, start(), {"square_limit": 0.1}),
    "an unknown kind": lambda: Request(1, start(), {"clip_norm": 0.1}, "evaluate"),
    "no kind": lambda: Request(1, start(), {"clip_norm": 0.1}, None),
    "a kind that is a list": lambda: Request(1, start(), {"clip_norm": 0.1}, ["train"]),
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_that_is_none_is_refused_and_free(kind, tmp_path):
    one = victim(folder=tmp_path)
    log = tmp_path / "private" / "rounds.jsonl"
    before = log.read_bytes()
    with pytest.raises(Refused, match="othing was spent"):
        one.answer(REQUESTS[kind]())
    assert booked(one) == []
    assert log.read_bytes() == before
