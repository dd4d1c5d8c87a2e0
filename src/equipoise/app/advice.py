"""What to train with, and why: rules over public facts, each with the measurement that it rests on.

Everything looked at is public: the stated population, the budget, the model's size, and what the user says of
the records. No private record has a say, so advice costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from equipoise._say import continued
from equipoise._validate import delta_warning
from equipoise.app.build import Experiment, make_sampling
from equipoise.app.default_settings import DEFAULT_MODEL, DEFAULT_SETTINGS
from equipoise.app.models import default_model
from equipoise.app.noise_calibration import answer
from equipoise.app.option_checks import LITTLE_LEARNED, SettingsError
from equipoise.app.recorded_accuracy import recorded, simplest_level
from equipoise.app.settings import AdviceSettings, CalibrationSettings, RunSettings
from equipoise.app.train import assemble_shown, describe_run

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["MEASURED", "Measured", "advise"]


@dataclass(frozen=True)
class Measured:
    """Two figures of a page under `docs/measurements`, in percent of test records, in the page's digits.

    Attributes:
        page: the page's name.
        where: data, model and budget.
        found: what this choice reached.
        plain: what DP-SGD reached in the same place, or the choice that this one is held against.
    """

    page: str
    where: str
    found: str
    plain: str

    def __str__(self) -> str:
        return f"{self.found}% against {self.plain}% ({self.where}; measurements/{self.page})"


COMPARED = "methods-compared"

MEASURED = {
    "auto_s": Measured(COMPARED, "MNIST, 10,000 records, epsilon 3", "97.16", "97.02"),
    "warm start": Measured(COMPARED, "Fashion-MNIST, 10,000 records, epsilon 1", "84.74", "84.28"),
    "warm start elsewhere": Measured(COMPARED, "MNIST, 10,000 records, epsilon 1", "95.42", "96.00"),
    "fixed order": Measured(COMPARED, "MNIST in a fixed order, epsilon 3", "94.7", "91.1"),
    "many steps": Measured(COMPARED, "MNIST, 400 steps, epsilon 8", "95.1", "94.8"),
    "mnist": Measured("accuracy", "MNIST, epsilon 2.93", "99.05", "98.16"),
    "fashion-mnist": Measured("accuracy", "Fashion-MNIST, epsilon 2.7", "91.23", "86.35"),
    "cifar10": Measured("accuracy", "CIFAR-10, epsilon 3", "75.87", "61.97"),
    "adult": Measured("accuracy", "whole Adult, default settings, epsilon 1", "85.85", "84.68"),
    "language model": Measured(COMPARED, "Tiny Shakespeare, 100 steps, epsilon 3", "34.83", "32.32"),
    "dice-sgd": Measured(COMPARED, "MNIST, 10,000 records, epsilon 3", "92.00", "97.02"),
    "dp-c4-plus": Measured(COMPARED, "MNIST, 10,000 records, epsilon 3", "95.96", "97.02"),
    "pcdp-sgd": Measured(COMPARED, "MNIST, 10,000 records, epsilon 3", "90.52", "97.02"),
}
"""Every figure that advice quotes, by what it speaks for."""

BETTER = {
    "mnist": "fixed features and one linear layer, and is ahead of cnn-tanh",
    "fashion-mnist": "fixed features and one linear layer, and is ahead of cnn-tanh",
    "cifar10": "fixed features and one linear layer, and is ahead of scatter-pooled",
    "adult": "a piecewise linear function of every number, and is ahead of logistic",
}
"""What the better model has, by the figure that speaks for it."""

LARGEST_DRAWING = 32
"""Features from drawn pictures were measured on images of so many rows and columns at most."""

MANY_STEPS, SMALL_SHARE = 100, 0.02
"""Where noise over steps was ahead of DP-SGD with Poisson sampling: so many steps on so small draws."""

LESS_NOISE = 0.8
"""A larger batch is worth its time where it brings the noise of the whole run below this share."""


def advise(settings: RunSettings, asked: AdviceSettings, console: Console) -> dict[str, Any]:
    """A recommendation with its reasons, what else is worth a trial, and a dry run of it.

    Args:
        settings: what the user has fixed.
        asked: what the user knows of the records.
        console: for people.

    Returns:
        Plain values: command, method, reasons, worth_trying, warnings, dry_run.
    """
    if settings.epsilon is None:
        raise SettingsError("--epsilon is missing: the budget decides. See docs/how-to/choose-epsilon.md.")
    settings = _with_model(settings)
    experiment = assemble_shown(settings, console)
    behind = ", ".join(f"{name} {MEASURED[name].found}" for name in ("dp-c4-plus", "dice-sgd", "pcdp-sgd"))
    place = MEASURED["dice-sgd"]
    reasons = [
        "DP-SGD, tuned, is the one to beat: no method compared is ahead of it on all data. "
        f"It reached {place.plain}%, {behind} ({place.where}; measurements/{place.page})."
    ]
    if experiment.dataset.task != "classification":
        reasons = [
            "DP-SGD, the simplest method. All methods were compared on classifications; for "
            f"{_task(experiment)} no measurement speaks for another one."
        ]
    best, speaks = _best_model(experiment)
    if experiment.settings.model == best:
        reasons.append(f"The model has {BETTER[speaks]}{_measured(speaks, experiment)}.")
    chosen = _chosen(settings, asked, experiment, reasons)
    resolved = chosen.resolved(experiment.settings.model, experiment.dataset.population)
    sampling = make_sampling(resolved, experiment.dataset.population)
    experiment = replace(experiment, settings=resolved, sampling=sampling)
    worth_trying = _worth_trying(chosen, asked, experiment)
    warnings = _warnings(asked, experiment)
    if (batch := _larger_batch(chosen, experiment)) is not None:
        worth_trying.append(batch)
    command = _command(chosen)
    for title, lines in (("Why", reasons), ("Worth a trial", worth_trying), ("Please note", warnings)):
        if lines:
            console.print(f"\n[bold]{title}[/]")
        for line in lines:
            console.print(f"  - {line}", markup=False, highlight=False, soft_wrap=True)
    console.print("\n[bold]A dry run of it[/]")
    found = describe_run(chosen, console)
    console.print("\n[bold]The command[/]")
    width = console.width if console.is_terminal else None
    console.print(continued(command, width), markup=False, soft_wrap=True)
    return {
        "command": command,
        "method": chosen.method,
        "reasons": reasons,
        "worth_trying": worth_trying,
        "warnings": warnings,
        "dry_run": found,
    }


def _with_model(settings: RunSettings) -> RunSettings:
    """With the best model that was measured on the data, where neither the user nor a default names one.

    The number of a table's records decides between its defaults, `logistic` and `additive`.
    """
    if settings.model is not None or settings.data in DEFAULT_MODEL:
        return settings
    rows = recorded(settings.data, settings.epsilon or 1.0)
    return replace(settings, model=rows[0].model) if rows and rows[0].model != "logistic" else settings


def _best_model(experiment: Experiment) -> tuple[str | None, str]:
    """The model that is ahead on such data, and the name of the figure that says so; None where none is."""
    data = experiment.settings.data
    if data in BETTER and data in DEFAULT_MODEL:
        return DEFAULT_MODEL[data], data
    usual, shape = default_model(experiment.dataset), experiment.dataset.input_shape
    if usual in ("cnn-tanh", "cnn-cifar") and shape[0] in (1, 3) and max(shape) <= LARGEST_DRAWING:
        return "patches-linear", "fashion-mnist" if shape[0] == 1 else "cifar10"
    return ("additive", "adult") if usual == "additive" else (None, "")


def _chosen(
    settings: RunSettings, asked: AdviceSettings, experiment: Experiment, reasons: list[str]
) -> RunSettings:
    """The settings to take; says why."""
    chosen = settings
    resolved = experiment.settings
    if asked.fixed_order:
        size = float(max(1, round(resolved.batch_size or 1)))
        chosen = replace(chosen, method="dp-mf", sampling="fixed-epochs", batch_size=size)
        reasons.append(
            "The order of the records may be known, so no sampling amplifies the guarantee. Noise that is "
            f"correlated over steps makes up for most of it{_measured('fixed order', experiment)}."
        )
    rows = [] if asked.fixed_order else recorded(settings.data, settings.epsilon or 1.0, resolved.model)
    if rows:
        best = simplest_level(rows, settings.public_records is not None)
        given = {name for name in best.settings() if getattr(settings, name) is not None}
        free = given <= {"method", "model"}
        chosen = replace(chosen, **(best.settings() if free else {}) | best.changes())
        reasons.append(
            f"On these data, at epsilon {best.epsilon:g}, all tuned alike: {best}. Best of {len(rows)} was "
            f"{rows[0]} (measurements/{COMPARED}). A simpler method is preferred where it is level."
        )
    known = (resolved.data, resolved.model) in DEFAULT_SETTINGS
    if not rows and not known and settings.clip_norm is None and not asked.fixed_order:
        chosen = replace(chosen, clip_rule="auto_s")
        reasons.append(
            "No clip norm is known for these data. AUTO-S normalises the gradients, so that only the "
            f"learning rate is left to tune, and is level with DP-SGD{_measured('auto_s', experiment)}."
        )
    return chosen


def _task(experiment: Experiment) -> str:
    return {"regression": "a regression", "multi-label": "several labels"}.get(experiment.dataset.task, "")


def _measured(name: str, experiment: Experiment, but: str | None = None) -> str:
    """The figures that a reason rests on; all are accuracies of classifications."""
    if experiment.dataset.task != "classification":
        return f" where classes are learnt; for {_task(experiment)} it was not measured"
    return f": {MEASURED[name]}" + (f"; but {MEASURED[but]}" if but else "")


def _worth_trying(chosen: RunSettings, asked: AdviceSettings, experiment: Experiment) -> list[str]:
    found = []
    resolved, sampling = experiment.settings, experiment.sampling
    if resolved.public_records is not None:
        found.append(
            "--method public-warm-start, since there are public records of the task"
            f"{_measured('warm start', experiment, 'warm start elsewhere')}. It must be the same task."
        )
    epsilon = resolved.epsilon or 0.0
    share = sampling.expected_size / sampling.population
    if not asked.fixed_order and epsilon >= 1 and sampling.steps >= MANY_STEPS and share <= SMALL_SHARE:
        found.append(
            f"--method dp-mf, since there are {sampling.steps:,} steps on small draws"
            f"{_measured('language model', experiment, 'many steps')}."
        )
    best, speaks = _best_model(experiment)
    if best is not None and resolved.model != best:
        found.append(f"--model {best}, which has {BETTER[speaks]}{_measured(speaks, experiment)}.")
    found.append(
        "--method sgd on data that need no protection: the same loop without privacy shows its price."
    )
    return found


def _noise(experiment: Experiment, batch_size: float) -> float:
    """How far the noise of a whole run of DP-SGD moves the model, over how far its gradients can."""
    settings, sampling = experiment.settings, experiment.sampling
    assert settings.epochs is not None
    assert settings.delta is not None
    asked = CalibrationSettings(
        population=sampling.population,
        batch_size=batch_size,
        epochs=settings.epochs,
        delta=settings.delta,
        epsilon=settings.epsilon,
        relation=settings.neighbours(),
    )
    return (
        answer(asked)["noise_multiplier"]
        * math.sqrt(_size(experiment) / asked.number_of_steps())
        / batch_size
    )


def _larger_batch(chosen: RunSettings, experiment: Experiment) -> str | None:
    """A batch size with clearly less noise at the same number of passes, or None."""
    size = experiment.sampling.expected_size
    larger = min(4 * size, experiment.sampling.population / 2)
    if chosen.sampling is not None or larger < 2 * size:
        return None
    now, then = _noise(experiment, size), _noise(experiment, larger)
    if then > LESS_NOISE * now:
        return None
    return (
        f"--batch-size {larger:g} at the same number of passes: the noise of the whole run falls to "
        f"{then / now:.0%} of what it is (computed for this budget). Raise the learning rate with it."
    )


def _warnings(asked: AdviceSettings, experiment: Experiment) -> list[str]:
    settings, population = experiment.settings, experiment.sampling.population
    found = []
    noise = _noise(experiment, experiment.sampling.expected_size)
    if noise > LITTLE_LEARNED:
        found.append(
            f"The noise moves the model {noise:.1f} times as far as all gradients can ({_size(experiment):,} "
            f"parameters, {population:,} records). Take a smaller model, fixed features, or more records."
        )
    if (owned := asked.records_per_person) > 1:
        found.append(
            f"A person owns up to {owned} records, and epsilon {settings.epsilon:g} is that of one: a "
            f"person's is about {owned * (settings.epsilon or 0):g}. Protect the person: --unit user --owner "
            f"COLUMN --records-per-user {owned} (docs/how-to/users.md)."
        )
    assert settings.delta is not None
    warning = delta_warning(settings.delta, population)
    return found if warning is None else [*found, warning]


def _size(experiment: Experiment) -> int:
    return sum(p.numel() for p in experiment.model.parameters() if p.requires_grad)


def _command(settings: RunSettings) -> str:
    return settings.command(with_paths=True).replace(" --seed 0", "")
