"""``equipoise train`` and ``equipoise resume``: a run from its start, or from where it was stopped."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli.federation import resume_folder
from equipoise.cli.screen import emit, loading, open_console, quiet
from equipoise.cli.trust import check_key, sign_with
from equipoise.cli.words import DataDir, Device, Json, RunArgument, RunDir, chosen_folder

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["resume", "train"]


def train(
    data: Annotated[str, typer.Option(help="Name of a data set, or package.module:function.")] = "digits",
    data_dir: DataDir = None,
    population: Annotated[
        int | None, typer.Option(help="Public number of training records (own data only).")
    ] = None,
    method: Annotated[str, typer.Option(help="Training method.")] = "dp-sgd",
    recipe: Annotated[
        str | None, typer.Option(help="library (default), or as_published: the paper's, holes and all.")
    ] = None,
    variant: Annotated[str | None, typer.Option(help="Form of the method, where it has several.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="Further argument of the method; repeatable.", metavar="NAME=VALUE"),
    ] = None,
    subset: Annotated[int | None, typer.Option(help="Use the first so many training records alone.")] = None,
    public_records: Annotated[
        int | None, typer.Option(help="Declare the last so many training records public.")
    ] = None,
    canaries: Annotated[
        int | None,
        typer.Option(
            help="Put so many made-up records beside the others, each by the toss of a coin, to audit."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Name of a model, or package.module:function.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Privacy budget.")] = None,
    delta: Annotated[float | None, typer.Option(help="Failure probability of the guarantee.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="Noise, instead of a budget.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Expected passes over the data.")] = None,
    batch_size: Annotated[float | None, typer.Option(help="Expected number of records a step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    clip_norm: Annotated[
        str | None,
        typer.Option(
            help="Bound on one record's gradient: a number, decay:START:RATE, quantile or quantile:SHARE."
        ),
    ] = None,
    clip_rule: Annotated[str | None, typer.Option(help="abadi, auto_s, nsgd or psac.")] = None,
    per_layer: Annotated[bool, typer.Option("--per-layer", help="Clip every layer on its own.")] = False,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam or adamw.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of sgd.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Learning rate: constant, linear or cosine.")] = None,
    ema: Annotated[float | None, typer.Option(help="Decay of averaged weights; 0 for none.")] = None,
    views: Annotated[int | None, typer.Option(help="Random views of a record, averaged.")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Records held in memory at once.")] = None,
    device: Device = None,
    seed: Annotated[int, typer.Option(help="Initial weights and other public randomness.")] = 0,
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="Noise follows the seed too: NOT PRIVATE.")
    ] = False,
    ledger: Annotated[
        str | None, typer.Option(help="Journal shared by runs over one data set.", metavar="FILE")
    ] = None,
    hardened: Annotated[
        bool, typer.Option("--hardened", help="Exact noise on a grid of integers; slower.")
    ] = False,
    signing_key: Annotated[
        str | None,
        typer.Option("--sign", help="Sign the statement with this Ed25519 private key.", metavar="KEY"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done; spend nothing.")
    ] = False,
    json_output: Json = False,
    run_dir: Annotated[
        str | None,
        typer.Option("--run-dir", help="The run folder to make; runs/DATA-TIME by default.", metavar="DIR"),
    ] = None,
) -> None:
    """Train a model privately and write a run folder."""
    from equipoise.app.names import DATA_NAMES, MODEL_NAMES, check_name
    from equipoise.app.run_checks import check_new_folder
    from equipoise.app.settings import Settings, parse_option
    from equipoise.methods.registry import registered

    settings = Settings(
        data=data,
        data_dir=data_dir,
        population=population,
        method=method,
        recipe=recipe.replace("-", "_") if recipe else None,
        variant=variant,
        options=dict(map(parse_option, option or [])),
        subset=subset,
        public_records=public_records,
        canaries=canaries,
        model=model,
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=noise_multiplier,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        clip_norm=clip_norm,
        clip_rule=clip_rule,
        per_layer=per_layer,
        optimizer=optimizer,
        momentum=momentum,
        weight_decay=weight_decay,
        schedule=schedule,
        ema=ema,
        views=views,
        micro_batch_size=micro_batch_size,
        device=device,
        seed=seed,
        reproducible=reproducible,
        hardened=hardened,
        ledger=ledger,
        run_dir=run_dir,
    )
    check_name("method", method, registered(), "a class derived from equipoise.Method")
    check_name("data", data, DATA_NAMES, "a function that returns a DataSet")
    check_name("model", model, MODEL_NAMES, "a function from the data set to a module")
    settings.check()
    if run_dir is not None and not dry_run:
        check_new_folder(run_dir)
    password = None if signing_key is None else check_key(signing_key)
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
    if signing_key is not None and found["finished"]:
        found |= {"signature": sign_with(found["run_dir"], signing_key, password, ledger)["signature"]}
    _finish(found, json_output, console)


def resume(
    run: RunArgument = None,
    data_dir: DataDir = None,
    device: Device = None,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Go on with an interrupted run or federation."""
    from equipoise.app.run_checks import is_federation, read_settings

    folder = chosen_folder(run, run_dir)
    if is_federation(folder):
        if device is not None:
            raise typer.BadParameter("a federation runs where it was begun", param_hint="--device")
        resume_folder(folder, data_dir, json_output)
        return
    read_settings(folder)
    with loading():
        from equipoise.app.train import resume_run

    quiet()
    console = open_console(json_output)
    _finish(resume_run(folder, console, data_dir=data_dir, device=device), json_output, console)


def _finish(found: dict[str, Any], as_json: bool, console: Console) -> None:
    """Show the end of a training: summary or JSON object; exit code 130 if somebody stopped it."""
    from equipoise.report import read_run, summary

    if as_json:
        emit(found)
    else:
        console.print()
        console.print(summary(read_run(found["run_dir"]), found["run_dir"], found["seconds"]))
    if not found["finished"]:
        print(f"equipoise: stopped; go on with: equipoise resume {found['run_dir']}", file=sys.stderr)
        raise typer.Exit(130)
