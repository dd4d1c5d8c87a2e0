"""``equipoise calibrate``, ``check``, ``methods``, ``recipe`` and ``schema init``: before a training."""

from __future__ import annotations

import json
import shlex
import tomllib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise._files import make_folder, schema_file, write_atomically, write_json
from equipoise._rounding import plain, rounded_up, significant
from equipoise._say import continued
from equipoise._validate import delta_warning, suggestion
from equipoise.app.default_settings import RECIPES, recipes
from equipoise.app.option_checks import data_form
from equipoise.app.settings import CalibrationSettings, RunSettings
from equipoise.cli.screen import answer, emit, loading, open_console
from equipoise.cli.settings_options import settings_options
from equipoise.cli.shared_options import Json, UsageError
from equipoise.methods.registry import find, registered

if TYPE_CHECKING:
    from rich.table import Table


@settings_options(CalibrationSettings, parameter="asked", file=True)
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

    with open_console(True).status("computing"):
        found = answer(asked)
    if run_dir is not None:
        write_json(make_folder(run_dir, "run_dir") / "calibration.json", found)
    console = open_console(json_output)
    if json_output:
        emit(found)
    else:
        users, other = found["users"], found["cross_check_rdp"]
        rdp = "" if other is None else f"; {rounded_up(other)} by RDP"
        of_users = "" if users is None else f"; users of at most {users['records']} records each"
        console.print(
            f"noise multiplier [bold]{significant(found['noise_multiplier'], 4)}[/]  gives  epsilon "
            f"[bold]{rounded_up(found['epsilon'])}[/] at delta {plain(found['delta'])}  [dim](by "
            f"{found['accountant'].upper()}{rdp}, {found['steps']:,} steps, "
            f"{found['relation'].replace('_', ' ')}{of_users})[/]"
        )
        console.print("\n[dim]epsilon at this noise, roughly, by batch size (across) and epochs (down)[/]")
        console.print(_shown(*table(asked, found["noise_multiplier"])))
    if (warning := delta_warning(found["delta"], found["population"])) is not None:
        console.print(f"\n[bold yellow]Warning[/]: {warning}")


def _shown(epochs: list[float], batch_sizes: list[float], cells: list[list[float]]) -> Table:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="dim")
    shown.add_column("", style="dim", justify="right")
    for size in batch_sizes:
        shown.add_column(f"{size:,g}", justify="right")
    for row, values in zip(epochs, cells, strict=True):
        shown.add_row(f"{row:,.4g}", *(significant(value, 3) for value in values))
    return shown


@settings_options(
    RunSettings, "data", "data_dir", "population", "target", "schema", "image_size", "loss",
    helps={"data": "Data that it takes: a named set or a file, as for train."},
)  # fmt: skip
def check(
    model: Annotated[str, typer.Argument(help="package.module:function that makes the model, or a name.")],
    settings: RunSettings,
    json_output: Json = False,
) -> None:
    """Prove that a model keeps records apart, or say why it is not proved, with exit code 1."""
    data = settings.data
    with loading():
        from equipoise.app.build import build_training
        from equipoise.app.train import assemble_shown
        from equipoise.gradients import CrossRecordError

    console = open_console(json_output)
    # a training evaluates on rows of a file: nothing does so here, and nothing is said of them
    share = 0.1 if data_form(data) in ("table", "images") else None
    settings = replace(settings, model=model, noise_multiplier=1.0, test_share=share, sampling="full-batch")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "column |data holds ")
            found = build_training(assemble_shown(settings, console, outline=True)).independence
        word, reason, said = str(found.word), found.reason, str(found)
    except CrossRecordError as error:
        word, reason, said = "refused", str(error), f"refused: {error}"
    if json_output:
        emit({"model": model, "data": data, "independence": word, "reason": reason})
    console.print(f"{model} on {data}: {said}", markup=False)
    if word != "proved":
        raise typer.Exit(1)


def methods(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Methods, or package.module:Class; all by default."),
    ] = None,
    json_output: Json = False,
) -> None:
    """List the training methods; with names: what each does, proves and costs, when it suits, its options."""

    unknown = [name for name in names or [] if ":" not in name and name not in registered()]
    if unknown:
        raise UsageError(
            f"there is no method {unknown[0]!r}.{suggestion(unknown[0], registered())} There are "
            f"{', '.join(registered())}, or package.module:Class."
        )
    with loading():
        rows = [_row(name) for name in names or registered()]
    from equipoise.report.listings import methods_listing, methods_table

    more = "\n[dim]equipoise methods NAME: what it proves and costs, and its options[/]"
    shown = [methods_listing(rows)] if names else [methods_table(rows), more]
    answer({"methods": rows}, json_output, *shown)


def _row(name: str) -> dict[str, Any]:
    """What there is to know of a method: its card, its recipes, its variants and its options.

    Args:
        name: as the registry has it, or "package.module:Class". A class without a card of its own states
            nothing: its summary is from the docstring, and the other fields of the card are None.
    """
    from dataclasses import asdict, fields

    from equipoise.methods.card import Card
    from equipoise.methods.configuration import (
        choices,
        defaults,
        dotted,
        first_paragraph,
        kinds_of,
        meanings,
    )

    kind = find(name)
    # the recipe of a wrapper is a property: it follows from what is wrapped
    recipe = kind.recipe if isinstance(kind.recipe, str) else "library"
    recipes = {recipe: kind}
    if registered().get(name, {}).get("published") is not None:
        recipes["as_published"] = find(name, "as_published")
    published = recipes.get("as_published") if recipe == "library" else None
    variants = {word: choices(found, "variant") for word, found in recipes.items()}
    # An inherited card would tell what another method proves and costs.
    card = vars(kind).get("card")
    stated = asdict(card) if card else dict.fromkeys(field.name for field in fields(Card))
    options = dotted(defaults(kind))
    options.pop("public", None)
    kinds = kinds_of(kind).items()
    return {
        "name": name,
        **stated,
        "summary": card.summary if card else first_paragraph(kind) or "The class has no docstring.",
        "published_guarantee": None if published is None else published.card.guarantee,
        "recipes": list(recipes),
        "variants": {word: names for word, names in variants.items() if names},
        "options": options,
        "meanings": {option: text for option, text in meanings(kind).items() if option in options},
        "options_of_kinds": {
            option: {word: dotted(defaults(chosen)) for word, chosen in found.items()}
            for option, found in kinds
        },
        "kinds": {
            option: {
                word: {"summary": first_paragraph(chosen), "meanings": meanings(chosen)}
                for word, chosen in found.items()
            }
            for option, found in kinds
        },
    }


def recipe(
    name: Annotated[str | None, typer.Argument(help="A recipe; all are listed by default.")] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of a training's configuration instead.")
    ] = False,
) -> None:
    """Print a recipe, a TOML file for `equipoise train --config`; without a name, list them."""
    from equipoise.app.settings import schema as schema_of_settings

    if schema:
        print(json.dumps(schema_of_settings(), indent=2))
    elif name is None:
        print("\n".join(recipes()))
    elif name in recipes():
        print((RECIPES / f"{name}.toml").read_text("utf-8"), end="")
    else:
        raise UsageError(f"there is no recipe {name!r}.{suggestion(name, recipes())}")


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
    comment: Annotated[str | None, typer.Option(help="Lines that begin with it are passed over.")] = None,
    header: Annotated[
        bool | None,
        typer.Option("--header/--no-header", help="Whether the first row holds the names of the columns."),
    ] = None,
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
        table, header=header, delimiter=delimiter, comment=comment, target=target, public_rows=public_rows
    )
    write_atomically(path, text.encode(), mode=0o644)
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
    drafted = tomllib.loads(text)["columns"]
    skipped = [name for name, part in drafted.items() if part["type"] == "skip"]
    inputs = [name for name in drafted if name not in (*skipped, *(target or "").split(","))]
    said.append(f"Inputs: {', '.join(inputs)}." + (f" Left out: {', '.join(skipped)}." if skipped else ""))
    said.append(
        'A column that names a person (an id, a name, an address) is no input: give it type = "skip", and '
        "nothing else."
    )
    train = f"equipoise train --data {shlex.quote(table)} --test-share 0.2 --epsilon 3"
    train += "" if target else " --target COLUMN"
    train += "" if output is None else f" --schema {shlex.quote(output)}"
    said += ["Next:", f"  edit {path}", continued(train, console.width)]
    console.print("\n".join(said), markup=False)


@schema.command(epilog="equipoise schema ranges people.csv --epsilon 0.1 --ledger people.jsonl")
def ranges(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="A CSV, TSV or Parquet file.")],
    epsilon: Annotated[float, typer.Option(min=1e-6, help="Budget of all runs in the ledger.")],
    ledger: Annotated[
        str, typer.Option(help="Journal to book it in, which `train` is given too.", metavar="FILE")
    ],
    schema: Annotated[
        str | None, typer.Option(help="The schema to fill in; TABLE.schema.toml by default.", metavar="FILE")
    ] = None,
    owner: Annotated[
        str | None, typer.Option(help="Column of a row's user, where users are protected.", metavar="COLUMN")
    ] = None,
    records_per_user: Annotated[int, typer.Option(min=1, help="Rows of a user to look at, at most.")] = 1,
    json_output: Json = False,
) -> None:
    """Fill in the ranges that a schema leaves open, from a noised histogram of the private rows."""
    with loading():
        from equipoise.app.ranges import fill_in_ranges
    found = fill_in_ranges(table, schema, epsilon, ledger, owner, records_per_user)
    said = [f"{name}: {low:.10g} to {high:.10g}" for name, (low, high) in found.items()]
    answer({"ranges": found}, json_output, *said, f"booked in {ledger}: give train the same --ledger")
