"""The noise of DiceSGD: constants of the joint release, the paper's formulas, and what can be proved of them.

**Joint release.** A record with gradient norm n contributes min(n, C1) to the body and min(n, Ce) to the
total, in the same direction. The two sums get the noise, with W, V ~ N(0, I) and multiplier sigma,

    total: sigma kappa Ce W        body: sigma (beta kappa Ce W + b V)

After whitening, the record contributes a vector of squared length

    h(n) = (min(n, Ce) / (kappa Ce))^2 + ((min(n, C1) - beta min(n, Ce)) / b)^2,

quadratic on [0, C1], convex on [C1, Ce] and constant after, so that sup h = max(h(C1), h(Ce)).
`joint_params` makes both equal to 1: the pair is one Gaussian release of multiplier sigma.

**Published form.** Noise of standard deviation sigma1 on the mean of clipped gradients plus the clipped
memory (Zhang, Bu, Wu and Hong 2024, "Differentially private SGD without clipping bias: an error-feedback
approach", Theorem 3.8 and Algorithm 4). The memory is a sum of raw gradients and is not noised, so that a
record drawn once moves every later release by up to 2 C2. What is proved here is `worst_case_multiplier`,
without amplification, and for a memory of bounded residuals `hidden_state_mu`.
"""

from __future__ import annotations

import math

import torch
from scipy import optimize, stats
from torch import Tensor

from equipoise.privacy.accounting.epsilon import gaussian_log_delta
from equipoise.privacy.mechanisms.joint_gaussian import CorrelatedNoise, radial_sensitivity

__all__ = [
    "claimed_epsilon",
    "hidden_state_epsilon",
    "hidden_state_mu",
    "independent_noise",
    "joint_noise",
    "joint_params",
    "normalising_noise",
    "published_noise_std",
    "reach",
    "worst_case_multiplier",
]


def joint_params(
    clip_norm: float, residual_clip_norm: float, noise_inflation: float = 1.0
) -> tuple[float, float]:
    """(beta, b) of the joint release, for which sup h = h(C1) = h(Ce) = 1.

    With r = C1 / Ce, q = (1 - kappa^-2)^(1/2) and s = (1 - (r / kappa)^2)^(1/2):

        b = C1 (1 - r) / (s - r q),        beta = r (1 - q b / C1)

    Args:
        clip_norm: C1 > 0.
        residual_clip_norm: Ce >= C1; at Ce = C1 the two sums are one, beta = 1 and b = 0.
        noise_inflation: kappa >= 1; more noise on the total, less on the body.

    Example:
        >>> beta, b = joint_params(1.0, 10.0)
        >>> round(beta, 6), round(b, 6)
        (0.1, 0.904534)
    """
    if residual_clip_norm == clip_norm:
        return 1.0, 0.0
    r = clip_norm / residual_clip_norm
    q = math.sqrt(1 - noise_inflation**-2)
    s = math.sqrt(1 - (r / noise_inflation) ** 2)
    b = clip_norm * (1 - r) / (s - r * q)
    return r * (1 - q * b / clip_norm), b


def _lower(beta: float, b: float, tail: float) -> list[list[float]]:
    """Cholesky factor of the noise of (body, total) = (beta tail W + b V, tail W)."""
    body = math.hypot(beta * tail, b)
    return [[body, 0.0], [beta * tail * tail / body, tail * b / body]]


def joint_noise(clip_norm: float, residual_clip_norm: float, noise_inflation: float = 1.0) -> CorrelatedNoise:
    """The correlated noise of body (clipped at C1) and total (clipped at Ce > C1).

    Example:
        >>> noise = joint_noise(1.0, 10.0)
        >>> [round(std, 4) for std in noise.standard_deviations]  # alone they would need 1 and 10
        [1.3484, 10.0]
    """
    beta, b = joint_params(clip_norm, residual_clip_norm, noise_inflation)

    def lengths(norms: Tensor) -> Tensor:
        return torch.stack([norms.clamp(max=clip_norm), norms.clamp(max=residual_clip_norm)], dim=1)

    factor = _lower(beta, b, noise_inflation * residual_clip_norm)
    return CorrelatedNoise(("body", "total"), factor, lengths, (clip_norm, residual_clip_norm))


def independent_noise(clip_norm: float, residual_clip_norm: float) -> CorrelatedNoise:
    """Independent noise for body and residual (total minus body): a naive split, also of sensitivity 1.

    Standard deviations (C1 Ce)^(1/2) and ((Ce - C1) Ce)^(1/2). The body's noise is 2.3 times that of the
    joint form at Ce = 10 C1; this is the form to compare with.

    Example:
        >>> [round(std, 4) for std in independent_noise(1.0, 10.0).standard_deviations]
        [3.1623, 9.4868]
    """
    span = residual_clip_norm - clip_norm

    def lengths(norms: Tensor) -> Tensor:
        body = norms.clamp(max=clip_norm)
        return torch.stack([body, norms.clamp(max=residual_clip_norm) - body], dim=1)

    factor = [[math.sqrt(clip_norm * residual_clip_norm), 0.0], [0.0, math.sqrt(span * residual_clip_norm)]]
    return CorrelatedNoise(("body", "residual"), factor, lengths, (clip_norm, residual_clip_norm))


def normalising_noise(
    clip_norm: float, residual_clip_norm: float, noise_inflation: float = 1.0, regulariser: float = 0.0
) -> CorrelatedNoise:
    """The joint noise where the body holds *normalised* gradients, C1 g / (|g| + gamma).

    Constants beta = C1 / Ce and b = C1: with t = min(n, Ce) / Ce the whitened length is
    (t / kappa)^2 + (1 - t)^2 <= 1 for gamma = 0. With gamma > 0 the supremum lies slightly above 1, is found
    numerically, and scales the noise.

    Example:
        >>> [round(std, 4) for std in normalising_noise(1.0, 10.0).standard_deviations]
        [1.4142, 10.0]
    """
    tail = noise_inflation * residual_clip_norm
    factor = _lower(clip_norm / residual_clip_norm, clip_norm, tail)

    def lengths(norms: Tensor) -> Tensor:
        body = clip_norm * norms / (norms + regulariser)
        body = torch.where(norms > 0, body, torch.zeros_like(body))
        # A row of infinite norm never comes here; a huge one is clip_norm / (1 + 0).
        return torch.stack([body, norms.clamp(max=residual_clip_norm)], dim=1)

    marks = (clip_norm, residual_clip_norm)
    above = max(1.0, radial_sensitivity(lengths, factor, marks))
    if above > 1:
        above *= 1 + 1e-6  # the grid on which the supremum is taken is fine, not infinite
    scaled = [[above * entry for entry in row] for row in factor]
    return CorrelatedNoise(("body", "total"), scaled, lengths, marks)


def reach(
    noise_multiplier: float,
    clip_norm: float,
    residual_clip_norm: float,
    *,
    num_parameters: int,
    steps: int,
    expected_batch_size: float,
    noise_inflation: float = 1.0,
) -> float:
    """The feedback radius C2 below which noise keeps the feedback from arriving within the training.

    Noise of standard deviation s a coordinate enters the memory at every step; the clipped feedback forgets
    over about s^2 d / (2 C2^2) steps. C2 >= s (5 d / T)^(1/2) makes that at most a tenth of the training.

    Example:
        >>> round(reach(0.927, 1.0, 10.0, num_parameters=22_000_000, steps=150, expected_batch_size=1000), 2)
        7.18
    """
    beta, b = joint_params(clip_norm, residual_clip_norm, noise_inflation)
    spread = math.hypot(noise_inflation * residual_clip_norm * (1 - beta), b)
    return noise_multiplier * spread / expected_batch_size * math.sqrt(5 * num_parameters / steps)


# ---- the published form


def published_noise_std(
    epsilon: float, delta: float, *, clip_norm: float, radius: float, population: int, steps: int
) -> float:
    """The paper's sigma1 = (32 T (C1^2 + 2 C^2) ln(1/delta))^(1/2) / (N epsilon), on the mean scale.

    Args:
        epsilon, delta: what the paper claims for it. The claim is false: see `worst_case_multiplier`.
        clip_norm: C1.
        radius: C; C2 in Algorithm 4 (with C1 = C2: (96 T ln(1/delta))^(1/2) C / (N epsilon)), B C2 in
            Theorem 3.8, which asks for C2 <= C / B.
        population: N.
        steps: T.

    Example:
        >>> std = published_noise_std(2.0, 1e-5, clip_norm=1.0, radius=1.0, population=50_000, steps=150)
        >>> round(std * 1000, 2)  # in units of C1 / B at B = 1000
        4.07
    """
    weight = clip_norm**2 + 2 * radius**2
    return math.sqrt(32 * steps * weight * math.log(1 / delta)) / (population * epsilon)


def claimed_epsilon(
    noise_std: float, delta: float, *, clip_norm: float, radius: float, population: int, steps: int
) -> float:
    """The epsilon that the paper claims for noise sigma1: `published_noise_std` solved for epsilon."""
    return (
        published_noise_std(
            1.0, delta, clip_norm=clip_norm, radius=radius, population=population, steps=steps
        )
        / noise_std
    )


def worst_case_multiplier(
    noise_std: float,
    *,
    clip_norm: float,
    feedback_clip_norm: float,
    expected_batch_size: float,
    relation: str = "add_or_remove_one",
) -> float:
    """sigma1 over the largest change of a release given the earlier ones: C1 / B + 2 C2, or 2 C1 / B + 2 C2.

    The feedback moves by up to 2 C2 at every step after a record's first participation, drawn or not, so
    that nothing is amplified by sampling: with all batches fixed, T such releases are mu-GDP with
    mu = T^(1/2) / multiplier, and joint convexity over the batches keeps the bound.

    Example:
        >>> from equipoise.privacy import gaussian_epsilon
        >>> z = worst_case_multiplier(
        ...     4.07e-3, clip_norm=1.0, feedback_clip_norm=1.0, expected_batch_size=1000
        ... )
        >>> f"{gaussian_epsilon(math.sqrt(150) / z, 1e-5):.1e}"  # where the paper claims 2
        '1.8e+07'
    """
    times = 1 if relation == "add_or_remove_one" else 2
    return noise_std / (times * clip_norm / expected_batch_size + 2 * feedback_clip_norm)


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
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(optimize.brentq(excess, 0.0, high, xtol=1e-9 * high, rtol=1e-12)) * (1 + 1e-9)
