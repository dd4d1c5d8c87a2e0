import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from equipoise.data.readers.files import DataFileError, MissingDataError
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


def test_damaged_npz(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    with pytest.raises(MissingDataError):
        read_npz(path, ["a"])
    np.savez_compressed(path, a=np.arange(1000))
    with pytest.raises(DataFileError, match="lacks the arrays"):
        read_npz(path, ["b"])
    content = path.read_bytes()
    path.write_bytes(content[:-30])
    with pytest.raises(DataFileError, match="truncated"):
        read_npz(path, ["a"])
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(flipped))
    with pytest.raises(DataFileError, match="again"):
        read_npz(path, ["a"])
    begun = bytearray(content)
    begun[30 + len("a.npy") + int.from_bytes(content[28:30], "little")] = 0b111  # no such kind of block
    path.write_bytes(bytes(begun))
    with pytest.raises(DataFileError, match="invalid block type"):
        read_npz(path, ["a"])
    with path.open("wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(DataFileError, match="single array"):
        read_npz(path, ["a"])
