"""Files that others may have written: read whole, or refused in words.

A folder from elsewhere may hold a pipe under a file's name, which would keep its reader waiting for ever, a
file larger than the memory, or brackets in brackets until the parser gives up.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from equipoise._files import PathLike

LARGEST_OBJECT = 64 * 2**20
"""Bytes of a file that holds one JSON value."""


_BEGUN = ("config.json", "federation.json", "settings.json", "checkpoint")
"""A run, a federation that has ended, one that has begun, a run whose settings are lost."""


class RunFolderError(ValueError):
    """The folder is not a run folder, or one of its files cannot be read."""


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON whose keys are there once: of two values another reader could take the other."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def read_file(path: PathLike, largest: int | None = None) -> bytes:
    """The content of a regular file.

    Args:
        path: of the file; links are followed.
        largest: how many bytes it may have; any number when None.

    Raises:
        FileNotFoundError: it is not there.
        RunFolderError: it is a folder, a pipe or a device, or too large.

    Example:
        >>> len(read_file(__file__)) > 100
        True
        >>> read_file("/dev/zero")
        Traceback (most recent call last):
        ...
        equipoise._run_files.RunFolderError: /dev/zero is no regular file, so it was not read...
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if largest is not None and size > largest:
            raise RunFolderError(
                f"{path} has {size:,} bytes, more than the {largest:,} that such a file may have; "
                "it was not read. Restore it from a copy."
            )
        return file.read()


@contextmanager
def open_regular(path: PathLike, *, to_change: bool = False) -> Iterator[BinaryIO]:
    """A regular file, open inside; links are followed.

    Args:
        path: of the file.
        to_change: open it to be written as well.

    Raises:
        FileNotFoundError: it is not there.
        RunFolderError: it is a folder, a pipe or a device.
    """
    # without O_NONBLOCK a pipe would be waited for; a regular file does not care
    descriptor = os.open(path, (os.O_RDWR if to_change else os.O_RDONLY) | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RunFolderError(f"{path} is no regular file, so it was not read. Restore it from a copy.")
    with os.fdopen(descriptor, "r+b" if to_change else "rb") as file:
        yield file


def read_json(path: PathLike) -> Any:
    """The value of a JSON file of `LARGEST_OBJECT` bytes at most.

    Raises:
        FileNotFoundError: it is not there.
        RunFolderError: it cannot be read, is not JSON, or has an object with a key twice.
    """
    content = read_file(path, LARGEST_OBJECT)
    try:
        return json.loads(content, object_pairs_hook=each_once)
    except (ValueError, RecursionError) as error:
        raise RunFolderError(
            f"{path} is damaged: it is not valid JSON ({error!s:.200}). Restore the file from a copy."
        ) from None


def read_object(path: PathLike) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        FileNotFoundError, RunFolderError: as `read_json`, and for any other value.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise RunFolderError(
            f"{path} holds a {type(value).__name__}, not a JSON object. Restore the file from a copy."
        )
    return value


def finite_number(value: object) -> float | None:
    """A finite number of a file; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # an integer of JSON may be beyond every float
    return float(value) if -sys.float_info.max <= value <= sys.float_info.max else None


def each_row(path: PathLike) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file. Lines that hold none are left out: a kill can cut the last one short.

    They are read one by one: a run of a million steps has as many.

    Raises:
        FileNotFoundError: it is not there.
        RunFolderError: it is no regular file.
    """
    with open_regular(path) as file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row


def file_of_run(folder: PathLike, name: str, otherwise: str | None = None) -> Path:
    """The path of a file in a run folder.

    Args:
        folder: of the run.
        name: of the file.
        otherwise: why a run may lack it, and what to do; by default it is one that a finished run has.

    Raises:
        RunFolderError: no such folder, no run in it, or no such file.
    """
    path = Path(folder)
    which = "Give the folder that a training made: runs/DATA-TIME by default."
    if path.is_file():
        folder = shlex.quote(str(path.parent))
        raise RunFolderError(f"run={str(path)!r} is a file. Give the folder that it lies in: {folder}")
    if not path.is_dir():
        raise RunFolderError(f"run={str(path)!r} is not a folder. {which}")
    if (path / "chosen").is_dir():
        which = f"It is that of a search. Give the run in it: {shlex.quote(str(path / 'chosen'))}"
    if not (path / name).is_file():  # a pipe would be waited for
        if not any((path / begun).exists() for begun in _BEGUN):
            raise RunFolderError(f"run={str(path)!r} holds no {name}, and no run was begun in it. {which}")
        otherwise = otherwise or (
            "the run is not finished, or the file was removed. Go on with the run: equipoise resume "
            f"{shlex.quote(str(path))}, or PrivateTraining.resume where it was begun from Python."
        )
        raise RunFolderError(f"run={str(path)!r} holds no {name}: {otherwise}")
    return path / name
