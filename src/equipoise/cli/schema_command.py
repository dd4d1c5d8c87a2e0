"""``equipoise schema init``: a first version of the schema of a table."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from equipoise._files import schema_file
from equipoise._say import continued
from equipoise.cli.screen import emit, loading, open_console
from equipoise.cli.shared_options import Json, UsageError

__all__ = ["schema"]

schema = typer.Typer(name="schema", help="Declare the columns of a table.", no_args_is_help=True)


@schema.callback()
def _group() -> None:
    """Declare the columns of a table."""


@schema.command(epilog="equipoise schema init people.csv --target income")
def init(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="A CSV, TSV or Parquet file.")],
    target: Annotated[str | None, typer.Option(help="Column to learn; several separated by commas.")] = None,
    public_rows: Annotated[
        str | None,
        typer.Option(
            help="Table of the same form whose rows are public: ranges and categories are taken from it.",
            metavar="FILE",
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="The schema to write; TABLE.schema.toml by default.", metavar="FILE")
    ] = None,
    delimiter: Annotated[str | None, typer.Option(help="Between cells; a comma, or a tab in .tsv.")] = None,
    no_header: Annotated[
        bool, typer.Option("--no-header", help="The first row holds data, not the names of the columns.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Write a schema of a table to edit: its columns, with the places that you must fill in."""
    with loading():
        from equipoise.data.readers.first_schema import first_schema
    path = Path(output) if output is not None else schema_file(table)
    if path.exists():
        raise UsageError(
            f"the schema {str(path)!r} exists already, perhaps with your edits. Remove it, or name another "
            "file: --output FILE."
        )
    text, left = first_schema(
        table, header=not no_header, delimiter=delimiter, target=target, public_rows=public_rows
    )
    path.write_text(text, encoding="utf-8")
    if json_output:
        emit({"schema": str(path), "to_fill_in": left})
        return
    console = open_console(False)
    said = [f"wrote {path}"]
    if left:
        said.append(
            f"Fill in, from public knowledge: {', '.join(left)}. Ranges and categories are never taken from "
            "the private rows: that would be a query on them which no epsilon covers."
        )
    said.append(
        'A column that names a person (an id, a name, an address) is no input: give it type = "skip", and '
        "nothing else."
    )
    train = f"equipoise train --data {shlex.quote(table)} --test-share 0.2 --epsilon 3"
    train += "" if target else " --target COLUMN"
    train += "" if output is None else f" --schema {shlex.quote(output)}"
    said += ["Next:", f"  edit {path}", continued(train, console.width if console.is_terminal else None)]
    console.print("\n".join(said), markup=False, soft_wrap=True)
