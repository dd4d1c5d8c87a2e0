"""DiceSGD as published: a far record is fed back at every step after it was drawn once.

One parameter, Huber losses, N - 1 records at 0 and one more: at 0 as well, or so far that its gradient is the
bound G = 4 B C2 T. Once it was drawn, the raw memory stays above C2 for the rest of the training, and every
update moves by C2, drawn or not; the published proof grants each of those steps the amplification of a fresh
draw. The attacker adds the updates up, less what the records at 0 give on average.

The noise is Theorem 3.8's (with C = B C2, which it asks for) or the smaller one of Algorithm 4. The runs are
vectorised: `update` is the published step for many runs at once, and a test compares it with the library's
`published.DiceSGD`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from equipoise._roots import crossing
from equipoise.audit.bounds import certify_thresholds
from equipoise.privacy.accounting.epsilon import gaussian_log_delta
from equipoise.published.dice_sgd import published_noise_std
from reproduction.attacks.finding import Finding

__all__ = ["attack_dice_sgd", "hidden_state_epsilon", "hidden_state_mu", "update"]

Numbers = NDArray[np.float64]


def update(
    x: Numbers,
    memory: Numbers,
    others: Numbers,
    special: Numbers,
    gradient: Numbers,
    *,
    batch: float,
    bound: float,
    clip_norm: float = 1.0,
    feedback_clip_norm: float = 1.0,
) -> tuple[Numbers, Numbers]:
    """The raw update and the next memory of Algorithm 2 in one dimension, [runs].

    Args:
        x, memory: of the runs.
        others: how many of the records at 0 were drawn.
        special: whether the record in question was drawn, 0 or 1.
        gradient: its gradient.
        batch: B.
        bound: G, of every gradient.
        clip_norm, feedback_clip_norm: C1 and C2.
    """
    at_zero = np.clip(x, -bound, bound)
    body = others * np.clip(at_zero, -clip_norm, clip_norm) + special * np.clip(
        gradient, -clip_norm, clip_norm
    )
    raw = others * at_zero + special * gradient
    out = body / batch + np.clip(memory, -feedback_clip_norm, feedback_clip_norm)
    return out, memory + raw / batch - out


def attack_dice_sgd(
    seed: int = 0,
    *,
    runs: int = 100_000,
    noise: str = "theorem",
    epsilon: float = 2.0,
    delta: float = 1e-5,
    confidence: float = 0.99,
    population: int = 2000,
    batch: int = 40,
    steps: int = 200,
) -> Finding:
    """Runs with and without the far record, and a threshold test of the added updates.

    Args:
        seed: of the runs.
        runs: of either kind.
        noise: "theorem" or "algorithm_4".
        epsilon, delta: as claimed.
        confidence: of the certificate.
        population, batch, steps: N, B, T.
    """
    rng = np.random.default_rng(seed)
    radius = float(batch) if noise == "theorem" else 1.0
    std = published_noise_std(
        epsilon, delta, clip_norm=1.0, radius=radius, population=population, steps=steps
    )
    bound = 4.0 * batch * steps
    rate, rates = batch / population, 0.01

    def statistic(far: bool) -> Numbers:
        x, memory, total = np.zeros(runs), np.zeros(runs), np.zeros(runs)
        for _ in range(steps):
            others = rng.binomial(population - 1, rate, runs).astype(np.float64)
            special = (rng.random(runs) < rate).astype(np.float64)
            gradient = np.full(runs, bound) if far else np.clip(x, -bound, bound)
            out, memory = update(x, memory, others, special, gradient, batch=batch, bound=bound)
            released = out + std * rng.standard_normal(runs)
            total += released - (population - 1) * rate / batch * np.clip(x, -1.0, 1.0)
            x = x - rates * released
        return total

    without, with_record = statistic(False), statistic(True)
    return Finding(
        name="dice-sgd",
        target=f"Algorithm 2 with the noise of {noise}: N={population}, B={batch}, T={steps}, C1=C2=1",
        claimed=epsilon,
        certificate=certify_thresholds(without, with_record, delta, confidence),
        details={
            "noise_std": std,
            "mean_shift_in_stds": float((with_record.mean() - without.mean()) / without.std()),
        },
    )


def hidden_state_mu(
    participations: int,
    noise_std: float,
    *,
    clip_norm: float,
    residual_clip_norm: float,
    expected_batch_size: float,
) -> float:
    """GDP parameter with an un-noised memory of bounded residuals, for K participations of a record.

    The difference of the two memories moves by at most R / B = (Ce - C1) / B at a participation, and by
    firm non-expansiveness of the projection |Pa - Pb|^2 + |(a - Pa) - (b - Pb)|^2 <= |a - b|^2 otherwise.
    Hence the differences d_t of the feedbacks obey sum_t d_t^2 <= (K R / B)^2, and

        mu <= (K^(1/2) C1 + K R) / (B sigma1).

    There is no amplification by sampling, and the cost grows with K.
    """
    span = residual_clip_norm - clip_norm
    total = math.sqrt(participations) * clip_norm + participations * span
    return total / (expected_batch_size * noise_std)


def hidden_state_epsilon(
    noise_std: float,
    delta: float,
    *,
    clip_norm: float,
    residual_clip_norm: float,
    expected_batch_size: float,
    sampling_rate: float,
    steps: int,
) -> float:
    """Epsilon of the same under Poisson sampling: delta(epsilon) averaged over K ~ Binomial(T, q)."""
    counts = range(1, int(stats.binom.ppf(1 - delta * 1e-3, steps, sampling_rate)) + 2)
    mus = [
        hidden_state_mu(
            k,
            noise_std,
            clip_norm=clip_norm,
            residual_clip_norm=residual_clip_norm,
            expected_batch_size=expected_batch_size,
        )
        for k in counts
    ]
    shares = [float(stats.binom.pmf(k, steps, sampling_rate)) for k in counts]
    beyond = float(stats.binom.sf(counts[-1], steps, sampling_rate))  # counted as no privacy at all

    def excess(epsilon: float) -> float:
        deltas = (
            share * math.exp(gaussian_log_delta(epsilon, mu)) for share, mu in zip(shares, mus, strict=True)
        )
        return beyond + sum(deltas) - delta

    if excess(0.0) <= 0:
        return 0.0
    _, enough = crossing(excess, 0.0, 1.0, tolerance=1e-12, relative=1e-9)
    return enough
