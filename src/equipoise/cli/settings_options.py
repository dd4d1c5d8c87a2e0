"""Options of a command from a class of settings, and ``--config FILE``, whose values go to the same class.

What the command line says comes before the file, and the file before the defaults.
"""

from __future__ import annotations

import functools
import inspect
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import click
import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from equipoise._files import explained
from equipoise._run_files import LARGEST_OBJECT, read_file, read_json
from equipoise._validate import suggestion
from equipoise.app.default_settings import RECIPES, recipes
from equipoise.app.model_table import MODELS
from equipoise.app.option_checks import DATA_NAMES, USUAL_NAMES, data_form, flag, is_code
from equipoise.app.settings import RunSettings, facts, shown_of
from equipoise.cli.shared_options import UsageError
from equipoise.methods.registry import METHODS

_NAMES = {"data": DATA_NAMES, "model": MODELS, "method": tuple(METHODS)}


def settings_options(
    kind: type,
    *names: str,
    parameter: str = "settings",
    file: bool = False,
    defaults: Mapping[str, Any] | None = None,
    helps: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per setting, in place of its parameter `parameter`.

    The command is called with an object of `kind` there. What an option is follows from the field: its type,
    its default and what is shown of it (see `equipoise.app.settings.setting`).

    Args:
        kind: a class of settings; one with a field `base` offers those of a training too.
        names: the settings of a training that the command offers; all when none are named.
        parameter: the command's parameter that the options replace.
        file: offer ``--config`` as well, for all options of the command.
        defaults, helps: by name of a field, where the command has its own.
    """
    usual, chosen = dict(defaults or {}), dict(_offered(kind, names))

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def called(**values: Any) -> None:
            context = click.get_current_context()
            given = {n: value for n, value in values.items() if _is_given(context, n)}
            config = values.pop("config", None)
            in_file = {} if config is None else _values_of(config, context)
            if given.get("sampling") == "full-batch":
                in_file.pop("batch_size", None)
            for name, other in _DISPLACED.items():
                if name in given:
                    in_file.pop(other, None)
            _check_code(str(config), {n: v for n, v in in_file.items() if n not in given})
            found = usual | in_file | given
            ours = {name: found[name] for name in chosen if name in found}
            others = {n: found.get(n, value) for n, value in values.items() if n not in chosen}
            command(**{parameter: _made(kind, ours)}, **others)

        parameters = []
        for own in inspect.signature(command, eval_str=True).parameters.values():
            replaced = own.name == parameter
            parameters += [_option(n, *chosen[n], usual, helps or {}) for n in chosen] if replaced else [own]
        if file:
            parameters.insert(0, _parameter("config", None, Annotated[str | None, _CONFIG]))
        made: Any = functools.update_wrapper(called, command)
        keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        made.__signature__ = inspect.Signature(keyword)
        made.__annotations__ = {p.name: p.annotation for p in keyword}
        return made

    return decorate


_DISPLACED = {
    "epsilon": "noise_multiplier",
    "noise_multiplier": "epsilon",
    "optimizer": "momentum",
}
"""What is said on the command line leaves the other without a meaning, where it is said in the file."""

_CONFIG: Any = typer.Option(
    "--config",
    help="Take options from this TOML file, from a recipe (`equipoise recipe` lists them), or from a "
    "run's config.json; those given here come first.",
    metavar="FILE",
    show_default=False,
)


def _offered(kind: type, names: tuple[str, ...]) -> Iterator[tuple[str, tuple[FieldInfo, Any, str | None]]]:
    """By name: the field, its type, and the heading of the help that it stands under."""
    hints, group = get_type_hints(kind), None
    for name, field in facts(kind).items():
        if name == "base":
            yield from _offered(hints[name], names)
            continue
        group = shown_of(field).get("group", group)
        if not names or name in names or kind is not RunSettings:
            yield name, (field, hints[name], group)


def _made(kind: type, values: dict[str, Any]) -> Any:
    if "base" not in facts(kind):
        return kind(**values)
    own = {name: values.pop(name) for name in facts(kind) if name in values}
    return kind(base=RunSettings(**values), **own)


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option(
    name: str,
    field: FieldInfo,
    hint: Any,
    group: str | None,
    usual: Mapping[str, Any],
    helps: Mapping[str, str],
) -> inspect.Parameter:
    """The option of a setting, as typer reads it from the signature of a command."""
    shown, known = shown_of(field), _NAMES.get(name, ())
    words = helps.get(name, field.description or "")
    if name in ("data", "model"):
        words += f" Names: {', '.join(known)}."
    default = usual.get(name, shown.get("usual", field.default))
    if field.is_required():
        words += " [required]"
    elif default not in (None, False, PydanticUndefined) and "default" not in words:
        words += f" [default: {default}]"
    kinds = {bool: bool, dict: list[str] | None, list: list[str] | None}
    plain = next((kind for kind in (*get_args(hint), hint) if kind in (int, float)), str)
    form = kinds.get(get_origin(hint) or hint, plain | None)

    def completed(incomplete: str) -> list[str]:
        return [word for word in known if word.startswith(incomplete)]

    typed = typer.Option(
        flag(shown.get("option", name)),  # a switch has no --no-... form
        help=words.replace("[", "\\["),  # of rich, whose marks stand in brackets
        rich_help_panel=group,
        autocompletion=completed if known else None,
        metavar=shown.get("metavar", shown.get("path")),
        envvar=shown.get("envvar"),
        show_default=False,
    )
    return _parameter(name, False if form is bool else None, Annotated[form, typed])


def _is_given(context: click.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")


def _values_of(config: str, context: click.Context) -> dict[str, Any]:
    """What the file or the recipe says, by the command's names of its options."""
    by_word = {
        word.lstrip("-").replace("-", "_"): str(option.name)
        for option in context.command.params
        for word in (str(option.name), *option.opts)
        if option.name != "config"
    }
    found: dict[str, Any] = {}
    for word, value in _read(config).items():
        name = by_word.get(word.replace("-", "_"))
        if name is None:
            usual = USUAL_NAMES.get(flag(word))
            meant = f" Did you mean {usual}?" if usual else suggestion(flag(word), map(flag, by_word))
            raise UsageError(
                f"--config {config!r} has {word!r}, which is no option of {context.command_path}.{meant} "
                f"`{context.command_path} --help` lists them."
            )
        if name in found:
            raise UsageError(
                f"--config {config!r} sets {flag(name)} twice, under two spellings. Leave one of them out."
            )
        found[name] = value
    return found


def _read(config: str) -> dict[str, Any]:
    """The names and values in the file or the recipe."""
    path = Path(config)
    if config in recipes() and not path.is_file():
        path = RECIPES / f"{config}.toml"
    try:
        if path.suffix == ".json":
            return _of_run(read_json(path), config)
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


def _of_run(values: Any, config: str) -> dict[str, Any]:
    """The settings in the `config.json` of a run; what else is there tells what came of it."""
    of_run = values.get("experiment") if isinstance(values, dict) else None
    if not isinstance(of_run, dict):
        raise UsageError(
            f"--config {config!r} holds no settings of the command line. Name the config.json of a run that "
            "`equipoise train` began."
        )
    found = {name: value for name, value in of_run.items() if name in facts(RunSettings)}
    if data_form(str(found.get("data"))) == "named":
        found.pop("population", None)  # published, and the smaller where records were left out
    else:  # published are the private ones, without those to evaluate on; the options count all
        private = found["population"] + found.get("public_records", 0)
        found["population"] = round(private / (1 - found.get("test_share", 0)))
    if "columns" in (values.get("schema") or {}):
        found["schema"] = config  # which stores the one that was used; its file may have been edited since
    return found


def _check_code(config: str, values: Mapping[str, Any]) -> None:
    """Refuse to import what a file names that a run wrote: it may come from elsewhere.

    A TOML file is somebody's own words, as a command in a script is.
    """
    code = {name: values[name] for name in ("data", "model", "method", "loss") if is_code(values.get(name))}
    if code and Path(config).suffix == ".json":
        words = " ".join(f"{flag(name)} {shlex.quote(value)}" for name, value in code.items())
        raise UsageError(
            f"--config {config!r} names code that is not part of equipoise. A file from elsewhere could name "
            f"any code, so nothing was run. If you trust this code, name it again: {words}"
        )
