"""Algorithms as their papers print them, line by line, in NumPy alone: what `equipoise.published` is held to.

Written from the papers' boxes. Nothing of the library is imported, and samples and noise are given. The line
numbers are the papers'. Every function yields after each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Gradients = Callable[[Array, Array], Array]  # (x, numbers of the records) -> [B, d], a row per record
Owner = tuple[Gradients, Sequence[Array], Sequence[Array]]  # a client: its gradients, samples and noise


def clip(u: Array, radius: float) -> Array:
    norm = float(np.linalg.norm(u))
    return u if norm <= radius else u * (radius / norm)


def unit(u: Array) -> Array:
    norm = float(np.linalg.norm(u))
    return u / norm if norm > 0 else u


# ---- DiceSGD (Zhang, Bu, Wu and Hong, ICLR 2024)


def dice_algorithm_2(
    x: Array, gradients: Gradients, samples: Sequence[Array], noise: Sequence[Array],
    *, c1: float, c2: float, eta: float, batch: float,
) -> Iterator[tuple[Array, Array]]:  # fmt: skip
    """(x, e) after each step; the noise w is on the scale of the mean."""
    e = np.zeros_like(x)  # 2
    for drawn, w in zip(samples, noise, strict=True):  # 3, 4
        g = gradients(x, drawn)
        v = sum((clip(g_i, c1) for g_i in g), np.zeros_like(x)) / batch + clip(e, c2)  # 5
        x = x - eta * (v + w)  # 6
        e = e + g.sum(axis=0) / batch - v  # 7
        yield x, e


def dice_algorithm_4(
    x: Array, gradients: Gradients, samples: Sequence[Array], noise: Sequence[Array],
    *, eta: float, batch: float,
) -> Iterator[tuple[Array, Array]]:  # fmt: skip
    """The automatic one: clip(u, 1) is u / |u|."""
    e = np.zeros_like(x)  # 2
    for drawn, w in zip(samples, noise, strict=True):  # 3, 4
        g = gradients(x, drawn)
        v = sum((unit(g_i) for g_i in g), np.zeros_like(x)) / batch + unit(e)  # 5
        x = x - eta * (v + w)  # 6
        e = e + g.sum(axis=0) / batch - v  # 7
        yield x, e


def dice_noise(c1: float, c: float, population: int, steps: int, epsilon: float, delta: float) -> float:
    """sigma_1 of Theorem 3.8, with min(C, G') = C."""
    return float(np.sqrt(32 * steps * (c1**2 + 2 * c**2) * np.log(1 / delta) / (population**2 * epsilon**2)))


def dice_noise_4(population: int, steps: int, epsilon: float, delta: float) -> float:
    """The factor of line 6 of Algorithm 4."""
    return float(np.sqrt(96 * steps * np.log(1 / delta)) / (population * epsilon))


# ---- DC-DPSGD (Sha et al., arXiv 2405.17529)


def dc_algorithm_1(
    w: Array, gradients: Gradients, samples: Sequence[Array], columns: Sequence[Array],
    trace_noise: Sequence[Array], noise: Sequence[Array],
    *, p: float, c1: float, c2: float, eta: float, sigma_tr: float, sigma_dp: float, mean: bool = False,
) -> Iterator[tuple[Array, Array]]:  # fmt: skip
    """(w, the deviations of the noise that the records got) after each step.

    Args:
        columns: [d, k] per step, as drawn, not yet orthogonal.
        trace_noise: [B] per step, standard normal.
        noise: [B, d] per step, standard normal: one vector for every record, as printed.
        mean: read line 6 literally, V V^T = (1/k) sum_j v_j v_j^T.
    """
    for drawn, drawn_columns, z_tr, z_dp in zip(samples, columns, trace_noise, noise, strict=True):
        g = gradients(w, drawn)  # 5
        big = len(g)
        v = np.linalg.qr(drawn_columns)[0]  # 6, v^T v = 1
        second_moment = v @ v.T / (v.shape[1] if mean else 1)
        traces = np.zeros(big)
        for i in range(big):
            unit_g = unit(g[i])  # 7
            traces[i] = unit_g @ second_moment @ unit_g  # 8
        order = np.argsort(-(traces + sigma_tr * z_tr))  # 9
        tail = set(order[: int(p * big)].tolist())
        total, deviations = np.zeros_like(w), np.zeros(big)
        for i in range(big):
            c = c1 if i in tail else c2
            total += g[i] / max(1, np.linalg.norm(g[i]) / c) + c * sigma_dp * z_dp[i]  # 10
            deviations[i] = c * sigma_dp
        w = w - eta * total / big  # 11, 12
        yield w, deviations


def dc_program(
    w: Array, gradients: Gradients, samples: Sequence[Array], columns: Sequence[Array],
    trace_noise: Sequence[Array], noise: Sequence[Array], layer: slice,
    *, p: float, c1: float, c2: float, eta: float, sigma: float, batch: float, mnist: bool = False,
) -> Iterator[tuple[Array, float]]:  # fmt: skip
    """The authors' program: (w, the deviation of the noise on the average) after each step.

    Args:
        columns: [size of the layer, k] per step.
        trace_noise: [B] per step, standard normal.
        noise: [d] per step, standard normal, for the average.
        layer: where the one parameter tensor lies that it looks at.
        mnist: the script for MNIST does not divide the trace's noise by B.
    """
    for drawn, drawn_columns, z_tr, z in zip(samples, columns, trace_noise, noise, strict=True):
        g = gradients(w, drawn)
        size = len(g)
        v = np.linalg.qr(drawn_columns)[0]
        part = g[:, layer]
        part = np.abs(part / np.linalg.norm(part))  # the norm of the whole batch
        traces = np.array([np.trace(v.T @ np.outer(row, row) @ v) for row in part])
        traces = traces + z_tr * (sigma if mnist else sigma / batch)
        bar = np.sort(traces)[::-1][int(size * p)]
        tail = traces > bar
        average = np.zeros_like(w)
        for i in range(size):
            average += clip(g[i], c1 if tail[i] else c2) / batch
        share = tail.sum() / size
        std = np.hypot(share * sigma * c1 / batch, (1 - share) * sigma * c2 / batch)
        w = w - eta * (average + std * z)
        yield w, float(std)


# ---- PCDP-SGD and FedPCDP (arXiv 2312.03792)


def leading(rows: Array, k: int) -> Array:
    """V_k of sum_j g_j g_j^T."""
    return np.linalg.eigh(rows.T @ rows)[1][:, -k:]


def pcdp_step(
    w: Array, g: Array, V: Array, w_noise: Array, *, c: float, gamma: float, B: float, before: bool
) -> Array:
    """Lines 8 to 15 of algorithm 1; PDP-SGD clips whole gradients and projects their sum (`before` False)."""
    P = V @ V.T
    clipped = [clip(P @ g_i, c) if before else P @ clip(g_i, c) for g_i in g]  # 8 to 11
    g_tilde = (sum(clipped, np.zeros_like(w)) + P @ w_noise) / B  # 13
    return w - gamma * g_tilde  # 15


def pcdp_algorithm_1(
    w: Array, gradients: Gradients, public: Gradients, samples: Sequence[Array],
    public_samples: Sequence[Array], noise: Sequence[Array], *, k: int, **given: Any,
) -> Iterator[Array]:  # fmt: skip
    """w after each step; the noise N(0, c^2 sigma^2 I) is of R^d."""
    for drawn, of_public, w_noise in zip(samples, public_samples, noise, strict=True):  # 4, 5
        V = leading(public(w, of_public), k)  # 7
        w = pcdp_step(w, gradients(w, drawn), V, w_noise, **given)
        yield w


def fed_pcdp_algorithm_2(
    w_g: Array, clients: Sequence[Owner], public: Gradients, public_samples: Sequence[Array],
    *, k: int, T: int, gamma_g: float, **given: Any,
) -> Iterator[Array]:  # fmt: skip
    """w_g after each round, all clients taking part; line 12 with the displacement after all T steps."""
    for r, of_public in enumerate(public_samples):  # 2; line 3 of algorithm 3
        V = leading(public(w_g, of_public), k)  # lines 4 and 5 of algorithm 3
        sent = []
        for gradients, samples, noise in clients:  # 7
            w = w_g  # 8
            for t in range(r * T, (r + 1) * T):  # 9
                w = pcdp_step(w, gradients(w, samples[t]), V, noise[t], **given)  # 10
            sent.append(V.T @ (w_g - w))  # 12, 13
        w_g = w_g - gamma_g * np.mean([V @ u for u in sent], axis=0)  # 16
        yield w_g


# ---- AdaptDP-FedAvg and DP-FedAvg (Fukami, Murata and Niwa, TMLR 2025)


def dp_local_steps(x: Array, owner: Owner, steps: range, *, C: float, sigma: float, eta: float) -> Array:
    """Lines 11 to 15 of algorithm 1, and 4 to 9 of algorithm 2; the noise is standard normal."""
    gradients, samples, noise = owner
    for k in steps:
        g = np.mean([clip(g_i, C) for g_i in gradients(x, samples[k])], axis=0)
        x = x - eta * (g + sigma * C * noise[k])
    return x


def adaptdp_algorithm_1(
    x: Array, clients: Sequence[Owner], queried: Sequence[Sequence[Array]], xi: Array,
    *, G: float, sigma: float, sigma_C: float, eta: float, K: int, B: float = math.inf, tau: float = 1.0,
    u: float = 0.01,
) -> Iterator[tuple[Array, float]]:  # fmt: skip
    """(x_r, C_r) after each round.

    Args:
        queried: the samples of the radius, by client and round.
        xi: standard normal numbers of the radius, [P, R].
    """
    P, R = xi.shape
    nu = math.sqrt(2 * sigma_C**2 * G**4 / P) * math.sqrt(math.log(2 * P * R / u))  # proposition 2
    for r in range(R):  # 5
        received = []
        for (gradients, *_), drawn, normal in zip(clients, queried, xi, strict=True):
            squares = (gradients(x, drawn[r]) ** 2).sum(1)
            received.append(np.minimum(squares, G**2).mean() + sigma_C * G**2 * normal[r])  # 7, 9
        C = min(math.sqrt(2 * tau * (np.mean(received) + nu)), G)  # 9
        steps = range(r * K, (r + 1) * K)
        x = np.mean([dp_local_steps(x, one, steps, C=C, sigma=sigma, eta=eta) for one in clients], axis=0)
        x = clip(x, B)  # 18
        yield x, C


def dp_fedavg_algorithm_2(
    x: Array, clients: Sequence[Owner], rounds: int, K: int, **given: float
) -> Iterator[Array]:
    for r in range(rounds):  # 1
        steps = range(r * K, (r + 1) * K)
        x = np.mean([dp_local_steps(x, one, steps, **given) for one in clients], axis=0)  # 2 to 11
        yield x
