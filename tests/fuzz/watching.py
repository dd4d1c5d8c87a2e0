"""What an input must never do: run a program, reach the network, unpickle, write outside its folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FORBIDDEN = {
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "socket.connect", "socket.bind",
    "pickle.find_class", "ctypes.dlopen",
}  # fmt: skip
_MOVES = {
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
}  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Harm(BaseException):
    """An input made the library do what no input may; no `except Exception` hides it."""


class _Watch:
    root: Path | None = None
    installed = False


def _inside(path: Any) -> bool:
    if not isinstance(path, str | bytes | os.PathLike):
        return True  # a descriptor: its opening was watched
    assert _Watch.root is not None
    place = Path(os.path.realpath(os.fsdecode(path)))
    return place.is_relative_to(_Watch.root) or place == Path("/dev/null")


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _Watch.root is None:
        return
    if event in _FORBIDDEN:
        raise Harm(f"{event} {arguments!r}")
    if event == "open":
        path, mode, flags = arguments
        writes = (isinstance(mode, str) and any(c in mode for c in "wax+")) or (
            isinstance(flags, int) and bool(flags & _WRITING)
        )
        if writes and not _inside(path):
            raise Harm(f"writes {path!r}")
    elif event in _MOVES and not _inside(arguments[0]):
        raise Harm(f"{event} {arguments!r}")


@contextmanager
def watched(root: Path) -> Iterator[None]:
    """Within, harm raises `Harm`; only below `root` may anything be written."""
    if not _Watch.installed:
        sys.addaudithook(_hook)  # for good: hooks cannot be taken away
        _Watch.installed = True
    before, _Watch.root = _Watch.root, Path(os.path.realpath(root))
    try:
        yield
    finally:
        _Watch.root = before
