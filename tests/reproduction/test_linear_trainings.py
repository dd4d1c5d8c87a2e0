"""DP-C4's methods written down for many linear trainings at once, held to the library's."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from equipoise.methods import (
    DPSGD,
    DPSVRG,
    Distance,
    DPC4Plus,
    Every,
    ExponentialDecay,
    LinearDecay,
    Quantile,
    ReleasedNorm,
    published,
)
from equipoise.privacy import FullBatch
from reproduction.harness import Problem, follow
from reproduction.papers import linear_trainings as written
from reproduction.papers.linear_trainings import Arm, Design, LinearRecords, Noise, simulate

RECORDS, FEATURES, STEPS, RIDGE, NONE = 60, 4, 40, 0.1, 1e-9
FALLING, RISING = ExponentialDecay(2.0, 0.99), LinearDecay(0.5, final=0.5 + 0.05 * STEPS, steps=STEPS + 1)


def kinds(routine, clip_norm):
    anchored = {
        "clip_norm": clip_norm,
        "schedule": Every(4, takes_next=routine == 4),
        "anchor_batch_size": float(RECORDS),
        "anchor_noise_multiplier": NONE,
    }
    raw = {"coupled_scale": 2.0, "anchor_scale": RISING, **anchored}
    plus = {"coupled": Distance(2.0), **anchored}
    return {
        written.SGD: partial(DPSGD, clip_norm=clip_norm),
        written.SVRG: partial(DPSVRG, **anchored),
        written.DICE: partial(published.DiceSGD, clip_norm=2.0),
        written.RAW: partial(published.DPC4, **raw),
        written.PLUS: partial(published.DPC4Plus, **raw),
        written.RELEASED: partial(DPC4Plus, anchor=ReleasedNorm(RISING), **plus),
        written.QUANTILE: partial(DPC4Plus, anchor=Quantile(quantile=0.6, count_noise=NONE), **plus),
    }


class Zero(nn.Linear):
    def __init__(self):
        super().__init__(FEATURES, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.weight)


def logistic(model, batch):
    scores = model(batch["x"])[:, 0]
    return F.softplus(-batch["y"] * scores) + RIDGE / 2 * model.weight.square().sum()


@pytest.mark.parametrize("routine", [2, 4])
@pytest.mark.parametrize("method", kinds(2, FALLING))
def test_they_are_the_librarys(method, routine):
    """Without noise, on all records in every step, with schedules of step size, C and c2."""
    rng = torch.Generator().manual_seed(4)
    x = 3 * torch.randn(RECORDS, FEATURES, generator=rng, dtype=torch.float64)
    y = torch.where(torch.rand(RECORDS, generator=rng) < 0.5, 1.0, -1.0).double()
    records = LinearRecords(x, y, lambda scores, y: -y * (-y * scores).sigmoid(), RIDGE)
    decay = 1.0 if method == written.DICE else 0.99
    arm = Arm(rate=0.3, halved_at=20, clip_norm=2.0, decay=decay, c1=2.0, c2=0.5, growth=0.05, quantile=0.6)
    other = Arm(rate=0.1)
    design = Design(STEPS, RECORDS, RECORDS, 4, routine)
    expected = []

    def keep(weights):
        expected.append(weights[0].clone())
        return weights.norm(dim=1)

    simulate(method, records, [arm, other], Noise(NONE, NONE, NONE), design, 0, keep)
    problem = Problem(
        "made up", Zero, logistic, {"x": x, "y": y}, RECORDS,
        lambda model: float((model.weight[0].detach() - expected[0]).norm()),
    )  # fmt: skip
    found = follow(
        kinds(routine, FALLING)[method](noise_multiplier=NONE),
        problem,
        sampling=FullBatch(RECORDS, STEPS),
        learning_rate=lambda k: 0.3 / (1 + k / 20),
        seed=0,
        measure_at=[STEPS],
    )
    assert float(expected[0].norm()) > 0.1
    assert found[STEPS] < 1e-7 * float(expected[0].norm())


@pytest.mark.parametrize("own_draws", [False, True])
@pytest.mark.parametrize(("method", "size", "z"), [(written.SGD, 100, 30.0), (written.PLUS, 400, 90.0)])
def test_noise_and_draws_have_their_size(method, size, z, own_draws):
    """Of rows of norm 1, all alike, a first step without noise is the drawn number over the expected one."""
    arms = [Arm(rate=1.0)] * 400
    x = torch.full((1000, 4), 0.5)
    records = LinearRecords(x, torch.zeros(1000), lambda scores, y: torch.ones_like(scores))
    models = []
    for noise in (Noise(0.0), Noise(z, z)):
        models_of = lambda w: models.append(w) or w[:, 0]  # noqa: E731
        simulate(method, records, arms, noise, Design(1, 100, 400, 4), 1, models_of, own_draws=own_draws)
    drawn = -2 * models[0][:, 0]
    assert float((models[1] - models[0]).std()) == pytest.approx(z / size, rel=0.05)
    if own_draws:
        assert float(drawn.mean()) == pytest.approx(1, abs=0.02)
        assert float(drawn.std()) == pytest.approx(((1 - size / 1000) / size) ** 0.5, rel=0.15)
    else:
        assert drawn.unique().numel() == 1
