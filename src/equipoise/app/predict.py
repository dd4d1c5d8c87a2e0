"""Using the model of a run: classes, probabilities or numbers for records, and scores where they can be."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise._files import write_atomically
from equipoise.app.data_loading import cache_folder, load_data
from equipoise.app.models import build_model, default_model, prepare_data
from equipoise.app.option_checks import SettingsError, data_form
from equipoise.app.settings import RunSettings
from equipoise.app.tasks import absent_warning, in_units, outputs_of, task_of
from equipoise.data import DataSet
from equipoise.data.readers.image_folders import images_for_model
from equipoise.data.records import MEDIAN
from equipoise.training import load_model
from equipoise.training.setup.argument_checks import existing_device


def predict_run(
    folder: str,
    settings: RunSettings,
    *,
    schema: Mapping[str, Any] | None = None,
    output: str | None = None,
    device: str | None = None,
    keep: Sequence[str] = (),
    by: Sequence[str] = (),
) -> dict[str, Any]:
    """Predict the test records of a data set with the model of a run.

    Args:
        folder: of the run or the federation, with its model.safetensors.
        settings: those of the folder, where the data may be others with inputs of the same shape.
        schema: of a table or of images, from the configuration of the run; its rows may lack what is to be
            predicted.
        output: file for the predictions, one row per record: the class and the probability of each, or the
            number.
        device: where to compute.
        keep: columns of the table that stand before the predictions in the file.
        by: columns of the table, by whose values together the rows are counted and scored.

    Returns:
        Plain values: run_dir, data, records, the scores where the rows say what is right, whether all answers
        are finite, and, where they were asked for, output and by.

    Raises:
        SettingsError: what is to be predicted is no table, or not of the kind that the model knows.
        DataFileError: the data cannot be used, or lack the columns.
    """
    target = None if device is None else existing_device(device)
    raw, labelled = records_to_predict(settings, schema)
    name = settings.model or default_model(raw)
    dataset = prepare_data(name, raw, cache_folder(), features=settings.features)
    model = load_model(build_model(name, dataset, seed=settings.seed), Path(folder) / "model.safetensors")
    if target is not None:
        model = model.to(target)
    outputs = outputs_of(model, dataset.test)
    task, found = task_of(dataset, settings.loss), dataset.test

    def scores_of(rows: Tensor) -> dict[str, float]:
        return task.scores_of(outputs[rows], replace(dataset, test=found.subset(rows))) if labelled else {}

    scores = scores_of(torch.ones(len(found), dtype=torch.bool))
    kept, groups = list[list[str]](), dict[str, dict[str, Any]]()
    if keep or by:
        if data_form(settings.data) != "table" or schema is None:
            raise SettingsError(f"--data is {settings.data!r}, but --keep and --by name columns of a table.")
        from equipoise.data.readers.schema import cells_of  # imports pydantic

        found_cells = cells_of(settings.data, schema, [*by, *keep])
        kept = found_cells[len(by) :]
        together = zip(*found_cells[: len(by)], strict=True)
        cells = [row[0] if len(row) == 1 else ", ".join(map(_within_a_list, row)) for row in together]
        for value in sorted(set(cells)):
            rows = torch.tensor([cell == value for cell in cells])
            groups[value] = {"records": int(rows.sum()), "evaluation": scores_of(rows)}
    if output is not None:
        header, written = _predictions(dataset, task.link(outputs))
        text = io.StringIO()
        table = ([*own, *row] for *own, row in zip(*kept, written, strict=True))
        csv.writer(text, lineterminator="\n").writerows([[*keep, *header], *table])
        if output.startswith("/dev/"):  # such as /dev/stdout, which is no file to put in place
            Path(output).write_text(text.getvalue(), encoding="utf-8")
        else:
            write_atomically(output, text.getvalue().encode(), mode=0o644)
    return {
        "run_dir": folder,
        "data": settings.data_name,
        "records": len(dataset.test),
        "accuracy": scores.get("accuracy"),
        "evaluation": scores,
        "warnings": [
            *([warning] if labelled and (warning := absent_warning(dataset)) else []),
            *([MEDIAN] if dataset.target_log else []),
        ],
        "finite": bool(outputs.isfinite().all()),
        **({} if output is None else {"output": output}),
        **({"by": groups} if by else {}),
    }


def records_to_predict(settings: RunSettings, schema: Mapping[str, Any] | None) -> tuple[DataSet, bool]:
    """The data set whose test records are predicted, and whether it says what is right."""
    form = data_form(settings.data)
    if form == "table" and schema is not None and "columns" in schema:
        from equipoise.data.readers.schema import records_for_model  # imports pydantic

        return records_for_model(settings.data, schema)
    if form == "images" and schema is not None and "image_size" in schema:
        return images_for_model(settings.data, schema)
    if form in ("table", "images") or (form == "named" and schema is not None):
        declared = sorted(schema or ["no table and no images"])
        raise SettingsError(
            f"--data is {settings.data!r}, but the run was trained on another kind of data: its "
            f"configuration declares {', '.join(declared)}. Give data of the kind that it was trained on."
        )
    # predicting spends nothing, so any positive population does for a function of the user's own
    population = (settings.population or 1) if form == "code" else None
    return load_data(replace(settings, population=population)), True


def _within_a_list(cell: str) -> str:
    """The cell, quoted if it holds a sign of the list: other cells never give the same list.

    >>> _within_a_list("Rome"), _within_a_list("Rome, Italy")
    ('Rome', '"Rome, Italy"')
    """
    return json.dumps(cell, ensure_ascii=False) if set(cell) & set(',"') else cell


def _predictions(dataset: DataSet, outputs: Tensor) -> tuple[list[str], Sequence[Sequence[Any]]]:
    names = list(dataset.class_names) or [str(i) for i in range(dataset.num_classes)]
    if dataset.task == "regression":
        return ["prediction"], [[f"{value:.6g}"] for value in in_units(outputs[:, 0], dataset).tolist()]
    if dataset.task == "multi-label":
        shares = outputs.double().sigmoid()
        found = [";".join(n for n, share in zip(names, row, strict=True) if share > 0.5) for row in shares]
    else:
        shares = outputs.double().softmax(1)
        found = [names[i] for i in outputs.argmax(1).tolist()]
    written = [[f"{share:.6f}" for share in row] for row in shares.tolist()]
    return ["prediction", *(f"p({name})" for name in names)], [
        [name, *row] for name, row in zip(found, written, strict=True)
    ]
