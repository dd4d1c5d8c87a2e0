"""``equipoise methods``: what the library can train with."""

from __future__ import annotations

from typing import Annotated

import typer

from equipoise.cli.screen import emit, loading, open_console
from equipoise.cli.words import Json, UsageError

__all__ = ["methods"]


def methods(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Methods; all by default.")
    ] = None,
    json_output: Json = False,
) -> None:
    """List the training methods: what each does, proves and costs, and when it suits."""
    from dataclasses import asdict

    with loading():
        from equipoise.methods import METHODS

    unknown = [name for name in names or [] if name not in METHODS]
    if unknown:
        raise UsageError(f"there is no method {unknown[0]!r}; there are {', '.join(METHODS)}.")
    rows = [{"name": name, **asdict(METHODS[name].card)} for name in names or METHODS]
    if json_output:
        emit({"methods": rows})
        return
    from equipoise.report.listings import methods_listing

    open_console(False).print(methods_listing(rows))
