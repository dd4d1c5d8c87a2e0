"""A server that tries everything: what it learns stays within each client's plan, whatever it asks."""

import math
import random

import pytest
import torch
from federated_problem import (
    LOCAL_STEPS,
    RECORDS,
    ROUNDS,
    ask,
    client,
    loss,
    network,
    records,
    same,
    start,
    train,
)

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


def test_a_refusal_leaves_the_journal_as_it_was(tmp_path):
    one = victim(folder=tmp_path, reproducible=False)
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
        lambda: train(one, 2, start(), 0.1, control=start()),
        lambda: ask(one, 1, moved, 0.25),
        lambda: ask(one, 2, start(), math.inf),
    ):
        with pytest.raises(Refused):
            request()
    assert (journal.read_bytes(), one.rounds_left) == before


def test_averaging_the_noise_away_is_paid_for_each_time():
    """The same model in every round: every round has noise of its own and is charged; then it is over."""
    one = victim(reproducible=False)
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


def broken(change):
    """The start with something else in the place of one tensor."""
    return start() | {"0.bias": change(start()["0.bias"])}


MODELS = {
    "a model with NaN": lambda: broken(lambda bias: bias * math.nan),
    "an infinite model": lambda: broken(lambda bias: bias + math.inf),
    "a shape": lambda: broken(lambda bias: bias[:-1]),
    "whole numbers": lambda: broken(lambda bias: bias.long()),
    "complex numbers": lambda: broken(lambda bias: bias.to(torch.complex64)),
    "no tensor": lambda: broken(lambda bias: 3.0),
    "a tensor too few": lambda: {name: value for name, value in start().items() if name != "0.bias"},
    "a tensor too many": lambda: {**start(), "extra": torch.zeros(1)},
}
REQUESTS = {
    **{name: lambda make=make: Request(1, make(), {"clip_norm": 0.1}) for name, make in MODELS.items()},
    **{f"{name} in a query": lambda make=make: Request(1, make(), {"square_limit": 0.1}, "query")
       for name, make in MODELS.items()},
    **{f"the radius {r!r}": lambda r=r: Request(1, start(), {"clip_norm": r})
       for r in (math.nan, math.inf, 0.0, -1.0, 0.6, 5e-324, 0.9e-25, True, "1", None, [0.5])},
    **{f"the scale {u!r}": lambda u=u: Request(1, start(), {"square_limit": u}, "query")
       for u in (math.nan, 0.0, -1.0, 0.26, True, "1", None)},
    **{f"the round {number!r}": lambda number=number: Request(number, start(), {"clip_norm": 0.1})
       for number in (0, -1, 1.0, True, None, "1")},
    "no radius": lambda: Request(1, start()),
    "no scale": lambda: Request(1, start(), {}, "query"),
    "an extra too many": lambda: Request(1, start(), {"clip_norm": 0.1, "learning_rate": 10.0}),
    "tensors for a number": lambda: Request(1, start(), {"clip_norm": start()}),
    "the extras of a query": lambda: Request(1, start(), {"square_limit": 0.1}),
    "an unknown kind": lambda: Request(1, start(), {"clip_norm": 0.1}, "evaluate"),
}  # fmt: skip


def test_a_request_that_makes_no_sense_is_refused_and_free(tmp_path):
    one = victim(folder=tmp_path)
    for kind, request in REQUESTS.items():
        with pytest.raises(Refused, match="othing was spent"):
            one.answer(request())
        assert (booked(one), one.rounds_left) == ([], ROUNDS), kind
        assert (tmp_path / "private" / "rounds.jsonl").read_bytes() == b"", kind


def test_what_a_method_does_not_take_is_refused_and_free():
    """DP-SGD at a fixed clip norm; and parameters that overflow only in the client's own type."""
    plain = client()
    for request in (Request(1, start(), {"clip_norm": 0.1}), Request(1, start(), {}, "query")):
        with pytest.raises(Refused, match=r"by method 'dp-sgd'|method 'dp-sgd' answers no request"):
            plain.answer(request)
    single = client(model=network().float(), data={**records(), "input": records()["input"].float()})
    with pytest.raises(Refused, match="not finite"):
        train(single, 1, {name: torch.full_like(value, 1e300) for name, value in start().items()})
    assert booked(plain) == booked(single) == []
