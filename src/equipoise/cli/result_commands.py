"""``equipoise report``, ``predict`` and ``export``: what a finished run is good for."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from equipoise.app.option_checks import check_data_and_model, check_name, data_form
from equipoise.app.run_checks import (
    check_model_file,
    check_own_code,
    is_federation,
    report_values,
    schema_of_run,
    settings_of_run,
)
from equipoise.cli.screen import answer, emit, loading, open_console, quiet, warn_of_numbers
from equipoise.cli.shared_options import (
    OF_CLIENTS,
    DataDir,
    Device,
    Json,
    LedgerFile,
    OwnModel,
    RunArgument,
    RunDir,
    UsageError,
    chosen_folder,
)
from equipoise.publishing import FORMS


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]", help="The run folder; of --federation the sites' folders.", show_default=False
        ),
    ] = None,
    ledger: LedgerFile = None,
    federation: Annotated[
        str | None,
        typer.Option(
            help="Gather: folder of a federation's server. Then name the sites' statements, in the order of "
            "the clients' numbers, by their folders.",
            metavar="SERVER",
        ),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="Public key of a site, or env:NAME; one for all, or one for each in their order.",
            metavar="FILE",
        ),
    ] = None,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Verify a run and write its report again, from its publishable files; or gather those of sites."""
    from equipoise.report import read_run, summary
    from equipoise.report.federation_page import federation_summary

    if federation is not None:
        if ledger is not None or run_dir is not None:
            raise UsageError("--federation takes folders of sites and --key, no --ledger and no --run-dir.")
        with loading():
            from equipoise.app.federation.gather import gather_federation

        words = " ".join(shlex.quote(one) for one in runs or [])
        command = f"equipoise report {words} --federation SERVER" + " --key KEY" * len(key or [])
        values = gather_federation(federation, runs or [], key or [], command)
        answer(values, json_output, federation_summary(values))
        return
    if key or len(runs or []) > 1:
        raise UsageError("several folders, or --key, need --federation SERVER.")
    folder = chosen_folder(runs[0] if runs else None, run_dir)
    if is_federation(folder):
        if ledger is not None:
            raise UsageError(OF_CLIENTS)
        with loading():
            from equipoise.app.federation.folder import report_federation

        values = report_federation(folder)
        shown = federation_summary(values)
    else:
        from equipoise.statements.verify import check_consistent, verify_run

        quiet()
        found = verify_run(folder, ledger_file=ledger)
        check_consistent(found, "no page was made", besides=("signature", "files"))
        values = report_values(folder)
        shown = summary(read_run(folder), folder)
    answer(values, json_output, shown)


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
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="Column of the table to write before the predictions; repeatable.", metavar="COLUMN"
        ),
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(help="Count and score the rows by this column, too; repeatable.", metavar="COLUMN"),
    ] = None,
    device: Device = None,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Use the model of a run on records, and print scores if the records have labels."""
    from equipoise.report.phrases import score_in_words, score_name

    folder = chosen_folder(run, run_dir)
    settings = settings_of_run(folder, published=True)
    schema = schema_of_run(folder)
    if schema is not None and data is None:
        data = settings.test
        if data is None:
            raise UsageError("the rows to predict are missing: --data FILE, of the form of the run's own.")
    check_data_and_model(data, None)
    settings = replace(settings, data=data or settings.data, data_dir=data_dir or settings.data_dir)
    check_own_code(folder, settings, data=data, model=model)
    check_model_file(folder)
    target = Path(output or "").resolve()
    if not (output is None or output.startswith("/dev/")) and (
        target.exists() or Path(folder).resolve() in target.parents
    ):
        raise UsageError(
            f"--output {output!r} is there already, or lies in the run's folder, and predict writes over "
            "nothing: neither data nor a model. Remove it, or name a new file elsewhere."
        )
    with loading():
        from equipoise.app.predict import predict_run

    columns = {"keep": keep or [], "by": by or []}
    found = predict_run(folder, settings, schema=schema, output=output, device=device, **columns)
    if data and data != settings.test and data_form(data) != "named":
        found["warnings"].append(UNPROTECTED)
    console = open_console(json_output)
    warn_of_numbers(found, console)
    for warning in found["warnings"]:
        console.print(f"[bold yellow]Warning[/]: {warning}")
    if json_output:
        emit(found)
        return
    console.print(f"{found['records']:,} records of {found['data']}", markup=False)
    for name, value in found["evaluation"].items():
        console.print(f"{score_name(name)} [bold]{score_in_words(name, value)}[/]")
    for group, of_group in found.get("by", {}).items():
        scores = [f", {score_name(n)} {score_in_words(n, v)}" for n, v in of_group["evaluation"].items()]
        said = f"{group}: {of_group['records']:,} records{''.join(scores)}"
        console.print(f"{', '.join(columns['by'])} {said}", markup=False)
    written = "[dim]--output FILE writes the predictions with their probabilities, as CSV[/]"
    console.print(written if output is None else f"predictions in {output}")


UNPROTECTED = (
    "numbers of records and scores are exact, and no epsilon covers them: publish them, and predictions, of "
    "public records alone"
)


def export(
    run: RunArgument = None,
    form: Annotated[
        str,
        typer.Option(
            "--format", help="safetensors, state-dict, onnx, or coefficients: CSV and SQL for tables."
        ),
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

    check_name("format", form, (*FORMS, "coefficients"))
    folder = chosen_folder(run, run_dir)
    if is_federation(folder):
        raise UsageError(
            f"{folder!r} is a federation, where each client has a statement of its own. `equipoise predict` "
            "and equipoise.load_model take its model.safetensors as it is."
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

    from rich.markup import escape

    found = export_run(folder, settings, output or str(Path(folder) / "export"), form=form, schema=schema)
    warned = [f"[bold yellow]Warning[/]: {warning}" for warning in found["warnings"]]
    said = f"{', '.join(found['files'])} in {found['output']}; README.md is the model card"
    answer(found, json_output, *warned, escape(said))
