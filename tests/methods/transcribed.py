"""Algorithms as their papers print them, line by line, in NumPy alone: what `equipoise.published` is held to.

Written from the papers' boxes. Nothing of the library is imported, and samples and noise are given. The line
numbers are the papers'. Every function yields after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Gradients = Callable[[Array, Array], Array]  # (x, numbers of the records) -> [B, d], a row per record


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


def dice_algorithm_3(
    x: Array, gradients: Gradients, samples: Sequence[Array], noise: Sequence[Array],
    *, c1: float, c2: float, eta: float, batch: float, beta1: float, beta2: float, small: float,
) -> Iterator[tuple[Array, Array]]:  # fmt: skip
    """As 2, with Adam. Printed slips that cannot be meant are mended: see the comments."""
    e, m1, m2 = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)  # 2
    for t, (drawn, w) in enumerate(zip(samples, noise, strict=True)):  # 3, 4
        g = gradients(x, drawn)
        body = sum((clip(g_i, c1) for g_i in g), np.zeros_like(x)) / batch + clip(e, c2)
        v = body + w  # 5
        m1 = beta1 * m1 + (1 - beta1) * v  # 6
        m2 = beta2 * m2 + (1 - beta2) * v**2  # 7, where the weight is printed as 1 - beta^2
        # 8: printed with the exponent t, which divides by zero in the first step, and with epsilon inside
        # the root; torch's Adam has it outside
        x = x - eta * (m1 / (1 - beta1 ** (t + 1))) / (np.sqrt(m2 / (1 - beta2 ** (t + 1))) + small)
        e = e + g.sum(axis=0) / batch - body  # 9
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
