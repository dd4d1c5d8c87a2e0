"""Membership inference with shadow models: the likelihood ratio of a record's confidence.

    python examples/shadow_models.py --data digits --epsilon 2 --models 32 --run-dir runs/shadow-digits

K trainings see each a random half of N records. How sure a model is of record i's label, on a scale on which
it is about normal,

    phi_i = log(p_y / (1 - p_y)),

has one law in the models that saw the record and another in those that did not. Each model in turn is the
target; the others fit both laws for every record, and the score is

    L_i = log N(phi_i; m_in, s_in^2) - log N(phi_i; m_out, s_out^2).

Every record is present in every model with probability 1/2, independently. Balanced halves (every record in
exactly K/2 models) would let the assignment in the other models tell the one in the target.

This is how strong a familiar attacker is, who has as many records of the same kind and sees only the final
model; it certifies nothing.

The private training is that of `equipoise train` with the default settings of the data set, on random halves
of its training records and from the same public initial weights. The other one is plain SGD, neither clipped
nor noised, four times as long, at the rate that the clipped one has at most (learning rate times clip norm).
Noise and draws follow the seed, so that a figure can be made again.

Source: Carlini, Chien, Nasr, Song, Terzis and Tramer 2022, the online attack.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from equipoise.app.audits.finished_run import roc_curves, save_roc_figure
from equipoise.app.build import Experiment, assemble, build_training, make_optimizer, make_scheduler
from equipoise.app.data_loading import load_data
from equipoise.app.models import build_model, default_model
from equipoise.app.option_checks import SettingsError
from equipoise.app.settings import RunSettings
from equipoise.app.tasks import outputs_of
from equipoise.audit.roc import Numbers, Roc, bound_on_roc, roc
from equipoise.data import Records
from equipoise.report.figures import Curve

MODELS_FOR_OWN_VARIANCE = 64
"""Below so many models all records share one variance per side, which K/2 values would estimate badly."""
LEAST_VARIANCE = 1e-12  # a variance; records of which every model is equally sure


@dataclass(frozen=True)
class Shadows:
    """What K models say of N records.

    Attributes:
        confidences: [K, N], phi.
        inside: [K, N] bool, which records each was trained on.
        scores: [K, N], L of each model as the target of the others.
    """

    confidences: Numbers
    inside: NDArray[np.bool_]
    scores: Numbers

    @property
    def roc(self) -> Roc:
        """One curve of all targets and records, with the same threshold for all."""
        return roc(self.scores, self.inside)


def accuracy(model: torch.nn.Module, records: Records) -> float:
    """The share of records whose class the model gives the highest score; NaN is wrong."""
    outputs = outputs_of(model, records)
    right = (outputs.argmax(1) == records.fields["label"]) & outputs.isfinite().all(1)
    return float(right.double().mean())


def scaled_confidence(logits: Tensor, labels: Tensor) -> Tensor:
    """phi = log(p_y / (1 - p_y)) = z_y - log sum_{j != y} e^{z_j}, [N] float64.

    Args:
        logits: z, [N, C] with C of at least 2.
        labels: y, [N].

    Example:
        >>> scaled_confidence(torch.tensor([[2.0, 0.5], [800.0, 0.0]]), torch.tensor([0, 1])).tolist()
        [1.5, -800.0]
    """
    own = torch.nn.functional.one_hot(labels, logits.shape[1]).bool()
    z = logits.double()
    return z[own] - z.masked_fill(own, -torch.inf).logsumexp(dim=1)


def train_shadows(
    observe: Callable[[int, Tensor], Tensor],
    records: int,
    models: int,
    *,
    seed: int,
    shared_variance: bool | None = None,
) -> Shadows:
    """Train K models on random halves and attack each with the help of the others.

    Args:
        observe: observe(number, inside [N] bool) -> phi [N]: trains on those records and asks about all.
        records: N.
        models: K, at least 4.
        seed: of the random assignment.
        shared_variance: as for `likelihood_ratios`; for fewer than 64 models where None.

    Raises:
        ValueError: too few models or records.
    """
    if models < 4 or records < 2:
        raise ValueError(
            f"models={models!r}, records={records!r}: at least 4 models, of which some saw a record and some "
            "did not, and 2 records are needed"
        )
    rng = torch.Generator().manual_seed(seed)
    inside = torch.rand(models, records, generator=rng) < 0.5
    found = torch.stack([observe(number, inside[number]).double() for number in range(models)]).numpy()
    shared = models < MODELS_FOR_OWN_VARIANCE if shared_variance is None else shared_variance
    return Shadows(found, inside.numpy(), likelihood_ratios(found, inside.numpy(), shared_variance=shared))


def likelihood_ratios(confidences: ArrayLike, inside: ArrayLike, *, shared_variance: bool = True) -> Numbers:
    """L of every record in every model, its laws fitted to the other models.

    Args:
        confidences: phi, [K, N].
        inside: bool, [K, N].
        shared_variance: one variance per side for all records; else one for each record.

    Returns:
        [K, N]; 0 where none of the others, or all of them, saw the record, or a side shows no variance.

    Example:
        >>> phi = np.array([[0.0], [0.1], [0.2], [5.0], [5.1], [5.2]])
        >>> inside = phi > 1
        >>> (likelihood_ratios(phi, inside) > 0)[:, 0].tolist()
        [False, False, False, True, True, True]
    """
    phi, present = np.asarray(confidences, dtype=np.float64), np.asarray(inside, dtype=bool)
    logs, known = [], np.ones(phi.shape, dtype=bool)
    centred = phi - phi.mean(axis=0)  # sums of squares lose fewer digits
    for side in (present, ~present):
        values = np.where(side, centred, 0.0)
        # of the models other than the row's own
        count = side.sum(axis=0) - side
        total, squares = values.sum(axis=0) - values, (values**2).sum(axis=0) - values**2
        mean = total / np.maximum(count, 1)
        spread = np.maximum(squares - total * mean, 0.0)
        freedom = np.maximum(count - 1, 0)
        variance = spread.sum(axis=1, keepdims=True) / np.maximum(freedom.sum(axis=1, keepdims=True), 1)
        if not shared_variance:
            variance = np.where(freedom > 0, spread / np.maximum(freedom, 1), variance)
        variance = np.maximum(variance, LEAST_VARIANCE)
        logs.append(-((centred - mean) ** 2) / (2 * variance) - np.log(variance) / 2)
        known &= (count > 0) & freedom.any(axis=1, keepdims=True)
    return np.where(known, logs[0] - logs[1], 0.0)


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
            f"shadow models guess by scores of classes, but {settings.data_name!r} is made for {whole.task}."
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Membership inference with shadow models.")
    parser.add_argument("--data", default="digits", help="one of the named data sets, or a table")
    parser.add_argument("--data-dir", help="folder of its files")
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--models", type=int, default=32, help="shadow models of either kind")
    parser.add_argument("--run-dir", help="folder to write")
    given = parser.parse_args()
    settings = RunSettings(data=given.data, data_dir=given.data_dir, epsilon=given.epsilon, delta=given.delta)
    found = audit_shadow(settings, given.models, given.run_dir, lambda done, of: print(f"{done} of {of}"))
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
