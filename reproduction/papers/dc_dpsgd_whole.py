"""DC-DPSGD's table on MNIST and Fashion-MNIST at full size: 40 passes, batches of 128, 26,010 parameters.

c_2 = 0.1 and c_1 = 1, epsilon 8 at delta = 1e-5, plain SGD, and the two rates that the paper prints for one
setting: 0.1 (text) and 1 (appendix). DP-SGD is clipped at c_2 as in the paper. The authors' program claims
epsilon 8 and has none; it is the script for MNIST, which looks at the first convolution. The norm rule is the
library's DC-DPSGD at a true epsilon of 8.

A run takes 18,750 steps, so that a command goes on where it was stopped, run by run; what is missing is left
out of the table. What tells the methods apart before any run is how much of a step is proved: DP-SGD's one
sum, nothing of the program's, and the norm rule's sum and count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import torch

from equipoise.app.models import cnn_tanh
from equipoise.data import load
from equipoise.methods import DCDPSGD, DPSGD, Method, published
from equipoise.methods.base import Setting
from equipoise.privacy import Budget, Poisson
from reproduction.findings import Curve, Findings, PaperExperiment, Progress, Site, Table, Verdict
from reproduction.harness import Problem, classification, follow

__all__ = ["EXPERIMENT", "METHODS", "PRINTED", "measure", "verdicts"]

BUDGET, PASSES, BATCH, BODY, TAIL = Budget(8.0, 1e-5), 40, 128, 0.1, 1.0
RATES, POPULATION = (1.0, 0.1), 60_000
DP_SGD, PROGRAM, NORM = "DP-SGD", "the program", "norm rule"
METHODS: dict[str, Callable[[], Method]] = {
    DP_SGD: lambda: DPSGD(clip_norm=BODY),
    PROGRAM: lambda: published.DCDPSGD(clip_norm=TAIL, body_clip_norm=BODY, variant="code_mnist"),
    NORM: lambda: DCDPSGD(clip_norm=TAIL, body_clip_norm=BODY, tail_fraction=0.1),
}
PROVEN = "proven releases"
PRINTED = {
    ("mnist", DP_SGD): 97.65,
    ("mnist", PROGRAM): 98.72,
    ("fashion-mnist", DP_SGD): 83.23,
    ("fashion-mnist", PROGRAM): 87.80,
}
"""Accuracy in percent."""


@cache
def _problem(data: str, data_dir: str | None) -> Problem:
    found = load(data, data_dir)
    train, judged = (
        {"x": part["input"], "y": part["label"]}
        for part in (found.train[torch.arange(found.population)], found.test[torch.arange(len(found.test))])
    )
    return classification(data, lambda: cnn_tanh(found), train, judged)


def measure(
    data: str, arm: str, rate: float, seed: int, data_dir: str | None, passes: int = PASSES
) -> dict[str, float]:
    """Test errors along one training, by the number of steps in words."""
    problem = _problem(data, data_dir)
    steps = round(passes * problem.population / BATCH)
    found = follow(
        METHODS[arm](),
        problem,
        sampling=Poisson(BATCH, problem.population, steps),
        budget=BUDGET,
        learning_rate=rate,
        seed=seed,
        measure_at=[steps * k // 8 for k in range(1, 9)],
    )
    return {str(step): value for step, value in found.items()}


def proven() -> dict[tuple[str, str, float], float]:
    """How many releases of a step are proved, by (`PROVEN`, method, 0)."""
    setting = Setting(sampling=Poisson(BATCH, POPULATION, round(PASSES * POPULATION / BATCH)), budget=BUDGET)
    plans = {name: make().plan(setting).releases for name, make in METHODS.items()}
    return {(PROVEN, name, 0.0): float(len(plan.releases)) for name, plan in plans.items()}


def _run(seeds: Sequence[int], progress: Progress, site: Site) -> Findings:
    cases = [(data, arm, rate) for data in ("mnist", "fashion-mnist") for rate in RATES for arm in METHODS]
    names = ("data", "arm", "rate", "seed")
    # Seed by seed, so that every case has one before any has two.
    planned = [(*case, seed) for seed in seeds for case in cases]
    found = site.kept.finish(
        [(dict(zip(names, one, strict=True)), partial(measure, *one, site.data_dir)) for one in planned],
        progress,
    )
    rows: list[list[str | float | int | None]] = []
    curves, accuracy = [], proven()
    for data, arm, rate in cases:
        runs = [
            {int(step): error for step, error in result.items()}
            for (*case, _), result in zip(planned, found, strict=True)
            if result is not None and tuple(case) == (data, arm, rate)
        ]
        if not runs:
            continue
        right = [100 - 100 * run[max(run)] for run in runs]
        middle = accuracy[data, arm, rate] = statistics.median(right)
        rows.append([data, arm, rate, middle, min(right), max(right), PRINTED.get((data, arm)), len(runs)])
        curves.append(Curve.of_seeds(f"{arm}, rate {rate:g}", runs, data))
    columns = ["data", "method", "rate", "accuracy %", "lowest", "highest", "paper %", "seeds"]
    note = "Test accuracy after 40 passes; medians over the seeds; curves show test errors."
    return Findings(Table(columns, rows, note), curves, verdicts(accuracy), numbers=accuracy)


def verdicts(accuracy: Mapping[tuple[str, str, float], float]) -> list[Verdict]:
    """The paper's claims, by (data, arm, rate) -> median accuracy; what was not run is left out."""
    out = []
    for (data, arm, rate), found in accuracy.items():
        if data == PROVEN:
            wanted = {DP_SGD: 1, PROGRAM: 0, NORM: 2}[arm]
            out.append(Verdict.within(f"{arm}: {PROVEN} of a step", found, wanted, wanted))
        plain = accuracy.get((data, DP_SGD, rate))
        if plain is None or data == PROVEN:
            continue
        printed = PRINTED[data, PROGRAM] - PRINTED[data, DP_SGD]
        if arm in (PROGRAM, NORM):
            sentence = f"{data}, rate {rate:g}: {arm} less DP-SGD in points (the paper: {printed:+.2f})"
            out.append(Verdict.at_least(sentence, found - plain, printed / 2))
    # what came out: these bars were set after the runs that the docs report
    for key, (low, high) in FOUND.items():
        if key in accuracy:
            data, arm, rate = key
            out.append(Verdict.within(f"{data}, rate {rate:g}: {arm}, as before", accuracy[key], low, high))
    return out


FOUND = {("mnist", DP_SGD, 1.0): (97.0, 98.7)}


EXPERIMENT = PaperExperiment(
    name="dc-dpsgd-whole",
    title="DC-DPSGD's table on MNIST and Fashion-MNIST at full size",
    summary="DP-SGD, the authors' program and the library's norm rule over 40 passes at both printed rates. "
    "The paper: 98.72 against 97.65, and 87.80 against 83.23. Goes on where it was stopped.",
    run_on=_run,
    default_seeds=1,
)
