"""``--config FILE``: the options of a command from a TOML file, or from what a run wrote down.

A name in the file is that of an option, and its value is read as the option's words are. What the command
line says comes before the file, and the file before the defaults.
"""

from __future__ import annotations

import functools
import inspect
import json
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise._files import explained
from equipoise._run_files import LARGEST_OBJECT, read_file, read_json
from equipoise._validate import suggestion
from equipoise.app.option_checks import USUAL_NAMES, data_form, flag
from equipoise.app.settings import RunSettings
from equipoise.cli.shared_options import UsageError

__all__ = ["option_file"]

_INSTEAD_OF = {"epsilon": "noise_multiplier", "noise_multiplier": "epsilon"}
"""Either decides the other: one on the command line displaces the other in the file."""

_IMPORTED = ("data", "model", "method")


def option_file(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command ``--config``, for all of its options."""
    shown = typer.Option(
        "--config",
        help="Take options from this TOML file, or from a run's config.json; those given here come first.",
        metavar="FILE",
        is_eager=True,  # the file is read before the options whose defaults it gives
        callback=_read,
        show_default=False,
    )
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = [
        inspect.Parameter("context", keyword, annotation=typer.Context),
        inspect.Parameter("config", keyword, default=None, annotation=Annotated[str | None, shown]),
    ]

    @functools.wraps(command)
    def called(context: typer.Context, config: str | None, **values: Any) -> None:
        if config is not None:
            _check_code(context, config, values)
            _displace(context, values)
        command(**values)

    own = inspect.signature(command).parameters.values()
    called.__signature__ = inspect.Signature([*added, *own])  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in [*added, *own]}
    return called


def _read(context: typer.Context, config: str | None) -> str | None:
    """Let the file give the defaults of the options."""
    if config is None:
        return None
    by_name: dict[str, Any] = {}
    for parameter in context.command.params:
        for name in (str(parameter.name), *(word.lstrip("-").replace("-", "_") for word in parameter.opts)):
            by_name[name] = parameter
    found: dict[str, Any] = {}
    for name, value in _values_of(config).items():
        chosen = by_name.get(name.replace("-", "_"))
        if chosen is None or chosen.name in ("config", "help"):
            known = [word for word in by_name if word not in ("config", "help", "h")]
            usual = USUAL_NAMES.get(flag(name))
            meant = f" Did you mean {usual}?" if usual else suggestion(name.replace("-", "_"), known)
            raise UsageError(
                f"--config {config!r} has {name!r}, which is no option of {context.command_path}."
                f"{meant} `{context.command_path} --help` lists them."
            )
        words = _words_of(config, name, value, chosen)
        try:
            chosen.type_cast_value(context, words)
        except Exception as error:
            said = error.format_message() if hasattr(error, "format_message") else str(error)
            raise UsageError(f"--config {config!r} has {name} = {value!r:.80}: {said}") from None
        found[str(chosen.name)] = words
    context.default_map = found
    return config


def _values_of(config: str) -> dict[str, Any]:
    """The names and values in the file, flat."""
    path = Path(config)
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
        raise UsageError(f"--config {config!r}: there is no such file.") from None
    except OSError as error:
        raise explained(error, f"--config {config!r}") from error


def _of_json(values: Any, config: str) -> dict[str, Any]:
    """The settings in the files that commands write: of a run, resolved or with gaps, or of a federation."""
    if not isinstance(values, dict):
        raise UsageError(f"--config {config!r} holds no object of settings. Name a run's config.json.")
    if "format" in values and not isinstance(values.get("experiment"), dict):
        raise UsageError(
            f"--config {config!r} is of a run begun from Python, and holds no settings of the command line."
        )
    if isinstance(values.get("experiment"), dict):
        settings = {item.name for item in fields(RunSettings)}  # the others tell what came of it
        values = {name: value for name, value in values["experiment"].items() if name in settings}
        if data_form(str(values.get("data"))) == "named":
            values.pop("population", None)  # published, and the smaller where records were left out
        elif "public_records" in values:
            values["population"] += values["public_records"]  # the private ones; the option counts all
    if isinstance(values.get("base"), dict):
        values = {**values["base"], **{name: value for name, value in values.items() if name != "base"}}
    # What was left open; a command has no option for what another one may leave open.
    return {name: value for name, value in values.items() if value not in (None, False, {})}


def _words_of(config: str, name: str, value: Any, parameter: Any) -> Any:
    """A value as the words of the command line: a switch is a bool, what is repeated a list."""
    if isinstance(value, Mapping):
        if not parameter.multiple:
            raise UsageError(f"--config {config!r} has a table {name!r}, but {flag(name)} takes one value.")
        return [f"{inner}={_word(part)}" for inner, part in _flat(value)]
    if parameter.is_flag:
        if not isinstance(value, bool):
            raise UsageError(f"--config {config!r} has {name} = {value!r:.80}: give true or false.")
        return value
    if isinstance(value, list):
        words = [_word(part) for part in value]
        return words if parameter.multiple else ",".join(words)
    return [_word(value)] if parameter.multiple else _word(value)


def _flat(values: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Tables in tables as dotted names."""
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{before}{name}.")
        else:
            found.append((before + name, value))
    return found


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _from_file(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "DEFAULT_MAP"


def _displace(context: typer.Context, values: dict[str, Any]) -> None:
    for name, other in _INSTEAD_OF.items():
        if values.get(other) is not None and _from_file(context, name) and not _from_file(context, other):
            values[name] = None


def _check_code(context: typer.Context, config: str, values: dict[str, Any]) -> None:
    """Refuse to import what a file names that a run wrote: it may come from elsewhere.

    A TOML file is somebody's own words, as a command in a script is.
    """
    if Path(config).suffix != ".json":
        return
    code = {
        name: values[name]
        for name in _IMPORTED
        if name in values and ":" in str(values[name] or "") and _from_file(context, name)
        and not str(values[name]).startswith("fedavg:")
    }  # fmt: skip
    if code:
        words = " ".join(f"{flag(name)} {shlex.quote(value)}" for name, value in code.items())
        raise UsageError(
            f"--config {config!r} names code that is not part of equipoise. A file from elsewhere could name "
            f"any code, so nothing was run. If you trust this code, name it again: {words}"
        )
