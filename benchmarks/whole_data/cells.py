"""The runs of the bench: a cell is a method on a data set at an epsilon.

Settings are chosen by the same walk and the same number of trials for every method, from the same start. A
point is a clip norm and a step length. The walk tries the start, then again and again the first neighbour
that is untried of the best point so far: a step length four times as long, or as short, a clip norm four
times as large, or as small. The three best points are tried a second time, and the best mean is taken. Trials
train on a part of the training records and are judged on the rest of them. Then each seed trains on all
training records at the best point, and the test records judge.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import equipoise as eq
from benchmarks.trained_contenders import DELTA, accuracy, train
from benchmarks.whole_data.contenders import CONTENDERS
from benchmarks.whole_data.problems import DESIGNS, Problem, Split
from equipoise.methods import ClipSGD, PlainSGD, PublicRecords
from equipoise.privacy.accounting.calibrate import calibrate_noise_multiplier
from reproduction.result_cache import ResultCache

Point = tuple[float, float]
Result = dict[str, Any]

TRIALS, AGAIN = 8, 3
SEEDS, TUNING_SEEDS = (0, 1, 2, 3, 4), (100, 101)
START: Point = (1.0, 4.0)
NO_CLIPPING = 1e4
"""A clip norm above all norms of gradients."""

PARTS = ("without noise", "without clipping", "without both")
"""DP-SGD at its chosen settings, with something taken away: what each of them costs. Not private."""


class TimeIsUp(Exception):
    """The minutes that were given have passed."""


class NotRun(Exception):
    """A result that is not in the file, where nothing is to be trained."""


def walk(score: Callable[[Point, int], float], clips: bool = True) -> Point:
    """The best point of `TRIALS`; the best few of them are tried once more, with another seed.

    Args:
        score: of a point and a seed; more is better.
        clips: whether the clip norm matters. Where it does not, more step lengths are tried.

    >>> walk(lambda point, seed: -abs(point[1] - 60))
    (1.0, 64.0)
    """
    others = [(4.0, 1.0), (0.25, 1.0)] if clips else [(1.0, 2.0), (1.0, 0.5)]
    moves = [(1.0, 4.0), (1.0, 0.25), *others]
    tried = {START: score(START, TUNING_SEEDS[0])}
    while len(tried) < TRIALS:
        for clip, length in sorted(tried, key=lambda point: -tried[point]):
            around = [(clip * by, length * times) for by, times in moves]
            if new := [point for point in around if point not in tried]:
                tried[new[0]] = score(new[0], TUNING_SEEDS[0])
                break
    best = sorted(tried, key=lambda point: -tried[point])[:AGAIN]
    return max(best, key=lambda point: tried[point] + score(point, TUNING_SEEDS[1]))


class Tuned(NamedTuple):
    """A cell that was run.

    Attributes:
        point: the chosen one.
        held_out: its mean accuracy while it was chosen; None for `PARTS`, which choose nothing.
        results: of each seed on the test records.
    """

    point: Point
    held_out: float | None
    results: list[Result]


class Bench:
    """Runs what is missing in a file.

    Args:
        file: one line of JSON per run.
        load: the problem of a data set, by its name.
        until: the time, as `time.monotonic` tells it, at which no further run begins; None for no end.
        train: whether to run what is missing, or to raise `NotRun`.
    """

    def __init__(
        self, file: Path, load: Callable[[str], Problem], until: float | None = None, train: bool = True
    ) -> None:
        self._kept, self._load, self._until, self._train = ResultCache(file), load, until, train
        self._problems: dict[str, Problem] = {}

    def cell(self, data: str, method: str, epsilon: float | None) -> Tuned:
        """Choose a point, and run each seed there."""

        def score(point: Point, seed: int) -> float:
            return float(self.run(data, method, epsilon, point, seed, "tuning")["accuracy"])

        if method in PARTS:
            best, held_out = self.cell(data, "dp-sgd", epsilon).point, None
        else:
            best = walk(score, CONTENDERS[method].clips)
            held_out = mean(score(best, seed) for seed in TUNING_SEEDS)
        return Tuned(best, held_out, [self.run(data, method, epsilon, best, seed, "test") for seed in SEEDS])

    def run(
        self, data: str, method: str, epsilon: float | None, point: Point, seed: int, split: Split
    ) -> Result:
        """One run: accuracy in percent, processor seconds, and what was trained."""
        settings = {"data": data, "method": method, "epsilon": epsilon, "clip_norm": point[0]}
        settings |= {"length": point[1], "seed": seed, "split": split, "delta": DELTA}
        settings |= {"steps": DESIGNS[data].steps, "draws": DESIGNS[data].draws}

        def do() -> Result:
            if not self._train:
                raise NotRun(settings)
            if self._until is not None and time.monotonic() > self._until:
                raise TimeIsUp
            if data not in self._problems:
                self._problems[data] = self._load(data)
            return measure(self._problems[data], method, epsilon, point, seed, split)

        return self._kept.result(settings, do)


def measure(
    problem: Problem, method: str, epsilon: float | None, point: Point, seed: int, split: Split
) -> Result:
    """Train once and judge."""
    clip_norm, length = point
    records, judges = problem.parts(split)
    population = len(records["label"])
    model = problem.model()
    sampling = eq.Poisson(population / problem.draws, population, problem.steps)
    began = time.process_time()
    contender = CONTENDERS["dp-sgd" if method in PARTS else method]
    rate = contender.rate(clip_norm, length)
    if method in PARTS:
        made, budget = _part(method, clip_norm, sampling, epsilon), None
    else:
        made = contender.make(clip_norm, PublicRecords(problem.public))
        budget = epsilon if contender.private else None
    training = train(
        model,
        records,
        sampling,
        made,
        budget,
        rate=rate,
        seed=seed,
        optimizer=contender.optimizer,
        micro_batch_size=4096,
    )
    found = {"accuracy": accuracy(model, judges), "cpu_seconds": time.process_time() - began}
    found |= {"rate": rate, "population": population, "batch": sampling.expected_size}
    found["judges"] = len(judges["label"])
    if method == "dp-sgd":
        noise = training.plan["gradient"].noise_multiplier * clip_norm / sampling.expected_size
        found |= {"noise": noise * sum(p.numel() for p in model.parameters()) ** 0.5}
        if isinstance(model, nn.Linear):
            found |= clipping_at(model, records, clip_norm)
    return found


def _part(part: str, clip_norm: float, sampling: eq.Poisson, epsilon: float | None) -> eq.Method:
    if part == "without both":
        return PlainSGD()
    if part == "without noise":
        return ClipSGD(clip_norm=clip_norm)
    assert epsilon is not None
    needed = calibrate_noise_multiplier(sampling, eq.Budget(epsilon, DELTA))
    return eq.DPSGD(clip_norm=NO_CLIPPING, noise_multiplier=needed * clip_norm / NO_CLIPPING)


@torch.no_grad()
def clipping_at(model: nn.Module, records: Mapping[str, torch.Tensor], clip_norm: float) -> Result:
    """What clipping does to the gradients of a linear model.

    Returns:
        `clipped`, the share of gradients above the clip norm; `bias`, the norm of the mean of what is cut
        off; `asymmetry`, the same over the mean of the norms of what is cut off: 0 where all of it cancels, 1
        where nothing does; `gradient`, the norm of the mean gradient; `tail`, the share of the sum
        of all norms that the longest hundredth of the gradients has.
    """
    inputs, label = records["input"], records["label"]
    outputs = model(inputs)
    errors = outputs.softmax(1) - F.one_hot(label, outputs.shape[1])
    norms = errors.norm(dim=1) * (inputs.square().sum(1) + 1).sqrt()
    cut = 1 - clip_norm / norms.clamp(min=clip_norm)
    off = errors * cut[:, None] / len(label)
    bias = float((off.T @ inputs).square().sum() + off.sum(0).square().sum()) ** 0.5
    mean = float((cut * norms).mean())
    return {
        "clipped": float((cut > 0).double().mean()),
        "bias": bias,
        "asymmetry": bias / mean if mean else 0.0,
        "gradient": float((errors.T @ inputs / len(label)).norm()),
        "tail": float(norms.topk(-(-len(norms) // 100)).values.sum() / norms.sum()),
    }


def cells(
    data: tuple[str, ...], methods: tuple[str, ...], epsilons: tuple[float, ...]
) -> Iterator[tuple[str, str, float | None]]:
    """All cells that are asked for, in that order: data set, method, epsilon.

    >>> list(cells(("adult",), ("sgd", "dp-sgd"), (3.0, 1.0)))
    [('adult', 'sgd', None), ('adult', 'dp-sgd', 3.0), ('adult', 'dp-sgd', 1.0)]
    """
    for epsilon in epsilons:
        for method in methods:
            private = method in PARTS or CONTENDERS[method].private
            if private or epsilon == epsilons[0]:
                yield from ((name, method, epsilon if private else None) for name in data)
