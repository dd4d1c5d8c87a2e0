"""Using the model of a run: classes for records, and their accuracy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from equipoise.app.classification import predictions
from equipoise.app.data_loading import cache_folder, load_data
from equipoise.app.models import build_model, default_model, prepare_data
from equipoise.app.settings import RunSettings
from equipoise.training import load_model

__all__ = ["predict_run"]


def predict_run(
    folder: str, settings: RunSettings, *, output: str | None = None, device: str | None = None
) -> dict[str, Any]:
    """Predict the test records of a data set with the model of a run.

    Args:
        folder: of the run or the federation, with its model.safetensors.
        settings: those of the folder, where the data may be others with inputs of the same shape.
        output: file for the predicted classes, one per line.
        device: where to compute.

    Returns:
        Plain values: run_dir, data, records, accuracy and, where one was written, output.
    """
    # predicting spends nothing, so any positive population does for a function of the user's own
    population = (settings.population or 1) if ":" in settings.data else None
    raw = load_data(replace(settings, population=population))
    name = settings.model or default_model(raw)  # a federation's settings may leave it open
    dataset = prepare_data(name, raw, cache_folder())
    model = load_model(build_model(name, dataset, seed=settings.seed), Path(folder) / "model.safetensors")
    if device is not None:
        model = model.to(device)
    found = predictions(model, dataset.test)
    labels = dataset.test.fields["label"]
    if output is not None:
        Path(output).write_text("".join(f"{label}\n" for label in found.tolist()), encoding="utf-8")
    return {
        "run_dir": folder,
        "data": settings.data,
        "records": len(labels),
        "accuracy": float((found == labels).double().mean()),
        **({} if output is None else {"output": output}),
    }
