"""From noise to epsilon and back, for one setting or for a table of them: what `equipoise calibrate` answers.

The plan is one clipped sum a step, which is DP-SGD's; nothing here needs data.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from equipoise._roots import crossing
from equipoise.privacy import (
    Budget,
    Gaussian,
    PrivacyPlan,
    Release,
    Sampling,
    calibrate,
    quick_epsilon,
)
from equipoise.privacy import sampling as samplings

__all__ = ["SAMPLINGS", "Question", "answer", "make_sampling", "table"]


def _word(name: str) -> str:
    """The command line's word for a class: WithoutReplacement is without-replacement."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()


SAMPLINGS = {_word(name): kind for name, kind in samplings.SAMPLINGS.items()}
"""Every sampling by its word on the command line."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One setting: either `noise_multiplier` or `epsilon` is given, and the other is asked for.

    Attributes:
        population: public number of records.
        batch_size: expected records a step.
        steps: number of steps.
        delta: failure probability.
        noise_multiplier: noise standard deviation over the clip norm, or None.
        epsilon: the target, or None.
        sampling: one of `SAMPLINGS`.
        relation: ``add_or_remove_one`` or ``replace_one``.
    """

    population: int
    batch_size: float
    steps: int
    delta: float
    noise_multiplier: float | None = None
    epsilon: float | None = None
    sampling: str = "poisson"
    relation: str = "add_or_remove_one"


def make_sampling(name: str, batch_size: float, population: int, steps: int) -> Sampling:
    """A sampling by its name on the command line.

    >>> make_sampling("poisson", 256, 60_000, 10).steps
    10
    """
    if name not in SAMPLINGS:
        raise ValueError(f"sampling={name!r} is unknown; give one of {', '.join(SAMPLINGS)}.")
    return SAMPLINGS[name].of_size(batch_size, population, steps)


def _plan(question: Question, noise_multiplier: float) -> PrivacyPlan:
    sampling = make_sampling(question.sampling, question.batch_size, question.population, question.steps)
    return PrivacyPlan([Release("gradient", 1.0, Gaussian(noise_multiplier))], sampling, question.relation)


def answer(question: Question) -> dict[str, Any]:
    """Epsilon and noise multiplier, with how they were found, as plain values.

    Raises:
        ValueError: not exactly one of noise_multiplier and epsilon is given, or a value is out of range.

    >>> question = Question(population=60_000, batch_size=256, steps=4700, delta=1e-5, noise_multiplier=1.0)
    >>> round(answer(question)["epsilon"], 3)
    1.571
    """
    if (question.noise_multiplier is None) == (question.epsilon is None):
        raise ValueError(
            "give exactly one of --noise-multiplier (to learn epsilon) and --epsilon (to learn the noise "
            "multiplier)."
        )
    if question.epsilon is None:
        assert question.noise_multiplier is not None
        plan = _plan(question, question.noise_multiplier)
    else:
        plan = calibrate(lambda scale: _plan(question, scale), Budget(question.epsilon, question.delta))
    noise = plan.releases[0].noise_multiplier
    found = plan.epsilon(question.delta)
    return {
        "epsilon": found.value,
        "delta": question.delta,
        "noise_multiplier": noise,
        "accountant": found.accountant,
        "cross_check_rdp": found.cross_check,
        "relation": question.relation,
        "sampling": plan.sampling.describe(),
        "sampling_rate": plan.sampling.sampling_rate,
        "steps": question.steps,
        "epochs": question.steps * plan.sampling.expected_size / question.population,
        "population": question.population,
        "noise_of_the_mean": noise / plan.sampling.expected_size,
    }


def table(question: Question, centre: float) -> tuple[list[float], list[float], list[list[float]]]:
    """The same question for a few numbers of epochs and batch sizes around the asked ones, quickly.

    The coarse accountant used here errs on the safe side, by a few per cent at most.

    Args:
        question: the setting in the middle.
        centre: the noise multiplier that belongs to it.

    Returns:
        (epochs [R], batch sizes [C], values [R][C]): epsilon where the noise is given, else the noise
        multiplier.
    """
    epochs = question.steps * question.batch_size / question.population
    rows = [epochs * factor for factor in (0.5, 1, 2)]
    columns = [b for factor in (0.25, 1, 4) if (b := _batch(question, factor)) <= question.population]
    return rows, columns, [[_cell(question, e, b, centre) for b in columns] for e in rows]


def _batch(question: Question, factor: float) -> float:
    size = question.batch_size * factor
    return size if factor == 1 or size < 1 else float(round(size))


def _cell(question: Question, epochs: float, batch_size: float, centre: float) -> float:
    steps = max(1, math.ceil(epochs * question.population / batch_size - 1e-9))
    here = replace(question, batch_size=batch_size, steps=steps)

    def epsilon(noise: float) -> float:
        return quick_epsilon(_plan(here, noise).event(), question.delta, question.relation)

    if question.epsilon is None:
        return epsilon(centre)
    goal = math.log(question.epsilon)

    def excess(log_noise: float) -> float:
        return math.log(max(epsilon(math.exp(log_noise)), 1e-12)) - goal

    _, enough = crossing(excess, math.log(centre), 0.5, tolerance=0.0025)
    return math.exp(enough)
