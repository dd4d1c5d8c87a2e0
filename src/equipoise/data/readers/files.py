"""Finding and opening data files, plain or gzip, with errors that say what is expected where."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

from equipoise._files import PathLike

__all__ = ["DataFileError", "MissingDataError", "find_file", "read_bytes", "read_text"]


class DataFileError(ValueError):
    """The data cannot be used as they are: a corrupt file, a label out of range, a NaN."""


class MissingDataError(DataFileError, FileNotFoundError):
    """A data file or folder is not where it is expected."""

    def __str__(self) -> str:
        # OSError's own __str__ would print the arguments as a tuple when there are two of them
        return str(self.args[0]) if self.args else ""


def find_file(folder: PathLike, name: str, *, subfolders: Sequence[str] = ()) -> Path:
    """The path of a file called ``name`` or ``name.gz``, in one of ``subfolders`` of ``folder`` or in
    ``folder`` itself.

    Raises:
        MissingDataError: there is no such file; the message lists every place that was looked at.

    >>> import tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "points.csv.gz").write_bytes(b"")
    >>> find_file(folder, "points.csv", subfolders=["points"]).name
    'points.csv.gz'
    """
    root = Path(folder)
    if not root.is_dir():
        raise MissingDataError(
            f"folder={str(root)!r} is not a folder. Create it and put the file {name!r} (or "
            f"{name + '.gz'!r}) there, or pass the folder that holds it."
        )
    looked_at: list[str] = []
    for place in [root / sub for sub in subfolders] + [root]:
        for candidate in (place / name, place / f"{name}.gz"):
            if candidate.is_file():
                return candidate
            looked_at.append(str(candidate))
    raise MissingDataError(
        f"The file {name!r} is missing from folder={str(root)!r}. Put it at one of: {', '.join(looked_at)}."
    )


def read_bytes(path: PathLike) -> bytes:
    """The content of a file; a name that ends in ``.gz`` is unpacked.

    Raises:
        MissingDataError: no such file.
        DataFileError: the gzip stream is cut short or damaged.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise MissingDataError(f"The file {str(path)!r} does not exist. Check the path.") from None
    if path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except EOFError:
        raise DataFileError(
            f"The gzip file {str(path)!r} is truncated: it ends before its content does. Fetch it again."
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataFileError(f"The gzip file {str(path)!r} is corrupt ({error}). Fetch it again.") from None


def read_text(path: PathLike) -> str:
    """The content of a UTF-8 text file, plain or gzip; a leading byte order mark is dropped.

    Raises:
        MissingDataError, DataFileError: as :func:`read_bytes`, and if the content is not UTF-8.
    """
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataFileError(
            f"The file {str(path)!r} is not UTF-8 text (byte {error.start}: {error.reason}). Convert it to "
            "UTF-8."
        ) from None
