"""``equipoise recipe``: settings to start from, as files to copy and edit."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from equipoise.cli.shared_options import UsageError

__all__ = ["recipe"]


def recipe(
    name: Annotated[str | None, typer.Argument(help="A recipe; all are listed by default.")] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of a training's configuration instead.")
    ] = False,
) -> None:
    """Print a recipe, a TOML file for `equipoise train --config`; without a name, list them."""
    from equipoise._validate import suggestion
    from equipoise.app.default_settings import RECIPES, recipes
    from equipoise.app.settings import schema as schema_of_settings

    if schema:
        print(json.dumps(schema_of_settings(), indent=2))
    elif name is None:
        print("\n".join(recipes()))
    elif name in recipes():
        print((RECIPES / f"{name}.toml").read_text("utf-8"), end="")
    else:
        raise UsageError(f"there is no recipe {name!r}.{suggestion(name, recipes())}")
