"""``equipoise federate``: several data owners, simulated on one machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from equipoise.app.federation_settings import FederationSettings, check_federation_folder
from equipoise.app.settings import Settings
from equipoise.cli.screen import emit, loading, open_console, quiet
from equipoise.cli.settings_options import settings_options
from equipoise.cli.shared_options import Json, RunDir

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["federate", "resume_folder"]


@settings_options(
    Settings,
    "method", "data", "data_dir", "epsilon", "delta", "batch_size", "learning_rate", "clip_norm", "model",
    "recipe", "options", "population", "subset", "public_records", "micro_batch_size", "seed", "reproducible",
    "hardened",
    parameter="base",
    defaults={"method": "adaptdp-fedavg", "data": "mnist", "epsilon": 3.0},
    helps={
        "method": "Federated method, or fedavg:NAME with any name that `equipoise methods` lists.",
        "epsilon": "Privacy budget of every client.",
        "batch_size": "Expected records per step at a client of average size; a tenth of it by default.",
        "learning_rate": "Of the local steps, plain SGD.",
        "clip_norm": "Bound on one record's gradient, or the largest radius.",
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
    base: Settings,
    federation: FederationSettings,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Train one model on the records of several simulated owners; goes on where it was stopped."""
    import time

    from equipoise.app.names import DATA_NAMES, MODEL_NAMES, check_name

    check_name("data", base.data, DATA_NAMES, "a function that returns a DataSet")
    check_name("model", base.model, MODEL_NAMES, "a function from the data set to a module")
    settings = replace(federation, base=base)
    settings.check()
    name = f"runs/{base.method}-{base.data}-{time.strftime('%Y%m%d-%H%M%S')}".replace(":", "-")
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
    from equipoise.report.federation_page import federation_summary

    console.print()
    console.print(federation_summary(found))
