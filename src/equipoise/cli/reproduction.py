"""``equipoise experiment``: a paper's small experiment again."""

from __future__ import annotations

from typing import Annotated

import typer

from equipoise.cli.screen import emit, loading, open_console, quiet
from equipoise.cli.words import DataDir, Json, RunDir

__all__ = ["experiment"]


def experiment(
    name: Annotated[str | None, typer.Argument(help="The experiment; without it they are listed.")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds; each experiment has a default.")] = None,
    data_dir: DataDir = None,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Run a small experiment of a paper again: table, verdicts and figure."""
    from equipoise.experiments.papers import TITLES, check_experiment
    from equipoise.report.listings import experiments_listing, findings_tables

    console = open_console(json_output)
    if name is None and not json_output:
        console.print(experiments_listing(TITLES))
        console.print("\n[dim]equipoise experiment NAME runs one; --json says what each compares[/]")
        return
    if name is not None:
        check_experiment(name)
    with loading():
        from equipoise.experiments.reproduce import list_experiments, run_experiment
    quiet()
    if name is None:
        emit({"experiments": list_experiments()})
        return
    findings, values = run_experiment(name, console, seeds=seeds, folder=run_dir, data_dir=data_dir)
    if json_output:
        emit(values)
        return
    console.print(
        f"[bold]{values['title']}[/]  [dim]{values['seeds']} seeds, {values['seconds']:,.0f} s[/]\n"
    )
    console.print(findings_tables(findings))
    console.print(f"\n[dim]{values['figure']}, findings.json beside it[/]", soft_wrap=True)
