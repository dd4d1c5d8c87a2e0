"""Options of a command from a declaration of settings, so that no setting is written down twice."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, get_type_hints

import typer

from equipoise.app.model_table import MODELS
from equipoise.app.option_checks import DATA_NAMES
from equipoise.app.settings import GROUPS
from equipoise.methods.registry import METHODS

__all__ = ["settings_options"]


_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


_NAMES = {"data": DATA_NAMES, "model": tuple(MODELS), "method": tuple(METHODS)}


def _completion(name: str) -> Callable[[str], list[str]] | None:
    """What a shell offers after an option that takes one of some names."""
    known = _NAMES.get(name)
    if known is None:
        return None

    def offered(incomplete: str) -> list[str]:
        return [word for word in known if word.startswith(incomplete)]

    return offered


def settings_options(
    kind: type,
    *names: str,
    parameter: str = "settings",
    defaults: Mapping[str, Any] | None = None,
    helps: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per setting, in place of its parameter `parameter`.

    The command is called with an object of `kind` there. What an option is follows from the field: its type,
    its default and the facts in its metadata (see `equipoise.app.settings.setting`).

    Args:
        kind: a dataclass of settings.
        names: the fields that the command offers; all when none are named.
        parameter: the command's parameter that the options replace.
        defaults, helps: by name of a field, where the command has its own.
    """
    hints = get_type_hints(kind)
    chosen = {item.name: item for item in fields(kind) if not names or item.name in names}

    def option(item: Field[Any]) -> inspect.Parameter:
        facts = item.metadata
        usual = inspect.Parameter.empty if item.default is MISSING else item.default
        if item.default_factory is not MISSING:  # a fresh dict or list: no option has one for its default
            usual = None
        default = (defaults or {}).get(item.name, usual)
        flags = [f"--{facts.get('option', item.name).replace('_', '-')}"]  # a switch has no --no-... form
        words = (helps or {}).get(item.name, facts.get("help", ""))
        if item.name in ("data", "model"):
            words += f" Names: {', '.join(_NAMES[item.name])}."
        meant = facts.get("shown", "by data and model" if facts.get("of_data") else None)
        in_words = meant is not None and default in (None, item.default)
        if in_words and "default" not in words:
            words += f" [default: {meant}]"
        shown = typer.Option(
            *flags,
            help=words.replace("[", "\\["),  # of rich, whose marks stand in brackets
            rich_help_panel=_GROUP_OF.get(item.name),
            autocompletion=_completion(item.name),
            metavar=facts.get("metavar", facts.get("path")),
            envvar=facts.get("envvar"),
            show_default=not in_words,
        )
        annotation: Any = Annotated[facts.get("form", hints[item.name]), shown]
        return inspect.Parameter(
            item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        options = [option(item) for item in chosen.values()]
        parameters = [p for q in own for p in (options if q.name == parameter else [q])]

        @functools.wraps(command)
        def called(**values: Any) -> None:
            given = {name: values.pop(name) for name in chosen}
            read = {
                name: item.metadata["read"](given[name]) if "read" in item.metadata else given[name]
                for name, item in chosen.items()
            }
            command(**{parameter: kind(**read)}, **values)

        keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        called.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in keyword}
        return called

    return decorate
