"""Federated baselines beside the library, around its clients."""

import functools
from dataclasses import dataclass, field

import pytest
import torch
from federated_problem import (
    LOCAL_STEPS,
    ROUNDS,
    ask,
    charges,
    client,
    loss,
    network,
    records,
    same,
    start,
    train,
)

import equipoise as eq
from baselines.averaged_iterate import AveragedIterate, IterateAverage
from baselines.fedprox import Proximal
from baselines.moon import Moon, MoonLoss
from baselines.projected_upload import ProjectedUpload
from baselines.scaffold import Scaffold
from equipoise.federated import FedAvg, Reply, Request, RoundSubspace, ServerRMS, simulate
from equipoise.methods.named_tensors import copied


@dataclass(frozen=True, kw_only=True)
class Noting(eq.DPSGD):
    """DP-SGD that notes where its steps began."""

    points: list = field(default_factory=list)

    def step(self, context, state):
        self.points.append(copied(context.params))
        return super().step(context, state)


@pytest.mark.wide
def test_it_is_the_mean_over_steps_clients_and_rounds():
    methods = [Noting(clip_norm=0.5, noise_multiplier=1.0) for _ in range(2)]
    clients = [client(AveragedIterate(method), p) for p, method in enumerate(methods)]
    for method in methods:
        method.points.clear()  # of the checks before the start
    server = IterateAverage(FedAvg(0.25))
    found = simulate(server, clients, start(), ROUNDS)
    points = [point for method in methods for point in method.points]
    assert len(points) == 2 * ROUNDS * LOCAL_STEPS
    for name, value in found.output.items():
        torch.testing.assert_close(value, torch.stack([point[name] for point in points]).mean(0))
    plain = simulate(FedAvg(0.25), [client(method, p) for p, method in enumerate(methods)], start(), ROUNDS)
    assert same(found.params, plain.params)
    assert server.refusal(Request(1, start()), Reply(start())) is not None  # a client without its mean


LIMIT = 25.0


def follower():
    noise = {"noise_multiplier": 1e-3, "radius_noise_multiplier": 1e-3}  # little, to see the records' part
    return ServerRMS(5.0, round_length=LOCAL_STEPS, **noise)


def contrastive():
    term = MoonLoss(loss, lambda model, batch: model[:-1](batch["input"]), network(), strength=5.0)
    return Moon(follower(), term), term


@functools.cache
def directions():
    return RoundSubspace(network(), loss, records(9, 20))


def inside():
    method, term = contrastive()
    return Proximal(method, 0.1), term


AROUND = {
    "proximal": lambda: (Proximal(follower(), 0.1), loss),
    "scaffold": lambda: (Scaffold(follower(), local_steps=LOCAL_STEPS, learning_rate=0.3), loss),
    "moon": contrastive,  # slow, and so none of the few
    "projected upload": lambda: (ProjectedUpload(follower(), directions()), loss),
    "averaged iterate": lambda: (AveragedIterate(follower()), loss),
    "moon inside": inside,
}


def answers(around, folder, *, reopened=False, killed=None):
    """What a client sends in three rounds whose global models differ, and what it was charged.

    Args:
        reopened: whether a new object goes on with the folder in every round.
        killed: the round in which the client is lost after its query was booked; it is asked again.
    """

    def opened():
        method, loss_function = AROUND[around]()
        return client(method, loss_function=loss_function, folder=folder)

    one, found = opened(), []
    params = {name: value + 0.5 for name, value in start().items()}
    for number in range(1, ROUNDS + 1):
        if number == killed:

            def lost(*entry):
                raise KeyboardInterrupt

            one._log.write = lost
            with pytest.raises(KeyboardInterrupt):
                ask(one, number, params, LIMIT)
        if reopened or number == killed:
            one.close()
            one = opened()
        found.append({"query": ask(one, number, params, LIMIT)})
        found.append(train(one, number, params, clip_norm=1.0))
        params = {name: value + 0.3 for name, value in params.items()}
    lines = [line.kind for line in one.training.ledger.journal.entries()]
    return found, charges(one), lines.count("void")


def equal(a, b):
    if isinstance(a, dict):
        return a == b
    return same(a, b)


@pytest.mark.few(4)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("killed", [None, ROUNDS])
def test_reopened_or_killed_it_answers_as_one_that_was_kept_open(around, killed, tmp_path):
    kept, charged, _ = answers(around, tmp_path / "kept")
    assert charged == ROUNDS * (1 + LOCAL_STEPS)
    again, charged_again, voids = answers(around, tmp_path / "again", reopened=killed is None, killed=killed)
    assert (charged_again, voids) == (charged, 0)
    assert all(equal(a, b) for a, b in zip(kept, again, strict=True))
