"""Rounds over secure sums: the same training to the rounding, a server that sees masks, claims that hold."""

from __future__ import annotations

import math

import pytest
import torch
from federated_problem import LOCAL_STEPS, RECORDS, ROUNDS, adaptive, charges, client, follower, same, start

import equipoise as eq
from baselines.fedprox import Proximal
from baselines.scaffold import ScaffoldAverage
from contrib.secure_sum import SecureClient, SecureSum, noise_share
from contrib.secure_sum import simulate as simulate_secure
from equipoise.federated import FedAvg, Refused, Request, simulate
from equipoise.privacy import Gaussian, Release

pytest.importorskip("flwr", reason="needs the extra federated")

from flower_grid import Building, LocalGrid

from contrib.secure_sum.flower import secure_client_app, serve
from equipoise.federated.flower import client_app

CLIENTS = 3
RULE = SecureSum(CLIENTS)
ROUNDING = RULE.step  # of a mean of three: half a step, and half a step for the order of float64's sums


def sealed(method=None, count=CLIENTS, **options):
    return [SecureClient(client(method and method(), p, **options), RULE, p) for p in range(count)]


def digest_of(number, params, asked):
    """Of a request whose kind and extras are one mapping."""
    extras = {name: value for name, value in asked.items() if name != "kind"}
    return Request(number, params, extras, asked["kind"]).fingerprint()


def close(a, b, rounds=ROUNDS):
    """What was rounded in a round moves the next ones a little: a wide bound."""
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=0, atol=1000 * rounds * ROUNDING)
    assert not same(a, start())


KINDS = {
    "fixed": (None, FedAvg),
    "radius": (follower, adaptive),
    "around radius": (lambda: Proximal(follower(), 0.1), adaptive),
}


@pytest.mark.parametrize("kind", KINDS)
def test_secure_rounds_are_the_plain_rounds_to_the_rounding(kind):
    method, strategy = KINDS[kind]
    plain = simulate(strategy(), [client(method and method(), p) for p in range(CLIENTS)], start(), ROUNDS)
    clients = sealed(method)
    found = simulate_secure(strategy(), clients, start(), ROUNDS, RULE)
    close(found.params, plain.params)
    for ours, theirs in zip(found.rounds, plain.rounds, strict=True):
        assert ours.answered == theirs.answered
        assert ours.metrics == pytest.approx(theirs.metrics, abs=1e-5)
    assert [charges(one.client) for one in clients] == [ROUNDS * (LOCAL_STEPS + (kind != "fixed"))] * CLIENTS


class Building3(Building):
    """Client p of the small problem behind secure sums."""

    def __call__(self, context):
        return SecureClient(super().__call__(context), RULE, context.node_config["partition-id"])


def test_over_the_grid_the_server_sees_masks_alone(tmp_path):
    nodes = LocalGrid(secure_client_app(Building3(tmp_path, follower)), CLIENTS)
    found = serve(nodes, adaptive(), CLIENTS, start(), 1, RULE)
    plain = simulate(adaptive(), [client(follower(), p) for p in range(CLIENTS)], start(), 1)
    close(found.params, plain.params)
    kinds = {kind for kind, _, _ in nodes.sent}
    assert kinds == {"query.introduce", "query.secure"}
    uploads = [c["stage"]["masked"] for _, c in nodes.replies if "masked" in c.get("stage", {})]
    assert len(uploads) == 2 * CLIENTS
    assert len(set(uploads)) == len(uploads)
    for _, content in nodes.replies:
        assert all(type(record).__name__ == "ConfigRecord" for record in content.values())  # no arrays
        for name, value in content.get("stage", {}).items():
            assert name in ("key", "terms", "noise", "masked") or name.startswith("share.")
            assert isinstance(value, bytes) or name in ("terms", "noise")
    with pytest.raises(ValueError, match="train"):  # such a node has nothing that answers in the clear
        nodes.deliver("train", 100, nodes.sent[-1][2])
    with pytest.raises(ValueError, match="secure"):
        LocalGrid(client_app(Building(tmp_path / "plain")), 1).deliver("query.secure", 100, nodes.sent[-1][2])


class Leaving(SecureClient):
    """Gone from a stage of the sum under way on."""

    gone = ()

    def answer_stage(self, number, params, values):
        if (number, values["stage"], values.get("kind", self.asked)) in self.gone:
            raise ConnectionError("away")
        self.asked = values.get("kind", self.asked)
        return super().answer_stage(number, params, values)

    asked = None


def leaving(gone, **options):
    clients = [Leaving(client(None, p, **options), RULE, p) for p in range(CLIENTS)]
    for p, stages in gone.items():
        clients[p].gone = stages
    return clients


def test_clients_that_drop_out_before_and_after_their_upload():
    """Before: the mean of the two others. After: it counts, although it did not help to unmask."""
    clients = leaving({0: [(1, "masked", "train")], 1: [(2, "unmask", "train")]})
    found = simulate_secure(FedAvg(), clients, start(), 2, RULE)
    assert [done.answered for done in found.rounds] == [(1, 2), (0, 1, 2)]
    assert "away" in found.rounds[0].absent[0]
    assert [charges(one.client) for one in clients] == [LOCAL_STEPS, 2 * LOCAL_STEPS, 2 * LOCAL_STEPS]

    class Flaky:
        def __init__(self, inner):
            self.inner = inner

        def answer(self, request):
            if request.round == 1:
                raise ConnectionError("away")
            return self.inner.answer(request)

    plain = [client(None, p) for p in range(CLIENTS)]
    close(found.params, simulate(FedAvg(), [Flaky(plain[0]), *plain[1:]], start(), 2).params)


def test_below_the_threshold_the_model_stays_and_the_ledgers_hold_what_was_released():
    clients = leaving({0: [(1, "unmask", "train")], 1: [(1, "unmask", "train")]})
    found = simulate_secure(FedAvg(), clients, start(), 1, RULE)
    assert same(found.params, start())
    assert found.rounds[0].answered == ()
    assert "threshold of 2" in found.rounds[0].absent[2]
    assert [charges(one.client) for one in clients] == [LOCAL_STEPS] * CLIENTS


def test_clients_with_other_settings_are_left_out():
    clients = sealed()
    clients[1] = SecureClient(client(None, 1), SecureSum(CLIENTS, limit=4.0), 1)
    done = simulate_secure(FedAvg(), clients, start(), 1, RULE).rounds[0]
    assert done.answered == (0, 2)
    assert "differ" in done.absent[1]


@pytest.mark.parametrize(
    "noise", [[3.0], "3", None, True, math.nan, math.inf, -1.0, pytest.param(10**400, id="too large")]
)
def test_a_client_whose_noise_is_no_number_is_left_out(noise):
    class Odd(SecureClient):
        def answer_stage(self, number, params, values):
            found = super().answer_stage(number, params, values)
            return found | {"noise": noise} if values["stage"] == "keys" else found

    clients = sealed(follower)
    clients[1] = Odd(client(follower(), 1), RULE, 1)
    done = simulate_secure(adaptive(), clients, start(), 1, RULE).rounds[0]
    assert done.answered == (0, 2)
    assert charges(clients[1].client) == 0


FIRST = (1, {"kind": "train", "clip_norm": 0.5}, 0.0)
OTHERS = {
    "round": (2, FIRST[1], 0.0),
    "radius": (1, {"kind": "train", "clip_norm": 0.25}, 0.0),
    "query": (1, {"kind": "query", "square_limit": 0.25}, 0.0),
    "parameters": (1, FIRST[1], 1e-12),
}


@pytest.mark.parametrize("server", ["tells the terms", "tells everyone their own", "asks otherwise later"])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("kind", ["local", "distributed"])
def test_clients_that_are_asked_different_things_never_sum(kind, server, other):
    """Client 0 is asked another thing than 1 and 2; nobody uploads, and nothing is spent."""
    clients = [shared(p) for p in range(CLIENTS)] if kind == "distributed" else sealed(lambda: follower())

    def asked(p):
        number, query, moved = OTHERS[other] if p == 0 else FIRST
        return number, {name: value + moved for name, value in start().items()}, query

    def opening(p):
        return {
            "stage": "keys",
            "request": digest_of(*asked(2 if server == "asks otherwise later" else p)),
        }

    keys = {p: clients[p].answer_stage(asked(p)[0], {}, opening(p)) for p in range(CLIENTS)}
    everyone = {f"key.{p}": found["key"] for p, found in keys.items()}
    boxes = {}

    def share(p):
        terms = {f"terms.{q}": keys[p if server == "tells everyone their own" else q]["terms"] for q in keys}
        boxes[p] = clients[p].answer_stage(asked(p)[0], {}, {"stage": "shares", **everyone, **terms})

    def upload(p):
        inbox = {f"share.{q}": boxes[q][f"share.{p}"] for q in boxes if q != p}
        number, params, query = asked(p)
        return clients[p].answer_stage(number, params, {"stage": "masked", **query, **inbox})

    for p in range(CLIENTS):
        if server == "tells the terms":
            with pytest.raises(Refused, match="asked for something else"):
                share(p)
        else:
            share(p)
    if server == "tells everyone their own":
        for p in range(CLIENTS):
            with pytest.raises(Refused, match="made for another sum"):
                upload(p)
    if server == "asks otherwise later":
        with pytest.raises(Refused, match="another request than the one agreed upon"):
            upload(0)
    assert [charges(one.client) for one in clients] == [0] * CLIENTS


def test_a_strategy_that_needs_more_than_the_mean_is_refused():
    with pytest.raises(ValueError, match="ScaffoldAverage"):
        simulate_secure(ScaffoldAverage(3, local_steps=2, learning_rate=0.3), sealed(), start(), 1, RULE)


# ---- distributed noise


def shared(number, honest=3, rule=RULE, method=None, **options):
    z = noise_share(2.0, honest)
    radius_z = noise_share(6.0, honest)
    made = method or follower(round_length=1, noise_multiplier=z, radius_noise_multiplier=radius_z)
    inner = client(made, number, **{"local_steps": 1, "steps": ROUNDS, **options})
    return SecureClient(inner, rule, number, noise="distributed", honest=honest)


def test_the_statement_is_that_of_the_own_noise_and_the_sums_claim_no_guarantee():
    clients = [shared(p) for p in range(CLIENTS)]
    history = simulate_secure(adaptive(), clients, start(), ROUNDS, RULE)
    assert all(done.answered == (0, 1, 2) for done in history.rounds)
    whole = eq.privacy.PrivacyPlan(
        [
            Release("gradient", 0.5, Gaussian(2.0), draw="batch"),
            Release("squares", 1.0, Gaussian(6.0), draw="radius", sampling=eq.FullBatch(RECORDS, ROUNDS)),
        ],
        eq.Poisson(20, RECORDS, ROUNDS),
    )
    claim, statement = clients[0].sum_claim(1e-5), clients[0].statement()
    assert (claim.guarantee, claim.epsilon) == ("none", None)
    assert claim.epsilon_claimed == pytest.approx(whole.epsilon(1e-5).value, rel=5e-3)
    assert any("rounded" in hole for hole in claim.holes)
    assert statement.epsilon is not None
    assert claim.epsilon_alone > claim.epsilon_claimed
    assert clients[0].client.training.plan.epsilon(1e-5).value == claim.epsilon_alone
    with pytest.raises(ValueError, match="noise='local'"):
        sealed(count=1)[0].sum_claim(1e-5)


def test_the_noise_of_a_sum_is_the_whole_noise():
    """Gradients of zero: what the sum holds is noise, with the deviation rate z C / B."""
    d, honest = 20_000, 3
    model = [torch.nn.Linear(d, 1, bias=False, dtype=torch.float64) for _ in range(CLIENTS)]
    zero = {"weight": torch.zeros(1, d, dtype=torch.float64)}
    clients = [
        shared(
            p, honest, method=eq.DPSGD(clip_norm=0.5, noise_multiplier=noise_share(2.0, honest)),
            model=model[p],
            loss_function=lambda m, batch: 0 * m.weight.sum() + 0 * batch["label"],
        )
        for p in range(CLIENTS)
    ]  # fmt: skip
    moved = simulate_secure(FedAvg(), clients, zero, 1, RULE).params["weight"] * CLIENTS
    assert moved.std().item() == pytest.approx(0.3 * 2.0 * 0.5 / 20, rel=0.03)  # rate z C / B


def test_under_distributed_noise_a_client_uploads_once_and_among_enough(tmp_path):
    clients = [shared(p, folder=tmp_path / str(p)) for p in range(CLIENTS)]

    def upload(members, number=1, query="train"):
        given = {"clip_norm": 0.5} if query == "train" else {"square_limit": 0.25}
        opening = {"stage": "keys", "request": digest_of(number, start(), {"kind": query, **given})}
        keys = {p: clients[p].answer_stage(number, {}, opening) for p in members}
        everyone = {f"key.{p}": a["key"] for p, a in keys.items()}
        everyone |= {f"terms.{p}": a["terms"] for p, a in keys.items()}
        boxes = {p: clients[p].answer_stage(number, {}, {"stage": "shares", **everyone}) for p in members}
        inbox = {f"share.{p}": boxes[p]["share.0"] for p in members if p != 0}
        return clients[0].answer_stage(number, start(), {"stage": "masked", "kind": query, **given, **inbox})

    with pytest.raises(Refused, match="fewer than 3"):
        upload([0, 1])
    assert charges(clients[0].client) == 0
    assert upload([0, 1, 2])["masked"]
    with pytest.raises(Refused, match="fewer than 3"):
        clients[0].answer_stage(1, {}, {"stage": "unmask", "survivors": [0, 1]})
    assert upload([0, 1, 2], query="query", number=2)["masked"]
    clients[0].close()
    clients[0] = shared(0, folder=tmp_path / "0")  # the journal remembers
    for number, query in ((1, "train"), (2, "query")):
        with pytest.raises(Refused, match="uploaded once"):
            upload([0, 1, 2], number, query)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"local_steps": 2, "steps": 6, "method": eq.DPSGD(clip_norm=0.5, noise_multiplier=1.0)},
            "local_steps=2",
        ),
        ({"method": Proximal(eq.DPSGD(clip_norm=0.5, noise_multiplier=1.0), 0.1)}, "under-noised releases"),
        (
            {"method": eq.DPSGD(clip_norm=eq.methods.ReleasedQuantile(0.5), noise_multiplier=1.0)},
            "under-noised releases",
        ),
        (
            {"learning_rate": None, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)},
            "plain SGD",
        ),
        ({"honest": 4}, "honest=4"),
        ({"rule": SecureSum(CLIENTS, colluding=1)}, "honest=3"),
    ],
)
def test_distributed_noise_is_refused_where_its_claim_does_not_hold(options, message):
    with pytest.raises(ValueError, match=message):
        shared(0, **options)


def test_a_client_that_has_finished_is_in_no_sum(tmp_path):
    clients = [SecureClient(client(None, p, folder=tmp_path / str(p)), RULE, p) for p in range(CLIENTS)]
    simulate_secure(FedAvg(), clients, start(), 1, RULE)
    assert (tmp_path / "1" / "private" / "secure_sum.json").exists()
    statement = clients[1].finish()
    clients[1].close()
    assert clients[1].statement() == statement
    assert not (tmp_path / "1" / "private" / "secure_sum.json").exists()
    done = simulate_secure(FedAvg(), clients, start(), 1, RULE, first_round=2).rounds[0]
    assert done.answered == (0, 2)
    assert "has finished" in done.absent[1]
    with pytest.raises(Refused, match="has finished"):
        SecureClient(client(None, 1, folder=tmp_path / "1"), RULE, 1)


def test_bad_words_are_named():
    with pytest.raises(ValueError, match="honest=None"):
        SecureClient(client(), RULE, 0, noise="distributed")
    with pytest.raises(ValueError, match="honest=0"):
        noise_share(1.0, 0)
    one = sealed(count=1)[0]
    nonsense = [
        {}, {"stage": "nothing"}, {"stage": "keys"}, {"stage": "keys", "request": 3},
        {"stage": "unmask", "survivors": "all"}, {"stage": "shares", "key.x": b""},
        {"stage": "masked", "kind": "train"}, {"stage": "shares", "key.0": 1.0}, {"stage": "shares"},
    ]  # fmt: skip
    for values in nonsense:
        with pytest.raises(Refused):
            one.answer_stage(1, start(), values)
    assert charges(one.client) == 0
    assert math.isfinite(one.epsilon())
