"""Small problems with a known answer, and the distance to it along a private training.

    errors[k] = error(x_k), or error(mean of x_{k-n+1}, ..., x_k) with `average_last=n`

The training is an ordinary `PrivateTraining` in memory: the method, the ledger, the noise and the booking
are those of a real run. Noise and sampling follow the public seed, so that a figure can be made again; such
a run is not private, and its problems hold no private data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.methods import Method
from equipoise.privacy import Budget, Sampling
from equipoise.training import Data, PrivateTraining, Run
from reproduction.findings import Curve, Findings, PaperExperiment, Progress, Table, Verdict

__all__ = [
    "Curve",
    "Findings",
    "PaperExperiment",
    "Problem",
    "Progress",
    "Table",
    "Verdict",
    "classification",
    "follow",
    "tuned_runs",
    "zero_linear",
]

P = TypeVar("P")
MakeOptimizer = Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]


@dataclass(frozen=True)
class Problem:
    """A model, a loss, records, and how far a model is from the answer.

    Attributes:
        name: of the problem, such as "interp".
        make_model: the model at its starting point; called under the run's seed.
        loss: loss(model, batch) -> [B], one number per record; a batch is a dict of the records' tensors.
        data: named tensors with one record axis, [N, ...].
        population: N, stated as a public number.
        error: of a model, such as the distance of its parameters to the known solution.
    """

    name: str
    make_model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    data: Mapping[str, Tensor]
    population: int
    error: Callable[[nn.Module], float]


def classification(
    name: str,
    make_model: Callable[[], nn.Module],
    data: Mapping[str, Tensor],
    judged: Mapping[str, Tensor],
) -> Problem:
    """A problem of classes: cross-entropy, and the share of wrong answers to the records `judged`.

    Args:
        name, make_model: as of a `Problem`.
        data, judged: inputs x [N, ...] and classes y [N].
    """

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    @torch.no_grad()
    def error(model: nn.Module) -> float:
        return float((model(judged["x"]).argmax(1) != judged["y"]).double().mean())

    return Problem(name, make_model, loss, data, len(data["y"]), error)


def zero_linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer with intercept that starts at zero."""
    model = nn.Linear(inputs, outputs)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def tuned_runs(
    finish: Callable[[Sequence[tuple[P, str, float, int]]], Sequence[dict[str, Any] | None]],
    parts: Iterable[P],
    arms: Iterable[str],
    rates: Sequence[float],
    tuning_seed: int,
    seeds: Iterable[int],
    steps: int,
) -> dict[tuple[P, str], tuple[float, list[dict[str, float]]]]:
    """By part and arm, the rate with the least error on the tuning seed, and each seed's errors at it.

    Args:
        finish: runs of (part, arm, rate, seed) -> errors by the number of steps in words; None where a run
            is missing, after an interrupt.
        parts, arms, rates: of the experiment.
        tuning_seed: on which every rate is tried.
        seeds: that run at the best rate.
        steps: after which the error counts.
    """
    found: dict[tuple[P, str], tuple[float, list[dict[str, float]]]] = {}
    for part in parts:
        tried = [(part, arm, rate, tuning_seed) for arm in arms for rate in rates]
        errors: dict[str, dict[float, float]] = {}
        for (_, arm, rate, _), result in zip(tried, finish(tried), strict=True):
            if result is not None:
                errors.setdefault(arm, {})[rate] = result[str(steps)]
        best = {arm: min(e, key=lambda rate: e[rate]) for arm, e in errors.items() if len(e) == len(rates)}
        planned = [(part, arm, rate, seed) for seed in seeds for arm, rate in best.items()]
        for (_, arm, rate, _), result in zip(planned, finish(planned), strict=True):
            if result is not None:
                found.setdefault((part, arm), (rate, []))[1].append(result)
    return found


def follow(
    method: Method,
    problem: Problem,
    *,
    sampling: Sampling,
    budget: Budget | None = None,
    learning_rate: float | Callable[[int], float],
    seed: int,
    measure_at: Sequence[int],
    average_last: int | None = None,
    optimizer: MakeOptimizer | None = None,
) -> dict[int, float]:
    """Train on a problem and measure the error after some of the steps.

    Args:
        method: estimator of the gradient; with multipliers of its own, or calibrated to `budget`.
        problem: what is trained on.
        sampling: of the whole training; its `population` must be the problem's.
        budget: None where the method has its noise multipliers.
        learning_rate: a number, or a function of the step k = 0, 1, ... that moves x_k to x_{k+1}.
        seed: of the initial model, sampling and noise.
        measure_at: numbers of steps done, from 0 (the start) to `sampling.steps`.
        average_last: measure the average of the last n iterates instead of the last one.
        optimizer: optimizer(parameters, learning_rate) -> torch optimiser; plain SGD by default.

    Returns:
        {steps done: error}, in rising order.

    Raises:
        ValueError: a step that is not part of the training, another population, or no iterate to average.

    Example:
        >>> from equipoise.methods import DPSGD
        >>> from equipoise.privacy import Poisson
        >>> x = torch.tensor([[1.0], [2.0], [-1.0]])
        >>> def loss(model, batch):
        ...     return ((model(batch["x"]) - 3 * batch["x"]) ** 2).sum(1)
        >>> def error(model):
        ...     return abs(model.weight.item() - 3)
        >>> line = Problem("line", lambda: nn.Linear(1, 1, bias=False), loss, {"x": x}, 3, error)
        >>> method = DPSGD(clip_norm=1.0, noise_multiplier=0.01)
        >>> found = follow(
        ...     method, line, sampling=Poisson(3, 3, 40), learning_rate=0.2, seed=0, measure_at=[0, 40]
        ... )
        >>> found[40] < 0.1 < found[0]
        True
    """
    wanted = sorted(set(measure_at))
    if not wanted or wanted[0] < 0 or wanted[-1] > sampling.steps:
        raise ValueError(
            f"measure_at={list(measure_at)!r}: give numbers of steps from 0 to "
            f"sampling.steps={sampling.steps}"
        )
    if sampling.population != problem.population:
        raise ValueError(
            f"sampling.population={sampling.population!r}, but the problem {problem.name!r} has "
            f"{problem.population} records: state the same public number in both"
        )
    if average_last is not None and average_last < 1:
        raise ValueError(f"average_last={average_last!r}: give a number of iterates above 0, or None")
    rate = learning_rate if callable(learning_rate) else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = problem.make_model()
        make = optimizer or torch.optim.SGD
        moving = make(
            [p for p in model.parameters() if p.requires_grad],
            rate(0) if rate is not None else float(learning_rate),  # type: ignore[arg-type]
        )
        training = PrivateTraining(
            model,
            moving,
            loss=problem.loss,
            # one microbatch, whatever memory is free: the same sums in the same order on every machine
            data=Data(dict(problem.data), microbatch_size=problem.population),
            sampling=sampling,
            method=method,
            budget=budget,
            run=Run(seed=seed, reproducible=True),
        )
        path = _Path(model, average_last)
        found: dict[int, float] = {}
        if wanted[0] == 0:
            found[0] = path.error(problem.error)
        for done in range(1, wanted[-1] + 1):
            if rate is not None:
                for group in moving.param_groups:
                    group["lr"] = rate(done - 1)
            training.take_step()
            if average_last is not None:
                path.note()
            if done in wanted:
                found[done] = path.error(problem.error)
    return found


class _Path:
    """The last iterates of a model, and the error of their mean."""

    def __init__(self, model: nn.Module, average_last: int | None) -> None:
        self._model = model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._last: deque[list[Tensor]] = deque(maxlen=average_last or 1)

    def note(self) -> None:
        """Keep the iterate of now."""
        self._last.append([p.detach().clone() for p in self._parameters])

    @torch.no_grad()
    def error(self, of: Callable[[nn.Module], float]) -> float:
        """The error of the mean of the kept iterates; of the model itself where none is kept."""
        if not self._last:
            return float(of(self._model))
        now = [p.detach().clone() for p in self._parameters]
        try:
            for number, parameter in enumerate(self._parameters):
                parameter.copy_(torch.stack([kept[number] for kept in self._last]).mean(0))
            return float(of(self._model))
        finally:
            for parameter, value in zip(self._parameters, now, strict=True):
                parameter.copy_(value)
