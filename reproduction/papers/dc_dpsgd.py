"""DC-DPSGD on linear regression with heavy-tailed noise: when two thresholds win, and when they lose.

    y = <w*, (x, 1)> + xi,   x ~ N(0, I_50),   w* uniform on the sphere,   gradient (prediction - y) (x, 1)

xi = W - E[W] with W = E^2, E exponential (a Weibull law of shape 1/2: skewed, theta = 2); the controls have
Gaussian noise of the same variance and symmetric noise of random sign. Error: ||w - w*||^2 of the average of
the last 200 of 400 iterates, the excess risk. Every method has the same true epsilon at delta = 1e-5, except
the authors' program, which has none and gets the noise that it claims to need. Learning rates and thresholds
were tuned on other seeds, for DP-SGD as for the rest; the tail fraction and the ratio of the thresholds were
tuned for the two-threshold rule alone, a freedom that DP-SGD does not have.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.methods import DCDPSGD, DPSGD, Method, Random, TopShare, Trace, published
from equipoise.methods.two_thresholds import sub_weibull
from equipoise.privacy import Budget, Poisson
from reproduction.findings import Curve, Findings, PaperExperiment, Progress, Table, Verdict, over_seeds
from reproduction.harness import Problem, follow, zero_linear

__all__ = ["ARMS", "EXPERIMENT", "Arm", "error_of", "regression", "verdicts"]

RECORDS, FEATURES, STEPS, BATCH, DELTA = 10_000, 50, 400, 250, 1e-5
AT = (25, 50, 100, 200, 300, 400)
SUBSPACE = 10


@dataclass(frozen=True)
class Arm:
    """A method with its tuned settings on one kind of noise at one epsilon."""

    label: str
    noise: str
    epsilon: float
    make: Callable[[], Method]
    learning_rate: float


def _arms() -> list[Arm]:
    arms = []
    for epsilon in (4.0, 1.0):
        for clip_norm in (80.0, 100.0, 120.0):
            for rate in (0.005, 0.01):
                label = f"DP-SGD C={clip_norm:g} lr={rate:g}"
                arms.append(Arm(label, "skewed", epsilon, lambda c=clip_norm: DPSGD(clip_norm=c), rate))  # type: ignore[misc]
        trace: dict[str, Any] = {"score": Trace(dimension=SUBSPACE), "tail_fraction": 0.1}
        algorithm_1 = Trace(dimension=SUBSPACE, structure="dense")
        wide = 320.0 if epsilon == 4 else 160.0
        settings: list[tuple[str, Callable[[], Method], float]] = [
            ("norm", partial(DCDPSGD, clip_norm=20.0), 0.03),
            ("norm, p=0.1", partial(DCDPSGD, clip_norm=10.0, tail_fraction=0.1), 0.1),
            ("trace", partial(DCDPSGD, clip_norm=wide, **trace), 0.003),
            ("random", partial(DCDPSGD, clip_norm=wide, score=Random(), tail_fraction=0.1), 0.003),
            ("top share by norm", partial(DCDPSGD, clip_norm=10.0, variant=TopShare()), 0.03),
            ("Algorithm 1", partial(published.DCDPSGD, clip_norm=10.0, trace=algorithm_1), 0.01),
            ("authors' program", partial(published.DCDPSGD, clip_norm=320.0, variant="code"), 0.01),
        ]
        arms += [Arm(label, "skewed", epsilon, make, rate) for label, make, rate in settings]
    arms += [
        Arm("DP-SGD", "Gaussian", 4.0, lambda: DPSGD(clip_norm=40.0), 0.01),
        Arm("norm", "Gaussian", 4.0, partial(DCDPSGD, clip_norm=80.0), 0.01),
        Arm("DP-SGD", "symmetric", 4.0, lambda: DPSGD(clip_norm=0.625), 0.3),
        Arm("norm", "symmetric", 4.0, partial(DCDPSGD, clip_norm=5.0), 0.1),
    ]
    return arms


ARMS = _arms()


def regression(noise: str, seed: int, records: int = RECORDS, features: int = FEATURES) -> Problem:
    """The problem of one seed: `noise` is "skewed", "Gaussian" or "symmetric"."""
    rng = torch.Generator().manual_seed(1000 + seed)
    answer = torch.randn(features + 1, generator=rng)
    answer /= answer.norm()
    x = torch.randn(records, features, generator=rng)
    if noise == "Gaussian":
        xi = math.sqrt(20) * torch.randn(records, generator=rng)  # the variance of E^2
    elif noise == "symmetric":
        xi = sub_weibull((records,), rng, 2.0)
    else:
        xi = sub_weibull((records,), rng, 2.0, "positive") - 2.0
    y = x @ answer[:-1] + answer[-1] + xi

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return 0.5 * (model(batch["x"])[:, 0] - batch["y"]).square()

    def error(model: nn.Module) -> float:
        found = torch.cat([p.detach().flatten() for p in model.parameters()])
        return float((found - answer).square().sum())

    return Problem(noise, partial(zero_linear, features, 1), loss, {"x": x, "y": y}, records, error)


def error_of(arm: Arm, seed: int, steps: int = STEPS) -> dict[int, float]:
    """{steps done: error} of one arm on the problem of one seed."""
    return follow(
        arm.make(),
        regression(arm.noise, seed),
        sampling=Poisson(BATCH, RECORDS, steps),
        budget=Budget(arm.epsilon, DELTA),
        learning_rate=arm.learning_rate,
        seed=seed,
        measure_at=[step for step in AT if step <= steps],
        average_last=steps // 2,
    )


Medians = Mapping[tuple[str, float, str], float]


def verdicts(median: Medians) -> list[Verdict]:
    """What was expected, against the margins set before the runs; arms that were not run are left out."""
    out: list[Verdict] = []
    for epsilon in (4.0, 1.0):

        def of(label: str, epsilon: float = epsilon) -> float:
            return median.get(("skewed", epsilon, label), math.nan)

        single = of("DP-SGD")
        at = f"epsilon {epsilon:g}"
        gap = abs(math.log(of("trace") / of("random")))
        ratio = of("norm, p=0.1") / single
        out += [
            Verdict.within(f"norm beats the best single threshold, {at}", single / of("norm"), 3.0, 12.0),
            Verdict.at_most(f"trace and random labels differ by |log ratio|, {at}", gap, 0.25),
            Verdict.within(
                f"the trace is worse than a single threshold, {at}", of("trace") / single, 2.0, 5.0
            ),
            Verdict.within(f"the paper's tail fraction only ties, {at}", ratio, 0.6, 1.5),
            Verdict.within(
                f"the top share by norm beats a single threshold, {at}",
                single / of("top share by norm"),
                3.0,
                15.0,
            ),
            # at the start the risk is 1: Algorithm 1 ends below it, or is carried beyond it by its noise
            Verdict.within(
                f"Algorithm 1 hardly moves, {at}",
                of("Algorithm 1"),
                *((0.6, 0.95) if epsilon == 4 else (1.1, 2.0)),
            ),
            Verdict.within(
                f"the authors' program only ties, {at}", of("authors' program") / single, 0.5, 1.6
            ),
            Verdict.within(f"the best single threshold, {at}", single, 0.05, 0.3),
        ]

    def control(noise: str) -> float:
        return median.get((noise, 4.0, "norm"), math.nan) / median.get((noise, 4.0, "DP-SGD"), math.nan)

    out += [
        Verdict.within("Gaussian noise: norm over DP-SGD", control("Gaussian"), 1.0, 1.8),
        Verdict.within("symmetric noise: norm over DP-SGD", control("symmetric"), 5.0, 200.0),
        Verdict.within(
            "Gaussian noise: DP-SGD", median.get(("Gaussian", 4.0, "DP-SGD"), math.nan), 0.05, 0.2
        ),
    ]
    return [verdict for verdict in out if not math.isnan(verdict.value)]


def summarise(runs: Mapping[Arm, Sequence[dict[int, float]]]) -> tuple[dict[Any, float], list[Curve], Table]:
    """Medians by (noise, epsilon, method), with the best setting of DP-SGD; curves; the table."""
    best: dict[tuple[str, float, str], tuple[float, Arm]] = {}
    for arm, found in runs.items():
        label = "DP-SGD" if arm.label.startswith("DP-SGD") else arm.label
        key = (arm.noise, arm.epsilon, label)
        middle = statistics.median(run[max(run)] for run in found)
        if key not in best or middle < best[key][0]:
            best[key] = (middle, arm)
    rows: list[list[str | float | int | None]] = []
    curves = []
    for (noise, epsilon, label), (middle, arm) in best.items():
        last = sorted(run[max(run)] for run in runs[arm])
        quarter = len(last) // 4
        rows.append([noise, epsilon, arm.label, middle, last[quarter], last[-1 - quarter]])
        curves.append(Curve.of_seeds(label, runs[arm], f"{noise} noise, epsilon {epsilon:g}"))
    note = (
        f"Excess risk after {STEPS} steps: median and quartiles over {len(next(iter(runs.values())))} seeds."
    )
    table = Table(["noise", "epsilon", "method", "median", "lower quartile", "upper quartile"], rows, note)
    return {key: middle for key, (middle, _) in best.items()}, curves, table


def _run(seeds: Sequence[int], progress: Progress) -> Findings:
    runs = over_seeds(ARMS, error_of, lambda arm: f"{arm.label}, {arm.noise}", seeds, progress)
    median, curves, table = summarise(dict(runs))
    return Findings(table, curves, verdicts(median), numbers=median)


EXPERIMENT = PaperExperiment(
    name="dc-dpsgd",
    title="Two thresholds on heavy-tailed regression",
    summary=(
        "DC-DPSGD beside DP-SGD at equal epsilon on linear regression with skewed heavy-tailed noise, and on "
        "two controls. Expected: the norm rule wins by 3 or more on skewed noise and loses on the controls; "
        "the trace does no better than labels by lot."
    ),
    run=_run,
)
