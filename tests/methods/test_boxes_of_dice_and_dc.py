"""DiceSGD and DC-DPSGD as published, beside their papers' boxes: the same samples and noise, step by step."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import transcribed as boxes
from stepping import Follower
from torch import nn

from equipoise.methods import two_thresholds
from equipoise.methods.subspaces import held
from equipoise.methods.two_thresholds import Trace
from equipoise.privacy import Budget, FullBatch, Poisson, Private
from equipoise.privacy.private import unwrap
from equipoise.published import DCDPSGD, DiceSGD
from equipoise.published import dc_dpsgd as published_dc
from equipoise.published.dc_dpsgd import claimed, share_multipliers

RECORDS, STEPS, ETA, FIRST, WIDTH = 40, 8, 0.3, 5, 8
RNG = np.random.default_rng(0)
X = RNG.standard_normal((RECORDS, WIDTH)) * RNG.exponential(2.0, (RECORDS, 1))
Y = X @ RNG.standard_normal(WIDTH) + RNG.exponential(3.0, RECORDS)
X[0] = 0  # a record without a gradient
CLOSE = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)


class TwoTensors(nn.Module):
    """A linear model whose weights are two tensors."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(FIRST, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(WIDTH - FIRST, dtype=torch.float64))

    def forward(self, x):
        return x[:, :FIRST] @ self.first + x[:, FIRST:] @ self.second


def loss(model, batch, scale=1.0):
    return 0.5 * scale * (model(batch["x"]) - batch["y"]).square()


def gradients(w, drawn, scale=1.0):
    return scale * (X[drawn] @ w - Y[drawn])[:, None] * X[drawn]


def flat(tensors):
    return np.concatenate([unwrap(tensors[name]).flatten().numpy() for name in ("first", "second")])


class Stepped:
    """A training with the library's class: its samples, noise, parameters and states."""

    def __init__(self, method, sampling, budget=None, scale=1.0):
        model = TwoTensors()
        data = {"x": torch.from_numpy(X), "y": torch.from_numpy(Y)}
        scaled = partial(loss, scale=scale)
        follower = Follower(method, model, scaled, data, sampling, budget=budget, learning_rate=ETA)
        self.follower, self.samples, self.noise, self.stds = follower, [], [], []
        draw, add = follower.ledger.sample, follower.ledger.release_unproven

        def noting(*arguments):
            ids = draw(*arguments)
            self.samples.append(ids.numpy())
            return ids

        def noting_std(*arguments, std, **options):
            self.stds.append(std)
            return add(*arguments, std=std, **options)

        follower.ledger.sample, follower.ledger.release_unproven = noting, noting_std
        self.xs, self.states = [], []
        for _ in range(sampling.steps):
            follower.step()
            self.xs.append(follower.vector.numpy().copy())
            self.states.append(follower.state)
        for sums, released in zip(follower.ledger.sums, follower.ledger.transcript, strict=True):
            ((name, values),) = sums.items()
            self.noise.append(flat(released[name]) - flat(values))


POISSON = Poisson(12, RECORDS, STEPS)


@pytest.mark.parametrize(("c1", "c2"), [(1.0, None), (0.5, 2.0), (3.0, 0.0)])
def test_dice_algorithm_2(c1, c2):
    ours = Stepped(DiceSGD(clip_norm=c1, feedback_clip_norm=c2, noise_multiplier=0.7), POISSON)
    assert ours.stds == pytest.approx([0.7 * c1 / 12] * STEPS, rel=1e-12)
    radii = {"c1": c1, "c2": c1 if c2 is None else c2}
    box = boxes.dice_algorithm_2(
        np.zeros(WIDTH), gradients, ours.samples, ours.noise, **radii, eta=ETA, batch=12
    )
    follows(ours, box)


def follows(ours, box):
    for (x, e), found, state in zip(box, ours.xs, ours.states, strict=True):
        CLOSE(found, x)
        CLOSE(flat(state["memory"]), e)
    assert float(np.linalg.norm(x)) > 0.1


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_dice_algorithm_4(scale):
    """With long gradients and with short ones, which are lengthened, as is a short memory."""
    ours = Stepped(DiceSGD(variant="algorithm_4"), POISSON, Budget(2.0, 1e-5), scale=scale)
    assert ours.stds == pytest.approx([boxes.dice_noise_4(RECORDS, STEPS, 2.0, 1e-5)] * STEPS, rel=1e-12)
    of_scale = partial(gradients, scale=scale)
    follows(
        ours, boxes.dice_algorithm_4(np.zeros(WIDTH), of_scale, ours.samples, ours.noise, eta=ETA, batch=12)
    )


def test_the_noise_of_the_theorem_and_what_it_claims():
    budget = Budget(2.0, 1e-5)
    method = DiceSGD(clip_norm=0.5, feedback_clip_norm=0.8, noise="theorem")
    ours = Stepped(method, POISSON, budget)
    sigma = boxes.dice_noise(0.5, 12 * 0.8, RECORDS, STEPS, 2.0, 1e-5)
    assert ours.stds == pytest.approx([sigma] * STEPS, rel=1e-12)
    assert method.claimed_epsilon(ours.follower.method_plan, 1e-5) == pytest.approx(2.0, rel=1e-12)


COLUMNS = [np.random.default_rng(step).exponential(1.0, (WIDTH, 3)) for step in range(STEPS)]
LOTS = [np.random.default_rng(100 + step).standard_normal(RECORDS) for step in range(STEPS)]


@pytest.fixture
def given(monkeypatch):
    """The columns and the lots above, in the place of drawn ones."""
    step = -1

    def next_columns(seed, shapes, dimension, **options):
        nonlocal step
        step += 1
        parts = dict(zip(shapes, np.split(COLUMNS[step].T, np.cumsum([FIRST]), axis=1), strict=True))
        return held({name: torch.from_numpy(part.copy()) for name, part in parts.items()})

    def next_entries(shape, generator, tail_index, signs):
        nonlocal step
        step += 1
        assert (tuple(shape), tail_index, signs) == ((FIRST, 3), 1.0, "positive")
        return torch.from_numpy(COLUMNS[step][:FIRST])

    def lots(ids, secret):
        numbers = torch.from_numpy(LOTS[step])[unwrap(ids)]
        return ids * 0 + Private(numbers, ids.draw)

    monkeypatch.setattr(two_thresholds, "random_subspace", next_columns)
    monkeypatch.setattr(published_dc, "sub_weibull", next_entries)
    monkeypatch.setattr(published_dc, "record_normals", lots)


@pytest.mark.parametrize("variant", ["alg1", "alg1_mean"])
def test_dc_algorithm_1(given, variant):
    """On whole batches, whose counts are the public ones. The box draws a noise vector for every record."""
    c1, c2, sigma = 2.0, 0.5, 0.3
    method = DCDPSGD(
        clip_norm=c1, body_clip_norm=c2, variant=variant, noise_multiplier=sigma,
        trace=Trace(dimension=3, structure="dense"),
    )  # fmt: skip
    ours = Stepped(method, FullBatch(RECORDS, STEPS))
    tail = RECORDS // 10
    # One vector for all records, whose sum is the noise that was drawn here.
    shared = [noise / (sigma * (tail * c1 + (RECORDS - tail) * c2)) for noise in ours.noise]
    box = boxes.dc_algorithm_1(
        np.zeros(WIDTH), gradients, ours.samples, COLUMNS, LOTS, [np.tile(z, (RECORDS, 1)) for z in shared],
        p=0.1, c1=c1, c2=c2, eta=ETA, sigma_tr=sigma, sigma_dp=sigma, mean=variant == "alg1_mean",
    )  # fmt: skip
    (release,) = ours.follower.plan.releases
    for (w, deviations), found in zip(box, ours.xs, strict=True):
        CLOSE(found, w)
        CLOSE(release.mechanism.noise_multiplier * release.max_bound, np.linalg.norm(deviations))


@pytest.mark.parametrize("variant", ["code", "code_mnist"])
def test_dc_program(given, variant):
    sigma, batch = 0.3, 12
    method = DCDPSGD(
        clip_norm=2.0, body_clip_norm=0.5, variant=variant, noise_multiplier=sigma, trace=Trace(dimension=3)
    )
    ours = Stepped(method, POISSON)
    numbers = [lots[drawn] for lots, drawn in zip(LOTS, ours.samples, strict=True)]
    noise = [drawn / std for drawn, std in zip(ours.noise, ours.stds, strict=True)]
    columns = [drawn[:FIRST] for drawn in COLUMNS]
    box = boxes.dc_program(
        np.zeros(WIDTH), gradients, ours.samples, columns, numbers, noise, slice(0, FIRST),
        p=0.1, c1=2.0, c2=0.5, eta=ETA, sigma=sigma, batch=batch, mnist=variant == "code_mnist",
    )  # fmt: skip
    for (w, std), found, ours_std in zip(box, ours.xs, ours.stds, strict=True):
        CLOSE(found, w)
        CLOSE(ours_std / batch, std)


def test_dc_noise_of_the_shares_and_what_they_claim():
    """MNIST at 4 + 4: the multipliers of Opacus' Renyi accountant, to three digits."""
    population, batch, epochs, sigma = 60_000, 128, 40, 0.705
    sampling = Poisson(batch, population, round(epochs * population / batch))
    both = share_multipliers(Budget(8.0, 1e-5), sampling, 0.5)
    assert both == pytest.approx((sigma, sigma), rel=2e-3)
    assert claimed(both, sampling, 1e-5) == pytest.approx(8.0, rel=1e-3)
