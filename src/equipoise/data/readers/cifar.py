"""CIFAR-10 and CIFAR-100 in their published layouts.

* binary: ``cifar-10-batches-bin/data_batch_1.bin`` ...; a record is a label byte (CIFAR-100: a coarse and a
fine one) and
  3,072 pixel bytes, channel by channel;
* python: ``cifar-10-batches-py/data_batch_1`` ..., pickled dicts of a uint8 array and a list of labels. A
pickle can run
  any code when it is read, so these are read by an unpickler that rebuilds numpy arrays and refuses
  everything else.

A. Krizhevsky, "Learning multiple layers of features from tiny images", University of Toronto, 2009. Images
are standardised one by one.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise._files import PathLike
from equipoise.data.readers.files import DataFileError, MissingDataError, find_file, read_bytes
from equipoise.data.readers.images import standardise_each
from equipoise.data.records import Records

__all__ = ["load_cifar", "read_cifar_binary", "read_cifar_pickle"]


Arrays = tuple[NDArray[np.uint8], NDArray[np.int64]]


_PIXELS = 3 * 32 * 32


def read_cifar_binary(path: PathLike, num_classes: int) -> Arrays:
    """Images uint8 ``[n, 3, 32, 32]`` and (fine) labels int64 ``[n]`` of a file in the binary layout.

    Raises:
        MissingDataError, DataFileError: no such file, or its size is no multiple of a record's.
    """
    label_bytes = 2 if num_classes == 100 else 1
    content = np.frombuffer(read_bytes(path), np.uint8)
    size = label_bytes + _PIXELS
    if len(content) == 0 or len(content) % size:
        raise DataFileError(
            f"The file {str(path)!r} has {len(content)} bytes, no multiple of the {size} that a record of "
            f"CIFAR-{num_classes} takes: it is truncated or of another layout. Fetch it again."
        )
    rows = content.reshape(-1, size)
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1].astype(np.int64)


class _ArrayUnpickler(pickle.Unpickler):
    """Rebuilds plain numpy arrays, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """The few names that a pickled array consists of."""
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return _empty_array
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            return _latin1_bytes
        raise DataFileError(
            f"the pickle asks for {module}.{name}, which is not part of a numpy array. It was refused, since "
            "a pickle can run any code. Fetch the file from its publisher, or use the binary layout."
        )


def _empty_array(kind: type, shape: tuple[int, ...], code: bytes | str) -> NDArray[Any]:
    if kind is not np.ndarray or tuple(shape) != (0,):
        raise DataFileError("the pickle holds another object in place of a numpy array. It was refused.")
    return np.ndarray((0,), np.int8)


def _latin1_bytes(text: str, encoding: str) -> bytes:
    # how Python 3 writes bytes in the old protocols
    if encoding != "latin1":
        raise DataFileError(f"the pickle asks for the text encoding {encoding!r}. It was refused.")
    return text.encode("latin1")


def read_cifar_pickle(path: PathLike, num_classes: int) -> Arrays:
    """Images uint8 ``[n, 3, 32, 32]`` and (fine) labels int64 ``[n]`` of a file in the python layout.

    Raises:
        MissingDataError, DataFileError: no such file, a damaged one, or one that holds more than arrays and
        labels.
    """
    content = read_bytes(path)
    try:
        batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    except DataFileError as error:
        raise DataFileError(f"The file {str(path)!r} was not read: {error}") from None
    except Exception as error:  # a damaged pickle can fail in almost any way
        raise DataFileError(
            f"The file {str(path)!r} is no readable pickle ({error}). Fetch it again."
        ) from None
    wanted = b"fine_labels" if num_classes == 100 else b"labels"
    entries = (
        {key.encode() if isinstance(key, str) else key: value for key, value in batch.items()}
        if isinstance(batch, dict)
        else {}
    )
    data, labels = entries.get(b"data"), entries.get(wanted)
    if (
        not isinstance(data, np.ndarray)
        or data.dtype != np.uint8
        or data.ndim != 2
        or data.shape[1] != _PIXELS
        or not isinstance(labels, list)
        or len(labels) != len(data)
        or not all(isinstance(label, int) for label in labels)
    ):
        raise DataFileError(
            f"The file {str(path)!r} does not hold 'data' (uint8 [n, {_PIXELS}]) and {wanted.decode()!r} (n "
            f"numbers) of CIFAR-{num_classes}. Check that it is a batch file of that set."
        )
    return data.reshape(-1, 3, 32, 32), np.array(labels, np.int64)


def load_cifar(folder: PathLike, part: str, *, num_classes: int = 10) -> Records:
    """The ``train`` or ``test`` part, images ``[n, 3, 32, 32]`` standardised one by one (float32).

    The layouts are looked for in this order: binary, python; in ``folder``, in ``folder/cifar10`` (or
    ``cifar100``), and in the folder that the published archives unpack to.

    Raises:
        MissingDataError, DataFileError: no layout is found, a file of it is missing, or one is damaged.
    """
    if part not in ("train", "test") or num_classes not in (10, 100):
        raise ValueError(
            f"part={part!r} must be 'train' or 'test', and num_classes={num_classes} must be 10 or 100."
        )
    if num_classes == 10:
        plain = [f"data_batch_{i}" for i in range(1, 6)] if part == "train" else ["test_batch"]
        archives = ("cifar-10-batches-bin", "cifar-10-batches-py")
    else:
        plain, archives = [part], ("cifar-100-binary", "cifar-100-python")
    set_name = f"cifar{num_classes}"
    subfolders = [f"{set_name}/{archive}" for archive in archives] + [set_name, *archives]
    layouts: list[tuple[list[str], Callable[[PathLike, int], Arrays]]] = [
        ([f"{name}.bin" for name in plain], read_cifar_binary),
        (plain, read_cifar_pickle),
    ]
    for names, read in layouts:
        try:
            find_file(folder, names[0], subfolders=subfolders)
        except MissingDataError:
            continue
        paths = [find_file(folder, name, subfolders=subfolders) for name in names]
        return _records([read(path, num_classes) for path in paths], num_classes)
    state = "holds no" if os.path.isdir(folder) else "is not a folder; it should hold the"
    raise MissingDataError(
        f"The data folder {str(folder)!r} {state} CIFAR-{num_classes} {part} data. Put there "
        f"{', '.join(n + '.bin' for n in plain)} (binary layout) or {', '.join(plain)} (python layout), in "
        f"the folder itself or in one of: {', '.join(subfolders)}."
    )


def _records(parts: list[Arrays], num_classes: int) -> Records:
    images = np.concatenate([images for images, _ in parts])
    labels = np.concatenate([labels for _, labels in parts])
    return Records(
        {"input": standardise_each(torch.from_numpy(images)), "label": torch.from_numpy(labels)},
        num_classes=num_classes,
    )
