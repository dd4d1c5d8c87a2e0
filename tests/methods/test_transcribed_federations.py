"""PCDP-SGD, FedPCDP, AdaptDP-FedAvg and DP-FedAvg as published, beside their papers' boxes.

The same samples and noise, step by step or round by round. Noise is given as standard normal numbers: how
long the method makes it is under test too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transcribed as boxes
from torch import Tensor, nn

from equipoise.federated import (
    AdaptDPFedAvg,
    FedAvg,
    PublishedRoundPCDP,
    PublishedRoundPDP,
    PublishedServerRMS,
    Reply,
    Request,
    RoundSubspace,
    SubspaceAverage,
    simulate,
)
from equipoise.federated.round_protocol import protocol_of
from equipoise.gradients.operator import DenseGradients
from equipoise.methods import PublicRecords, PublicSubspace, published
from equipoise.methods.adaptive_rms import RMSRadius
from equipoise.methods.base import Setting
from equipoise.methods.named_tensors import copied
from equipoise.privacy import Draw, PrivateRows, WithoutReplacement
from equipoise.privacy.private import unwrap


class LeastSquares:
    """Records (a, y) with losses (w a + v - y)^2 / 2; the parameters in a row are (w, v)."""

    def __init__(self, a: np.ndarray, y: np.ndarray) -> None:
        self.batch = {"a": torch.from_numpy(a), "y": torch.from_numpy(y)}

    @staticmethod
    def model() -> nn.Module:
        return nn.Linear(5, 1).double()

    @staticmethod
    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return 0.5 * (model(batch["a"])[:, 0] - batch["y"]).square()

    def rows(self, params: Mapping[str, Tensor], ids: Any = slice(None)) -> DenseGradients:
        a, y = self.batch["a"][ids], self.batch["y"][ids]
        residual = (a @ params["weight"][0] + params["bias"] - y)[:, None]
        return DenseGradients({"weight": (residual * a)[:, None], "bias": residual})


def named(x: np.ndarray) -> dict[str, Tensor]:
    """The parameters of a row."""
    row = torch.from_numpy(x)
    return {"weight": row[None, :5].clone(), "bias": row[5:].clone()}


def row_of(params: Mapping[str, Tensor]) -> np.ndarray:
    """The parameters in a row."""
    return np.concatenate([params["weight"].numpy().ravel(), params["bias"].numpy()])


@dataclass
class Handle:
    rows: PrivateRows
    name: str = "batch"

    def query(self, fn: Callable[..., Any], at: Any = None) -> Any:
        return fn(self.rows, torch.arange(self.rows._rows.num_records))


class GivenNoise:
    """Adds standard normal numbers of the test, times the planned multiplier and the sum's own bound."""

    def __init__(self, plan: Any, normals: Mapping[str, Sequence[np.ndarray]]) -> None:
        self.plan, self.normals = plan, {name: iter(values) for name, values in normals.items()}

    def release(self, draw: Any, sums: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        out = {name: {k: unwrap(v).clone() for k, v in b.value.items()} for name, b in sums.items()}
        for name, bounded in sums.items():
            scale = self.plan[name].noise_multiplier * bounded.add_remove
            normal = torch.as_tensor(next(self.normals[name]))
            noise = {"sum": normal} if name == "squares" else named(normal.numpy())
            out[name] = {
                key: value + scale * noise[key].reshape(value.shape) for key, value in out[name].items()
            }
        return out


@dataclass
class BoxContext:
    """What a step may use, with the samples of the test."""

    private: LeastSquares
    public: LeastSquares | None
    params: dict[str, Tensor]
    sampling: Any
    plan: Any
    samples: Mapping[str, Iterator[np.ndarray]]
    ledger: GivenNoise
    step: int = 0
    relation: str = "replace_one"

    def draw(self, name: str = "batch") -> Handle:
        rows = self.private.rows(self.params, torch.from_numpy(next(self.samples[name])))
        return Handle(PrivateRows(rows, Draw(name, self.step)), name)

    def public_gradients(self, batch: Any, at: Any = None, step: Any = None) -> DenseGradients:
        return LeastSquares(batch["a"].numpy(), batch["y"].numpy()).rows(self.params if at is None else at)

    def public_rng(self, step: int) -> torch.Generator:
        return torch.Generator().manual_seed(step)


@dataclass
class ScriptedClient:
    """A client of a federation with samples and noise of the test; it answers as `Client` does."""

    method: Any
    private: LeastSquares
    samples: Mapping[str, np.ndarray]
    normals: Mapping[str, Any]
    rate: float
    local_steps: int = 1
    public: LeastSquares | None = None
    state: Any = None
    context: BoxContext = field(init=False)

    def __post_init__(self) -> None:
        batches = self.samples["batch"]
        sampling = WithoutReplacement(batches.shape[1], len(self.private.batch["y"]), len(batches))
        plan = self.method.plan(Setting(sampling=sampling, relation="replace_one"))
        self.context = BoxContext(
            self.private,
            self.public,
            {},
            sampling,
            plan,
            {name: iter(values) for name, values in self.samples.items()},
            GivenNoise(plan.releases, self.normals),
        )

    def move(self, params: Mapping[str, Tensor]) -> None:
        self.context.params = copied(params)
        self.state = (
            self.method.init(self.context)
            if self.state is None
            else self.method.rebase(self.state, self.context.params)
        )

    def train(self, steps: int) -> dict[str, Tensor]:
        for _ in range(steps):
            estimate, self.state = self.method.step(self.context, self.state)
            self.context.params = {
                name: value - self.rate * estimate[name] for name, value in self.context.params.items()
            }
            self.context.step += 1
        return self.context.params

    def answer(self, request: Request) -> Reply:
        protocol = protocol_of(self.method)
        self.move(request.params)
        self.state = protocol.follow(self.state, request.extras)
        if request.kind == "query":
            return Reply(reports=protocol.query(self.context, self.state))
        end = self.train(self.local_steps)
        self.state = protocol.end_round(self.state, end)
        return protocol.reply(self.state, request.params, copied(end))


D, RECORDS, PUBLIC, BATCH, K, STEPS, ROUNDS = 6, 30, 9, 8, 3, 4, 3
RNG = np.random.default_rng(0)
START = RNG.normal(size=D)
CLOSE = partial(np.testing.assert_allclose, rtol=0, atol=1e-12)


class Owner:
    """Records of one data owner, the samples of every draw, and standard normal numbers."""

    def __init__(self, seed, rounds=ROUNDS, steps=STEPS):
        rng = np.random.default_rng(seed)
        self.a, self.y = rng.normal(size=(RECORDS, D - 1)), 3 * rng.normal(size=RECORDS)
        self.batches = np.stack([rng.permutation(RECORDS)[:BATCH] for _ in range(rounds * steps)])
        self.queried = np.stack([rng.permutation(RECORDS)[:BATCH] for _ in range(rounds)])
        self.normals = rng.normal(size=(rounds * steps, D))
        self.of_squares = rng.normal(size=rounds)

    def given(self, noise=1.0):
        """Gradients, samples and noise, as a transcription takes them."""
        return gradients(self.a, self.y), self.batches, noise * self.normals

    def client(self, method, rate, **options):
        return ScriptedClient(
            method,
            LeastSquares(self.a, self.y),
            {"batch": self.batches, "radius": self.queried},
            {"gradient": self.normals, "squares": self.of_squares},
            rate,
            **options,
        )


OWNERS = [Owner(1), Owner(2)]
PUBLIC_A, PUBLIC_Y = RNG.normal(size=(PUBLIC, D - 1)), RNG.normal(size=PUBLIC)
PUBLIC_BATCHES = np.stack([RNG.permutation(PUBLIC)[:6] for _ in range(20)])


def gradients(a, y):
    """(w, ids) -> the gradients of (a w + v - y)^2 / 2, one row a record."""

    def rows(w, ids):
        residual = a[ids] @ w[:-1] + w[-1] - y[ids]
        return np.column_stack([residual[:, None] * a[ids], residual])

    return rows


PUBLIC_ROWS = gradients(PUBLIC_A, PUBLIC_Y)


def give_public_batches(monkeypatch):
    """The public records of every refresh, one sample after the other."""
    given = iter(torch.from_numpy(PUBLIC_BATCHES))
    monkeypatch.setattr(PublicRecords, "drawn", lambda self, size, rng: self.take(next(given)))


@pytest.mark.parametrize(("kind", "before"), [(published.PCDPSGD, True), (published.PDPSGD, False)])
def test_algorithm_1_of_pcdp_sgd(kind, before, monkeypatch):
    c, sigma, gamma = 0.5, 2.0, 0.3
    owner = OWNERS[0]
    give_public_batches(monkeypatch)
    public = LeastSquares(PUBLIC_A, PUBLIC_Y)
    source = PublicSubspace(PublicRecords(public.batch), dimension=K, batch_size=6)
    method = kind(source=source, clip_norm=c, noise_multiplier=sigma)
    run = owner.client(method, gamma, public=public)
    run.move(named(START))
    own, samples, noise = owner.given(c * sigma)
    path = boxes.pcdp_algorithm_1(
        START, own, PUBLIC_ROWS, samples[:STEPS], PUBLIC_BATCHES[:STEPS], noise[:STEPS],
        k=K, c=c, gamma=gamma, B=BATCH, before=before,
    )  # fmt: skip
    for w in path:
        CLOSE(row_of(run.train(1)), w)


@pytest.mark.parametrize(
    ("kind", "before", "form"),
    [
        (PublishedRoundPCDP, True, "coordinates"),
        (PublishedRoundPCDP, True, "combination"),
        (PublishedRoundPDP, False, "combination"),
    ],
)
def test_algorithms_2_and_3_of_fed_pcdp(kind, before, form, monkeypatch):
    c, sigma, gamma, gamma_g = 0.5, 2.0, 0.3, 0.7
    *_, w_g = boxes.fed_pcdp_algorithm_2(
        START, [owner.given(c * sigma) for owner in OWNERS], PUBLIC_ROWS, PUBLIC_BATCHES[:ROUNDS],
        k=K, T=STEPS, gamma_g=gamma_g, c=c, gamma=gamma, B=BATCH, before=before,
    )  # fmt: skip
    give_public_batches(monkeypatch)
    public = LeastSquares(PUBLIC_A, PUBLIC_Y)
    how = {"dimension": K, "blocks": "whole", "batch_size": 6}
    space = RoundSubspace(public.model(), public.loss, public.batch, **how)
    method = kind(source=space, clip_norm=c, noise_multiplier=sigma, form=form)
    clients = [owner.client(method, gamma, local_steps=STEPS) for owner in OWNERS]
    found = simulate(SubspaceAverage(space, gamma_g), clients, named(START), ROUNDS).params
    CLOSE(row_of(found), w_g)


def adaptdp(owners, **given):
    """The last model, and the radii."""
    path = boxes.adaptdp_algorithm_1(
        START, [owner.given() for owner in owners], [owner.queried for owner in owners],
        np.stack([owner.of_squares for owner in owners]), K=STEPS, **given,
    )  # fmt: skip
    models, radii = zip(*path, strict=True)
    return models[-1], radii


@pytest.mark.parametrize("largest", [None, 0.5])
def test_algorithm_1_of_adaptdp_fedavg(largest):
    G, sigma, sigma_C, eta = 9.0, 0.05, 0.01, 0.1
    expected, radii = adaptdp(OWNERS, G=G, sigma=sigma, sigma_C=sigma_C, eta=eta, B=largest or math.inf)
    assert min(radii) < G == max(radii)
    assert (np.linalg.norm(expected) > 0.5 + 1e-12) == (largest is None)
    noise = {"noise_multiplier": sigma * BATCH, "radius_noise_multiplier": sigma_C * BATCH}
    method = PublishedServerRMS(clip_norm=G, round_length=STEPS, **noise)
    clients = [owner.client(method, eta, local_steps=STEPS) for owner in OWNERS]
    server = AdaptDPFedAvg(RMSRadius(G, offset="paper"), ROUNDS, len(OWNERS), largest)
    found = simulate(server, clients, named(START), ROUNDS)
    CLOSE(row_of(found.params), expected)
    CLOSE([done.metrics["radius"] for done in found.rounds], radii)


def test_the_same_with_one_client_and_no_server():
    """`published.AdaptiveRMS` alone is algorithm 1 with P = 1."""
    G, sigma, sigma_C, eta = 9.0, 0.05, 0.01, 0.1
    owner = OWNERS[0]
    x, _ = adaptdp([owner], G=G, sigma=sigma, sigma_C=sigma_C, eta=eta)
    noise = {"noise_multiplier": sigma * BATCH, "radius_noise_multiplier": sigma_C * BATCH}
    run = owner.client(published.AdaptiveRMS(clip_norm=G, round_length=STEPS, **noise), eta)
    run.move(named(START))
    CLOSE(row_of(run.train(ROUNDS * STEPS)), x)


def test_algorithm_2_of_dp_fedavg():
    C, sigma, eta = 0.5, 0.05, 0.1
    given = [owner.given() for owner in OWNERS]
    *_, x = boxes.dp_fedavg_algorithm_2(START, given, ROUNDS, STEPS, C=C, sigma=sigma, eta=eta)
    method = published.DPFedAvg(clip_norm=C, noise_multiplier=sigma * BATCH)
    clients = [owner.client(method, eta, local_steps=STEPS) for owner in OWNERS]
    found = simulate(FedAvg(), clients, named(START), ROUNDS).params
    CLOSE(row_of(found), x)
