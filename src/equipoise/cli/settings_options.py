"""Options of a command from a class of settings, and ``--config FILE``, whose values go to the same class.

What the command line says comes before the file, and the file before the defaults.
"""

from __future__ import annotations

import functools
import inspect
import shlex
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import click
import typer
from pydantic_core import PydanticUndefined

from equipoise._files import explained
from equipoise._run_files import LARGEST_OBJECT, read_file, read_json
from equipoise._validate import suggestion
from equipoise.app.default_settings import RECIPES, recipes
from equipoise.app.model_table import MODELS
from equipoise.app.option_checks import DATA_NAMES, USUAL_NAMES, data_form, flag
from equipoise.app.settings import (
    GROUPS,
    RunSettings,
    facts,
    shown_of,
)
from equipoise.cli.shared_options import UsageError
from equipoise.methods.registry import METHODS

__all__ = ["option_file", "settings_options"]

_NAMES = {"data": DATA_NAMES, "model": tuple(MODELS), "method": tuple(METHODS)}


def _completion(name: str) -> Callable[[str], list[str]] | None:
    """What a shell offers after an option that takes one of some names."""
    known = _NAMES.get(name, ())
    return (lambda incomplete: [word for word in known if word.startswith(incomplete)]) if known else None


_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}

_INSTEAD_OF = {"epsilon": "noise_multiplier", "noise_multiplier": "epsilon"}
"""Either decides the other: one on the command line displaces the other in the file."""

_FILE, _VALUES = "equipoise.config", "equipoise.values"
"""Where the context of a command keeps the name of the file and the settings in it."""


def settings_options(
    kind: type,
    *names: str,
    parameter: str = "settings",
    defaults: Mapping[str, Any] | None = None,
    helps: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per setting, in place of its parameter `parameter`.

    The command is called with an object of `kind` there. What an option is follows from the field: its type,
    its default and what is shown of it (see `equipoise.app.settings.setting`).

    Args:
        kind: a class of settings.
        names: the fields that the command offers; all when none are named.
        parameter: the command's parameter that the options replace.
        defaults, helps: by name of a field, where the command has its own.
    """
    hints, usual = get_type_hints(kind), dict(defaults or {})
    chosen = {name: field for name, field in facts(kind).items() if not names or name in names}

    def option(name: str) -> inspect.Parameter:
        field, shown = chosen[name], shown_of(chosen[name])
        words = (helps or {}).get(name, field.description or "")
        if name in ("data", "model"):
            words += f" Names: {', '.join(_NAMES[name])}."
        default = usual.get(name, shown.get("usual", field.default))
        if default is PydanticUndefined and field.default_factory is None:
            words += " [required]"
        elif default not in (None, False, PydanticUndefined) and "default" not in words:
            words += f" [default: {default}]"
        kinds = {bool: bool, dict: list[str] | None, list: list[str] | None}
        form = kinds.get(get_origin(hints[name]) or hints[name], _plain(hints[name]) | None)
        typed = typer.Option(
            flag(shown.get("option", name)),  # a switch has no --no-... form
            help=words.replace("[", "\\["),  # of rich, whose marks stand in brackets
            rich_help_panel=_GROUP_OF.get(name),
            autocompletion=_completion(name),
            metavar=shown.get("metavar", shown.get("path")),
            envvar=shown.get("envvar"),
            show_default=False,
        )
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=False if form is bool else None,
            annotation=Annotated[form, typed],
        )  # fmt: skip

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def called(**values: Any) -> None:
            context = click.get_current_context()
            words = {name: values.pop(name) for name in chosen}
            given = {name: value for name, value in words.items() if _is_given(context, name)}
            in_file = context.meta.get(_VALUES, {})
            of_file = {name: in_file[name] for name in chosen if name in in_file and name not in given}
            for name, other in _INSTEAD_OF.items():
                if other in given:
                    of_file.pop(name, None)
            _check_code(context.meta.get(_FILE, ""), of_file)
            command(**{parameter: kind(**(usual | of_file | given))}, **values)

        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [p for q in own for p in (map(option, chosen) if q.name == parameter else [q])]
        found: Any = _with_parameters(command, called, parameters)
        found.settings = {*chosen, *vars(command).get("settings", ())}
        return found

    return decorate


def _is_given(context: click.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")


def _with_parameters(
    command: Callable[..., None], called: Callable[..., None], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    """The function under the command's name, with these parameters for typer to read."""
    found: Any = functools.update_wrapper(called, command)
    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    found.__signature__ = inspect.Signature(keyword)
    found.__annotations__ = {p.name: p.annotation for p in keyword}
    return found


def _plain(hint: Any) -> Any:
    """What typer reads the words of an option as: int, float or str."""
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind in (int, float)]
    return kinds[0] if kinds else str


def option_file(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command ``--config``, for all of its options."""
    of_settings = vars(command).get("settings", set())

    def read(context: typer.Context, config: str | None) -> str | None:
        return _read(context, config, of_settings)

    typed = typer.Option(
        "--config",
        help="Take options from this TOML file, from a recipe (`equipoise recipe` lists them), or from a "
        "run's config.json; those given here come first.",
        metavar="FILE",
        is_eager=True,  # the file is read before the options whose defaults it gives
        callback=read,
        show_default=False,
    )
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = inspect.signature(command, eval_str=True).parameters.values()
    config = inspect.Parameter("config", keyword, default=None, annotation=Annotated[str | None, typed])
    return _with_parameters(command, lambda config, **values: command(**values), [config, *own])


def _read(context: typer.Context, config: str | None, own: Collection[str]) -> str | None:
    """Keep the settings of the file for the command's class of settings; its other options get defaults."""
    if config is None:
        return None
    by_name = {
        word.lstrip("-").replace("-", "_"): parameter
        for parameter in context.command.params
        for word in (str(parameter.name), *parameter.opts)
        if parameter.name not in ("config", "help")
    }
    settings: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for written, value in _values_of(config).items():
        name = written.replace("-", "_")
        if name not in by_name:
            usual = USUAL_NAMES.get(flag(name))
            raise UsageError(
                f"--config {config!r} has {written!r}, which is no option of {context.command_path}."
                f"{f' Did you mean {usual}?' if usual else suggestion(name, by_name)} "
                f"`{context.command_path} --help` lists them."
            )
        name = str(by_name[name].name)
        if name in settings or name in others:
            raise UsageError(
                f"--config {config!r} sets {flag(name)} twice, under two spellings. Leave one of them out."
            )
        (settings if name in own else others)[name] = value
    context.meta[_FILE], context.meta[_VALUES] = config, settings
    context.default_map = {
        name: ",".join(map(str, value)) if isinstance(value, list) else value
        for name, value in others.items()
    }
    return config


def _values_of(config: str) -> dict[str, Any]:
    """The names and values in the file or the recipe."""
    path = Path(config)
    if config in recipes() and not path.is_file():
        path = RECIPES / f"{config}.toml"
    try:
        if path.suffix == ".json":
            return _of_json(read_json(path), config)
        return tomllib.loads(read_file(path, LARGEST_OBJECT).decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--config {config!r} is no TOML file: {error}. Write lines such as epsilon = 3, or name a "
            "run's config.json."
        ) from None
    except FileNotFoundError:
        raise UsageError(
            f"--config {config!r}: there is no such file, and no such recipe.{suggestion(config, recipes())}"
        ) from None
    except OSError as error:
        raise explained(error, f"--config {config!r}") from error


def _of_json(values: Any, config: str) -> dict[str, Any]:
    """The settings in the files that commands write: of a run, resolved or with gaps, or of a federation."""
    if not isinstance(values, dict):
        raise UsageError(f"--config {config!r} holds no object of settings. Name a run's config.json.")
    if isinstance(of_run := values.get("experiment"), dict):
        # the others tell what came of it
        values = {name: value for name, value in of_run.items() if name in facts(RunSettings)}
        if data_form(str(values.get("data"))) == "named":
            values.pop("population", None)  # published, and the smaller where records were left out
        else:  # published are the private ones, without those to evaluate on; the options count all
            share = values.get("test_share") or 0
            private = values["population"] + values.get("public_records", 0)
            values["population"] = round(private / (1 - share))
    elif "format" in values:
        raise UsageError(
            f"--config {config!r} is of a run begun from Python, and holds no settings of the command line."
        )
    if isinstance(base := values.get("base"), dict):
        values = {**base, **{name: value for name, value in values.items() if name != "base"}}
    # What was left open; a command has no option for what another one may leave open.
    # Compared one by one: 0 == False, and a momentum of 0 is a choice.
    return {
        n: value for n, value in values.items() if value is not None and value is not False and value != {}
    }


def _check_code(config: str, values: Mapping[str, Any]) -> None:
    """Refuse to import what a file names that a run wrote: it may come from elsewhere.

    A TOML file is somebody's own words, as a command in a script is.
    """
    code = {
        name: value
        for name in ("data", "model", "method")
        if ":" in (value := str(values.get(name) or "")) and not value.startswith("fedavg:")
    }
    if code and Path(config).suffix == ".json":
        words = " ".join(f"{flag(name)} {shlex.quote(value)}" for name, value in code.items())
        raise UsageError(
            f"--config {config!r} names code that is not part of equipoise. A file from elsewhere could name "
            f"any code, so nothing was run. If you trust this code, name it again: {words}"
        )
