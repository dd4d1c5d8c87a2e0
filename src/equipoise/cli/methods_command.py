"""``equipoise methods``: what the library can train with."""

from __future__ import annotations

from typing import Annotated, Any

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
    from equipoise.app.option_checks import suggestion
    from equipoise.methods.registry import registered

    unknown = [name for name in names or [] if name not in registered()]
    if unknown:
        raise UsageError(
            f"there is no method {unknown[0]!r}.{suggestion(unknown[0], registered())} There are "
            f"{', '.join(registered())}."
        )
    with loading():
        rows = [_row(name) for name in names or registered()]
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


def _row(name: str) -> dict[str, Any]:
    """What there is to know of a method: its card, its recipes, its variants and its options."""
    from dataclasses import asdict

    from equipoise.methods.configuration import (
        choices,
        defaults,
        dotted,
        kinds_explained,
        meanings,
        nested_options,
    )
    from equipoise.methods.registry import find, registered

    recipes = {"library": find(name)}
    if registered()[name].published is not None:
        recipes["as_published"] = find(name, "as_published")
    published = recipes.get("as_published")
    variants = {recipe: choices(kind, "variant") for recipe, kind in recipes.items()}
    options = dotted(defaults(recipes["library"]))
    options.pop("public", None)
    return {
        "name": name,
        **asdict(recipes["library"].card),
        "published_guarantee": None if published is None else published.card.guarantee,
        "recipes": list(recipes),
        "variants": {recipe: words for recipe, words in variants.items() if words},
        "options": options,
        "meanings": {
            option: text for option, text in meanings(recipes["library"]).items() if option in options
        },
        "options_of_kinds": nested_options(recipes["library"]),
        "kinds": kinds_explained(recipes["library"]),
    }
