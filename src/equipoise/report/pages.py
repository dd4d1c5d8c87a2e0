"""What all pages share: the environment of their templates, and a file that is whole or not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["template", "write_page"]


def template(name: str) -> Template:
    """A template of this room; unknown names in it are errors, and values are escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("equipoise.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template(name)


def write_page(text: str, folder: str | os.PathLike[str], name: str) -> Path:
    """Write a page into a folder in one move and return its path."""
    path = Path(folder) / name
    temporary = path.with_suffix(".html.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    return path
