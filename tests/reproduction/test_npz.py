import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from equipoise.data.readers.files import DataFileError
from reproduction.data.npz import read_npz


class Runs:
    """Pickles to a call of ``os.mkdir``: reading it in earnest would leave a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_npz_with_pickled_objects_is_refused(tmp_path: Path) -> None:
    trap, path = tmp_path / "trap", tmp_path / "x.npz"
    np.savez(path, a=np.array([Runs(trap)], dtype=object))
    with pytest.raises(DataFileError, match="refused"):
        read_npz(path, ["a"])
    path.write_bytes(pickle.dumps(Runs(trap)))
    with pytest.raises(DataFileError, match="refused"):
        read_npz(path, ["a"])
    assert not trap.exists()
