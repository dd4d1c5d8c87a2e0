"""``equipoise train`` and ``equipoise resume``: a run from its start, or from where it was stopped."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise._say import at_width, continued
from equipoise.app.settings import RunSettings
from equipoise.cli.federate_command import resume_folder
from equipoise.cli.screen import emit, loading, open_console, quiet, warn_of_numbers
from equipoise.cli.settings_options import option_file, settings_options
from equipoise.cli.shared_options import (
    DataDir,
    Device,
    DryRun,
    Json,
    OwnData,
    OwnModel,
    RunArgument,
    RunDir,
    chosen_folder,
)
from equipoise.cli.verify_command import read_key, sign_with

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["resume", "train"]


@option_file
@settings_options(RunSettings)
def train(
    settings: RunSettings,
    signing_key: Annotated[
        str | None,
        typer.Option("--sign", help="Sign the statement with this Ed25519 private key.", metavar="KEY"),
    ] = None,
    dry_run: DryRun = False,
    json_output: Json = False,
) -> None:
    """Train a model privately and write a run folder."""
    from equipoise.app.option_checks import check_data_and_model, check_name
    from equipoise.app.run_checks import check_new_folder
    from equipoise.methods.registry import registered

    check_name("method", settings.method, registered(), "a class derived from equipoise.Method")
    check_data_and_model(settings.data, settings.model)
    settings.check()
    if settings.run_dir is not None and not dry_run:
        check_new_folder(settings.run_dir)
    key = None if signing_key is None else read_key(signing_key)
    with loading():
        from equipoise.app.train import describe_run, train_run

    quiet()
    console = open_console(json_output)
    if dry_run:
        found = describe_run(settings, console)
        if json_output:
            emit(found)
        return
    found = train_run(settings, console)
    if key is not None and found["finished"]:
        found |= {"signature": sign_with(found["run_dir"], key, settings.ledger)["signature"]}
    _finish(found, json_output, console)


def resume(
    run: RunArgument = None,
    data_dir: DataDir = None,
    device: Device = None,
    data: OwnData = None,
    model: OwnModel = None,
    method: Annotated[
        str | None, typer.Option(help="The run's own class for the method, named again.")
    ] = None,
    stop_fixed_beforehand: Annotated[
        bool,
        typer.Option(
            "--stop-fixed-beforehand",
            help="Take no further step: end the run here and claim the steps taken, not the whole plan. Only "
            "for a stop that was fixed before the run, or had nothing to do with its results.",
        ),
    ] = False,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Resume an interrupted run or federation."""
    from equipoise.app.run_checks import check_own_code, is_federation, settings_of_run

    folder = chosen_folder(run, run_dir)
    settings = settings_of_run(folder)
    check_own_code(folder, settings, data=data, model=model, method=method)
    if is_federation(folder):
        if device is not None:
            raise typer.BadParameter("a federation runs where it was begun", param_hint="--device")
        if stop_fixed_beforehand:
            raise typer.BadParameter(
                "a federation ends with its last round; its clients claim what they planned",
                param_hint="--stop-fixed-beforehand",
            )
        resume_folder(folder, data_dir, json_output)
        return
    settings = replace(settings, data_dir=data_dir or settings.data_dir, device=device or settings.device)
    with loading():
        from equipoise.app.train import resume_run

    quiet()
    console = open_console(json_output)
    found = resume_run(folder, settings, console, stop_fixed_beforehand=stop_fixed_beforehand)
    _finish(found, json_output, console)


def _finish(found: dict[str, Any], as_json: bool, console: Console) -> None:
    """Show the end of a training: summary or JSON object; exit code 130 after Ctrl-C, 143 after SIGTERM."""
    from equipoise.app.run_checks import named_again, settings_of_run
    from equipoise.report import read_run, summary

    settings, folder = settings_of_run(found["run_dir"]), shlex.quote(found["run_dir"])
    code = found.pop("exit_code", 130)
    if as_json:
        emit(found)
    else:
        run = read_run(found["run_dir"])
        console.print()
        console.print(summary(run, found["run_dir"], found["seconds"]))
    warn_of_numbers(found, console)
    if not found["finished"]:
        stopped = (
            "equipoise: stopped; the statement claims the whole plan, which covers every reason to stop. Go "
            f"on with: equipoise resume {folder}{named_again(settings, 'data', 'model', 'method')}"
        )
        print(at_width(stopped), file=sys.stderr)
        raise typer.Exit(code)
    if not as_json:
        is_table = bool(run.config.get("schema"))
        rows = " --data ROWS.csv" if is_table else named_again(settings, "data")
        rows += named_again(settings, "model")
        width = console.width if console.is_terminal else None
        commands = (f"equipoise verify {folder}", f"equipoise predict {folder}{rows} --output predicted.csv")
        said = "\n".join(["Next:", *(continued(one, width) for one in commands)])
        console.print(said, markup=False, soft_wrap=True)
