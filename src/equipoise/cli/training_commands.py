"""``equipoise train``, ``resume``, ``federate`` and ``compare``: all that trains."""

from __future__ import annotations

import json
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from equipoise._rounding import plain, rounded_up
from equipoise._say import at_width, continued
from equipoise.app.contenders import Comparison
from equipoise.app.option_checks import check_name
from equipoise.app.run_checks import (
    FEDERATION_FILE,
    check_federation_folder,
    check_new_folder,
    check_own_code,
    is_federation,
    named_again,
    settings_of_run,
)
from equipoise.app.settings import OF_OWN_DATA, FederationSettings, RunSettings
from equipoise.app.sweep import Grid, Sweep
from equipoise.cli.screen import answer, emit, fail, loading, open_console, warn_of_numbers
from equipoise.cli.settings_options import settings_options
from equipoise.cli.shared_options import (
    DataDir,
    Device,
    DryRun,
    Json,
    OwnData,
    OwnLoss,
    OwnModel,
    RunArgument,
    RunDir,
    UsageError,
    chosen_folder,
)
from equipoise.cli.verify_command import Password, read_key, sign_with
from equipoise.methods.registry import registered

if TYPE_CHECKING:
    from rich.console import Console

    from equipoise.training.metrics import MetricWriter


Log = Annotated[
    Literal["json"] | None,
    typer.Option(help="Print events as JSON lines on standard output, the answer last; words go to stderr."),
]


def _writers(log: str | None) -> list[MetricWriter]:
    from equipoise.training import Events

    return [] if log is None else [Events(lambda event: print(json.dumps(event), flush=True))]


@settings_options(RunSettings, file=True)
def train(
    settings: RunSettings,
    signing_key: Annotated[
        str | None,
        typer.Option("--sign", help="Sign the statement with this Ed25519 private key.", metavar="KEY"),
    ] = None,
    password: Password = None,
    dry_run: DryRun = False,
    log: Log = None,
    json_output: Json = False,
) -> None:
    """Train a model privately and write a run folder."""

    check_name("method", settings.method, registered(), "package.module:Class of an equipoise.Method")
    settings.check()
    if settings.run_dir is not None and not dry_run:
        check_new_folder(settings.run_dir)
    key = None if signing_key is None else read_key(signing_key, password)
    with loading():
        from equipoise.app.train import describe_run, train_run

    json_output |= log is not None
    console = open_console(json_output)
    if dry_run:
        answer(describe_run(settings, console), json_output)
        return
    found = train_run(settings, console, _writers(log))
    if key is not None and found["finished"]:
        found |= {"signature": sign_with(found["run_dir"], key, settings.ledger)["signature"]}
    _finish(found, json_output, console)


def resume(
    run: RunArgument = None,
    data_dir: DataDir = None,
    device: Device = None,
    data: OwnData = None,
    model: OwnModel = None,
    loss: OwnLoss = None,
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
    log: Log = None,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Resume an interrupted run or federation."""

    folder = chosen_folder(run, run_dir)
    settings = settings_of_run(folder)
    check_own_code(folder, settings, data=data, model=model, method=method, loss=loss)
    if is_federation(folder):
        if device is not None or log is not None or stop_fixed_beforehand:
            raise UsageError(
                "--device, --log and --stop-fixed-beforehand are for single runs: a federation runs where it "
                "was begun, prints no events, and ends with its last round."
            )
        federation = FederationSettings.read(Path(folder) / FEDERATION_FILE)
        base = replace(federation.base, data_dir=data_dir or federation.base.data_dir)
        _run(replace(federation, base=base), folder, json_output)
        return
    settings = replace(settings, data_dir=data_dir or settings.data_dir, device=device or settings.device)
    with loading():
        from equipoise.app.train import resume_run

    json_output |= log is not None
    console = open_console(json_output)
    found = resume_run(folder, settings, console, _writers(log), stop_fixed_beforehand=stop_fixed_beforehand)
    _finish(found, json_output, console)


def _finish(found: dict[str, Any], as_json: bool, console: Console) -> None:
    """Show the end of a training: summary or JSON object; exit code 130 after Ctrl-C, 143 after SIGTERM."""
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
        said = "equipoise: stopped; the statement claims the whole plan, which covers every reason to stop. "
        again = f"equipoise resume {folder}{named_again(settings, 'data', 'model', 'method', 'loss')}"
        print(f"{at_width(said + 'Go on with:')}\n{continued(again, console.width)}", file=sys.stderr)
        raise typer.Exit(code)
    if not as_json:
        is_table = bool(run.config.get("schema"))
        rows = " --data ROWS.csv" if is_table else named_again(settings, "data")
        rows += named_again(settings, "model")
        commands = (f"equipoise verify {folder}", f"equipoise predict {folder}{rows} --output predicted.csv")
        said = "\n".join(["Next:", *(continued(one, console.width) for one in commands)])
        console.print(said, markup=False)


@settings_options(
    FederationSettings,
    "method", "data", "data_dir", "epsilon", "delta", "batch_size", "sampling", "relation", "learning_rate",
    "clip_norm", "model", "recipe", "options", *OF_OWN_DATA, "subset", "public_records",
    "micro_batch_size", "seed", "reproducible", "hardened",
    file=True,
    defaults={"method": "dp-fedavg", "data": "digits", "epsilon": 3.0},
    helps={
        "method": "Federated method, or fedavg:NAME with any name that `equipoise methods` lists.",
        "epsilon": "Privacy budget of every client.",
        "batch_size": "Expected records per step at a client of average size; a tenth of it by default.",
        "learning_rate": "Of the local steps, plain SGD; by default one that suits the noise.",
        "clip_norm": "Bound on one record's gradient, or the largest radius; 1 by default.",
        "seed": "Initial weights, partition and choice of clients.",
        "hardened": "Exact noise on a grid of integers at every client; slower.",
    },
)  # fmt: skip
def federate(
    settings: FederationSettings,
    dry_run: DryRun = False,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Train one model on the records of several simulated owners; resumes an interrupted federation."""
    base = settings.base
    settings.check()
    if dry_run:
        with loading():
            from equipoise.app.federation.run import describe_federation

        answer(describe_federation(settings, open_console(json_output)), json_output)
        return
    name = f"runs/{base.method}-{base.data_name}-{time.strftime('%Y%m%d-%H%M%S')}".replace(":", "-")
    check_federation_folder(settings, run_dir or name)
    _run(settings, run_dir or name, json_output)


def _run(settings: FederationSettings, folder: str, json_output: bool) -> None:
    try:
        with loading():
            from equipoise.app.federation.run import run_federation

        console = open_console(json_output)
        found = run_federation(settings, folder, console)
    except KeyboardInterrupt:
        begun = (Path(folder) / FEDERATION_FILE).is_file()
        again = named_again(settings.base, "data", "model", "method", "loss")
        resume = f"go on with: equipoise resume {shlex.quote(folder)}{again}"
        remedy = resume if begun else "nothing was begun"
        raise typer.Exit(fail(f"stopped; {remedy}", json_output, 130)) from None
    from equipoise.report.federation_page import federation_summary

    answer(found, json_output, "\n", federation_summary(found))


@settings_options(Sweep, parameter="asked", file=True)
def sweep(
    asked: Sweep,
    out: Annotated[str | None, typer.Option(help="The table; RUN_DIR/results.csv.", metavar="FILE")] = None,
    json_output: Json = False,
) -> None:
    """Train every combination of settings: a table, and a picture; resumes an interrupted sweep."""
    asked.combinations()
    with loading():
        from equipoise.app.sweep import sweep as run

    console = open_console(json_output)
    folder = asked.base.run_dir or f"runs/sweep-{asked.base.data_name.replace(':', '-')}"
    found = run(asked, folder, out, console)
    said = f"{found['runs']:,} runs, {found['failed']:,} of them failed (column error)"
    if found["best"] is not None:
        at = ", ".join(f"{name.replace('_', ' ')} {found['best'][name]}" for name in asked.axes())
        said += f". Best {found['score']}: {found['best'][found['score']]:.4g} with {at}"
    warned = "Epsilon of a row is that of its run alone; choosing among rows by private scores costs more."
    answer(found, json_output, said, warned, found["results"], found["picture"])
    if found["failed"]:
        raise typer.Exit(1)


@settings_options(
    Grid,
    parameter="asked",
    file=True,
    helps={
        "epsilon": "Privacy budget of the whole search.",
        "grid": "A setting that no plan follows from, and the values to draw from; repeatable.",
    },
)
def search(
    asked: Grid,
    mean: Annotated[float, typer.Option(help="Expected number of runs.")] = 5.0,
    shape: Annotated[
        float, typer.Option(help="Of the law of their number: 1 geometric, 0 logarithmic.", min=-0.99)
    ] = 1.0,
    json_output: Json = False,
) -> None:
    """Train a random number of runs with settings drawn at random, keep the best, and charge it for all."""
    asked.combinations()
    with loading():
        from equipoise.app.search import search as run
        from equipoise.privacy import PrivateSearch

    folder = asked.base.run_dir or f"runs/search-{asked.base.data_name.replace(':', '-')}"
    found = run(asked, PrivateSearch(mean, shape), folder, open_console(json_output))
    at = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found["chosen"].items())
    spent = f"epsilon [bold]{rounded_up(found['epsilon'])}[/] at delta {plain(found['delta'])}"
    answer(found, json_output, f"kept: {at}; {spent}, the search included", found["run_dir"])


@settings_options(
    Comparison,
    "data", "data_dir", *OF_OWN_DATA, "subset", "public_records", "model", "epsilon", "delta", "epochs",
    "batch_size", "learning_rate", "clip_norm", "optimizer", "momentum", "schedule", "ema",
    "micro_batch_size", "device", "reproducible", "unit", "owner", "records_per_user", "user_rows",
    parameter="comparison",
    file=True,
    helps={
        "epsilon": "Privacy budget of every run.",
        "learning_rate": "Centre of the rates that are tried.",
        "public_records": "Declare the last so many training records public, for all methods.",
        "reproducible": "Noise follows the seeds: NOT PRIVATE.",
    },
)  # fmt: skip
def compare(comparison: Comparison, json_output: Json = False, run_dir: RunDir = None) -> None:
    """Compare methods at one budget over several seeds; resumes an interrupted comparison."""
    base = comparison.base
    comparison.check()
    with loading():
        from equipoise.app.compare import run_comparison

    console = open_console(json_output)
    found = run_comparison(comparison, run_dir or f"runs/compare-{base.data_name.replace(':', '-')}", console)
    from equipoise.report.comparison_page import comparison_table

    answer(found, json_output, comparison_table(found), f"\n{found['page']}")
