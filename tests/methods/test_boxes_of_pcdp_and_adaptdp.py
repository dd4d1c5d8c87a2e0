"""The published classes step by step beside their papers' algorithms, transcribed here in NumPy.

The transcriptions are of arXiv 2312.03792 (algorithms 1, 2 and 3) and of Fukami, Murata and Niwa, TMLR 2025
(algorithms 1 and 2), line by line, and use nothing of the library.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from boxes import LeastSquares, ScriptedClient, named, row_of

from equipoise.federated import (
    AdaptDPFedAvg,
    FedAvg,
    PublishedRoundPCDP,
    PublishedRoundPDP,
    PublishedServerRMS,
    RoundSubspace,
    SubspaceAverage,
    simulate,
)
from equipoise.methods import PublicRecords, PublicSubspace, published
from equipoise.methods.adaptive_rms import RMSRadius

D, RECORDS, PUBLIC, BATCH, K, STEPS, ROUNDS = 6, 30, 9, 8, 3, 4, 3
RNG = np.random.default_rng(0)
START = RNG.normal(size=D)


class Owner:
    """Records of one data owner, the samples of every draw, and standard normal numbers."""

    def __init__(self, seed, rounds=ROUNDS, steps=STEPS):
        rng = np.random.default_rng(seed)
        self.a, self.y = rng.normal(size=(RECORDS, D - 1)), 3 * rng.normal(size=RECORDS)
        self.batches = np.stack([rng.permutation(RECORDS)[:BATCH] for _ in range(rounds * steps)])
        self.queried = np.stack([rng.permutation(RECORDS)[:BATCH] for _ in range(rounds)])
        self.normals = rng.normal(size=(rounds * steps, D))
        self.of_squares = rng.normal(size=rounds)

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


def gradients(w, a, y):
    """Of (a w + v - y)^2 / 2, one row a record."""
    residual = a @ w[:-1] + w[-1] - y
    return np.column_stack([residual[:, None] * a, residual])


def top_k(rows, k):
    """V_k of sum_j g_j g_j^T."""
    return np.linalg.eigh(rows.T @ rows)[1][:, -k:]


def clip(rows, c):
    return rows / np.maximum(1, np.linalg.norm(rows, axis=1, keepdims=True) / c)


def give_public_batches(monkeypatch):
    """The public records of every refresh, one sample after the other."""
    given = iter(torch.from_numpy(PUBLIC_BATCHES))
    monkeypatch.setattr(PublicRecords, "drawn", lambda self, size, rng: self.take(next(given)))


# ---- PCDP-SGD and PDP-SGD


def pcdp_step(w, owner, t, V, c, sigma, gamma, before=True):
    """Lines 5 to 15 of algorithm 1; PDP-SGD clips the whole gradients and projects their sum."""
    ids = owner.batches[t]  # line 5
    g = gradients(w, owner.a[ids], owner.y[ids])  # line 6
    P = V @ V.T
    g_bar = clip(g @ P, c) if before else clip(g, c) @ P  # lines 8 to 11
    g_tilde = (g_bar.sum(0) + P @ (c * sigma * owner.normals[t])) / BATCH  # line 13
    return w - gamma * g_tilde  # line 15


@pytest.mark.parametrize(("kind", "before"), [(published.PCDPSGD, True), (published.PDPSGD, False)])
def test_algorithm_1_of_pcdp_sgd(kind, before, monkeypatch):
    c, sigma, gamma = 0.5, 2.0, 0.3
    owner, w = OWNERS[0], START
    give_public_batches(monkeypatch)
    public = LeastSquares(PUBLIC_A, PUBLIC_Y)
    source = PublicSubspace(PublicRecords(public.batch), dimension=K, batch_size=6)
    method = kind(source=source, clip_norm=c, noise_multiplier=sigma)
    run = owner.client(method, gamma, public=public)
    run.move(named(START))
    for t in range(STEPS):
        ids = PUBLIC_BATCHES[t]
        V = top_k(gradients(w, PUBLIC_A[ids], PUBLIC_Y[ids]), K)  # line 7
        w = pcdp_step(w, owner, t, V, c, sigma, gamma, before)
        np.testing.assert_allclose(row_of(run.train(1)), w, rtol=0, atol=1e-12)


# ---- FedPCDP and FedPDP


@pytest.mark.parametrize(("kind", "before"), [(PublishedRoundPCDP, True), (PublishedRoundPDP, False)])
@pytest.mark.parametrize("form", ["coordinates", "combination"])
def test_algorithms_2_and_3_of_fed_pcdp(kind, before, form, monkeypatch):
    c, sigma, gamma, gamma_g = 0.5, 2.0, 0.3, 0.7
    w_g = START  # line 1
    for r in range(ROUNDS):  # line 2
        ids = PUBLIC_BATCHES[r]  # line 3 of algorithm 3
        V = top_k(gradients(w_g, PUBLIC_A[ids], PUBLIC_Y[ids]), K)  # its lines 4 and 5
        sent = []
        for owner in OWNERS:
            w = w_g  # line 8
            for t in range(STEPS):
                w = pcdp_step(w, owner, r * STEPS + t, V, c, sigma, gamma, before)  # line 10
            sent.append(V.T @ (w_g - w))  # lines 12 and 13
        w_g = w_g - gamma_g * np.mean([V @ u for u in sent], axis=0)  # line 16
    give_public_batches(monkeypatch)
    public = LeastSquares(PUBLIC_A, PUBLIC_Y)
    space = RoundSubspace(
        public.model(), public.loss, public.batch, dimension=K, blocks="whole", batch_size=6
    )
    clients = [
        owner.client(
            kind(source=space, clip_norm=c, noise_multiplier=sigma, form=form), gamma, local_steps=STEPS
        )
        for owner in OWNERS
    ]
    found = simulate(SubspaceAverage(space, gamma_g), clients, named(START), ROUNDS).params
    np.testing.assert_allclose(row_of(found), w_g, rtol=0, atol=1e-12)


# ---- AdaptDP-FedAvg and DP-FedAvg


def local_steps(x, owner, r, C, sigma, eta):
    """Lines 11 to 15 of algorithm 1, and 4 to 9 of algorithm 2."""
    for k in range(STEPS):
        ids = owner.batches[r * STEPS + k]
        g = clip(gradients(x, owner.a[ids], owner.y[ids]), C).mean(0)
        x = x - eta * (g + sigma * C * owner.normals[r * STEPS + k])
    return x


def adaptdp(G, sigma, sigma_C, eta, B, tau=1.0, u=0.01):
    P, x, radii = len(OWNERS), START, []
    nu = math.sqrt(2 * sigma_C**2 * G**4 / P) * math.sqrt(math.log(2 * P * ROUNDS / u))  # proposition 2
    for r in range(ROUNDS):
        received = []
        for owner in OWNERS:
            ids = owner.queried[r]
            squares = (gradients(x, owner.a[ids], owner.y[ids]) ** 2).sum(1)
            received.append(np.minimum(squares, G**2).mean() + sigma_C * G**2 * owner.of_squares[r])  # line 7
        C = min(math.sqrt(2 * tau * (np.mean(received) + nu)), G)  # line 9
        mean = np.mean([local_steps(x, owner, r, C, sigma, eta) for owner in OWNERS], axis=0)
        x = mean * min(1, B / np.linalg.norm(mean))  # line 18
        radii.append(C)
    return x, radii


@pytest.mark.parametrize("largest", [None, 0.5])
def test_algorithm_1_of_adaptdp_fedavg(largest):
    G, sigma, sigma_C, eta = 9.0, 0.05, 0.01, 0.1
    expected, radii = adaptdp(G, sigma, sigma_C, eta, largest or math.inf)
    assert min(radii) < G == max(radii)
    assert (np.linalg.norm(expected) > 0.5 + 1e-12) == (largest is None)
    clients = [
        owner.client(
            PublishedServerRMS(
                clip_norm=G,
                round_length=STEPS,
                noise_multiplier=sigma * BATCH,
                radius_noise_multiplier=sigma_C * BATCH,
            ),
            eta,
            local_steps=STEPS,
        )
        for owner in OWNERS
    ]
    server = AdaptDPFedAvg(RMSRadius(G, offset="paper"), ROUNDS, len(OWNERS), largest)
    found = simulate(server, clients, named(START), ROUNDS)
    np.testing.assert_allclose(row_of(found.params), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose([done.metrics["radius"] for done in found.rounds], radii, rtol=1e-12)


def test_the_same_with_one_client_and_no_server():
    """`published.AdaptiveRMS` alone is algorithm 1 with P = 1."""
    G, sigma, sigma_C, eta = 9.0, 0.05, 0.01, 0.1
    owner, x = OWNERS[0], START
    nu = math.sqrt(2 * sigma_C**2 * G**4) * math.sqrt(math.log(2 * ROUNDS / 0.01))
    for r in range(ROUNDS):
        ids = owner.queried[r]
        squares = (gradients(x, owner.a[ids], owner.y[ids]) ** 2).sum(1)
        mean = np.minimum(squares, G**2).mean() + sigma_C * G**2 * owner.of_squares[r]
        x = local_steps(x, owner, r, min(math.sqrt(2 * (mean + nu)), G), sigma, eta)
    noise = {"noise_multiplier": sigma * BATCH, "radius_noise_multiplier": sigma_C * BATCH}
    run = owner.client(published.AdaptiveRMS(clip_norm=G, round_length=STEPS, **noise), eta)
    run.move(named(START))
    np.testing.assert_allclose(row_of(run.train(ROUNDS * STEPS)), x, rtol=0, atol=1e-12)


def test_algorithm_2_of_dp_fedavg():
    C, sigma, eta, x = 0.5, 0.05, 0.1, START
    for r in range(ROUNDS):
        x = np.mean([local_steps(x, owner, r, C, sigma, eta) for owner in OWNERS], axis=0)
    method = published.DPFedAvg(clip_norm=C, noise_multiplier=sigma * BATCH)
    clients = [owner.client(method, eta, local_steps=STEPS) for owner in OWNERS]
    found = simulate(FedAvg(), clients, named(START), ROUNDS).params
    np.testing.assert_allclose(row_of(found), x, rtol=0, atol=1e-12)


# ---- the noise of equations (1) and (3)


def least_sigma(target, releases, b, n, alpha):
    """The least sigma with releases x S(alpha) <= target, by bisection of S as it is printed."""

    def S(sigma):
        def epsilon(order):
            return order * (2 / b) ** 2 / (2 * sigma**2)

        gamma = b / n
        inside = 1 + gamma**2 * math.comb(alpha, 2) * min(
            4 * (math.exp(epsilon(2)) - 1), 2 * math.exp(epsilon(2))
        )
        for j in range(3, alpha + 1):
            inside += 2 * gamma**j * math.comb(alpha, j) * math.exp((j - 1) * epsilon(j))
        return math.log(inside) / (alpha - 1)

    low, high = 1e-3, 10.0
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if releases * S(middle) <= target else (middle, high)
    return high


@pytest.mark.parametrize("epsilon", [2.0, 8.0])
def test_the_noise_of_equations_1_and_3(epsilon):
    n, b, R, K_, delta = 10_000, 100, 100, 20, 1e-5
    alpha = 1 + math.ceil(2 * math.log(1 / delta) / epsilon)
    of_part = {"population": n, "batch": b}
    noise = published.adaptive_rms.published_noise
    found = []
    for releases, parts in ((R * K_, 2), (R, 2), (R * K_, 1)):
        expected = least_sigma(epsilon / (2 * parts), releases, b, n, alpha)
        found.append(noise(epsilon, delta, steps=releases, parts=parts, **of_part))
        assert found[-1] == pytest.approx(expected, rel=1e-9)
    of_run = {"steps": R * K_, "rounds": R, **of_part}
    claimed = published.adaptive_rms.claimed_epsilon
    assert claimed(*found[:2], delta, **of_run) == pytest.approx(epsilon, rel=1e-3)
    assert claimed(found[2], None, delta, **of_run) == pytest.approx(epsilon, rel=1e-3)
