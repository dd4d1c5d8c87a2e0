"""DC-DPSGD's long-tailed table on real images: CIFAR10-HT, and MNIST and Fashion-MNIST with the same counts.

Class j keeps int(5000 * 0.01^(j / 9)) training images, 12,406 in all; the test set is as published, 1,000 a
class. The model is linear with intercept on scattering features that are averaged to 4 x 4; the paper's is
linear on features of a network that was trained on CIFAR-100, with the LDAM loss, whose margins are private
counts that nobody pays for. Cross-entropy here.

The paper prints epsilon 8. Here every method has 8 in truth at delta = 1e-5, except the authors' program,
which has no guarantee and gets the noise that it claims to need. 200 steps, Poisson batches of 250, average
of the last 100 iterates. c_1 = 1 as in the paper; the learning rate is the best of the same four for every
method, on a selection of four fifths of these counts and 500 other training images a class.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.scattering import PooledScattering
from equipoise.data import Records, load
from equipoise.data.features.extractors import extract
from equipoise.methods import DCDPSGD, DPSGD, PSAC, Method, Trace, published
from equipoise.privacy import Budget, Poisson
from reproduction.data.imbalance import imbalanced
from reproduction.findings import Curve, Findings, PaperExperiment, Progress, Site, Table, Verdict
from reproduction.harness import classification, follow, tuned_runs, zero_linear

__all__ = ["ARMS", "EXPERIMENT", "METHODS", "PAPER", "held_out", "measure", "verdicts"]

LARGEST, CLASSES, STEPS, BATCH, EPSILON, DELTA = 5000, 10, 200, 250, 8.0, 1e-5
HELD, TUNING_SEED = 500, 100
CLIP_NORM, RATES = 1.0, (1.0, 4.0, 16.0, 64.0)
NAMES = {"fashion-mnist": "Fashion-MNIST-HT", "cifar10": "CIFAR10-HT", "mnist": "MNIST-HT"}
PROGRAM, FREE = "authors' program", "no privacy"
METHODS: dict[str, Callable[[], Method]] = {
    "DP-SGD": lambda: DPSGD(clip_norm=CLIP_NORM),
    "PSAC": lambda: DPSGD(clip_norm=CLIP_NORM, clip_rule=PSAC()),
    "norm, p=0.1": lambda: DCDPSGD(clip_norm=CLIP_NORM, tail_fraction=0.1),
    "norm, p=0.2": lambda: DCDPSGD(clip_norm=CLIP_NORM),
    "trace, p=0.1": lambda: DCDPSGD(clip_norm=CLIP_NORM, score=Trace(), tail_fraction=0.1),
    PROGRAM: lambda: published.DCDPSGD(clip_norm=CLIP_NORM, variant="code", trace=Trace(layers=("bias",))),
    FREE: lambda: DPSGD(clip_norm=1000.0, noise_multiplier=1e-9),
}
ARMS = tuple(METHODS)
TWO = ("norm, p=0.1", "norm, p=0.2", "trace, p=0.1")
PAPER = {"DP-SGD": 57.98, "PSAC": 57.99, PROGRAM: 62.57, FREE: 71.74}
"""Accuracy in percent that the paper prints for CIFAR10-HT at epsilon 8; its method's at the program."""


@dataclass(frozen=True)
class _Features:
    train: Records
    test: dict[str, Tensor]


@cache
def _features(data: str, data_dir: str | None) -> _Features:
    """Scattering features of a whole set."""
    found = load(data, data_dir)
    extractor = PooledScattering(tuple(found.input_shape[1:]))  # type: ignore[arg-type]
    return _Features(extract(found.train, extractor), _flat(extract(found.test, extractor)))


def _flat(records: Records) -> dict[str, Tensor]:
    batch = records[slice(None)]
    return {"x": batch["input"].flatten(1), "y": batch["label"]}


def held_out(train: Records, seed: int) -> tuple[Records, Records]:
    """A long-tailed selection of four fifths of the counts, and 500 other records of every class."""
    place = torch.arange(len(train))
    numbered = Records({"input": place[:, None], "label": train.fields["label"]})
    chosen = imbalanced(numbered, LARGEST * 0.8, seed=seed).fields["input"][:, 0]
    free = torch.ones(len(train), dtype=torch.bool)
    free[chosen] = False
    others = [place[free & (train.fields["label"] == j)][:HELD] for j in range(CLASSES)]
    return train.subset(chosen), train.subset(torch.cat(others))


def measure(
    data: str, arm: str, rate: float, seed: int, data_dir: str | None, steps: int = STEPS
) -> dict[str, float]:
    """Errors along one training, by the number of steps in words."""
    features = _features(data, data_dir)
    if seed == TUNING_SEED:
        train, judged = (_flat(part) for part in held_out(features.train, seed))
    else:
        train, judged = _flat(imbalanced(features.train, LARGEST, seed=seed)), features.test
    found = follow(
        METHODS[arm](),
        classification(NAMES[data], partial(zero_linear, train["x"].shape[1], CLASSES), train, judged),
        sampling=Poisson(BATCH, len(train["y"]), steps),
        budget=None if arm == FREE else Budget(EPSILON, DELTA),
        learning_rate=rate,
        seed=seed,
        measure_at=[steps * k // 8 for k in range(1, 9)],
        average_last=steps // 2,
    )
    return {str(step): value for step, value in found.items()}


def _run(seeds: Sequence[int], progress: Progress, site: Site) -> Findings:
    def finish(planned: Sequence[tuple[str, str, float, int]]) -> list[dict[str, Any] | None]:
        names = ("data", "arm", "rate", "seed")
        return site.kept.finish(
            [
                (dict(zip(names, case, strict=True)), partial(measure, *case, site.data_dir))
                for case in planned
            ],
            progress,
        )

    return summarise(tuned_runs(finish, NAMES, ARMS, RATES, TUNING_SEED, seeds, STEPS))


def summarise(
    found: Mapping[tuple[str, str], tuple[float, Sequence[Mapping[str, float]]]],
) -> Findings:
    """Table, curves and verdicts of the finished runs."""
    rows: list[list[str | float | int | None]] = []
    curves, middle = [], {}
    for (data, arm), (rate, runs) in found.items():
        right = [100 * (1 - run[str(STEPS)]) for run in runs]
        middle[data, arm] = statistics.median(right)
        printed = PAPER.get(arm) if data == "cifar10" else None
        rows.append(
            [
                NAMES[data], arm, rate, round(middle[data, arm], 2),
                round(min(right), 2), round(max(right), 2), printed, len(runs),
            ]
        )  # fmt: skip
        curves.append(Curve.of_seeds(arm, [{int(k): v for k, v in run.items()} for run in runs], NAMES[data]))
    columns = ["data", "method", "rate", "accuracy %", "lowest", "highest", "paper %", "seeds"]
    note = f"Balanced test accuracy at epsilon {EPSILON:g}, medians over the seeds; curves show test errors."
    return Findings(Table(columns, rows, note), curves, verdicts(middle), numbers=middle)


def verdicts(middle: Mapping[tuple[str, str], float]) -> list[Verdict]:
    """The paper's claim, by (data, arm) -> median accuracy in percent; set before the runs."""
    out = []
    for data, name in NAMES.items():
        if not {(data, arm) for arm in ARMS} <= set(middle):
            continue
        plain = middle[data, "DP-SGD"]
        for arm in TWO:
            # the paper prints a gain of 4.6 points on CIFAR10-HT
            out.append(
                Verdict.at_least(f"{name}: {arm}, less DP-SGD in points", middle[data, arm] - plain, 0)
            )
        gain = middle[data, PROGRAM] - plain
        out.append(Verdict.at_least(f"{name}: {PROGRAM}, without a guarantee, less DP-SGD", gain, 0))
        if data != "fashion-mnist":
            continue
        # what came out, in points: these bars were set after the runs that the docs report
        out.append(Verdict.within(f"{name}: DP-SGD's accuracy", plain, 66.0, 80.0))
        for arm, (low, high) in FOUND.items():
            found = middle[data, arm] - plain
            out.append(Verdict.within(f"{name}: {arm}, less DP-SGD, as found", found, low, high))
    return out


FOUND = {
    "PSAC": (-2.0, 2.0),
    "norm, p=0.1": (-10.0, -3.5),
    "norm, p=0.2": (-5.0, -0.5),
    "trace, p=0.1": (-22.0, -10.5),
    PROGRAM: (0.5, 6.0),
    FREE: (0.5, 8.0),
}
"""Bars of the accuracy on Fashion-MNIST-HT less DP-SGD's, in points."""


EXPERIMENT = PaperExperiment(
    name="dc-dpsgd-images",
    title="Two thresholds on long-tailed CIFAR-10, MNIST and Fashion-MNIST",
    summary="DC-DPSGD beside DP-SGD and PSAC at a true epsilon of 8 with the class counts of CIFAR10-HT, "
    "linear on scattering features. The paper gains 4.6 points. Goes on where it was stopped.",
    run_on=_run,
    default_seeds=3,
)
