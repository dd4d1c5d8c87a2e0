"""``equipoise methods``: what the library can train with."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from equipoise.cli.screen import emit, loading, open_console
from equipoise.cli.shared_options import Json, UsageError

__all__ = ["methods"]


def methods(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Methods, or package.module:Class; all by default."),
    ] = None,
    json_output: Json = False,
) -> None:
    """List the training methods; with names: what each does, proves and costs, when it suits, its options."""
    from equipoise._validate import suggestion
    from equipoise.methods.registry import registered

    unknown = [name for name in names or [] if ":" not in name and name not in registered()]
    if unknown:
        raise UsageError(
            f"there is no method {unknown[0]!r}.{suggestion(unknown[0], registered())} There are "
            f"{', '.join(registered())}, or package.module:Class, a class derived from equipoise.Method."
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
    from equipoise.methods.registry import find, registered

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
