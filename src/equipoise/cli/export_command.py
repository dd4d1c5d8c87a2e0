"""``equipoise export``: the model of a run for other programs, with a card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from equipoise.app.option_checks import check_name
from equipoise.app.settings import EXPORTS
from equipoise.cli.screen import emit, loading, open_console
from equipoise.cli.shared_options import (
    DataDir,
    Json,
    OwnModel,
    RunArgument,
    RunDir,
    UsageError,
    chosen_folder,
)

__all__ = ["export"]


def export(
    run: RunArgument = None,
    form: Annotated[
        str, typer.Option("--format", help="safetensors, state-dict, or onnx (with the extra 'onnx').")
    ] = "safetensors",
    output: Annotated[
        str | None, typer.Option(help="Folder to write to; RUN/export by default.", metavar="DIR")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="For onnx: data with inputs of the same shape; the run's by default.")
    ] = None,
    model: OwnModel = None,
    data_dir: DataDir = None,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Write the model for other programs, with a card that holds its statement."""
    from equipoise.app.run_checks import (
        check_model_file,
        check_own_code,
        is_federation,
        schema_of_run,
        settings_of_run,
    )

    check_name("format", form, EXPORTS)
    folder = chosen_folder(run, run_dir)
    if is_federation(folder):
        raise UsageError(
            f"{folder!r} is a federation, where each client has a statement of its own, and none is there "
            "for a card. Its model is model.safetensors in that folder: `equipoise predict` uses it, and "
            "equipoise.load_model reads it."
        )
    settings = settings_of_run(folder, published=True)
    schema = schema_of_run(folder)
    settings = replace(
        settings, data=data or settings.test or settings.data, data_dir=data_dir or settings.data_dir
    )
    if form == "onnx":  # the others run no code of the user's
        check_own_code(folder, settings, data=data, model=model)
    check_model_file(folder)
    with loading():
        from equipoise.app.export import export_run

    found = export_run(folder, settings, output or str(Path(folder) / "export"), form=form, schema=schema)
    if json_output:
        emit(found)
        return
    console = open_console(False)
    console.print(f"{', '.join(found['files'])} in {found['output']}", markup=False, soft_wrap=True)
    console.print("[dim]README.md is the model card[/]")
