"""The IDX format of MNIST and its kin, plain or gzip.

A file is: two zero bytes, one byte for the type of the values, one for the number d of dimensions, d
big-endian 32-bit sizes, then the values, big-endian, last index fastest (Y. LeCun, C. Cortes, C. Burges, "The
MNIST database").
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

__all__ = ["IDX_FILES", "load_idx_pair", "read_idx"]


_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def read_idx(path: PathLike) -> Tensor:
    """The array in an IDX file (``.gz`` is unpacked), with the file's own type and shape.

    Raises:
        MissingDataError: no such file.
        DataFileError: not an IDX file, truncated, or longer than its header says.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "two-idx1-ubyte"
    >>> _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 7]))
    >>> read_idx(path).tolist()
    [5, 7]
    """
    content = read_bytes(path)
    if len(content) < 4:
        raise DataFileError(
            f"The file {str(path)!r} is truncated: {len(content)} bytes cannot hold an IDX header."
        )
    zero, kind, dimensions = struct.unpack(">HBB", content[:4])
    if zero != 0 or kind not in _TYPES or dimensions == 0:
        raise DataFileError(
            f"The file {str(path)!r} is not an IDX file: it starts with {content[:4].hex(' ')} instead of 00 "
            "00, a known type (08, 09, 0b, 0c, 0d, 0e) and a number of dimensions. Check that the right file "
            "is in place."
        )
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise DataFileError(f"The file {str(path)!r} is truncated within its header. Fetch it again.")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    dtype = np.dtype(_TYPES[kind])
    expected = header + prod(shape) * dtype.itemsize
    if len(content) != expected:
        state = "truncated" if len(content) < expected else "too long"
        raise DataFileError(
            f"The file {str(path)!r} is {state}: its header announces {list(shape)} values, {expected} bytes "
            f"in all, but there are {len(content)}. Fetch it again."
        )
    values = np.frombuffer(content, dtype=dtype, offset=header).reshape(shape)
    return torch.from_numpy(values.astype(dtype.newbyteorder("=")))


def load_idx_pair(folder: PathLike, part: str, *, name: str, num_classes: int = 10) -> Records:
    """Images ``[n, 1, h, w]``, standardised one by one (float32), and labels of the ``train`` or ``test``
    part.

    The four standard file names are looked for in ``folder/name`` and in ``folder``, plain and with ``.gz``.

    Raises:
        MissingDataError, DataFileError: as :func:`read_idx`, and if images and labels differ in number or
            form.
    """
    if part not in IDX_FILES:
        raise ValueError(f"part={part!r} must be 'train' or 'test'.")
    image_path, label_path = (find_file(folder, file, subfolders=[name]) for file in IDX_FILES[part])
    images, labels = read_idx(image_path), read_idx(label_path)
    if images.ndim != 3 or labels.ndim != 1:
        raise DataFileError(
            f"{str(image_path)!r} has {images.ndim} dimensions and {str(label_path)!r} has {labels.ndim}; 3 "
            "and 1 are expected. Were the files exchanged?"
        )
    if len(images) != len(labels):
        raise DataFileError(
            f"{str(image_path)!r} holds {len(images)} images, {str(label_path)!r} {len(labels)} labels. They "
            "must belong together: fetch both again."
        )
    return Records(
        {"input": standardise_each(images.unsqueeze(1)), "label": labels.long()}, num_classes=num_classes
    )
