"""Archives of numpy arrays (npz), read without pickles: an object array could run code, and is refused."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise._files import PathLike
from equipoise.data.readers.files import DataFileError, MissingDataError

__all__ = ["read_npz"]


def read_npz(path: PathLike, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """The arrays called ``names`` in an npz file.

    Raises:
        MissingDataError: no such file.
        DataFileError: no npz file, a damaged one, one that lacks an array, or one that holds pickled objects.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "x.npz"
    >>> np.savez(path, a=np.arange(3), b=np.zeros(2))
    >>> read_npz(path, ["a"])["a"].tolist()
    [0, 1, 2]
    """
    if not Path(path).is_file():
        raise MissingDataError(f"The file {str(path)!r} does not exist. Check the path.")
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DataFileError(
                f"The file {str(path)!r} is a single array, not an npz archive. Save it with numpy.savez."
            )
        with archive:
            missing = [name for name in names if name not in archive.files]
            if missing:
                raise DataFileError(
                    f"The file {str(path)!r} lacks the arrays {missing}; it holds {archive.files}."
                )
            return {name: archive[name] for name in names}
    except DataFileError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise DataFileError(
            f"The file {str(path)!r} is truncated or no npz archive ({error}). Fetch it again."
        ) from None
    except ValueError as error:
        if "pickle" in str(error) or "Object arrays" in str(error):
            raise DataFileError(
                f"The file {str(path)!r} holds pickled objects or is no npz archive. It was refused, since a "
                "pickle can run any code. Save plain arrays."
            ) from None
        raise DataFileError(f"The file {str(path)!r} is damaged ({error}). Fetch it again.") from None
