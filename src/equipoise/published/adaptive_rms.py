"""RMS-adaptive clipping as published: the paper's offset, scale and noise (its equation (1)).

    C = min(G, sqrt(max(2 tau (m + c s), C_min^2))),    c = sqrt(2 ln(2 N / u)),    squares cut at G^2

The releases are those of the library's method with a query before every round, so that the ledger proves
them, at an epsilon of its own.

The paper samples b of n records without replacement, takes replace-one neighbours, gives the *mean* clipped
gradient noise of deviation sigma C and the mean clipped squared norm noise of deviation sigma_C G^2 (G the
a-priori bound), and counts R radius queries and R K steps. With Delta = 2/b, gamma = b/n and
epsilon(alpha) = alpha Delta^2 / (2 sigma^2) it bounds the Renyi divergence of one subsampled release by

    S(alpha) = ln(1 + gamma^2 (alpha over 2) min(4 (e^epsilon(2) - 1), 2 e^epsilon(2))
                    + 2 sum_{j=3..alpha} gamma^j (alpha over j) e^((j-1) epsilon(j))) / (alpha - 1)

and takes the least sigma with R K S <= epsilon/4 and the least sigma_C with R S <= epsilon/4, both at the
order alpha = 1 + ceil(2 ln(1/delta) / epsilon); the other half of epsilon pays the conversion to
(epsilon, delta). The terms with j >= 3 do not vanish as sigma grows, so that a target may be out of reach
however much noise is added: that is reported, not searched for ever.

`DPFedAvg` is the paper's baseline: DP-SGD, whose R K releases have epsilon/2 to themselves (equation (3)).

Where this is not the letter of algorithm 1: b and b_C are expected sizes (lines 7 and 13); the gradient of
line 13 is at x_{k-1} (the box has x_k, which line 14 makes of it); a root of a number below zero, which the
paper leaves open, is that of (1e-6 G)^2 (line 9); and one client averages nothing (line 18), which is the
server's, in `equipoise.federated`.

Source: Fukami, Murata and Niwa, TMLR 2025, equations (1) and (3). What comes out is the paper's figure; what
a run may claim is the ledger's, which also knows that the squared norm moves by G^2 and not by 2 G^2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from equipoise._roots import NoCrossing, crossing
from equipoise._rounding import plain
from equipoise.methods.adaptive_rms import RMSClipping, RMSRadius, sampling_at
from equipoise.methods.base import Method, Plan, Setting
from equipoise.methods.configuration import Count, Noise, Positive, UpToOne
from equipoise.methods.dp_sgd import DPSGD
from equipoise.privacy import BallsInBins, BudgetError, FixedEpochs, PrivacyPlan, Sampling, WithoutReplacement


class PrintedNoise(Method):
    """A mixin of methods with the noise of equations (1) and (3): what these are proved for."""

    def plan(self, setting: Setting) -> Plan:
        """As without the mixin.

        Raises:
            ValueError: slices of an epoch, which equations (1) and (3) do not cover.
        """
        if isinstance(setting.sampling, FixedEpochs | BallsInBins):
            raise ValueError(
                f"sampling={setting.sampling!r} with recipe='as_published': equation (1) assumes a fresh "
                "sample for every step, which slices of an epoch are not. Give WithoutReplacement(...), as "
                "its proof does, or use recipe='library'"
            )
        return super().plan(setting)  # type: ignore[safe-super]

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        own = super().assumptions(plan)
        differs = "" if plan is None else " and ".join(_other_than_proved(plan.releases))
        if not differs:
            return own
        return (
            *own,
            "the published claim alone, and no part of this guarantee: equation (1) is proved for subsets "
            f"without replacement under replace-one, and this run has {differs}",
        )


@dataclass(frozen=True, kw_only=True)
class AdaptiveRMS(PrintedNoise, RMSClipping):
    """RMS-adaptive clipping with a query before every round, and the noise of equation (1).

    Args:
        clip_norm: G > 0, the largest radius and the first one.
        tau: > 0, factor of the mean square.
        round_length: K, steps per round.
        radius_sampling_rate: q_C of the query; that of the steps when None, all records at 1.
        noise_multiplier, radius_noise_multiplier: z and z_C; those of equation (1) when None.

    Raises:
        ValueError: a value out of range.
    """

    clip_norm: Positive = 1.0
    tau: Positive = 1.0
    round_length: Count = 1
    radius_sampling_rate: UpToOne | None = None
    noise_multiplier: Positive | None = None
    radius_noise_multiplier: Positive | None = None

    @property
    def rule(self) -> RMSRadius:
        return RMSRadius(float(self.clip_norm), tau=self.tau, offset="paper")

    def query_sampling(self, sampling: Sampling, rounds: int) -> Sampling:
        if self.radius_sampling_rate is None:
            return replace(sampling, steps=rounds)  # type: ignore[type-var]
        return sampling_at(self.radius_sampling_rate, sampling, rounds)

    def _calibrated(self, setting: Setting, query: Sampling) -> PrivacyPlan:
        sampling, budget = setting.sampling, setting.required_budget("noise multipliers")
        target, records = (budget.epsilon, budget.delta), sampling.population
        size, query_size = sampling.expected_size, query.expected_size
        noise = published_noise(*target, population=records, batch=size, steps=sampling.steps)
        radius = published_noise(
            *target, population=records, batch=query_size, steps=query.steps, part="radius"
        )
        return self._releases(setting, query, noise * size, radius * query_size)

    def claimed_epsilon(self, plan: Plan, delta: float) -> float | None:
        query, sampling = plan.constants, plan.releases.sampling
        return claimed_epsilon(
            plan.releases["gradient"].noise_multiplier / sampling.expected_size,
            self.radius_noise(plan),
            delta,
            population=sampling.population,
            batch=sampling.expected_size,
            steps=sampling.steps,
            rounds=query.steps,
            radius_batch=query.expected_size,
        )


@dataclass(frozen=True, kw_only=True)
class DPFedAvg(PrintedNoise, DPSGD):
    """The client's half of DP-FedAvg, the paper's baseline: DP-SGD with the noise of equation (3).

    Args:
        clip_norm, clip_rule, per_layer: as for `DPSGD`.
        noise_multiplier: z; that of equation (3) when None.
    """

    name: ClassVar[str] = "dp-fedavg-client"
    recipe: ClassVar[str] = "as_published"
    card = DPSGD.card

    noise_multiplier: Noise = None

    def calibrated(self, setting: Setting, *arguments: Any, **options: Any) -> PrivacyPlan:
        found = self
        if self.noise_multiplier is None:
            sampling, budget = setting.sampling, setting.required_budget()
            size, records = sampling.expected_size, sampling.population
            noise = published_noise(
                budget.epsilon, budget.delta, population=records, batch=size, steps=sampling.steps, parts=1
            )
            found = replace(self, noise_multiplier=size * noise)
        return super(DPFedAvg, found).calibrated(setting, *arguments, **options)

    def claimed_epsilon(self, plan: Plan, delta: float) -> float | None:
        sampling, size = plan.releases.sampling, plan.releases.sampling.expected_size
        noise, records = plan.releases["gradient"].noise_multiplier / size, sampling.population
        return claimed_epsilon(
            noise, None, delta, population=records, batch=size, steps=sampling.steps, rounds=1
        )


def _other_than_proved(plan: PrivacyPlan) -> list[str]:
    """Where a run differs from what equation (1) is proved for."""
    sampling = plan.sampling
    found = [] if isinstance(sampling, WithoutReplacement) else [f"{type(sampling).__name__} sampling"]
    return found + ([] if plan.relation == "replace_one" else ["add-or-remove-one neighbours"])


# Up to here the least epsilon of a claim is sought. A choice: less noise than it takes is refused.
_LARGEST_EPSILON = 1e9


def order(epsilon: float, delta: float) -> int:
    """alpha = 1 + ceil(2 ln(1/delta) / epsilon), the order at which equation (1) is taken.

    Example:
        >>> [order(1.0, 1e-5), order(2.0, 1e-5), order(8.0, 1e-5), order(1.0, 1e-4)]
        [25, 13, 4, 20]
    """
    return 1 + math.ceil(2 * math.log(1 / delta) / epsilon)


def subsampled_rdp(noise_multiplier: float, sampling_rate: float, alpha: int) -> float:
    """S(alpha) of a release whose noise on the *sum* is `noise_multiplier` times the bound C.

    Args:
        noise_multiplier: sigma b; infinity gives the limit that no noise can go below.
        sampling_rate: gamma; 1 for all records, where the divergence is epsilon(alpha) itself.
        alpha: order, an integer of at least 2.

    Example:
        >>> round(subsampled_rdp(2.0, 0.01, 2), 8)
        0.00054351
    """
    square = (2 / noise_multiplier) ** 2  # (Delta / sigma)^2
    if sampling_rate >= 1:
        return alpha * square / 2

    def log_term(j: int) -> float:
        # at most alpha terms, each too large for a float where the noise is small: logarithms throughout
        choose = math.lgamma(alpha + 1) - math.lgamma(j + 1) - math.lgamma(alpha - j + 1)
        head = j * math.log(sampling_rate) + choose
        if j > 2:
            return head + math.log(2) + (j - 1) * j * square / 2
        exact = -math.inf if square == 0 else math.log(4) + square + math.log(-math.expm1(-square))
        return head + min(exact, math.log(2) + square)

    logs = [0.0, *map(log_term, range(2, alpha + 1))]
    top = max(logs)
    if top == 0:
        return math.log1p(math.fsum(math.exp(term) for term in logs[1:])) / (alpha - 1)
    return (top + math.log(math.fsum(math.exp(term - top) for term in logs))) / (alpha - 1)


def published_noise(
    epsilon: float, delta: float, *, population: int, batch: float, steps: int, part: str = "gradient",
    parts: int = 2,
) -> float:  # fmt: skip
    """The least sigma, relative to the mean, whose `steps` releases stay within their share of epsilon.

    Args:
        epsilon, delta: the paper's target for gradients and radii together.
        population: n, the client's public size.
        batch: b, or b_C for the radius.
        steps: R K for gradients, R for the radius.
        part: what is noised, for the message.
        parts: that share epsilon/2 alike: gradients and radii in equation (1), gradients alone in (3).

    Raises:
        BudgetError: no noise reaches the target: the equation has no solution.

    Example:
        >>> round(published_noise(8.0, 1e-5, population=10_000, batch=100, steps=2000), 5)
        0.02134
    """
    alpha, rate, share = order(epsilon, delta), min(batch / population, 1.0), epsilon / (2 * parts)

    def excess(noise_multiplier: float) -> float:
        return steps * subsampled_rdp(noise_multiplier, rate, alpha) / share - 1

    least = steps * subsampled_rdp(math.inf, rate, alpha)
    if least >= share:
        equation = 1 if parts == 2 else 3
        raise BudgetError(
            f"epsilon={epsilon:g} at delta={plain(delta)} is out of reach for the {part} as published: at "
            f"order {alpha} even infinite noise leaves {steps} releases with {least:.4g}, above the share "
            f"{share:.4g} of epsilon that equation ({equation}) grants them. Raise epsilon, take "
            "smaller batches or fewer steps, or use recipe='library', whose accounting has no such floor"
        )
    return _least(excess) / batch


def claimed_epsilon(
    noise: float, radius_noise: float | None, delta: float, *, population: int, batch: float, steps: int,
    rounds: int, radius_batch: float | None = None,
) -> float:  # fmt: skip
    """The least epsilon that equation (1) grants to the noise (sigma, sigma_C), relative to the means.

    Args:
        noise, radius_noise: sigma and sigma_C; None for training without a radius query, which then shares
            epsilon/2 instead of epsilon/4.
        delta: of the claim.
        population, batch, steps, rounds: n, b, R K, R.
        radius_batch: b_C; b when None.

    Example:
        >>> round(claimed_epsilon(0.02134, 0.01289, 1e-5, population=10_000, batch=100, steps=2000, rounds=100), 2)
        8.0
    """  # noqa: E501
    parts = [(noise, batch, steps)]
    if radius_noise is not None:
        parts.append((radius_noise, radius_batch or batch, rounds))
    share = 1 / (2 * len(parts))

    def excess(epsilon: float) -> float:
        alpha = order(epsilon, delta)
        return max(
            count * subsampled_rdp(sigma * size, min(size / population, 1.0), alpha) / (share * epsilon) - 1
            for sigma, size, count in parts
        )

    return _least(excess)


def _least(excess: Callable[[float], float]) -> float:
    """The least value at which a falling function is at most zero; infinite beyond the largest epsilon."""
    limits = {"least": math.log(1e-9), "most": math.log(_LARGEST_EPSILON)}
    try:
        _, found = crossing(lambda x: excess(math.exp(x)), 0.0, math.log(2), tolerance=1e-12, **limits)
    except NoCrossing as error:
        return math.inf if error.above else 1e-9
    return math.exp(found)
