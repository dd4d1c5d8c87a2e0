"""``equipoise calibrate``: between noise and epsilon."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from equipoise._files import make_folder
from equipoise._validate import delta_warning
from equipoise.app.settings import CalibrationSettings
from equipoise.cli.screen import emit, loading, open_console, quiet
from equipoise.cli.settings_options import option_file, settings_options
from equipoise.cli.shared_options import Json

__all__ = ["calibrate"]


@option_file
@settings_options(CalibrationSettings, parameter="asked")
def calibrate(
    asked: CalibrationSettings,
    json_output: Json = False,
    run_dir: Annotated[
        str | None,
        typer.Option("--run-dir", help="Folder to write the answer to, as calibration.json.", metavar="DIR"),
    ] = None,
) -> None:
    """Translate between noise and epsilon; shows a table over epochs and batch sizes."""
    asked.check()
    with loading():
        from equipoise.app.noise_calibration import answer, table

    quiet()
    asks_epsilon = asked.epsilon is None
    with open_console(True).status("computing epsilon" if asks_epsilon else "calibrating the noise"):
        found = answer(asked)
    if run_dir is not None:
        (make_folder(run_dir, "run_dir") / "calibration.json").write_text(
            json.dumps(found, indent=2) + "\n", encoding="utf-8"
        )
    warning = delta_warning(found["delta"], found["population"])
    if json_output:
        emit(found)
    else:
        sought = "epsilon" if asks_epsilon else "noise multiplier"
        _show(found, sought, table(asked, found["noise_multiplier"]))
    if warning is not None:
        open_console(json_output).print(f"\n[bold yellow]Warning[/]: {warning}", soft_wrap=True)


def _show(
    found: dict[str, Any], sought: str, table: tuple[list[float], list[float], list[list[float]]]
) -> None:
    from rich.table import Table

    from equipoise._rounding import plain, rounded_up, significant

    console = open_console(False)
    console.print(
        f"noise multiplier [bold]{significant(found['noise_multiplier'], 4)}[/]  gives  epsilon "
        f"[bold]{rounded_up(found['epsilon'])}[/] at delta {plain(found['delta'])}  [dim](by "
        f"{found['accountant'].upper()}, {found['steps']:,} steps, {found['relation'].replace('_', ' ')}"
        f"{_users(found['users'])})[/]"
    )
    epochs, batch_sizes, cells = table
    shown = Table(box=None, pad_edge=False, header_style="dim")
    shown.add_column("", style="dim", justify="right")
    for size in batch_sizes:
        shown.add_column(f"{size:,g}", justify="right")
    for row, values in zip(epochs, cells, strict=True):
        shown.add_row(f"{row:,.4g}", *(significant(v, 3) for v in values))
    console.print(f"\n[dim]{sought}, roughly, by batch size (across) and epochs (down)[/]")
    console.print(shown)


def _users(users: dict[str, Any] | None) -> str:
    return "" if users is None else f"; users of at most {users['records']} records each"
