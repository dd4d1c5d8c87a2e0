"""A file of JSON lines that loses nothing: what is about to happen is on disk before it happens.

One line per row. A row is written by one `write` under a file lock and flushed to the operating system, so
that a killed process loses nothing. With `durable=True` it is also synced to the device, which withstands a
loss of power. A last line that is torn (the process died within the write) stands for something that never
happened; the next writer cuts it off. A damaged line elsewhere is an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from equipoise._files import PathLike
from equipoise.privacy.errors import JournalError

_CHUNK = 1 << 20  # bytes that are read at once: a choice between memory and calls


class WriteAheadLog:
    """Rows in memory (path None) or in a file.

    Args:
        path: JSON-lines file; made if missing, together with its folder.
        durable: sync every row to the device before it counts as written.
        read_only: only for reading; the file must exist and is not touched.
        existing: the file must exist: neither it nor its folder is made.

    Example:
        >>> log = WriteAheadLog()
        >>> log.write({"type": "note"})  # its length now
        1
        >>> log.read()
        [{'type': 'note'}]
    """

    def __init__(
        self,
        path: PathLike | None = None,
        durable: bool = False,
        *,
        read_only: bool = False,
        existing: bool = False,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.durable = durable
        self.read_only = read_only
        self._memory: list[dict[str, Any]] = []
        self._descriptor: int | None = None
        self._locks = 0
        if self.path is not None:
            try:
                self._descriptor = _opened(self.path, read_only, existing)
            except (OSError, ValueError) as error:
                made = not (existing or read_only)
                remedy = "give a writable path" if made else "name the journal that the run was booked in"
                raise JournalError(
                    f"the journal {str(self.path)!r} cannot be opened ({error}); nothing can be released "
                    f"without it: {remedy}"
                ) from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the file: reading and writing within are one step for other processes. May be nested."""
        if self._descriptor is None:
            yield
            return
        if self._locks == 0:  # flock does not count: the inner of two would give the lock back
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        self._locks += 1
        try:
            yield
        finally:
            self._locks -= 1
            if self._locks == 0:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    @property
    def length(self) -> int:
        """How much was written whole: bytes of the file, or rows in memory."""
        return len(self._memory) if self._descriptor is None else self._whole_length()

    def read(self, start: int = 0) -> list[dict[str, Any]]:
        """All whole rows; a torn last line is left out.

        Args:
            start: the `length` up to which they are known, to read those that came since.

        Raises:
            JournalError: for a damaged line that is not the last, or if less is there than was known.
        """
        return [row for _, row in self.rows(start)]

    def rows(self, start: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        """As `read`, one by one, so that a long file need not fit in memory.

        Yields:
            The `length` with the row, and the row.
        """
        with self.locked():
            size = len(self._memory) if self._descriptor is None else os.fstat(self._descriptor).st_size
            if size < start:
                raise JournalError(
                    f"the journal {self.path or 'in memory'} was closed, or cut while the run went on: "
                    "charges are lost, and nothing more is released under it. Restore the file from a copy, "
                    "and resume the run"
                )
        if self._descriptor is None:
            yield from enumerate(self._memory[start:], start + 1)
            return
        # A line that has its end was written whole. Damage in it is an edit or a fault of the disk, and what
        # it charged is unknown: to skip it would give privacy away.
        end, torn = start, b""
        while chunk := os.pread(self._descriptor, min(_CHUNK, size - end - len(torn)), end + len(torn)):
            *lines, torn = (torn + chunk).split(b"\n")
            for line in lines:
                try:
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError("not an object")
                except (ValueError, RecursionError) as error:
                    number = 1 + os.pread(self._descriptor, end, 0).count(b"\n")
                    raise JournalError(
                        f"line {number} of {self.path} is damaged ({error}). Charges may be lost, so nothing "
                        "more can be released under it. Restore the file from a copy, or start anew and "
                        "count the old run as spent in full"
                    ) from error
                end += len(line) + 1
                yield end, row

    def write(self, row: dict[str, Any]) -> int:
        """Write a row and flush it; the answer is the `length` with it.

        Raises:
            JournalError: if it cannot be written whole; what it announces must not happen then.
        """
        if self.read_only:
            raise JournalError(f"the journal {self.path} was opened for reading only; nothing was released")
        if self.path is None:
            self._memory.append(json.loads(json.dumps(row)))  # a copy, as it would be read from a file
            return len(self._memory)
        if self._descriptor is None:
            raise JournalError(f"the journal {self.path} was closed; nothing was released: resume the run")
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        try:
            with self.locked():
                # Another process may have written since, or died within a line: what that line announced
                # never happened, and the next line must not run into it.
                end = self._whole_length()
                if os.fstat(self._descriptor).st_size > end:
                    os.ftruncate(self._descriptor, end)
                os.lseek(self._descriptor, end, os.SEEK_SET)
                # One call, and the line's end last: whatever stops it leaves a line without an end.
                written = os.write(self._descriptor, line)
                if written != len(line):  # the disk is full
                    os.ftruncate(self._descriptor, end)
                    raise OSError(f"{written} of {len(line)} bytes written")
                if self.durable:
                    os.fsync(self._descriptor)
                return end + written
        except OSError as error:
            raise JournalError(
                f"the journal {self.path} cannot be written ({error}): nothing was released; free space or "
                "fix the path, then resume the run"
            ) from error

    def sync(self) -> None:
        """Sync what was written to the device: from then on a loss of power cannot undo it.

        Raises:
            JournalError: if the device refuses.
        """
        if self._descriptor is None:
            return
        try:
            # fdatasync, where the system has it, leaves out the time of the last change
            getattr(os, "fdatasync", os.fsync)(self._descriptor)
        except OSError as error:
            raise JournalError(
                f"the journal {self.path} cannot be synced to its device ({error}): nothing that depends on "
                "it was written; free space or fix the path, then resume the run"
            ) from error

    def close(self) -> None:
        """Close the file; its rows stay."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            self._memory = []

    def _whole_length(self) -> int:
        """Length of the file up to the end of its last whole line."""
        assert self._descriptor is not None
        end = os.fstat(self._descriptor).st_size
        while end > 0:
            # From the end, since the file may be long and only its last line can be torn.
            start = max(0, end - 65536)
            found = os.pread(self._descriptor, end - start, start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
        return 0

    def __repr__(self) -> str:
        place = str(self.path) if self.path else "in memory"
        return f"{type(self).__name__}({place}, durable={self.durable})"


def _opened(path: Path, read_only: bool, existing: bool) -> int:
    """A descriptor of the file.

    Raises:
        OSError, ValueError: it cannot be opened, or is no regular file: a pipe would be waited for.
    """
    flags = os.O_RDONLY if read_only else os.O_RDWR
    if not (read_only or existing):
        path.parent.mkdir(parents=True, exist_ok=True)
        flags |= os.O_CREAT
    # O_NONBLOCK: to open a pipe would wait for its other end.
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is no regular file")
    return descriptor
