"""Files and folders, and what the operating system refused, in words that say what to do about it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

PathLike = str | os.PathLike[str]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message tells what to do."""


_NO_FOLDER = "there is no such folder, or a part of the path is a file; name a place in a folder that exists"
_NO_PERMISSION = "you may not write there; name a folder of your own, or have its permissions changed"
_FULL = "no space is left on the device; free some, or name a folder on another one"
_REMEDIES = {
    errno.ENOENT: _NO_FOLDER,
    errno.ENOTDIR: _NO_FOLDER,
    errno.EEXIST: "a file of that name is there; name a new folder",
    errno.EISDIR: "it is a folder; name a file",
    errno.EFBIG: "a file may not become so large there; raise the limit (ulimit -f), or name another device",
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.EROFS: "its device can only be read; name a folder on another one",
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
}


def explained(error: OSError, what: str) -> OSError:
    """The error with what was meant, the reason and the remedy; one that has words of its own as it is.

    Args:
        error: as the system raised it.
        what: the argument or option and its value, such as ``run_dir='runs/a'``.

    Example:
        >>> print(explained(PermissionError(errno.EACCES, "Permission denied", "/x/y"), "run_dir='/x/y'"))
        run_dir='/x/y': you may not write there; name a folder of your own, or have its permissions changed
    """
    if error.errno is None:
        return error
    reason = _REMEDIES.get(error.errno, error.strerror or "the operating system refused it")
    return type(error)(f"{what}: {reason}")


def make_folder(path: PathLike, argument: str) -> Path:
    """Make a folder, and those that it lies in, where it is not there yet.

    Args:
        path: of the folder.
        argument: that names it, for messages.

    Raises:
        OSError: it cannot be made; the message names argument, path, reason and remedy.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explained(error, f"{argument}={str(path)!r}") from error
    return folder


def write_atomically(path: PathLike, content: bytes, mode: int = 0o600) -> None:
    """Write a file so that at every moment either the old or the new content is there, whole.

    Raises:
        OSError: as the system says (a full disk among others); the old file is untouched, the temporary one
            removed.
    """
    path = Path(path)
    # In the folder of the file: a rename is atomic only within one file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):  # a full disk names no file, and the temporary one is none to name
            error.filename, error.filename2 = str(path), None
        raise
    # The rename itself must survive a power cut.
    with contextlib.suppress(OSError):
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def write_json(path: PathLike, value: Any, mode: int = 0o644) -> None:
    """Write plain values as JSON for people to read, in one move; readable by all unless `mode` says less."""
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode(), mode)


def schema_file(data: PathLike) -> Path:
    """Where the schema of a table is looked for.

    >>> str(schema_file("people.csv.gz"))
    'people.schema.toml'
    """
    path = Path(data)
    path = path.with_suffix("") if path.suffix == ".gz" else path
    return path.parent / f"{path.stem}.schema.toml"  # also of a folder, which the reader refuses in words
