"""``equipoise audit``: attacks on a method, on a step of it with bugs and without, or on a run."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.app.option_checks import DATA_NAMES, FILES, check_name, flag
from equipoise.app.run_checks import check_own_code, settings_of_run
from equipoise.app.settings import OF_OWN_DATA, AuditSettings, RunSettings
from equipoise.cli.audit_views import show_method, show_neighbours, show_run, show_shadow, show_steps
from equipoise.cli.screen import loading, open_console, quiet
from equipoise.cli.settings_options import settings_options
from equipoise.cli.shared_options import Json, RunDir, UsageError, chosen_folder

if TYPE_CHECKING:
    from equipoise.audit.method_audit import Audit
    from equipoise.audit.neighbours import NeighbourAudit
    from equipoise.audit.one_step import Probe
    from equipoise.privacy import Unit

__all__ = ["audit"]


@settings_options(RunSettings, *OF_OWN_DATA, parameter="base")
@settings_options(AuditSettings, parameter="asked")
def audit(
    base: RunSettings,
    asked: AuditSettings,
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="A finished run that was trained with --canaries; any run of --neighbours."
        ),
    ] = None,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Certify a lower bound on epsilon next to the claimed upper one, or see what one record moves.

    Exit code 1: a claim is refuted, a sum moved too far, or --one-step misses a bug that it put in.
    """
    # with --shadow, --run-dir is the folder to write
    of_run = run is not None or (run_dir is not None and not asked.shadow)
    asked.check(of_run)
    if asked.shadow or (asked.neighbours and not of_run):
        base = _own_settings(base, asked)
    elif given := [flag(name) for name in OF_OWN_DATA if getattr(base, name)]:
        raise UsageError(
            f"{' and '.join(given)} is for --shadow and --neighbours with --data: a run knows its own data, "
            "and the audit of a method makes some up."
        )
    with loading():
        import equipoise.methods  # noqa: F401
    quiet()
    warnings.filterwarnings("ignore", category=UserWarning, module="equipoise.methods")
    if asked.neighbours:
        fine = show_neighbours(_audit_neighbours(base, asked, run, run_dir), json_output)
    elif asked.one_step:
        fine = show_steps(_audit_steps(asked), asked, json_output)
    elif asked.method is not None:
        fine = show_method(_audit_method(asked.method, asked), json_output)
    elif asked.shadow:
        fine = show_shadow(_audit_shadow(base, asked, run_dir), json_output)
    else:
        fine = show_run(_audit_run(asked, chosen_folder(run, run_dir)), json_output)
    if not fine:
        raise typer.Exit(1)


def _method_options(name: str, asked: AuditSettings) -> dict[str, Any]:
    """Arguments of the method, in the words of `equipoise train`."""
    from equipoise.app.method_settings import check_options, read_clip_norm
    from equipoise.audit.designs import AUDITS
    from equipoise.methods.registry import find

    if name not in AUDITS:
        raise UsageError(f"--method is {name!r}, but it must be one of {', '.join(AUDITS)}.")
    words = ({"variant": asked.variant} if asked.variant else {}) | asked.options
    options = check_options(name, find(name), words)
    if isinstance(options.get("clip_norm"), str):
        options["clip_norm"] = read_clip_norm(options["clip_norm"])
    return options


def _unit(asked: AuditSettings) -> Unit:
    from equipoise.privacy import Unit

    return Unit(asked.unit, asked.records_per_user or 1, asked.user_rows)


def _audit_method(name: str, asked: AuditSettings) -> Audit:
    from equipoise.audit.method_audit import audit_method
    from equipoise.privacy import LedgerError

    options = _method_options(name, asked)
    with open_console(True).status(f"training canaries with {name}"):
        try:
            return audit_method(
                name,
                asked.epsilon,
                asked.delta,
                options=options,
                relation=asked.relation,
                hardened=asked.hardened,
                seeds=range(asked.seeds),
                confidence=asked.confidence,
                unit=_unit(asked),
            )
        except LedgerError as error:
            raise UsageError(f"{name} cannot be audited with --hardened: {error}.") from error


def _audit_steps(asked: AuditSettings) -> list[Probe]:
    """A step of one method or of all, clean and with bugs."""
    from equipoise.audit.designs import ONE_STEP
    from equipoise.audit.one_step import probe_method

    names = list(ONE_STEP) if asked.method is None else [asked.method]
    options = {} if asked.method is None else _method_options(asked.method, asked)
    # The confidence is that of all certificates together, so each may fail with its share of the rest.
    share = 1 - (1 - asked.confidence) / len(names)
    rows = []
    for name in names:
        with open_console(True).status(f"a step of {name}, clean and with bugs"):
            rows.append(
                probe_method(
                    name,
                    asked.epsilon,
                    asked.delta,
                    options=options,
                    relation=asked.relation,
                    confidence=share,
                    unit=_unit(asked),
                )
            )
    return rows


def _own_settings(base: RunSettings, asked: AuditSettings) -> RunSettings:
    """Of a training on the data that the options name.

    Raises:
        SettingsError: data that cannot be used.
    """
    data = asked.data or "digits"
    check_name("data", data, DATA_NAMES, "a function that returns a DataSet", FILES)
    settings = replace(base, data=data, data_dir=asked.data_dir, epsilon=asked.epsilon, delta=asked.delta)
    if asked.neighbours:
        settings = replace(
            settings,
            model=asked.model,
            method=asked.method or "dp-sgd",
            variant=asked.variant,
            options=asked.options,
            relation=asked.relation,
            hardened=asked.hardened,
        )
    settings.check()
    return settings


def _audit_neighbours(
    settings: RunSettings, asked: AuditSettings, run: str | None, run_dir: str | None
) -> NeighbourAudit:
    """Of the data, model and method of a run, or of those that the options name."""
    if run is not None or run_dir is not None:
        folder = chosen_folder(run, run_dir)
        settings = settings_of_run(folder)
        check_own_code(folder, settings, data=asked.data, model=asked.model)
        settings = replace(settings, data_dir=asked.data_dir or settings.data_dir)
    with loading():
        from equipoise.app.audits.finished_run import neighbours_of
    with open_console(True).status("taking steps with one record more, less or replaced"):
        return neighbours_of(
            settings, asked.positions, asked.steps, (1,) if asked.threads == 1 else (1, asked.threads)
        )


def _audit_shadow(settings: RunSettings, asked: AuditSettings, run_dir: str | None) -> dict[str, Any]:
    from equipoise.app.audits.shadow_models import audit_shadow

    with open_console(True).status("training shadow models") as status:
        return audit_shadow(
            settings, asked.models, run_dir, lambda done, of: status.update(f"shadow model {done} of {of}")
        )


def _audit_run(asked: AuditSettings, folder: str) -> dict[str, Any]:
    settings = settings_of_run(folder)
    check_own_code(folder, settings, data=asked.data, model=asked.model)
    settings = replace(settings, data_dir=asked.data_dir or settings.data_dir)
    with loading():
        from equipoise.app.audits.finished_run import audit_run

    with open_console(True).status("guessing the canaries"):
        return audit_run(folder, settings, asked.confidence)
