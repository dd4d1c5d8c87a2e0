"""Finding and opening data files, plain or gzip, with errors that say what is expected where."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

from equipoise._files import PathLike


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
            f"The data folder {str(root)!r} is not a folder. Create it and put the file {name!r} (or "
            f"{name + '.gz'!r}) there, or pass the folder that holds it."
        )
    looked_at: list[str] = []
    for place in [root / sub for sub in subfolders] + [root]:
        for candidate in (place / name, place / f"{name}.gz"):
            if candidate.is_file():
                return candidate
            looked_at.append(str(candidate))
    raise MissingDataError(
        f"The file {name!r} is missing from the data folder {str(root)!r}. Put it at one of: "
        f"{', '.join(looked_at)}."
    )


def is_same(path: PathLike, other: PathLike) -> bool:
    """Whether two names lead to one file or folder, or the other lies in the folder of the first."""
    if not (Path(path).exists() and Path(other).exists()):
        return False
    return Path(other).samefile(path) or Path(path).resolve() in Path(other).resolve().parents


def refuse_same(data: PathLike, test: PathLike | None) -> None:
    """Refuse to evaluate on the private records themselves.

    Raises:
        DataFileError: both are one file or folder, or the test records lie among the private ones.
    """
    if test is not None and is_same(data, test):
        raise DataFileError(
            f"--test is {str(test)!r}, which holds private records of --data {str(data)!r} itself. Scores on "
            "records that were trained on say nothing of others, and are published without noise. Name a "
            "file of other records, or set some aside: --test-share 0.2."
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
