"""The model of a run in a form that others read, with a card that says what is promised of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from equipoise.app.data_loading import cache_folder
from equipoise.app.model_table import LINEAR, STATISTICS
from equipoise.app.models import build_model, default_model, prepare_data
from equipoise.app.option_checks import SettingsError
from equipoise.app.predict import records_to_predict
from equipoise.app.settings import RunSettings
from equipoise.publishing import publish
from equipoise.report.run_reader import read_run

_USE = """## Use

The inputs are the columns of `schema.json` in order, coded by equipoise. The outputs are logits in the order
of `rows.class_names`, or a target between -1 and 1. For a CSV file of rows, with or without the target:

```python
import json

import torch

from equipoise import load_model
from equipoise.app.models import build_model
from equipoise.data.readers.schema import records_for_model

with open("schema.json") as file:
    rows, _ = records_for_model("rows.csv", json.load(file))
inputs = rows.test.fields["input"]
CALL
```

"""
_CALLS = {
    "safetensors": 'outputs = load_model(build_model("MODEL", rows), "model.safetensors").eval()(inputs)',
    "state-dict": 'model = build_model("MODEL", rows)\nmodel.load_state_dict(torch.load("model.pt"))\n'
    "outputs = model.eval()(inputs)",
    "onnx": 'import onnxruntime\n\noutputs = onnxruntime.InferenceSession("model.onnx").run(None, '
    '{"input": inputs.numpy()})[0]',
}


def export_run(
    folder: str,
    settings: RunSettings,
    output: str,
    *,
    form: str = "safetensors",
    schema: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Publish a run of the command line: as `equipoise.publish`, with the schema and how to read rows by it.

    Args:
        folder: of the run, finished.
        settings: those of the run; for ONNX the data are loaded, for the shape of an input.
        output: the folder to write to.
        form: safetensors, state-dict (of `torch.load`), onnx, or coefficients: safetensors, and CSV and SQL
            of a linear model of a table.
        schema: of a table or of images, from the configuration of the run; it goes with the model.

    Returns:
        Plain values: run_dir, output, format, files, and warnings of what is left out.

    Raises:
        SettingsError: ONNX without its packages, or files in the folder that are not of an export of the run.
        RunFolderError: the run is not finished, or damaged.
    """
    run = read_run(folder)
    texts = {} if schema is None else {"schema.json": json.dumps(dict(schema), indent=2)}
    unsaid = ""
    if form == "coefficients":
        table, sql, unsaid = _coefficients(folder, settings, schema)
        texts |= {"coefficients.csv": table, **({} if sql is None else {"prediction.sql": sql})}
    if form == "onnx" and settings.model in STATISTICS:
        raise SettingsError(f"--format onnx cannot hold {settings.model}. Take --format coefficients.")
    weights = "safetensors" if form == "coefficients" else form
    use = _USE.replace("CALL", _CALLS[weights]).replace("MODEL", str(run.details.get("model")))
    model, example = _model_and_example(settings, schema) if form == "onnx" else (None, None)
    try:
        files = publish(
            folder,
            output,
            form=weights,
            model=model,
            example=example,
            files={name: text.encode() for name, text in texts.items()},
            use=use if "columns" in (run.config.get("schema") or {}) else "",
        )
    except ValueError as error:
        raise SettingsError(f"--{str(error).removeprefix('-')}") from None
    found = {"run_dir": folder, "output": output, "format": form, "files": files}
    return {**found, "warnings": [unsaid] if unsaid else []}


def _coefficients(
    folder: str, settings: RunSettings, schema: Mapping[str, Any] | None
) -> tuple[str, str | None, str]:
    """A linear model in words of its columns: as `written` gives it."""
    if settings.model not in LINEAR or "columns" not in (schema or {}):
        raise SettingsError(
            f"--format coefficients is for tables and the models {', '.join(LINEAR)}, and {folder!r} has "
            f"{settings.model} on {settings.data_name}. Take another format."
        )
    from equipoise.app.coefficients import written
    from equipoise.data.readers.schema import table_of  # imports pydantic

    weights = load_file(Path(folder) / "model.safetensors")
    return written(weights, table_of(schema or {}), settings.loss)


def _model_and_example(settings: RunSettings, schema: Mapping[str, Any] | None) -> tuple[Any, Any]:
    """A model of the run's make, and zeros of the public shape of its inputs."""
    raw, _ = records_to_predict(settings, schema)
    name = settings.model or default_model(raw)
    raw = replace(raw, train=raw.test)
    dataset = prepare_data(name, raw, cache_folder(), features=settings.features)
    example = torch.zeros(2, *dataset.input_shape, dtype=dataset.test.fields["input"].dtype)
    return build_model(name, dataset, seed=settings.seed), example
