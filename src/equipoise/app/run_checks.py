"""What a run folder holds for the commands that go on with it, looked at before torch is loaded."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from equipoise._run_files import file_of_run, read_json, read_object
from equipoise.app.option_checks import SettingsError, flag, is_code
from equipoise.app.settings import FederationSettings, RunSettings, facts
from equipoise.report import RunFolderError, read_run
from equipoise.report.run_reader import damage_named

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

    Rows of a table are coded as in its first step, by `config.json`: its schema's file may be another by now.

    Args:
        folder: of the run.
        published: be content with those in config.json or federation.json, which lack the paths, where only
            what may be published is there.

    Raises:
        RunFolderError: the folder is not that of a run started from the command line.
        SettingsError: the settings have names or values that this version does not know.
    """
    federation = is_federation(folder)
    places = [(FEDERATION_FILE, "base") if federation else (SETTINGS_FILE, "")]
    if published:
        places.append((RESULT_FILE, "settings") if federation else ("config.json", "experiment"))
    for name, key in places:
        if not (Path(folder) / name).is_file():
            continue
        found = read_json(Path(folder) / name)
        values = found.get(key) if key and isinstance(found, dict) else found
        if name == "config.json" and values is None:  # begun from Python
            continue
        if not isinstance(values, dict):
            raise RunFolderError(f"run={folder!r}: {name} holds no settings. Restore it from a copy.")
        if name == SETTINGS_FILE and "columns" in (schema_of_run(folder) or {}):
            values = {**values, "schema": str(Path(folder) / "config.json")}
        known = facts(RunSettings) if name in (RESULT_FILE, "config.json") else values
        try:
            return RunSettings(**{field: value for field, value in values.items() if field in known})
        except SettingsError as error:
            raise SettingsError(f"run={folder!r}, {name}: {error}") from None
    otherwise = (
        "it is the published part of a federation, which only its owner can go on with. The commands verify, "
        "report and predict take it."
        if federation
        else "`equipoise train` did not begin this run, or its checkpoint was deleted. The commands resume, "
        "predict, export and audit serve runs of the command line. For one begun from Python call "
        "PrivateTraining.resume to go on, equipoise.load_model to use the model, equipoise.publish to export "
        "it, and audit_neighbours of equipoise.audit.neighbours."
    )
    return RunSettings(**read_object(file_of_run(folder, places[0][0], otherwise)))


def schema_of_run(folder: str) -> dict[str, Any] | None:
    """The schema of the table or the images that a run or federation was trained on; None of other data.

    Raises:
        RunFolderError: the file that would hold it is missing or damaged.
    """
    name = RESULT_FILE if is_federation(folder) else "config.json"
    lost = "it says how the data are read. Restore it from a copy of the run."
    schema = read_object(file_of_run(folder, name, lost)).get("schema")
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
    code = {name for name, value in kept.items() if is_code(value)}
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
    return "".join(f" {flag(name)} {shlex.quote(value)}" for name, value in values.items() if is_code(value))


def check_new_folder(folder: str) -> None:
    """Refuse to begin a training in a folder that holds one.

    Raises:
        RunFolderError: saying how to go on with it; or that the folder is a file.
    """
    path = Path(folder)
    if path.is_file():
        raise RunFolderError(f"--run-dir {folder!r} is a file. Name a new folder.")
    begun = ("config.json", "private/journal.jsonl", SETTINGS_FILE, FEDERATION_FILE, RESULT_FILE)
    if any((path / name).exists() for name in begun):
        ended = (path / RESULT_FILE).exists() or is_finished(folder)
        way = "It is finished." if ended else f"Go on with it: equipoise resume {shlex.quote(folder)}."
        raise RunFolderError(
            f"--run-dir {folder!r} holds a run already. {way} Or name a new folder; what the old run spent "
            "stays spent."
        )


def check_federation_folder(settings: FederationSettings, folder: str) -> FederationSettings:
    """See that a folder is continued with the settings that it was begun with.

    Returns:
        The settings, with the folder's model and features where they name none.

    Raises:
        SettingsError: the folder holds another federation, or something else.
    """
    path = Path(folder)
    kept = path / FEDERATION_FILE
    if kept.is_file():
        old = FederationSettings.read(kept)
        open_ = [name for name in ("model", "features") if getattr(settings.base, name) is None]
        of_old = {name: getattr(old.base, name) for name in open_}
        settings = replace(settings, base=replace(settings.base, **of_old))
        was, now = ({**which.public(), "driver": None} for which in (old, settings))
        changed = sorted(name for name in {**was, **now} if was.get(name) != now.get(name))
        if changed:
            raise SettingsError(
                f"--run-dir {str(path)!r} holds a federation that was begun with another "
                f"{', '.join(changed)}. Repeat the command that began it to go on, or name a new folder."
            )
    elif path.is_file() or (path.exists() and any(path.iterdir())):
        raise SettingsError(f"--run-dir {str(path)!r} holds something else. Name a new folder.")
    return settings


def check_model_file(folder: str) -> None:
    """Look whether the model of a run is there and whole, by the file's header alone.

    Raises:
        RunFolderError: it is missing or damaged.
    """
    try:
        with safe_open(file_of_run(folder, "model.safetensors"), framework="np"):
            pass
    except SafetensorError:
        raise RunFolderError(
            f"run={folder!r}: model.safetensors is damaged. Restore it from a copy, or train again."
        ) from None


def report_values(folder: str) -> dict[str, Any]:
    """The page of a run, written again, and what the run comes to, as plain values."""
    from equipoise.report import write_report  # the writer of pages takes time to load

    report, run = write_report(folder), read_run(folder)
    return {
        "run_dir": folder,
        "report": str(report),
        "steps": int(run.last("step") or 0),
        "accuracy": run.accuracy,
        "evaluation": run.evaluation,
        "baseline": run.baseline,
        "epsilon": run.epsilon,
        "delta": run.delta,
        "guarantee": run.guarantee,
        "private": run.is_private,
        "statement": dict(run.statement),
    }


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
