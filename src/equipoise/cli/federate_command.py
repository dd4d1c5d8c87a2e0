"""``equipoise federate``: several data owners, simulated on one machine."""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from pathlib import Path

import typer

from equipoise.app.option_checks import check_data_and_model
from equipoise.app.run_checks import FEDERATION_FILE, check_federation_folder, named_again
from equipoise.app.settings import OF_OWN_DATA, FederationSettings, RunSettings
from equipoise.cli.screen import emit, fail, loading, open_console, quiet
from equipoise.cli.settings_options import option_file, settings_options
from equipoise.cli.shared_options import DryRun, Json, RunDir

__all__ = ["federate", "resume_folder"]


@option_file
@settings_options(
    RunSettings,
    "method", "data", "data_dir", "epsilon", "delta", "batch_size", "sampling", "relation", "learning_rate",
    "clip_norm", "model", "recipe", "options", *OF_OWN_DATA, "subset", "public_records",
    "micro_batch_size", "seed", "reproducible", "hardened",
    parameter="base",
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
@settings_options(
    FederationSettings,
    "clients", "rounds", "clients_per_round", "local_steps", "partition", "alpha", "driver",
    parameter="federation",
)  # fmt: skip
def federate(
    base: RunSettings,
    federation: FederationSettings,
    dry_run: DryRun = False,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Train one model on the records of several simulated owners; resumes an interrupted federation."""
    check_data_and_model(base.data, base.model)
    settings = replace(federation, base=base)
    settings.check()
    if dry_run:
        _describe(settings, json_output)
        return
    name = f"runs/{base.method}-{base.data_name}-{time.strftime('%Y%m%d-%H%M%S')}".replace(":", "-")
    folder = run_dir or name
    check_federation_folder(settings, folder)
    _run(settings, folder, json_output)


def _describe(settings: FederationSettings, json_output: bool) -> None:
    with loading():
        from equipoise.app.federation.run import describe_federation

    quiet()
    found = describe_federation(settings, open_console(json_output))
    if json_output:
        emit(found)


def resume_folder(folder: str, data_dir: str | None, json_output: bool) -> None:
    """``equipoise resume`` on the folder of a federation; the code that its settings name is run."""
    settings = FederationSettings.read(Path(folder) / FEDERATION_FILE)
    if data_dir is not None:
        settings = replace(settings, base=replace(settings.base, data_dir=data_dir))
    _run(settings, folder, json_output)


def _run(settings: FederationSettings, folder: str, json_output: bool) -> None:
    try:
        with loading():
            from equipoise.app.federation.run import run_federation

        quiet()
        console = open_console(json_output)
        found = run_federation(settings, folder, console)
    except KeyboardInterrupt:
        begun = (Path(folder) / FEDERATION_FILE).is_file()
        again = named_again(settings.base, "data", "model", "method")
        resume = f"go on with: equipoise resume {shlex.quote(folder)}{again}"
        remedy = resume if begun else "nothing was begun"
        raise typer.Exit(fail(f"stopped; {remedy}", json_output, 130)) from None
    if json_output:
        emit(found)
        return
    from equipoise.report.federation_page import federation_summary

    console.print()
    console.print(federation_summary(found))
