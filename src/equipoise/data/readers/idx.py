"""The IDX format of MNIST and its kin, plain or gzip.

A file is: two zero bytes, one byte for the type of the values (8: bytes), one for the number d of dimensions,
d big-endian 32-bit sizes, then the values, last index fastest (Y. LeCun, C. Cortes, C. Burges, "The MNIST
database").
"""

from __future__ import annotations

import struct
from math import prod

import numpy as np
import torch
from torch import Tensor

from equipoise._files import PathLike
from equipoise.data.readers.files import DataFileError, find_file, read_bytes
from equipoise.data.readers.images import standardise_each
from equipoise.data.records import Records

IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def read_idx(path: PathLike, dimensions: int) -> Tensor:
    """The bytes in an IDX file (``.gz`` is unpacked), uint8 with the file's own shape.

    Raises:
        MissingDataError: no such file.
        DataFileError: not an IDX file of bytes with that many dimensions, truncated, or longer than its
            header says.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "two-idx1-ubyte"
    >>> _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 7]))
    >>> read_idx(path, 1).tolist()
    [5, 7]
    """
    content, header = read_bytes(path), 4 + 4 * dimensions
    start = bytes([0, 0, 8, dimensions])
    if content[:4] != start or len(content) < header:
        raise DataFileError(
            f"The file {str(path)!r} is not an IDX file of bytes in {dimensions} dimensions: it starts with "
            f"{content[:4].hex(' ')} instead of {start.hex(' ')}, or is truncated within its header. Check "
            "that the right file is in place, and that images and labels were not exchanged."
        )
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    expected = header + prod(shape)
    if len(content) != expected:
        state = "truncated" if len(content) < expected else "too long"
        raise DataFileError(
            f"The file {str(path)!r} is {state}: its header announces {list(shape)} values, {expected} bytes "
            f"in all, but there are {len(content)}. Fetch it again."
        )
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy())


def load_idx_pair(folder: PathLike, part: str, *, name: str) -> Records:
    """Images ``[n, 1, h, w]``, standardised one by one (float32), and labels, 0 to 9, of a part.

    The four standard file names are looked for in ``folder/name`` and in ``folder``, plain and with ``.gz``.

    Args:
        folder: with the files, or with a subfolder that holds them.
        part: ``train`` or ``test``.
        name: of the set, and of the subfolder.

    Raises:
        MissingDataError, DataFileError: as :func:`read_idx`, and if images and labels differ in number.
    """
    images, labels = (
        read_idx(find_file(folder, file, subfolders=[name]), dimensions)
        for file, dimensions in zip(IDX_FILES[part], (3, 1), strict=True)
    )
    return Records({"input": standardise_each(images.unsqueeze(1)), "label": labels.long()}, num_classes=10)
