"""``equipoise report`` and ``equipoise predict``: what a finished run is good for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from equipoise.app.option_checks import check_data_and_model
from equipoise.cli.screen import emit, loading, open_console, warn_of_numbers
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
        str | None,
        typer.Option(
            help="Data to predict for; the run's test records by default. A table may lack the target."
        ),
    ] = None,
    model: OwnModel = None,
    data_dir: DataDir = None,
    output: Annotated[
        str | None,
        typer.Option(help="Write the predictions and their probabilities there, as CSV.", metavar="FILE"),
    ] = None,
    device: Device = None,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Use the model of a run on records, and print scores if the records have labels."""
    from equipoise.app.run_checks import (
        check_model_file,
        check_own_code,
        schema_of_run,
        settings_of_run,
    )
    from equipoise.report.phrases import score_in_words, score_name

    folder = chosen_folder(run, run_dir)
    settings = settings_of_run(folder, published=True)
    schema = schema_of_run(folder)
    if schema is not None and data is None and settings.test is None:
        raise UsageError("the rows to predict are missing: --data FILE, of the form of the run's own.")
    if schema is not None and data is None:
        data = settings.test
    check_data_and_model(data, None)
    settings = replace(settings, data=data or settings.data, data_dir=data_dir or settings.data_dir)
    check_own_code(folder, settings, data=data, model=model)
    check_model_file(folder)
    if output is not None and not Path(output).parent.is_dir():
        raise UsageError(
            f"--output is {output!r}, but there is no folder {str(Path(output).parent)!r}. Make it first."
        )
    with loading():
        from equipoise.app.predict import predict_run

    found = predict_run(folder, settings, schema=schema, output=output, device=device)
    warn_of_numbers(found, open_console(json_output))
    if json_output:
        emit(found)
        return
    console = open_console(False)
    scores = dict(found["evaluation"])
    if "accuracy" in scores:
        accuracy = scores.pop("accuracy")
        console.print(
            f"accuracy [bold]{accuracy:.2%}[/] on {found['records']:,} test records of {found['data']}"
        )
    else:
        console.print(f"{found['records']:,} records of {found['data']}", markup=False)
    for warning in found["warnings"]:
        console.print(f"[bold yellow]Warning[/]: {warning}", soft_wrap=True)
    for name, value in scores.items():
        console.print(f"{score_name(name)} [bold]{score_in_words(name, value)}[/]")
    if output is not None:
        console.print(f"predictions in {output}")
    else:
        console.print("[dim]--output FILE writes the predictions with their probabilities, as CSV[/]")
