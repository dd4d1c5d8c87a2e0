"""The averaged iterate: the mean of all points at which local steps began, at no cost."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from federated_problem import LOCAL_STEPS, ROUNDS, client, same, start
from test_table import federation

import equipoise as eq
from baselines.averaged_iterate import AveragedIterate, IterateAverage
from equipoise.federated import FedAvg, Reply, Request, simulate
from equipoise.methods.named_tensors import copied


@dataclass(frozen=True, kw_only=True)
class Noting(eq.DPSGD):
    """DP-SGD that notes where its steps began."""

    points: list = field(default_factory=list)

    def step(self, context, state):
        self.points.append(copied(context.params))
        return super().step(context, state)


def noting():
    return [Noting(clip_norm=0.5, noise_multiplier=1.0) for _ in range(2)]


def test_it_is_the_mean_over_steps_clients_and_rounds():
    methods = noting()
    clients = [client(AveragedIterate(method), p) for p, method in enumerate(methods)]
    for method in methods:
        method.points.clear()  # of the checks before the start
    found = simulate(IterateAverage(FedAvg(0.25)), clients, start(), ROUNDS)
    points = [point for method in methods for point in method.points]
    assert len(points) == 2 * ROUNDS * LOCAL_STEPS
    for name, value in found.output.items():
        torch.testing.assert_close(value, torch.stack([point[name] for point in points]).mean(0))
    assert not same(found.output, found.params)


def test_the_rounds_and_their_cost_are_those_without_it():
    averaged = [client(AveragedIterate(method), p) for p, method in enumerate(noting())]
    plain = [client(method, p) for p, method in enumerate(noting())]
    found = simulate(IterateAverage(FedAvg()), averaged, start(), ROUNDS)
    expected = simulate(FedAvg(), plain, start(), ROUNDS)
    assert same(found.params, expected.params)
    assert same(expected.output, expected.params)
    assert [one.epsilon() for one in averaged] == [one.epsilon() for one in plain]
    assert found.rounds[0].bytes_up == 2 * expected.rounds[0].bytes_up


@pytest.mark.parametrize("recipe", ["library", "as_published"])
def test_the_table_offers_it_and_a_server_that_restarts_goes_on(tmp_path, recipe):
    strategy, clients = federation("baselines.averaged_iterate:ADAPTDP", recipe)
    seen = []

    def evaluate(params):
        seen.append(copied(params))
        return {}

    whole = simulate(strategy, clients, start(), 2, evaluate=evaluate)
    assert same(seen[-1], whole.output)  # what is evaluated is what the training gives
    strategy, clients = federation("baselines.averaged_iterate:ADAPTDP", recipe)
    simulate(strategy, clients, start(), 1, folder=tmp_path)
    strategy, _ = federation("baselines.averaged_iterate:ADAPTDP", recipe)
    found = simulate(strategy, clients, start(), 2, folder=tmp_path)
    assert same(found.output, whole.output)
    assert same(found.params, whole.params)
    assert all(one.statement().guarantee == "proven" for one in clients)


@pytest.mark.parametrize(
    "mean",
    [
        {},
        {".mean.0.weight": torch.zeros(2)},
        {f".mean.{name}": torch.full_like(value, float("nan")) for name, value in start().items()},
    ],
)
def test_a_mean_that_cannot_be_used_leaves_its_client_out(mean):
    server = IterateAverage(FedAvg())
    good = {f".mean.{name}": value for name, value in start().items()}
    request = Request(1, start())
    assert server.refusal(request, Reply({**start(), **good})) is None
    assert server.refusal(request, Reply({**start(), **mean})) is not None


def answer(request):
    """A reply whose last iterate and mean of a round are the request's parameters plus one."""
    value = {name: tensor + 1 for name, tensor in request.params.items()}
    return Reply({**value, **{f".mean.{name}": tensor for name, tensor in value.items()}})


class Failing(FedAvg):
    """An average that fails the first time."""

    failed = False

    def aggregate(self, params, replies):
        if not self.failed:
            self.failed = True
            raise RuntimeError("no average")
        return super().aggregate(params, replies)


class Twice(FedAvg):
    """A round in two halves, from the model of the round before and from that of the first half."""

    def round(self, number, params):
        half = yield from super().round(number, params)
        return (yield from super().round(number, half))


def finish(server, number, params):
    """Run a round with one client."""
    requests = server.round(number, params)
    request = next(requests)
    while True:
        try:
            request = requests.send([answer(request)])
        except StopIteration as finished:
            return finished.value


def test_a_round_counts_when_it_is_over():
    server = IterateAverage(Failing())
    with pytest.raises(RuntimeError, match="no average"):
        finish(server, 1, {"w": torch.zeros(1)})
    assert server.output({}) == {}
    first = finish(server, 1, {"w": torch.zeros(1)})
    finish(server, 2, first)
    assert server.output({})["w"].item() == 1.5  # of 1 and 2


def test_a_folder_of_another_inner_strategy_is_refused(tmp_path):
    method = noting()[0]
    simulate(IterateAverage(FedAvg()), [client(AveragedIterate(method))], start(), 1, folder=tmp_path)
    with pytest.raises(ValueError, match=r"IterateAverage\(FedAvg\).*IterateAverage\(Twice\)"):
        simulate(IterateAverage(Twice()), [client(AveragedIterate(method))], start(), 1, folder=tmp_path)
