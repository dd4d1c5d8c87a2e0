"""The trainings at AdaptDP-FedAvg's printed noise are the library's, and what the noise is said to cost."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from equipoise.federated import AdaptDPFedAvg, Client, FedAvg, PublishedServerRMS, simulate
from equipoise.methods import published
from equipoise.methods.adaptive_rms import RMSRadius
from equipoise.methods.named_tensors import copied
from equipoise.privacy import FullBatch
from equipoise.training import Run
from reproduction.papers import adaptive_rms_printed as printed

CLASSES, INPUTS, RECORDS, ROUNDS, STEPS = 3, 4, 20, 4, 3


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


@pytest.mark.parametrize("square", [None, 1e-12])
def test_the_training_as_written_down_is_the_librarys(square):
    """All records in every step, and noise of no size."""
    rng = torch.Generator().manual_seed(0)
    shares = [
        {
            "x": torch.randn(RECORDS, INPUTS, generator=rng, dtype=torch.float64),
            "y": torch.randint(CLASSES, (RECORDS,), generator=rng),
        }
        for _ in range(2)
    ]
    model = nn.Linear(INPUTS, CLASSES).double()
    first = copied(dict(model.named_parameters()))
    weight = torch.cat([first["weight"], first["bias"][:, None]], 1)
    with_ones = [{"x": printed.with_ones(share["x"]), "y": share["y"]} for share in shares]
    *_, (expected, radius) = printed.train(
        with_ones, weight, printed.Noise(0.0, square, rng), clip_norm=3.0, rate=0.5, rounds=ROUNDS,
        local_steps=STEPS, batch=RECORDS,
    )  # fmt: skip
    noise = {"noise_multiplier": 1e-12}
    method = published.DPFedAvg(clip_norm=3.0, **noise)
    server = FedAvg()
    if square is not None:
        noise["radius_noise_multiplier"] = square * RECORDS
        method = PublishedServerRMS(clip_norm=3.0, round_length=STEPS, **noise)
        server = AdaptDPFedAvg(RMSRadius(3.0, offset="paper"), ROUNDS, 2)
    clients = [
        Client(
            nn.Linear(INPUTS, CLASSES).double(), loss, share, FullBatch(RECORDS, ROUNDS * STEPS), method,
            local_steps=STEPS, learning_rate=0.5, run=Run(seed=number, reproducible=True),
        )
        for number, share in enumerate(shares)
    ]  # fmt: skip
    found = simulate(server, clients, first, ROUNDS)
    torch.testing.assert_close(found.params["weight"], expected[:, :-1], rtol=0, atol=1e-9)
    torch.testing.assert_close(found.params["bias"], expected[:, -1], rtol=0, atol=1e-9)
    assert radius == pytest.approx(found.rounds[-1].metrics.get("radius", 3.0))
    assert (radius < 3.0) == (square is not None)


@pytest.mark.parametrize(("kind", "costs"), [(printed.FIXED, 1190), (printed.ADAPTIVE, 4510)])
def test_the_mildest_noise_is_granted_four_digits_of_epsilon(kind, costs):
    assert printed.printed_epsilon(3, kind, 100) == pytest.approx(costs, rel=0.01)
