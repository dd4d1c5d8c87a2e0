"""Tables of the site that have their words elsewhere: help, a schema, cards of methods.

A line `<!-- options: train -->` of a page becomes a table of that command's options, by group;
`<!-- keys: releases -->` one of the keys of `statement.schema.json` below `releases` (`statement`: of all);
`<!-- kinds: mechanism -->` one of the kinds of a mechanism;
`<!-- cards: methods -->` one of the methods, linked to the pages that have them as headings;
`<!-- commands: all -->` one of the commands; `<!-- rooms: all -->` one of the packages.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from equipoise.cli import app

DOCS = Path(__file__).parent
SOURCES = DOCS.parent / "src" / "equipoise"
MARK = re.compile(r"^<!-- (options|keys|cards|commands|rooms|kinds): ([a-z ]+) -->$", re.M)


def table(heads: list[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    cells = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in cells)


def options(words: str) -> str:
    """The options of a command, by group."""
    command: Any = typer.main.get_command(app)
    for word in words.split():
        command = command.commands[word]
    groups: dict[str, list[list[str]]] = {}
    for one in command.params:
        if one.hidden or not any(name.startswith("--") for name in one.opts) or "--help" in one.opts:
            continue
        metavar = one.metavar or ("" if getattr(one, "is_flag", False) else one.type.name.upper())
        name = f"`{' '.join([next(name for name in one.opts if name.startswith('--')), metavar]).strip()}`"
        words = re.sub(r"\s*\[default: by data and model\]", " *", one.help.replace("\\[", "["))
        if one.envvar:
            words += f" Or `${one.envvar}`."
        groups.setdefault(getattr(one, "rich_help_panel", None) or "Command", []).append([name, words])
    return "\n\n".join(table([group, "meaning"], rows) for group, rows in groups.items())


def commands(_: str) -> str:
    """The commands, with the first line of their help."""
    group: Any = typer.main.get_command(app)
    rows = ([f"`{name}`", one.help.split("\n", 1)[0]] for name, one in group.commands.items())
    return table(["command", "what it does"], rows)


def types(one: dict[str, Any]) -> str:
    """The type of a key, or its values."""
    if "enum" in one:
        return ", ".join("null" if value is None else f"`{value}`" for value in one["enum"])
    if "anyOf" in one:
        return " or ".join(dict.fromkeys(types(each) for each in one["anyOf"]))
    kind = one.get("type", "object")  # or a reference to one
    return {"array": "list", "object": "mapping"}.get(kind, kind)


def keys(words: str) -> str:
    """The keys of a statement, or of a release."""
    schema = json.loads((SOURCES / "statements" / "statement.schema.json").read_text(encoding="utf-8"))
    found = schema["properties"]
    if words != "statement":
        found = found[words]["items"]["properties"]
    return table(
        ["key", "type", "meaning"],
        ([f"`{key}`", types(one), one["description"]] for key, one in found.items()),
    )


def kinds(key: str) -> str:
    """The forms that a key of a release may have."""
    schema = json.loads((SOURCES / "statements" / "statement.schema.json").read_text(encoding="utf-8"))
    forms = schema["properties"]["releases"]["items"]["properties"][key]["anyOf"]
    return table(
        ["kind", "noise"], ([f"`{one['properties']['kind']['const']}`", one["description"]] for one in forms)
    )


def cards(folder: str) -> str:
    """The methods with their summaries, linked from a page of the folder."""
    pages = {}
    for page in (DOCS / folder).glob("*.md"):
        for heading in re.findall(r"^##? (\S+)$", page.read_text(encoding="utf-8"), re.M):
            pages[heading] = page.name if heading == page.stem else f"{page.name}#{heading}"
    found = tomllib.loads((SOURCES / "methods" / "methods.toml").read_text(encoding="utf-8"))
    rows = ([f"[{name}]({pages[name]})", card["summary"]] for name, card in found.items())
    return table(["method", "what it does"], rows)


def rooms(_: str) -> str:
    """The packages below `src/equipoise`, with the first line of their docstrings."""
    found = {}
    for file in sorted([*SOURCES.glob("*/__init__.py*"), *SOURCES.glob("training/*/__init__.py")]):
        words = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
        if words:
            found[file.parent.relative_to(SOURCES).as_posix()] = words.split("\n\n", 1)[0].replace("\n", " ")
    return table(["folder", "what it holds"], ([f"`{name}/`", words] for name, words in found.items()))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with every page."""
    makers = {
        "options": options,
        "keys": keys,
        "kinds": kinds,
        "cards": cards,
        "commands": commands,
        "rooms": rooms,
    }
    return MARK.sub(lambda mark: makers[mark[1]](mark[2]), markdown)
