"""A folder to hand on: the model of a finished run, its statement, and a card that says what is promised."""

from __future__ import annotations

import copy
import logging
import math
import shutil
import warnings
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise import _validate
from equipoise._extras import lacking
from equipoise._files import PathLike, make_folder, write_atomically
from equipoise._lazy import later
from equipoise._run_files import read_object
from equipoise.report.phrases import evaluated_in_words, readable, score_in_words, score_name, unit_in_words
from equipoise.report.run_reader import Run, damage_named, read_run
from equipoise.statements import Statement

if TYPE_CHECKING:
    import torch
    from safetensors import torch as safetensors
    from torch import nn

    from equipoise import training
else:
    torch, safetensors = later("torch"), later("safetensors.torch")
    training = later("equipoise.training")

FORMS = {"safetensors": "model.safetensors", "state-dict": "model.pt", "onnx": "model.onnx"}
"""What the model's file is called, by its form."""

_COPIED = ("statement.json", "statement.sig.json")


def publish(
    run: Any,
    output: PathLike,
    *,
    form: str = "safetensors",
    model: nn.Module | None = None,
    example: Any = None,
    files: Mapping[str, bytes] | None = None,
    use: str = "",
) -> list[str]:
    """Write the model of a finished run, its card and its statement into a folder; nothing that is private.

    The card (README.md) has epsilon, delta, the unit of privacy, what was assumed, and the scores on public
    records, in the form that model hubs read.

    Args:
        run: a `PrivateTraining`, its result, a `PrivateTrainer`, or a run's folder.
        output: the folder to write to: a new one, or one with an earlier export of the same run.
        form: "safetensors", "state-dict" (of `torch.load`), or "onnx", which needs an example.
        model: for ONNX, a model of the run's make; by default the training's own.
        example: for ONNX, inputs of the model: a tensor or a tuple of tensors, records along the first axis.
        files: further public files to go with the model, by their names.
        use: a section of the card in Markdown that says how to call the model.

    Returns:
        The names of the files that were written.

    Raises:
        ValueError: no folder, ONNX without its packages or an example, or files there that are not of an
            export of this run.
        RunFolderError: the run is not finished, or damaged.

    Example:
        >>> import tempfile, equipoise as eq
        >>> from torch import nn, optim, randn
        >>> model, place = nn.Linear(3, 1), tempfile.mkdtemp()
        >>> training = eq.PrivateTraining(
        ...     model,
        ...     optim.SGD(model.parameters(), lr=0.1),
        ...     loss=lambda model, batch: model(batch["x"]).square().sum(1),
        ...     data={"x": randn(200, 3)},
        ...     sampling=eq.Poisson(20, population=200, steps=2),
        ...     budget=eq.Budget(1.0, 1e-3),
        ...     run=f"{place}/run",
        ... )
        >>> publish(training.run(progress=False), f"{place}/model")
        ['model.safetensors', 'README.md', 'statement.json']
    """
    _validate.one_of(tuple(FORMS), form=form)
    folder = _folder_of(run)
    found, files = read_run(folder), dict(files or {})
    with damage_named(found.name):
        copied = [name for name in _COPIED if (folder / name).is_file()]
        card = model_card(found, form, use, [*files, *copied])
    place = Path(output)
    _refuse_foreign(place, (FORMS[form], "README.md", *files, *_COPIED), found)
    if form == "onnx":
        model = getattr(run, "model", None) if model is None else model
        if model is None or example is None:
            raise ValueError('form="onnx" traces the model: give model=, and example= with inputs of it')
        if find_spec("onnx") is None or find_spec("onnxscript") is None:
            raise ValueError(f'form="onnx": {lacking("onnx")}')
    weights, path = folder / FORMS["safetensors"], make_folder(str(place), "output") / FORMS[form]
    if form == "safetensors":
        shutil.copyfile(weights, path)
    elif form == "state-dict":
        torch.save(safetensors.load_file(weights), path)
    else:
        assert model is not None
        whole = training.load_model(copy.deepcopy(model).cpu(), weights).eval()
        _write_onnx(whole, example if isinstance(example, tuple) else (example,), path)
    for name, content in {"README.md": card.encode(), **files}.items():
        write_atomically(place / name, content, mode=0o644)
    for name in copied:
        shutil.copyfile(folder / name, place / name)
    return [path.name, "README.md", *files, *copied]


def _folder_of(run: Any) -> Path:
    """The folder of a training, a result or a Trainer, or a path."""
    found = getattr(run, "run_dir", None) or getattr(getattr(run, "folder", None), "path", None)
    if found is None and not isinstance(run, str | Path):
        raise ValueError(
            f"run is {_validate.what_is(run)} without a folder; a run is published from its folder: give "
            "PrivateTraining(..., run=folder)"
        )
    return Path(found or run)


def _refuse_foreign(place: Path, names: tuple[str, ...], run: Run) -> None:
    """Write over files of an earlier export of the same run only, which its statement tells."""
    there, statement = [name for name in names if (place / name).exists()], place / _COPIED[0]
    # a run's own folder has a statement and no card
    is_export = (place / "README.md").is_file() and statement.is_file()
    if there and not (is_export and read_object(statement).get("run") == run.statement.get("run")):
        raise ValueError(
            f"output is {str(place)!r}, where {', '.join(there)} would be written over, and no export of "
            "this run lies there. Name an empty or a new folder"
        )


def _write_onnx(model: nn.Module, example: tuple[Any, ...], path: Path) -> None:
    """By torch's exporter, for any number of records."""
    # torch's exporter says that torchvision is not there, which is not needed, and warns of its own old code
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg|torch")
        torch.onnx.export(
            model,
            example,
            path,
            input_names=["input", *(f"input_{number}" for number in range(2, len(example) + 1))],
            output_names=["output"],
            dynamic_shapes=tuple({0: torch.export.Dim("records")} for _ in example),
            external_data=False,
            dynamo=True,
            verbose=False,
        )


def model_card(run: Run, form: str = "safetensors", use: str = "", files: Iterable[str] = ()) -> str:
    """A card in Markdown, from the publishable files of a run.

    Args:
        run: as `read_run` gives it.
        form: of the model's file.
        use: the section that says how to call the model.
        files: names of the others that go with the model.
    """
    details = run.details
    model = details.get("model")
    made_of = dict(model) if isinstance(model, Mapping) else {"class": model}
    title = " on ".join(map(str, filter(None, [made_of.get("class"), details.get("data")]))) or run.name
    facts = {
        "parameters that were trained privately": made_of.get("parameters"),
        "method": details.get("method"),
        "data": ": ".join(str(details[k]) for k in ("data", "data_description") if details.get(k)),
        "training records, a public number": details.get("population"),
        "begun": str(run.config.get("begun") or ""),
        "steps": run.steps_in_words,
    }
    rows = [f"- {readable(name)}: {value}\n" for name, value in facts.items() if value]
    return (
        "---\nlibrary_name: pytorch\ntags:\n- differential-privacy\n- equipoise\n---\n\n"
        f"# {title}\n\n{''.join(rows)}{privacy_section(run)}\n"
        f"{use.rstrip()}{chr(10) * 2 if use else ''}"
        f"## Files\n\n- `{FORMS[form]}`: the {'graph, weights included' if form == 'onnx' else 'weights'}\n"
        + "".join(f"- `{name}`\n" for name in files)
    )


def privacy_section(run: Run) -> str:
    """What a card says of a run's scores, its best step, its stages and its privacy, in Markdown."""
    statement, details, found = Statement(**run.statement), run.details, run.evaluation
    of_errors = {f"{name}_error" for name in found if run.is_private_score(name)}
    rows = [
        f"{readable(score_name(name))} on {evaluated_in_words(details, run.is_private_score(name))}: "
        f"{score_in_words(name, value)}{_interval(name, value, found, details)}"
        for name, value in found.items()
        if name not in of_errors
    ]
    if run.best_step is not None:
        lucky = ", a score that noise may have made the best" if of_errors else ""
        rows.append(f"Parameters of step {run.best_step:,.0f}, the best evaluation{lucky}")
    for begins, *names in details.get("stages") or ():
        rows.append(f"Trained from step {begins + 1:,} on: {', '.join(f'`{name}`' for name in names)}")
    promised = statement.guarantee != "none" and run.is_private
    unit = f"{unit_in_words(statement.unit)}\n\n" if promised else ""
    return "".join(f"- {row}\n" for row in rows) + f"\n{unit}{statement.markdown()}"


def _interval(name: str, value: float, found: Mapping[str, float], details: Mapping[str, Any]) -> str:
    """The interval of 95% of a score whose error is known, or of a share of test records, by Wilson's."""
    middle, records = value, details.get("test_records")
    if math.isnan(error := found.get(f"{name}_error", 0.0)):
        return " (its error is unknown: too few records, too much noise)"
    if f"{name}_error" not in found:
        if name != "accuracy" or not records:
            return ""
        middle = (value * records + 1.96**2 / 2) / (records + 1.96**2)
        error = math.sqrt(value * (1 - value) * records + 1.96**2 / 4) / (records + 1.96**2)
    low, high = (score_in_words(name, middle + 1.96 * side * error) for side in (-1, 1))
    return f" (95% interval {low} to {high})"
