"""``equipoise federate``: several data owners, simulated on one machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli.screen import emit, loading, open_console, quiet
from equipoise.cli.words import DataDir, Json, RunDir

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["federate", "resume_folder"]


def federate(
    method: Annotated[
        str,
        typer.Option(help="Federated method, or fedavg:NAME with any name that `equipoise methods` lists."),
    ] = "adaptdp-fedavg",
    clients: Annotated[int, typer.Option(help="Number of data owners.")] = 10,
    rounds: Annotated[int, typer.Option(help="Number of rounds.")] = 60,
    data: Annotated[str, typer.Option(help="Name of a data set, or package.module:function.")] = "mnist",
    data_dir: DataDir = None,
    epsilon: Annotated[float, typer.Option(help="Privacy budget of every client.")] = 3.0,
    delta: Annotated[float | None, typer.Option(help="Failure probability of the guarantee.")] = None,
    partition: Annotated[str, typer.Option(help="iid, dirichlet or one-class.")] = "iid",
    alpha: Annotated[float, typer.Option(help="Concentration of dirichlet; small: few classes each.")] = 0.5,
    clients_per_round: Annotated[
        int | None, typer.Option(help="Picked at random each round; all by default.")
    ] = None,
    local_steps: Annotated[int, typer.Option(help="Steps of a client in a round.")] = 5,
    batch_size: Annotated[
        float | None, typer.Option(help="Expected records a step at a client of average size; a tenth of it.")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Of the local steps, plain SGD.")] = None,
    clip_norm: Annotated[
        str | None, typer.Option(help="Bound on one record's gradient, or the largest radius.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Name of a model, or package.module:function.")] = None,
    recipe: Annotated[str | None, typer.Option(help="library (default), or as_published.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="Further setting of the method; repeatable.", metavar="NAME=VALUE"),
    ] = None,
    population: Annotated[
        int | None, typer.Option(help="Public number of training records (own data only).")
    ] = None,
    subset: Annotated[int | None, typer.Option(help="Use the first so many training records alone.")] = None,
    public_records: Annotated[
        int | None, typer.Option(help="Declare the last so many training records public.")
    ] = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Records held in memory at once.")] = None,
    driver: Annotated[
        str, typer.Option(help="inline, or flower: its simulation, with the extra 'federated'.")
    ] = "inline",
    seed: Annotated[int, typer.Option(help="Initial weights, partition and choice of clients.")] = 0,
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="Noise follows the seed too: NOT PRIVATE.")
    ] = False,
    hardened: Annotated[
        bool, typer.Option("--hardened", help="Exact noise on a grid of integers at every client; slower.")
    ] = False,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Train one model on the records of several simulated owners; goes on where it was stopped."""
    import time

    from equipoise.app.federation_settings import FederationSettings, check_federation_folder
    from equipoise.app.names import DATA_NAMES, MODEL_NAMES, check_name
    from equipoise.app.settings import Settings, parse_option

    check_name("data", data, DATA_NAMES, "a function that returns a DataSet")
    check_name("model", model, MODEL_NAMES, "a function from the data set to a module")
    base = Settings(
        data=data,
        data_dir=data_dir,
        population=population,
        method=method,
        recipe=recipe.replace("-", "_") if recipe else None,
        options=dict(map(parse_option, option or [])),
        subset=subset,
        public_records=public_records,
        model=model,
        epsilon=epsilon,
        delta=delta,
        batch_size=batch_size,
        learning_rate=learning_rate,
        clip_norm=clip_norm,
        micro_batch_size=micro_batch_size,
        seed=seed,
        reproducible=reproducible,
        hardened=hardened,
    )
    settings = FederationSettings(
        base=base,
        clients=clients,
        rounds=rounds,
        clients_per_round=clients_per_round,
        local_steps=local_steps,
        partition=partition,
        alpha=alpha,
        driver=driver,
    )
    settings.check()
    name = f"runs/{method}-{data}-{time.strftime('%Y%m%d-%H%M%S')}".replace(":", "-")
    folder = run_dir or name
    check_federation_folder(settings, folder)
    with loading():
        from equipoise.app.federate import run_federation

    quiet()
    console = open_console(json_output)
    _show(run_federation(settings, folder, console), json_output, console)


def resume_folder(folder: str, data_dir: str | None, json_output: bool) -> None:
    """``equipoise resume`` on the folder of a federation."""
    with loading():
        from equipoise.app.federate import resume_federation

    quiet()
    console = open_console(json_output)
    _show(resume_federation(folder, console, data_dir), json_output, console)


def _show(found: dict[str, Any], json_output: bool, console: Console) -> None:
    if json_output:
        emit(found)
        return
    from equipoise.report.federation import federation_summary

    console.print()
    console.print(federation_summary(found))
