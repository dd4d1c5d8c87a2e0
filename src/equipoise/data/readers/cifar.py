"""CIFAR-10 in its binary layout: ``cifar-10-batches-bin/data_batch_1.bin`` and so on.

A record is a label byte and 3,072 pixel bytes, channel by channel. A. Krizhevsky, "Learning multiple layers
of features from tiny images", University of Toronto, 2009. Images are standardised one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise._files import PathLike
from equipoise.data.readers.files import DataFileError, MissingDataError, find_file, read_bytes
from equipoise.data.readers.images import standardise_each
from equipoise.data.records import Records

Arrays = tuple[NDArray[np.uint8], NDArray[np.int64]]
PIXELS = 3 * 32 * 32
CIFAR10_FILES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}


def read_cifar_binary(path: PathLike, num_classes: int = 10) -> Arrays:
    """Images uint8 ``[n, 3, 32, 32]`` and labels int64 ``[n]`` of a file.

    Args:
        path: of the file.
        num_classes: with 100 a coarse label stands before the label.

    Raises:
        MissingDataError, DataFileError: no such file, or its size is no multiple of a record's.
    """
    label_bytes = 2 if num_classes == 100 else 1
    content = np.frombuffer(read_bytes(path), np.uint8)
    size = label_bytes + PIXELS
    if len(content) == 0 or len(content) % size:
        raise DataFileError(
            f"The file {str(path)!r} has {len(content)} bytes, no multiple of the {size} that a record of "
            f"CIFAR-{num_classes} takes: it is truncated or of another layout. Fetch it again."
        )
    rows = content.reshape(-1, size)
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1].astype(np.int64)


def cifar_records(parts: Sequence[Arrays], num_classes: int) -> Records:
    """The records of several files, images standardised one by one (float32)."""
    images, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Records(
        {"input": standardise_each(torch.from_numpy(images)), "label": torch.from_numpy(labels)},
        num_classes=num_classes,
    )


def load_cifar(folder: PathLike, part: str) -> Records:
    """The ``train`` or ``test`` part of CIFAR-10, in ``folder``, ``folder/cifar10`` or the archive's folder.

    Raises:
        MissingDataError, DataFileError: a file is missing or damaged.
    """
    places = ["cifar10/cifar-10-batches-bin", "cifar10", "cifar-10-batches-bin"]
    try:
        paths = [find_file(folder, name, subfolders=places) for name in CIFAR10_FILES[part]]
    except MissingDataError as error:
        raise MissingDataError(f"{error} It belongs to the binary version, cifar-10-binary.tar.gz.") from None
    return cifar_records([read_cifar_binary(path) for path in paths], 10)
