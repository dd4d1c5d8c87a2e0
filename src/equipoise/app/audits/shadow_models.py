"""Shadow models of a data set, with noise and without, and the curve that its guarantee allows.

The private training is that of `equipoise train` with the default settings of the data set, on random halves
of its training records and from the same public initial weights. The other one is plain SGD, neither clipped
nor noised, four times as long, at the rate that the clipped one has at most (learning rate times clip norm).
Noise and draws follow the seed, so that a figure can be made again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.app.audits.finished_run import roc_curves, save_roc_figure
from equipoise.app.build import Experiment, assemble, build_training, make_optimizer, make_scheduler
from equipoise.app.data_loading import load_data
from equipoise.app.models import build_model, default_model
from equipoise.app.option_checks import SettingsError
from equipoise.app.settings import RunSettings
from equipoise.app.tasks import accuracy
from equipoise.audit.roc import Roc, bound_on_roc
from equipoise.audit.shadow import scaled_confidence, train_shadows
from equipoise.report.figures import Curve

__all__ = ["audit_shadow"]


LEVELS = (0.01, 0.001)
"""False-positive rates at which the attack is quoted."""


LONGER = 4


UNCLIPPED = "1e9"  # a clip norm that no gradient reaches


def audit_shadow(
    settings: RunSettings,
    models: int = 32,
    folder: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Attack K trainings with noise and K without, and write `shadow.json` and `roc.png`.

    Args:
        settings: of the private training; batches are halved with the records.
        models: K, of either kind.
        folder: where `private/` comes; `runs/shadow-DATA` by default.
        progress: called with (trainings done, trainings in all).

    Returns:
        Plain values: of either training its epsilon, the area under the curve, TPR at 1% and 0.1% false
        positives, what the bound allows there, and accuracies.

    Raises:
        SettingsError, DataFileError: before anything is trained.
        ValueError: too few models.
    """
    whole = load_data(settings)
    if whole.task != "classification":
        raise SettingsError(
            f"--shadow guesses by the scores of classes, but {settings.data_name!r} is made for {whole.task}."
        )
    settings = replace(settings.resolved(default_model(whole), whole.population), reproducible=True)
    assert settings.batch_size is not None
    settings = replace(settings, batch_size=settings.batch_size / 2)
    half = replace(whole, population=max(1, whole.population // 2))
    done = 0

    def note() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, 2 * models)

    trainings: dict[str, Any] = {}
    curves: dict[str, Roc] = {}
    for label, chosen in (
        ("private", settings),
        ("not private", _plain(settings)),
    ):
        trainings[label], curves[label] = _attack(assemble(chosen, raw=half), models, note)
    assert settings.delta is not None
    claimed = trainings["private"]["epsilon"]
    out = Path(folder or f"runs/shadow-{settings.data_name}") / "private"
    values: dict[str, Any] = {
        "data": settings.data_name,
        "model": settings.model,
        "records": len(whole.train),
        "models": models,
        "delta": settings.delta,
        "trainings": trainings,
        "allowed": _at_levels(lambda rate: float(bound_on_roc(rate, claimed, settings.delta or 0.0))),
        "run_dir": str(out.parent),
        "figure": str(out / "roc.png"),
    }
    _write(out, values, roc_curves(curves, models * len(whole.train), claimed, settings.delta))
    return values


def _plain(settings: RunSettings) -> RunSettings:
    """The same model, data and batches under plain SGD."""
    assert settings.learning_rate is not None
    assert settings.clip_norm is not None
    assert settings.epochs is not None
    return replace(
        settings,
        method="clip-sgd",
        clip_norm=UNCLIPPED,
        learning_rate=settings.learning_rate * float(settings.clip_norm),
        epochs=LONGER * settings.epochs,
    )


def _attack(experiment: Experiment, models: int, note: Callable[[], None]) -> tuple[dict[str, Any], Roc]:
    """What the shadows of one kind of training give away, and the curve."""
    settings, data = experiment.settings, experiment.dataset
    assert settings.model is not None
    epsilons: list[float | None] = []
    seen, test = [], []

    def observe(number: int, inside: Tensor) -> Tensor:
        model = build_model(settings.model or "", data, seed=settings.seed)
        optimizer = make_optimizer(settings, model)
        mine = replace(
            experiment,
            # the seed itself assigns the initial weights and who is present; shadows take seeds of their own
            settings=replace(settings, seed=settings.seed + 1000 + number),
            dataset=replace(data, train=data.train.subset(inside)),
            model=model,
            optimizer=optimizer,
            scheduler=make_scheduler(settings, optimizer, experiment.sampling.steps),
        )
        training = build_training(mine, on_disk=False)
        if not epsilons:
            plan = training.plan
            epsilons.append(plan.epsilon(training.delta).value if plan.releases else None)
        for _ in training:
            pass
        model.eval()
        seen.append(accuracy(model, mine.dataset.train))
        test.append(accuracy(model, data.test))
        note()
        with torch.no_grad():
            logits = model(data.train.fields["input"].to(training.device)).cpu()
        return scaled_confidence(logits, data.train.fields["label"])

    found = train_shadows(observe, len(data.train), models, seed=settings.seed)
    curve = found.roc
    values = {
        "method": settings.method,
        "epsilon": epsilons[0],
        "steps": experiment.sampling.steps,
        "area_under_curve": curve.area,
        "true_positives": _at_levels(lambda rate: float(curve.at(rate))),
        "accuracy_on_own_records": float(np.mean(seen)),
        "accuracy_on_test_records": float(np.mean(test)),
    }
    return values, curve


def _at_levels(of: Callable[[float], float]) -> dict[str, float]:
    return {f"{level:g}": of(level) for level in LEVELS}


def _write(out: Path, values: dict[str, Any], curves: list[Curve]) -> None:
    """The numbers and the picture, only for the owner: they speak of records."""
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    content = values | {"curves": [{"label": c.label, "x": list(c.x), "y": list(c.y)} for c in curves]}
    (out / "shadow.json").write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    (out / "shadow.json").chmod(0o600)
    save_roc_figure(curves, out / "roc.png")
