"""``equipoise methods``: what the library can train with."""

from __future__ import annotations

from typing import Annotated

import typer

from equipoise.cli.screen import emit, loading, open_console
from equipoise.cli.shared_options import Json, UsageError

__all__ = ["methods"]


def methods(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Methods; all by default.")
    ] = None,
    json_output: Json = False,
) -> None:
    """List the training methods; with names: what each does, proves and costs, when it suits, its options."""
    from dataclasses import asdict

    from equipoise.app.names import METHOD_NAMES, suggestion

    unknown = [name for name in names or [] if name not in METHOD_NAMES]
    if unknown:
        raise UsageError(
            f"there is no method {unknown[0]!r}.{suggestion(unknown[0], METHOD_NAMES)} "
            f"There are {', '.join(METHOD_NAMES)}."
        )
    with loading():
        from equipoise.methods import METHODS

    rows = [
        {
            "name": name,
            **asdict(METHODS[name].card),
            "variants": METHODS[name].variants,
            "options": METHODS[name].options(),
        }
        for name in names or METHODS
    ]
    if json_output:
        emit({"methods": rows})
        return
    from equipoise.report.listings import methods_listing, methods_table

    console = open_console(False)
    if names:
        console.print(methods_listing(rows))
        return
    console.print(methods_table(rows))
    console.print(
        "\n[dim]equipoise methods NAME says what it proves and costs, when it suits, and its options[/]"
    )
