"""The defects of Flower's own DP wrappers that ours does not have.

The defects were found in flwr 1.28 to 1.42; each test is named after one.
"""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from federated_problem import (
    LOCAL_STEPS,
    RECORDS,
    ROUNDS,
    ask,
    charges,
    client,
    follower,
    records,
    same,
    start,
    train,
)
from torch import nn

import equipoise as eq
from equipoise.federated import Client, FedAvg, QuantileFedAvg, Reply, ServerQuantile, simulate
from equipoise.federated.methods.server_quantile import SHARE
from equipoise.privacy import Poisson, calibrate_noise_multiplier
from equipoise.privacy.accounting.epsilon import gaussian_epsilon

# ---- the adaptive wrapper's feedback is inverted: its clip norm runs away from the quantile


@pytest.mark.parametrize("begin", [0.1, 10.0])
def test_the_clip_norm_goes_to_the_quantile(begin):
    """40 clients whose norms have the median 1."""
    norms = torch.linspace(0.5, 1.5, 40)
    server = QuantileFedAvg(eq.methods.ReleasedQuantile(begin, quantile=0.5, learning_rate=0.2))
    for _ in range(60):
        clip_norm = server.extras()["clip_norm"]
        share = float((norms <= clip_norm).double().mean())
        server.aggregate({"w": torch.zeros(1)}, [Reply({"w": torch.zeros(1)}, {SHARE: share})])
    assert 0.9 < clip_norm < 1.1


# ---- it clips at the old clip norm and scales the noise by the new one


def test_noise_and_clipping_use_the_same_clip_norm():
    rule = eq.methods.ReleasedQuantile(0.5, count_noise=0.3, learning_rate=1.0)
    one = client(ServerQuantile(rule, noise_multiplier=1.0))
    sent = []

    class Noting(QuantileFedAvg):
        def extras(self):
            sent.append(super().extras()["clip_norm"])
            return {"clip_norm": sent[-1]}

    simulate(Noting(rule), [one], start(), ROUNDS)
    entries = one.training.ledger.journal.entries()
    releases = [entry for entry in entries if entry.kind == "release"]
    bounds = [entry.bounds["gradient"] for entry in releases if "gradient" in entry.bounds]
    assert bounds == pytest.approx([clip_norm for clip_norm in sent for _ in range(LOCAL_STEPS)])
    assert len(set(sent)) == ROUNDS


# ---- it draws its noise from NumPy's global generator


def test_noise_comes_from_no_global_generator():
    def trained(seed):
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        before = numpy.random.get_state()[1].copy(), torch.random.get_rng_state()
        one = client(reproducible=False)
        found = train(one, 1, start())
        assert (numpy.random.get_state()[1] == before[0]).all()
        assert torch.equal(torch.random.get_rng_state(), before[1])
        return found

    assert not same(trained(0), trained(0))  # whoever knows the global seed knows nothing


# ---- parameters without axes are never clipped


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x):
        return self.scale * x


def scalar_client(x, clip_norm=0.5):
    return Client(
        Scalar(),
        lambda model, batch: model(batch["x"]).sum(1),
        {"x": x},
        eq.FullBatch(len(x), 2),
        eq.DPSGD(clip_norm=clip_norm, noise_multiplier=1e-09),
        learning_rate=1.0,
        run=eq.Run(reproducible=True),
    )


def test_a_parameter_without_axes_is_clipped():
    one = scalar_client(torch.full((4, 1), 100.0, dtype=torch.float64))
    moved = train(one, 1, {"scale": torch.tensor(1.0, dtype=torch.float64)}).params["scale"]
    assert moved.shape == ()
    assert float(1.0 - moved) == pytest.approx(0.5, abs=1e-6)  # the mean gradient is 100, clipped 0.5


# ---- an update of zero is divided by its length


def test_an_update_of_zero_is_no_error():
    one = scalar_client(torch.zeros(4, 1, dtype=torch.float64))
    moved = train(one, 1, {"scale": torch.tensor(1.0, dtype=torch.float64)}).params["scale"]
    assert float(moved) == pytest.approx(1.0, abs=1e-6)


# ---- weights by the number of examples, where the noise was scaled for equal ones


def test_weights_are_equal_and_sizes_are_not_sent():
    answers = [
        train(client(data=records(p, n), sampling=Poisson(5, n, 2)), 1, start())
        for p, n in ((0, 20), (1, 60))
    ]
    assert all((set(sent.params), set(sent.reports)) == (set(start()), set()) for sent in answers)
    mean = FedAvg().aggregate(start(), answers)
    for name, value in mean.items():
        torch.testing.assert_close(
            value, (answers[0].params[name] + answers[1].params[name]) / 2, rtol=0, atol=0
        )


# ---- the local wrapper's noise follows a formula that holds below epsilon 1 alone


def formula(epsilon):
    return math.sqrt(2 * math.log(1.25 / 1e-5)) / epsilon


@pytest.mark.parametrize("target", [0.5, 8.0, 30.0])
def test_noise_is_calibrated_by_a_valid_accountant(target):
    z = calibrate_noise_multiplier(eq.FullBatch(RECORDS, 1), eq.Budget(target, 1e-5))
    assert 0.98 * target < gaussian_epsilon(1 / z, 1e-5) <= target
    assert (gaussian_epsilon(1 / formula(target), 1e-5) > target) == (target > 10)


# ---- only one accountant, for fixed clipping alone: ours counts whatever a client releases


def test_counts_and_queries_are_counted_too():
    query = follower()
    with_query, without = client(query), client()
    ask(with_query, 1, start(), 0.25)
    for one in (with_query, without):
        train(one, 1, start(), *([0.2] if one is with_query else []))
    assert charges(with_query) == charges(without) + 1
    spent = [one.training.ledger.spent(1e-3).value for one in (with_query, without)]
    assert spent[0] > spent[1]
