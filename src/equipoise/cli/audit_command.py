"""``equipoise audit``: attacks on a run, on its steps, or on a method."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Annotated, Any

import click
import typer
from click.core import ParameterSource

from equipoise.app.option_checks import check_data_and_model, flag
from equipoise.app.run_checks import check_own_code, settings_of_run
from equipoise.app.settings import OF_OWN_DATA, RunSettings
from equipoise.cli.audit_views import show_method, show_neighbours, show_run
from equipoise.cli.screen import loading, open_console, quiet
from equipoise.cli.settings_options import settings_options
from equipoise.cli.shared_options import (
    DataDir,
    Json,
    OwnData,
    OwnModel,
    RunArgument,
    RunDir,
    UsageError,
    chosen_folder,
)

__all__ = ["audit"]

audit = typer.Typer(
    name="audit",
    help="Certify a lower bound on epsilon next to the claimed upper one, or see what one record moves. Exit "
    "code 1: a claim is refuted, or a sum moved too far.",
    no_args_is_help=True,
)

CLAIM: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-5}
"""What is audited where no run says it."""

Confidence = Annotated[float, typer.Option(min=0.5, max=0.9999, help="Of the certificates together.")]
Several = Annotated[int, typer.Option(min=1, help="Number of audits, each with a seed of its own.")]


@audit.command(epilog="equipoise audit run runs/NAME")
def run(
    run: RunArgument = None,
    confidence: Confidence = 0.99,
    data: OwnData = None,
    model: OwnModel = None,
    data_dir: DataDir = None,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Guess which canaries a finished run was trained with (equipoise train --canaries)."""
    folder = chosen_folder(run, run_dir)
    settings = _of_run(folder, data, model, data_dir)
    with loading():
        from equipoise.app.audits.finished_run import audit_run
    quiet()
    with open_console(True).status("guessing the canaries"):
        found = audit_run(folder, settings, confidence)
    _end(show_run(found, json_output))


@audit.command(epilog="equipoise audit neighbours --data digits --positions 3")
@settings_options(
    RunSettings,
    "data", "data_dir", "model", "method", "variant", "options", "epsilon", "delta", "relation", "hardened",
    *OF_OWN_DATA,
    parameter="base",
    defaults=CLAIM,
    helps={
        "data": "Data set, as of train; or the run's own function, named again.",
        "model": "Model, as of train; or the run's own function, named again.",
        "epsilon": "What the method's noise is calibrated to.",
    },
)  # fmt: skip
def neighbours(
    base: RunSettings,
    run: RunArgument = None,
    positions: Annotated[int, typer.Option(min=1, help="How many records are tried.")] = 10,
    steps: Annotated[int, typer.Option(min=1, help="Steps on each pair of data sets.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Try so many threads, too.")] = 1,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Take steps with one record more, less or replaced, and see what moves; of RUN, or of --data."""
    if run is None and run_dir is None:
        check_data_and_model(base.data, base.model)
        base.check()
    else:
        context = click.get_current_context()
        given = [n for n in vars(base) if context.get_parameter_source(n) is ParameterSource.COMMANDLINE]
        if extra := [flag(name) for name in given if name not in ("data", "model", "data_dir")]:
            raise UsageError(f"leave {' and '.join(extra)} out: data, method and settings come from the run.")
        data = base.data if "data" in given else None
        base = _of_run(chosen_folder(run, run_dir), data, base.model, base.data_dir)
    with loading():
        from equipoise.app.audits.finished_run import neighbours_of
    _quieten()
    with open_console(True).status("taking steps with one record more, less or replaced"):
        found = neighbours_of(base, positions, steps, (1,) if threads == 1 else (1, threads))
    _end(show_neighbours(found, json_output))


@audit.command(epilog="equipoise audit method dp-sgd --epsilon 2")
@settings_options(
    RunSettings,
    "variant", "options", "epsilon", "delta", "relation", "unit", "records_per_user", "user_rows", "hardened",
    parameter="base",
    defaults=CLAIM,
    helps={"epsilon": "What the method's noise is calibrated to."},
)  # fmt: skip
def method(
    base: RunSettings,
    name: Annotated[str, typer.Argument(metavar="METHOD", help="A name that `equipoise methods` lists.")],
    one_step: Annotated[
        bool, typer.Option("--one-step", help="Steps on all records: the bound comes close to the claim.")
    ] = False,
    seeds: Several = 1,
    confidence: Confidence = 0.99,
    json_output: Json = False,
) -> None:
    """Train canaries with a method, and certify what its releases give away."""
    if base.unit != "user" and (base.records_per_user or base.user_rows):
        raise UsageError("--records-per-user and --user-rows belong to --unit user.")
    if base.unit == "user" and base.records_per_user is None:
        raise UsageError("--unit user needs --records-per-user: how many records a user has.")
    with loading():
        from equipoise.privacy import LedgerError, Unit
        from equipoise.testing import method_audit
    _quieten()
    options = _method_options(name, base)
    with open_console(True).status(f"training canaries with {name}"):
        try:
            found = method_audit.audit_method(
                name,
                base.epsilon or CLAIM["epsilon"],
                base.delta or CLAIM["delta"],
                one_step=one_step,
                options=options,
                relation=base.neighbours(),
                hardened=base.hardened,
                seeds=range(seeds),
                confidence=confidence,
                unit=Unit(base.unit or "record", base.records_per_user or 1, base.user_rows),
            )
        except LedgerError as error:
            raise UsageError(f"{name} cannot be audited with --hardened: {error}.") from error
    _end(show_method(found, json_output))


def _method_options(name: str, base: RunSettings) -> dict[str, Any]:
    """Arguments of the method, in the words of `equipoise train`."""
    from equipoise.app.method_settings import check_options, read_clip_norm
    from equipoise.methods.registry import find
    from equipoise.testing.designs import AUDITS

    if name not in AUDITS:
        raise UsageError(f"METHOD is {name!r}, but it must be one of {', '.join(AUDITS)}.")
    words = ({"variant": base.variant} if base.variant else {}) | base.options
    options = check_options(name, find(name), words)
    if isinstance(options.get("clip_norm"), str):
        options["clip_norm"] = read_clip_norm(options["clip_norm"])
    return options


def _of_run(folder: str, data: str | None, model: str | None, data_dir: str | None) -> RunSettings:
    """The settings of a run, whose own code the user has named again."""
    settings = settings_of_run(folder)
    check_own_code(folder, settings, data=data, model=model)
    return replace(settings, data_dir=data_dir or settings.data_dir)


def _quieten() -> None:
    """A method warns of settings that are chosen badly: those of an audit are chosen to be hard."""
    quiet()
    warnings.filterwarnings("ignore", category=UserWarning, module="equipoise.methods")


def _end(fine: bool) -> None:
    if not fine:
        raise typer.Exit(1)
