"""The averaged iterate: the mean of all points at which local steps began, at no cost."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from federated_problem import LOCAL_STEPS, ROUNDS, client, same, start

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
