"""``equipoise report`` and ``equipoise predict``: what a finished run is good for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.screen import emit, loading, open_console
from equipoise.cli.shared_options import (
    DataDir,
    Device,
    Json,
    OwnModel,
    RunArgument,
    RunDir,
    UsageError,
    chosen_folder,
)

__all__ = ["predict", "report"]


def report(run: RunArgument = None, json_output: Json = False, run_dir: RunDir = None) -> None:
    """Write the report of a run again, from its publishable files."""
    from equipoise.app.run_checks import is_federation
    from equipoise.report import read_run, summary, write_report

    folder = chosen_folder(run, run_dir)
    if is_federation(folder):
        _report_federation(folder, json_output)
        return
    path = write_report(folder)
    found = read_run(folder)
    if json_output:
        emit(
            {
                "run_dir": folder,
                "report": str(path),
                "accuracy": found.accuracy,
                "epsilon": found.epsilon,
                "delta": found.delta,
                "guarantee": found.guarantee,
                "statement": dict(found.statement),
            }
        )
        return
    console = open_console(False)
    console.print(summary(found, folder))


def _report_federation(folder: str, json_output: bool) -> None:
    with loading():
        from equipoise.app.federation.folder import report_federation
    from equipoise.report.federation_page import federation_summary

    found = report_federation(folder)
    if json_output:
        emit(found)
    else:
        open_console(False).print(federation_summary(found))


def predict(
    run: RunArgument = None,
    data: Annotated[
        str | None, typer.Option(help="Data to predict for; the run's test records by default.")
    ] = None,
    model: OwnModel = None,
    data_dir: DataDir = None,
    output: Annotated[
        str | None, typer.Option(help="Write the predicted classes there, one per line.", metavar="FILE")
    ] = None,
    device: Device = None,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Use the model of a run on records and print its accuracy."""
    from equipoise.app.run_checks import check_model_file, check_own_code, settings_of_run

    folder = chosen_folder(run, run_dir)
    settings = settings_of_run(folder)
    settings = replace(settings, data=data or settings.data, data_dir=data_dir or settings.data_dir)
    check_own_code(folder, settings, data=data, model=model)
    check_model_file(folder)
    if output is not None and not Path(output).parent.is_dir():
        raise UsageError(
            f"--output is {output!r}, but there is no folder {str(Path(output).parent)!r}. Make it first."
        )
    with loading():
        from equipoise.app.predict import predict_run

    found = predict_run(folder, settings, output=output, device=device)
    if json_output:
        emit(found)
        return
    console = open_console(False)
    console.print(
        f"accuracy [bold]{found['accuracy']:.2%}[/] on {found['records']:,} test records of {found['data']}"
    )
    if output is not None:
        console.print(f"predictions in {output}")
    else:
        console.print("[dim]--output FILE writes the predicted classes, one per line[/]")
