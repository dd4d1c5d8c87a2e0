"""The federated methods: each trains through the clients' ledgers, at the price of its gradients."""

import functools
import math

import pytest
import torch
from federated_problem import (
    LOCAL_STEPS,
    ask,
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
from torch import nn

import equipoise as eq
from baselines.fedlrs import FedLRS
from baselines.fedprox import Proximal
from baselines.moon import Moon, MoonLoss
from baselines.scaffold import Scaffold, ScaffoldAverage
from equipoise.audit.canary_scores import WithCanaryScores
from equipoise.federated import (
    AdaptDPFedAvg,
    FedAvg,
    QuantileFedAvg,
    Refused,
    RoundPCDP,
    RoundSubspace,
    ServerQuantile,
    SubspaceAverage,
    simulate,
)
from equipoise.federated.methods.server_quantile import SHARE
from equipoise.methods import PublicRecords
from equipoise.methods.adaptive_rms import RMSRadius
from equipoise.methods.wrapper import MethodWrapper

RATE, ROUNDS = 0.3, 3
QUANTILE = eq.methods.ReleasedQuantile(0.5, count_noise=0.3)


def dp_sgd():
    return eq.DPSGD(clip_norm=0.5, noise_multiplier=1.0)


def directions(**options):
    """Made anew: server and clients compute the same without having it from each other."""
    return RoundSubspace(network(), loss, records(9, 20), **options)


shared = functools.cache(directions)


def moon_loss():
    return MoonLoss(loss, lambda model, batch: model[1](model[0](batch["input"])), network(), strength=2.0)


def moon():
    term = moon_loss()
    return Moon(dp_sgd(), term), {"loss_function": term}


def corrected(method):
    return Scaffold(method, local_steps=LOCAL_STEPS, learning_rate=RATE)


def corrections(clients, **options):
    return ScaffoldAverage(clients, **({"local_steps": LOCAL_STEPS, "learning_rate": RATE} | options))


# client's method and further arguments of its client, and the server's strategy
TABLE = {
    "fedpcdp": (
        lambda: (RoundPCDP(shared(), 0.5, noise_multiplier=1.0), {}),
        lambda: SubspaceAverage(shared()),
    ),
    "scaffold": (lambda: (corrected(dp_sgd()), {}), lambda: corrections(1)),
    "moon": (moon, FedAvg),
    "quantile": (
        lambda: (shared_quantile(), {}),
        lambda: QuantileFedAvg(QUANTILE),
    ),
}


def make(name, number=0, **options):
    method, further = TABLE[name][0]()
    return client(method, number, **(options | further))


@pytest.mark.parametrize(
    "name", ["fedpcdp", "scaffold", "quantile", pytest.param("moon", marks=pytest.mark.wide)]
)
def test_a_client_that_is_killed_goes_on_with_what_its_method_remembers(name, tmp_path):
    def rounds(folder, killed):
        one, strategy, params, sent = make(name, folder=folder), TABLE[name][1](), start(), []
        for number in range(1, ROUNDS + 1):
            asked = strategy.extras()
            answer = train(one, number, params, **asked)
            if killed:
                one.close()
                one = make(name, folder=folder)
                assert same(train(one, number, params, **asked), answer)
            sent.append(answer)
            params = strategy.aggregate(params, [answer])
        assert charges(one) == ROUNDS * LOCAL_STEPS
        return sent

    whole, broken = rounds(tmp_path / "a", False), rounds(tmp_path / "b", True)
    assert all(same(a, b) for a, b in zip(whole, broken, strict=True))


# ---- FedPCDP


@pytest.mark.parametrize("form", ["coordinates", "combination"])
@pytest.mark.parametrize(
    "options", [{}, {"dimension": 4, "normalise": True}, {"blocks": "whole", "batch_size": 9}]
)
def test_what_is_sent_of_a_round_is_all_of_it(form, options):
    """Both ends compute the subspace themselves; local steps stay in it."""
    one = client(RoundPCDP(directions(**options), 0.5, noise_multiplier=1.0, form=form))
    sent = train(one, 1, start()).params
    end = {name: value.detach() for name, value in one.training.parameters.items()}
    assert not same(end, start())
    restored = SubspaceAverage(directions(**options)).received(start(), sent)
    assert max(float((restored[name] - value).abs().max()) for name, value in end.items()) < 1e-8
    assert set(sent) == {form}


# ---- SCAFFOLD


class Pull(nn.Module):
    """Least squares in one dimension, with a curvature of the client's own."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))


def pulls(method):
    """Two clients with different optima and curvatures; the joint optimum is 3 / 4, drift ends elsewhere."""
    options = {
        "sampling": eq.FullBatch(10, 3 * 12), "local_steps": 3, "learning_rate": 0.2,
        "loss_function": lambda model, batch: 0.5 * batch["a"] * (model.w - batch["t"]).square(),
    }  # fmt: skip
    owners = [(1.0, 0.0), (3.0, 1.0)]  # curvature, optimum
    data = [{"a": torch.full((10,), a).double(), "t": torch.full((10,), t).double()} for a, t in owners]
    return [client(method(), p, model=Pull(), data=one, **options) for p, one in enumerate(data)]


def test_without_noise_scaffold_reaches_the_joint_optimum_and_fedavg_does_not():
    zero = {"w": torch.zeros(1, dtype=torch.float64)}

    def method():
        return Scaffold(eq.methods.ClipSGD(clip_norm=math.inf), local_steps=3, learning_rate=0.2)

    server = corrections(2, local_steps=3, learning_rate=0.2)
    found = simulate(server, pulls(method), zero, 12).params["w"]
    drifted = simulate(FedAvg(), pulls(lambda: eq.methods.ClipSGD(clip_norm=math.inf)), zero, 12).params["w"]
    assert float(found) == pytest.approx(0.75, abs=1e-4)
    assert abs(float(drifted) - 0.75) > 0.02


# ---- MOON


def test_the_term_is_what_it_says():
    model = nn.Linear(2, 2, bias=False).double()
    term = MoonLoss(lambda m, x: x[:, 0] * 0, lambda m, x: m(x), model, strength=3.0, temperature=0.5)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
    turned = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    term.compare_with({"weight": torch.eye(2)}, {"weight": turned})
    # the global model agrees (cosine 1), the last one is at a right angle (0)
    expected = 3 * math.log(1 + math.exp(-1 / 0.5))
    found = term(model, torch.randn(4, 2, dtype=torch.float64))
    torch.testing.assert_close(found, torch.full((4,), expected, dtype=torch.float64))


# ---- the shared quantile


def test_all_clients_clip_at_the_servers_norm_which_follows_their_counts(monkeypatch):
    server, clients, params = QuantileFedAvg(QUANTILE), [make("quantile", p) for p in range(2)], start()
    counts = {0: [], 1: []}
    for p, one in enumerate(clients):
        release = one.training.ledger.release

        def listening(draw, sums, checks, release=release, p=p):
            found = release(draw, sums, checks)
            counts[p].append(float(next(iter(found["below_threshold"].values()))))
            return found

        monkeypatch.setattr(one.training.ledger, "release", listening)
    norms = []
    for number in range(1, ROUNDS + 1):
        asked = server.extras()
        norms += [asked["clip_norm"]] * LOCAL_STEPS
        answers = [train(one, number, params, **asked) for one in clients]
        shares = [sum(counts[p][-LOCAL_STEPS:]) / LOCAL_STEPS / 20 + 0.5 for p in range(2)]
        assert [answer.reports[SHARE] for answer in answers] == pytest.approx(shares)
        params = server.aggregate(params, answers)
        share = min(max(sum(shares) / 2, 0.0), 1.0)
        assert server.metrics()["radius"] == pytest.approx(norms[-1] * math.exp(-0.2 * (share - 0.5)))
    for one in clients:
        entries = one.training.ledger.journal.entries()
        assert [entry.bounds["gradient"] for entry in entries if entry.kind == "release"] == norms
    assert len(set(norms)) == ROUNDS


def test_a_client_that_does_not_train_on_moons_loss_is_refused():
    for method in (Moon(dp_sgd(), moon_loss()), Proximal(Moon(dp_sgd(), moon_loss()), 0.1)):
        with pytest.raises(ValueError, match="loss=loss is not the loss that method"):
            client(method)


def test_bad_settings_of_federated_methods_are_named():
    for make_it, words in (
        (lambda: AdaptDPFedAvg(RMSRadius(1.0), 1, 1, 0.0), "model_clip_norm=0.0"),
        (lambda: directions(batch_size=0), "batch_size=0"),
        (lambda: directions(dimension=0), "dimension=0"),
        (lambda: FedAvg(0.0), "server_rate=0.0"),
        (lambda: RoundPCDP(directions(), form="short"), "form='short'"),
        (lambda: follower(round_length=0), "round_length=0"),
        (lambda: follower(radius_sampling_rate=1.5), "radius_sampling_rate=1.5"),
        (lambda: client(follower(round_length=3)), "round_length=3"),
    ):
        with pytest.raises(ValueError, match=words):
            make_it()


def shared_quantile():
    return ServerQuantile(QUANTILE, noise_multiplier=1.0)


def test_around_a_follower_it_follows_the_server():
    """The first step of a round is the follower's own: neither pull nor controls have anything to add."""
    plain, one = client(shared_quantile()), client(Proximal(corrected(shared_quantile()), strength=0.1))
    with pytest.raises(Refused, match="clip_norm is missing"):
        train(one, 1, start())
    with pytest.raises(Refused, match="answers no request of kind 'query'"):
        ask(one, 1, start(), 0.25)
    found, expected = (train(each, 1, start(), clip_norm=0.1) for each in (one, plain))
    assert found.params.keys() == expected.params.keys()
    assert found.reports.keys() == expected.reports.keys()
    entries = [e for e in one.training.ledger.journal.entries() if e.kind == "release"]
    assert [e.bounds["gradient"] for e in entries] == [0.1] * LOCAL_STEPS


class Plain(MethodWrapper):
    """Adds nothing, and knows of no rounds."""

    name = "plain"


def test_a_method_that_would_keep_the_rounds_from_another_one_is_refused(tmp_path):
    warm = eq.methods.PublicWarmStart
    for around in (
        Plain(corrected(dp_sgd())),
        WithCanaryScores(follower(), {}),
        warm(public=PublicRecords(records(9, 20)), inner=FedLRS(dp_sgd())),
        Proximal(Plain(shared_quantile()), 0.1),
        Plain(Plain(Proximal(dp_sgd(), 0.1))),
    ):
        with pytest.raises(ValueError, match="takes part in the server's rounds"):
            client(around, folder=tmp_path / "client")
        assert not (tmp_path / "client").exists()
    assert train(client(Plain(dp_sgd())), 1, start()).params.keys() == start().keys()
