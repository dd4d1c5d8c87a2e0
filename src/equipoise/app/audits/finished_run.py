"""Auditing a finished run that was trained with canaries: what the model tells, and what every step did.

The picture of a membership test: its curves on logarithmic axes, and what epsilon and delta allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equipoise._files import write_json
from equipoise._run_files import finite_number, read_object
from equipoise.app.build import assemble
from equipoise.app.method_settings import make_method
from equipoise.app.run_checks import check_model_file, is_finished
from equipoise.app.settings import RunSettings
from equipoise.audit.bounds import spent_by
from equipoise.audit.canary_records import SCORES_FILE, InsertedCanaries
from equipoise.audit.neighbours import NeighbourAudit, audit_neighbours
from equipoise.audit.one_run import guess_by_score, trade_offs
from equipoise.audit.roc import Roc, bound_on_roc, roc
from equipoise.report import RunFolderError, read_run
from equipoise.report.figures import Curve, plot
from equipoise.statements.checks import published_record
from equipoise.training.folder.run_folder import load_model


def neighbours_of(
    settings: RunSettings, positions: int, steps: int, threads: Sequence[int]
) -> NeighbourAudit:
    """How far the sums of a training with these settings move by one record; nothing is spent.

    Args:
        settings: of the training; it is not made.
        positions, steps, threads: as for `audit_neighbours`.

    Raises:
        SettingsError, DataFileError: settings or data that cannot be used.
        ValueError: the method releases nothing that is proved.
    """
    experiment = assemble(replace(settings, canaries=None))
    settings = experiment.settings
    method, budget = make_method(settings, experiment.sampling, experiment.public)
    return audit_neighbours(
        experiment.model,
        experiment.loss,
        experiment.data,
        sampling=experiment.sampling,
        method=method,
        positions=positions,
        steps=steps,
        threads=threads,
        seed=settings.seed,
        budget=budget,
        unit=experiment.unit,
        hardened=settings.hardened,
        device=settings.device,
    )


def audit_run(folder: str, settings: RunSettings, confidence: float = 0.95) -> dict[str, Any]:
    """Guess the canaries of a run and certify what the guesses prove.

    Black box: the final model's loss on each canary, low where it was trained on. White box: how far the
    released steps pointed along each canary's gradient (`audit.canary_scores`).

    Args:
        folder: of the run.
        settings: those of the folder, where data files may be elsewhere.
        confidence: of the certificates together.

    Returns:
        Plain values: claimed epsilon, delta, and of either attack its certificate and the area under its
        curve. They are also written to `private/audit.json`, and the curves drawn into `private/audit.png`.

    Raises:
        RunFolderError: the run is not finished.
        FileNotFoundError: it was not trained with canaries.
        ValueError: the canaries or their scores are damaged.
    """
    canaries = InsertedCanaries.load(folder)
    check_model_file(folder)
    if not is_finished(folder):
        raise RunFolderError(f"run={folder!r} is not finished. Go on with it: equipoise resume {folder}")
    run = read_run(folder)
    experiment = assemble(settings)
    model = load_model(experiment.model, Path(folder) / "model.safetensors").eval()
    canaries.check(experiment.dataset.train)
    with torch.no_grad():
        losses = experiment.loss(model, dict(canaries.fields))
    scores = {"black box": -losses.double().numpy()}
    path = Path(folder) / SCORES_FILE
    if path.is_file():
        scores["white box"] = _read_scores(path, len(canaries))
    present = canaries.present.numpy()
    delta = float(run.delta or 1e-5)
    is_proven = run.guarantee == "proven"
    offs = trade_offs(spent_by(published_record(run.statement).plan)) if is_proven else None
    each = 1 - (1 - confidence) / len(scores)
    curves = {name: roc(values, present) for name, values in scores.items()}
    figure = Path(folder) / "private" / "audit.png"
    found: dict[str, Any] = {
        "run_dir": folder,
        "canaries": len(canaries),
        "claimed_epsilon": run.epsilon,
        "delta": delta,
        "confidence": confidence,
        "attacks": {
            name: {
                **asdict(guess_by_score(values, present, delta, each, offs)),
                "auc": curves[name].area,
            }
            for name, values in scores.items()
        },
        "figure": str(figure),
    }
    write_json(Path(folder) / "private" / "audit.json", found, mode=0o600)
    save_roc_figure(roc_curves(curves, len(canaries), run.epsilon, delta), figure)
    return found


def _read_scores(path: Path, count: int) -> np.ndarray:
    """[count] a finite score of every canary.

    Raises:
        RunFolderError: the file holds something else.
    """
    values = read_object(path).get("scores")
    numbers = [finite_number(value) for value in values] if isinstance(values, list) else []
    if len(numbers) != count or None in numbers:
        raise RunFolderError(f"{path} does not hold {count} scores. Restore it from a copy, or remove it.")
    return np.array(numbers, dtype=np.float64)


def roc_curves(found: Mapping[str, Roc], size: int, epsilon: float | None, delta: float) -> list[Curve]:
    """The curves, from a few false positives on, with the bound where there is one, and guessing.

    Args:
        found: curves by label.
        size: number of scores, present and absent ones.
        epsilon, delta: of the guarantee; no epsilon, no bound.
    """
    rates = np.geomspace(min(0.1, 10 / size), 1.0, 200)
    x = rates.tolist()
    curves = [
        Curve(f"{label} (area {curve.area:.3f})", x, curve.at(rates).tolist())
        for label, curve in found.items()
    ]
    if epsilon is not None:
        bound = bound_on_roc(rates, epsilon, delta).tolist()
        curves.append(Curve(f"allowed by epsilon {epsilon:.3g}", x, bound))
    return [*curves, Curve("guessing", x, x)]


def save_roc_figure(curves: Sequence[Curve], path: Path) -> None:
    """Draw the curves into a file only for the owner: they speak of records."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    axes = figure.subplots()
    for number, curve in enumerate(curves):
        plot(axes, curve, number)
    axes.set(xscale="log", yscale="log", xlabel="false-positive rate", ylabel="true-positive rate")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    path.chmod(0o600)
