"""The model of a run in a form that others read, with a card that says what is promised of it."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from equipoise._extras import lacking
from equipoise._files import make_folder, write_atomically
from equipoise.app.data_loading import cache_folder
from equipoise.app.models import build_model, default_model, prepare_data
from equipoise.app.option_checks import SettingsError
from equipoise.app.predict import records_to_predict
from equipoise.app.settings import EXPORTS, RunSettings
from equipoise.report import Run, read_run
from equipoise.report.phrases import readable, score_in_words, score_name, unit_in_words
from equipoise.report.run_reader import damage_named
from equipoise.statements import Statement
from equipoise.training import load_model

_COPIED = ("statement.json", "statement.sig.json")
_SCHEMA = "schema.json"

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
    """Write the model, its card and its statement into a folder; only what may be published.

    Args:
        folder: of the run, finished.
        settings: those of the run; for ONNX the data are loaded, for the shape of an input.
        output: the folder to write to.
        form: safetensors, state-dict (of `torch.load`) or onnx.
        schema: of a table or of images, from the configuration of the run; it goes with the model.

    Returns:
        Plain values: run_dir, output, format and files.

    Raises:
        SettingsError: ONNX without its packages, or files in the folder that are not of an export of the run.
        RunFolderError: the run is not finished, or damaged.
    """
    run = read_run(folder)
    with damage_named(run.name):
        card = model_card(run, form)
    if form == "onnx" and (find_spec("onnx") is None or find_spec("onnxscript") is None):
        raise SettingsError(f"--format onnx: {lacking('onnx')}")
    with damage_named(run.name):
        _refuse_foreign(Path(output), (EXPORTS[form], "README.md", _SCHEMA, *_COPIED), run)
    weights, place = Path(folder) / "model.safetensors", make_folder(output, "output")
    path = place / EXPORTS[form]
    if form == "safetensors":
        shutil.copyfile(weights, path)
    elif form == "state-dict":
        torch.save(load_file(weights), path)
    else:
        _write_onnx(weights, settings, schema, path)
    files = [path.name, "README.md"]
    write_atomically(place / "README.md", card.encode(), mode=0o644)
    if schema is not None:
        write_atomically(place / _SCHEMA, json.dumps(dict(schema), indent=2).encode(), mode=0o644)
        files.append(_SCHEMA)
    for name in _COPIED:
        if (Path(folder) / name).is_file():
            shutil.copyfile(Path(folder) / name, place / name)
            files.append(name)
    return {"run_dir": folder, "output": output, "format": form, "files": files}


def _refuse_foreign(place: Path, names: Sequence[str], run: Run) -> None:
    """Write over files of an earlier export of the same run only, which its card tells."""
    there = [name for name in names if (place / name).exists()]
    card, cards = place / "README.md", [model_card(run, form).encode() for form in EXPORTS]
    if there and not (card.is_file() and card.read_bytes() in cards):
        raise SettingsError(
            f"--output is {str(place)!r}, where {', '.join(there)} would be written over, and no card of an "
            "export of this run lies there. Name an empty or a new folder."
        )


def _write_onnx(weights: Path, settings: RunSettings, schema: Mapping[str, Any] | None, path: Path) -> None:
    """By torch's exporter, for any number of records; an input is zeros of the public shape."""
    raw, _ = records_to_predict(settings, schema)
    name = settings.model or default_model(raw)
    raw = replace(raw, train=raw.test)
    dataset = prepare_data(name, raw, cache_folder(), features=settings.features)
    model = load_model(build_model(name, dataset, seed=settings.seed), weights).eval()
    example = torch.zeros(2, *dataset.input_shape, dtype=dataset.test.fields["input"].dtype)
    # torch's exporter says that torchvision is not there, which is not needed, and warns of its own old code
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg|torch")
        torch.onnx.export(
            model,
            (example,),
            path,
            input_names=["input"],
            output_names=["output"],
            dynamic_shapes=({0: torch.export.Dim("records")},),
            external_data=False,
            dynamo=True,
            verbose=False,
        )


def model_card(run: Run, form: str = "safetensors") -> str:
    """A card in Markdown, from the publishable files of a run.

    Args:
        run: as `read_run` gives it.
        form: of the model's file.
    """
    details, statement = run.details, Statement(**run.statement)
    title = " on ".join(str(details[key]) for key in ("model", "data") if details.get(key)) or run.name
    facts = {
        "method": details.get("method"),
        "data": ": ".join(str(details[k]) for k in ("data", "data_description") if details.get(k)),
        "training records, a public number": details.get("population"),
        "begun": str(run.config.get("begun") or ""),
        "steps": run.steps_in_words,
    }
    rows = [f"- {readable(name)}: {value}" for name, value in facts.items() if value]
    rows += [
        f"- {readable(score_name(name))} on the test records: {score_in_words(name, value)}"
        for name, value in run.evaluation.items()
    ]
    promised = statement.guarantee != "none" and run.is_private
    unit = f"{unit_in_words(statement.unit)}\n\n" if promised else ""
    columns = "columns" in (run.config.get("schema") or {})
    use = _USE.replace("CALL", _CALLS[form]).replace("MODEL", str(details.get("model"))) if columns else ""
    return (
        "---\nlibrary_name: pytorch\ntags:\n- differential-privacy\n- equipoise\n---\n\n"
        f"# {title}\n\n" + "\n".join(rows) + "\n\n"
        f"{unit}{statement.markdown()}\n"
        f"{use}"
        "## Files\n\n"
        f"- `{EXPORTS[form]}`: the {'graph, weights included' if form == 'onnx' else 'weights'}\n"
        "- `schema.json`: where the data are a table or images, what the inputs are made of, in order\n"
        "- `statement.json`: the statement above, for programs\n"
        "- `statement.sig.json`: its signature, where the run was signed\n"
    )
