"""Options that several commands take, and the folder that a run is in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and its cost; spend nothing.")]


RunDir = Annotated[str | None, typer.Option("--run-dir", help="The run folder.", metavar="DIR")]


RunArgument = Annotated[str | None, typer.Argument(metavar="RUN", help="The run folder.", show_default=False)]


LedgerFile = Annotated[
    str | None,
    typer.Option("--ledger", help="The run's journal, where it is not in the folder.", metavar="FILE"),
]


OF_CLIENTS = "--ledger names one journal, but every client of a federation has its own."


DataDir = Annotated[
    str | None, typer.Option(help="Folder that holds the data files.", envvar="EQUIPOISE_DATA", metavar="DIR")
]


Device = Annotated[str | None, typer.Option(help="Where to compute: cpu, cuda, cuda:1, mps.")]


OwnData = Annotated[str | None, typer.Option(help="The run's own function for the data, named again.")]


OwnModel = Annotated[str | None, typer.Option(help="The run's own function for the model, named again.")]


OwnLoss = Annotated[str | None, typer.Option(help="The run's own function for the loss, named again.")]


class UsageError(ValueError):
    """Options that do not fit together."""


def chosen_folder(run: str | None, run_dir: str | None) -> str:
    """The run folder, named by the argument RUN or by ``--run-dir``.

    Raises:
        UsageError: it was named twice, differently, or not at all.
    """
    if run is not None and run_dir is not None and Path(run) != Path(run_dir):
        raise UsageError(f"the run folder was given twice: {run!r} and --run-dir {run_dir!r}. Give it once.")
    folder = run if run is not None else run_dir
    if folder is None:
        raise UsageError(
            "the run folder is missing. Name it after the command, such as runs/digits-20260131-120000."
        )
    return folder
