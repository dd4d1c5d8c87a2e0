"""``equipoise calibrate``: between noise and epsilon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise.cli.screen import emit, loading, open_console, quiet
from equipoise.cli.shared_options import Json

__all__ = ["calibrate"]


def calibrate(
    population: Annotated[int, typer.Option(help="Public number of records.")],
    batch_size: Annotated[float, typer.Option(help="Expected number of records a step.")],
    steps: Annotated[int | None, typer.Option(help="Number of steps.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Expected passes, instead of steps.")] = None,
    delta: Annotated[float, typer.Option(help="Failure probability of the guarantee.")] = 1e-5,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise over clip norm; asks for epsilon.")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="Target; asks for the noise multiplier.")] = None,
    sampling: Annotated[
        str, typer.Option(help="poisson, without-replacement, full-batch or fixed-epochs.")
    ] = "poisson",
    relation: Annotated[str, typer.Option(help="add-or-remove-one or replace-one.")] = "add-or-remove-one",
    json_output: Json = False,
    run_dir: Annotated[
        str | None,
        typer.Option("--run-dir", help="Folder to write the answer to, as calibration.json.", metavar="DIR"),
    ] = None,
) -> None:
    """Translate between noise and epsilon; shows a table over epochs and batch sizes."""
    from equipoise.app.options import check_calibration, check_choice

    check_calibration(
        population=population,
        batch_size=batch_size,
        steps=steps,
        epochs=epochs,
        delta=delta,
        noise_multiplier=noise_multiplier,
        epsilon=epsilon,
        relation=relation,
    )
    with loading():
        from equipoise.app.calibration_answers import SAMPLINGS, Question, answer, table

    check_choice("sampling", sampling, tuple(SAMPLINGS))

    quiet()
    if steps is None:
        assert epochs is not None
        steps = _steps(epochs, population, batch_size)
    question = Question(
        population=population,
        batch_size=batch_size,
        steps=steps,
        delta=delta,
        noise_multiplier=noise_multiplier,
        epsilon=epsilon,
        sampling=sampling,
        relation=relation.replace("-", "_"),
    )
    with open_console(True).status("computing epsilon" if epsilon is None else "calibrating the noise"):
        found = answer(question)
    if run_dir is not None:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        (Path(run_dir) / "calibration.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if json_output:
        emit(found)
        return
    _show_calibration(found, epsilon is None, table(question, found["noise_multiplier"]))


def _steps(epochs: float, population: int, batch_size: float) -> int:
    import math

    return max(1, math.ceil(epochs * population / batch_size - 1e-9))


def _show_calibration(
    found: dict[str, Any], asked_epsilon: bool, table: tuple[list[float], list[float], list[list[float]]]
) -> None:
    from rich.table import Table

    from equipoise._rounding import plain, rounded_up, significant
    from equipoise.app.options import delta_warning

    console = open_console(False)
    console.print(
        f"noise multiplier [bold]{significant(found['noise_multiplier'], 4)}[/]  gives  "
        f"epsilon [bold]{rounded_up(found['epsilon'])}[/] at delta {plain(found['delta'])}  "
        f"[dim](by {found['accountant'].upper()}, {found['steps']:,} steps, "
        f"{found['relation'].replace('_', ' ')})[/]"
    )
    epochs, batch_sizes, cells = table
    shown = Table(box=None, pad_edge=False, header_style="dim")
    shown.add_column("", style="dim", justify="right")
    for size in batch_sizes:
        shown.add_column(f"{size:,g}", justify="right")
    for row, values in zip(epochs, cells, strict=True):
        shown.add_row(f"{row:,.4g}", *(significant(v, 3) for v in values))
    asked = "epsilon" if asked_epsilon else "noise multiplier"
    console.print(f"\n[dim]{asked}, roughly, by batch size (across) and epochs (down)[/]")
    console.print(shown)
    warning = delta_warning(found["delta"], found["population"])
    if warning is not None:
        console.print(f"\n[bold yellow]Warning[/]: {warning}")
