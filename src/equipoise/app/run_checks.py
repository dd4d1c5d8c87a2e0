"""What a run folder holds for the commands that go on with it, looked at before torch is loaded."""

from __future__ import annotations

import os
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from equipoise._run_files import file_of_run, read_json
from equipoise.app.model_table import ON_FEATURES
from equipoise.app.option_checks import SettingsError, flag
from equipoise.app.settings import FederationSettings, RunSettings
from equipoise.report import RunFolderError, read_run
from equipoise.report.run_reader import damage_named

__all__ = [
    "FEDERATION_FILE",
    "RESULT_FILE",
    "SETTINGS_FILE",
    "check_federation_folder",
    "check_model_file",
    "check_new_folder",
    "check_own_code",
    "is_federation",
    "is_finished",
    "named_again",
    "schema_of_run",
    "settings_of_run",
]


SETTINGS_FILE = "checkpoint/settings.json"


FEDERATION_FILE = "settings.json"
"""Written when a federation begins. It holds paths, so it stays with its owner."""


RESULT_FILE = "federation.json"
"""Written when a federation ends, for publication."""


def is_federation(folder: str) -> bool:
    """Whether the folder is one of `equipoise federate`, or the published part of one."""
    path = Path(folder)
    marked = any((path / name).is_file() for name in (RESULT_FILE, FEDERATION_FILE))
    return marked and not (path / SETTINGS_FILE).is_file()


def settings_of_run(folder: str, *, published: bool = False) -> RunSettings:
    """The settings that a run was started with; of a federation, those of its data, model and budget.

    Args:
        folder: of the run.
        published: be content with those in config.json or federation.json, which lack the paths, where only
            what may be published is there.

    Raises:
        RunFolderError: the folder is not that of a run started from the command line.
    """
    federation = is_federation(folder)
    name = FEDERATION_FILE if federation else SETTINGS_FILE
    if published and not (Path(folder) / name).is_file():
        settings = _published_settings(folder)
        if settings is not None:
            return settings
    otherwise = (
        "it is the published part of a federation, which only its owner can go on with. The commands verify, "
        "report and predict take it."
        if federation
        else "`equipoise train` did not begin this run, or its checkpoint was deleted. The commands resume, "
        "predict and audit serve runs of the command line. For one begun from Python call "
        "PrivateTraining.resume to go on, equipoise.load_model to use the model, and audit_neighbours of "
        "equipoise.audit.neighbours."
    )
    values = read_json(file_of_run(folder, name, otherwise))
    if federation and isinstance(values, dict):
        values = values.get("base")
    if not isinstance(values, dict):
        raise RunFolderError(f"run={folder!r}: {name} holds no settings. Restore it from a copy.")
    return _saved_settings(folder, name, values)


def _saved_settings(folder: str, name: str, values: dict[str, Any]) -> RunSettings:
    """The settings that a file of the folder holds; what is wrong with them is said with its name."""
    try:
        settings = RunSettings.from_json(values)
    except SettingsError as error:
        raise SettingsError(f"run={folder!r}, {name}: {error}") from None
    if settings.model == ON_FEATURES and settings.features is None:
        raise RunFolderError(
            f"run={folder!r}: {name} does not say which features {settings.model} was trained on: an earlier "
            "version of equipoise began it. Use that version for it, or train again."
        )
    return settings


def _published_settings(folder: str) -> RunSettings | None:
    """Those of a published run or federation, or None where the command line did not begin it."""
    name, key = (RESULT_FILE, "settings") if is_federation(folder) else ("config.json", "experiment")
    path = Path(folder) / name
    found = read_json(path) if path.is_file() else None
    values = found.get(key) if isinstance(found, dict) else None
    if not isinstance(values, dict):
        if name == RESULT_FILE and path.is_file():  # a federation is always begun by the command line
            raise RunFolderError(f"run={folder!r}: {name} holds no settings. Restore it from a copy.")
        return None
    known = {item.name for item in fields(RunSettings)}
    return _saved_settings(folder, name, {field: value for field, value in values.items() if field in known})


def schema_of_run(folder: str) -> dict[str, Any] | None:
    """The schema of the table or the images that a run or federation was trained on; None of other data."""
    path = Path(folder) / (RESULT_FILE if is_federation(folder) else "config.json")
    config = read_json(path) if path.is_file() else None
    schema = config.get("schema") if isinstance(config, dict) else None
    return schema if isinstance(schema, dict) else None


def check_own_code(folder: str, settings: RunSettings, **named: str | None) -> None:
    """Refuse to run code that nobody but the folder names: a folder from elsewhere could name any.

    Args:
        folder: of the run.
        settings: as the folder holds them.
        named: what the user named, package.module:function, for each setting whose code would be run.

    Raises:
        RunFolderError: code that was not named again, with the words that do so.
        SettingsError: something else was named than what the run has.
    """
    kept = {name: getattr(settings, name) for name in named}
    code = {name: value for name, value in kept.items() if value is not None and _is_code(value)}
    for name, value in named.items():
        if value is not None and value != kept[name]:
            raise SettingsError(
                f"{flag(name)} is {value!r}, but run={folder!r} was trained with {kept[name]!r}, and the "
                f"option only names that again: {'repeat it' if name in code else 'leave it out'}."
            )
    if any(named[name] is None for name in code):
        raise RunFolderError(
            f"run={folder!r} was trained with code that is not part of equipoise. A folder from elsewhere "
            "could name any code, so nothing was run. If you trust this code, name it again:"
            + named_again(settings, *named)
        )


def named_again(settings: RunSettings, *names: str) -> str:
    """The options that `check_own_code` asks for, ready to follow a command; "" of a run without own code."""
    values = {name: getattr(settings, name) for name in names}
    return "".join(
        f" {flag(name)} {shlex.quote(value)}"
        for name, value in values.items()
        if value is not None and _is_code(value)
    )


def _is_code(value: str) -> bool:
    """Whether a data set, model or method is imported; fedavg:NAME names a method of the table."""
    return ":" in value and not value.startswith("fedavg:")


def check_new_folder(folder: str) -> None:
    """Refuse to begin a training in a folder that holds one.

    Raises:
        RunFolderError: saying how to go on with it; or that the folder cannot be made.
    """
    path = _usable(folder)
    begun = ("config.json", "private/journal.jsonl", SETTINGS_FILE, FEDERATION_FILE, RESULT_FILE)
    if any((path / name).exists() for name in begun):
        ended = (path / RESULT_FILE).exists() or is_finished(folder)
        way = (
            "It is finished. Name"
            if ended
            else f"Go on with it: equipoise resume {shlex.quote(folder)}. Or name"
        )
        raise RunFolderError(
            f"--run-dir {folder!r} holds a run already. {way} a new folder; what the old "
            "run spent stays spent."
        )


def _usable(folder: str) -> Path:
    """The path of a folder that can be made or written to.

    Raises:
        RunFolderError: it cannot be.
    """
    path = Path(folder)
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not there.is_dir():
        raise RunFolderError(f"--run-dir {folder!r}: {str(there)!r} is a file. Name a new folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RunFolderError(
            f"--run-dir {folder!r}: you may not write to {str(there)!r}. Name a folder of your own, or have "
            "its permissions changed."
        )
    return path


def check_federation_folder(settings: FederationSettings, folder: str) -> FederationSettings:
    """See that a folder is continued with the settings that it was begun with.

    Returns:
        The settings, with the folder's model and features where they name none.

    Raises:
        SettingsError: the folder holds another federation, or something else.
        RunFolderError: it cannot be made.
    """
    path = _usable(folder)
    kept = path / FEDERATION_FILE
    if kept.is_file():
        old = FederationSettings.read(kept)
        base = settings.base
        if base.model is None:
            settings = replace(settings, base=replace(base, model=old.base.model))
        if base.features is None:
            settings = replace(settings, base=replace(settings.base, features=old.base.features))
        was, now = ({**which.public(), "driver": None} for which in (old, settings))
        changed = sorted(name for name in {**was, **now} if was.get(name) != now.get(name))
        if changed:
            raise SettingsError(
                f"--run-dir {str(path)!r} holds a federation that was begun with another "
                f"{', '.join(changed)}. Repeat the command that began it to go on, or name a new folder."
            )
    elif path.exists() and any(path.iterdir()):
        raise SettingsError(f"--run-dir {str(path)!r} holds something else. Name a new folder.")
    return settings


def check_model_file(folder: str) -> None:
    """Look whether the model of a run is there and whole, by the file's header alone.

    Raises:
        RunFolderError: it is missing or damaged.
    """
    path = file_of_run(folder, "model.safetensors")
    try:
        with safe_open(path, framework="np") as file:
            whole = bool(file.keys())
    except SafetensorError:
        whole = False
    if not whole:
        size = path.stat().st_size
        raise RunFolderError(
            f"run={folder!r}: model.safetensors is damaged ({size:,} bytes). Restore it from a copy, or "
            "train again."
        )


def is_finished(folder: str) -> bool:
    """Whether the training ended: statement, then model are written, then the secret key is deleted."""
    model, statement = Path(folder) / "model.safetensors", Path(folder) / "statement.json"
    if (Path(folder) / "private" / "key").exists() or not (model.is_file() and statement.is_file()):
        return False
    # a reproducible run has no key, so the statement must say that no release is to come
    with damage_named(folder):
        run = read_run(folder)
        claims = run.statement
        made = (one.get("used") == one.get("count") for one in claims.get("releases", []))
        complete = all(made) or run.ended_early or claims.get("stop_fixed_beforehand") is True
    return complete and model.stat().st_mtime_ns >= statement.stat().st_mtime_ns
