"""DC-DPSGD on rare classes: a linear classifier where class j keeps 5000 * 0.01^(j / 9) of the records.

    x = mu_y + N(0, I_32),   mu_j ~ N(0, 0.475^2 I_32),   cross-entropy of a linear model with intercept

The counts are those of CIFAR10-HT, 12,406 records in ten classes; the test set has 1,000 of each. At this
spread of the means the regression without privacy answers about as many right as the paper's network, 71.7%.
The error is the share of wrong test answers of the average of the last 200 of 400 iterates, Poisson batches
of 250. Every method has the same true epsilon at delta = 1e-5, except the authors' program, which has none
and gets the noise that it claims to need; its score looks at the bias alone, as for the paper's linear
classifier. The trace has the paper's 200 columns. Thresholds and learning rates were chosen on other seeds,
the same grid for all.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from equipoise.methods import DCDPSGD, DPSGD, PSAC, Method, Random, Trace, published
from equipoise.privacy import Budget, Poisson
from reproduction.data.imbalance import imbalance_counts
from reproduction.findings import Curve, Findings, PaperExperiment, Progress, Table, Verdict, over_seeds
from reproduction.harness import Problem, classification, follow, zero_linear

__all__ = ["ARMS", "EXPERIMENT", "Arm", "error_of", "rare_classes", "verdicts"]

CLASSES, FEATURES, SPREAD, TEST = 10, 32, 0.475, 1000
COUNTS = tuple(imbalance_counts(5000, CLASSES))
RECORDS, STEPS, BATCH, DELTA = sum(COUNTS), 400, 250, 1e-5
AT = (25, 50, 100, 200, 300, 400)
PROGRAM = "authors' program"


@dataclass(frozen=True)
class Arm:
    """A method with its settings at one epsilon; infinite without privacy."""

    label: str
    epsilon: float
    make: Callable[[], Method]
    learning_rate: float


# (clip norm c_1, learning rate) of every method at epsilon 8 and 2, as the search on the seeds 100 and 101
# chose them; the trace takes those of labels by lot.
SETTINGS: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "DP-SGD": ((1.0, 30.0), (4.0, 2.5)),
    "PSAC": ((32.0, 1.25), (16.0, 1.25)),
    "norm, p=0.1, 10:1": ((4.0, 2.5), (4.0, 2.5)),
    "norm, p=0.2, 10:1": ((4.0, 2.5), (4.0, 2.5)),
    "norm, p=0.4, 4:1": ((2.0, 15.0), (4.0, 2.5)),
    "trace, p=0.1": ((2.0, 15.0), (4.0, 2.5)),
    "random, p=0.1": ((2.0, 15.0), (4.0, 2.5)),
    "Algorithm 1": ((0.5, 6.0), (4.0, 0.075)),
    PROGRAM: ((2.0, 120.0), (4.0, 15.0)),
}


FOUND: tuple[tuple[str, float, float], ...] = (
    ("PSAC", -3.0, 1.5),
    ("norm, p=0.1, 10:1", -6.0, -0.3),
    ("norm, p=0.2, 10:1", -2.0, 2.0),
    ("norm, p=0.4, 4:1", -2.0, 2.0),
    ("trace, p=0.1", -16.0, -5.0),
    ("random, p=0.1", -20.0, -6.0),
    ("Algorithm 1", -45.0, -20.0),
    (PROGRAM, 1.0, 8.0),
)
"""label -> bars of the accuracy less DP-SGD's, in points, at both epsilons."""


def _arms() -> list[Arm]:
    def method(label: str, clip_norm: float) -> Callable[[], Method]:
        made: dict[str, Callable[[], Method]] = {
            "DP-SGD": lambda: DPSGD(clip_norm=clip_norm),
            "PSAC": lambda: DPSGD(clip_norm=clip_norm, clip_rule=PSAC()),
            "norm, p=0.1, 10:1": partial(DCDPSGD, clip_norm=clip_norm, tail_fraction=0.1),
            "norm, p=0.2, 10:1": partial(DCDPSGD, clip_norm=clip_norm),
            "norm, p=0.4, 4:1": partial(
                DCDPSGD, clip_norm=clip_norm, body_clip_norm=clip_norm / 4, tail_fraction=0.4
            ),
            "trace, p=0.1": partial(DCDPSGD, clip_norm=clip_norm, score=Trace(), tail_fraction=0.1),
            "random, p=0.1": partial(DCDPSGD, clip_norm=clip_norm, score=Random(), tail_fraction=0.1),
            "Algorithm 1": partial(published.DCDPSGD, clip_norm=clip_norm),
            PROGRAM: partial(
                published.DCDPSGD, clip_norm=clip_norm, variant="code", trace=Trace(layers=("bias",))
            ),
        }
        return made[label]

    arms = [
        Arm(label, epsilon, method(label, clip_norm), rate)
        for number, epsilon in enumerate((8.0, 2.0))
        for label, (clip_norm, rate) in ((label, pair[number]) for label, pair in SETTINGS.items())
    ]
    free = Arm("no privacy", math.inf, lambda: DPSGD(clip_norm=1000.0, noise_multiplier=1e-09), 10.0)
    return [*arms, free]


ARMS = _arms()


def rare_classes(seed: int) -> Problem:
    """The problem of the module docstring, with class means and records of its own for every seed."""
    rng = torch.Generator().manual_seed(1000 + seed)
    centres = SPREAD * torch.randn(CLASSES, FEATURES, generator=rng)

    def drawn(counts: Sequence[int]) -> dict[str, Tensor]:
        label = torch.repeat_interleave(torch.arange(CLASSES), torch.tensor(counts))
        return {"x": centres[label] + torch.randn(len(label), FEATURES, generator=rng), "y": label}

    train, test = drawn(COUNTS), drawn([TEST] * CLASSES)

    return classification("rare classes", partial(zero_linear, FEATURES, CLASSES), train, test)


def error_of(arm: Arm, seed: int, steps: int = STEPS) -> dict[int, float]:
    """{steps done: share of wrong test answers} of one arm on the problem of one seed."""
    return follow(
        arm.make(),
        rare_classes(seed),
        sampling=Poisson(BATCH, RECORDS, steps),
        budget=None if math.isinf(arm.epsilon) else Budget(arm.epsilon, DELTA),
        learning_rate=arm.learning_rate,
        seed=seed,
        measure_at=[step for step in AT if step <= steps],
        average_last=steps // 2,
    )


def verdicts(accuracy: Mapping[tuple[float, str], float]) -> list[Verdict]:
    """DP-SGD ahead of every two-threshold mode, in points of accuracy on balanced classes."""
    out = []
    for epsilon in (8.0, 2.0):
        two = {
            label: value
            for (at, label), value in accuracy.items()
            if at == epsilon and label not in ("DP-SGD", "PSAC")
        }
        single, program = accuracy[epsilon, "DP-SGD"], two.pop(PROGRAM)
        best = max(two, key=lambda label: two[label])
        out += [
            Verdict.at_least(
                f"DP-SGD's accuracy less the best two-threshold mode's ({best}), epsilon {epsilon:g}",
                single - two[best],
                0.0,
            ),
            Verdict.at_least(
                f"DP-SGD's accuracy less that of the {PROGRAM}, claimed epsilon {epsilon:g}",
                single - program,
                0.0,
            ),
        ]
        # what came out, in points: both bars were set after the runs that the docs report
        for label, low, high in FOUND:
            out.append(
                Verdict.within(
                    f"{label}: accuracy less DP-SGD's, epsilon {epsilon:g}",
                    accuracy[epsilon, label] - single,
                    low,
                    high,
                )
            )
        out.append(Verdict.within(f"DP-SGD's accuracy, epsilon {epsilon:g}", single, 58.0, 74.0))
    free = accuracy[math.inf, "no privacy"] - accuracy[8.0, "DP-SGD"]
    out.append(Verdict.within("no privacy: accuracy less DP-SGD's at epsilon 8", free, 1.0, 8.0))
    return out


def _run(seeds: Sequence[int], progress: Progress) -> Findings:
    rows: list[list[str | float | int | None]] = []
    curves, accuracy = [], {}
    measured = over_seeds(
        ARMS, error_of, lambda arm: f"{arm.label}, epsilon {arm.epsilon:g}", seeds, progress
    )
    for arm, runs in measured:
        right = [100 * (1 - run[max(run)]) for run in runs]
        accuracy[arm.epsilon, arm.label] = statistics.median(right)
        rows.append([arm.epsilon, arm.label, statistics.median(right), min(right), max(right)])
        if math.isfinite(arm.epsilon):
            curves.append(Curve.of_seeds(arm.label, runs, f"epsilon {arm.epsilon:g}"))
    note = f"Accuracy on balanced classes, in percent, after {STEPS} steps: median and range of {len(seeds)} "
    table = Table(["epsilon", "method", "accuracy", "lowest", "highest"], rows, note + "seeds.")
    return Findings(table, curves, verdicts(accuracy), numbers=accuracy)


EXPERIMENT = PaperExperiment(
    name="dc-dpsgd-long-tail",
    title="Two thresholds on rare classes",
    summary=(
        "DC-DPSGD beside DP-SGD and PSAC at equal epsilon on logistic regression with the class counts of "
        "CIFAR10-HT and a balanced test. Expected: DP-SGD ahead of every two-threshold mode."
    ),
    run=_run,
    default_seeds=6,
)
