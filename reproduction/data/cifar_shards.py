"""Lossless shards of 32 x 32 colour images, two thirds of the size of the published archives.

A shard is an uncompressed npz with ``labels`` uint8 [n], ``index`` int32 [n] (the position in the published
order), ``residual`` uint8 (an xz stream) and ``sha256`` of the decoded uint8 array [n, 3, 32, 32]. The stream
holds, channel by channel and image by image, prediction residuals of the planes R - G, G, B - G. A pixel is
predicted from its left (a), upper (b) and upper left (c) neighbour by the median edge detector of LOCO-I (M.
Weinberger et al., IEEE TIP 9, 2000),

    prediction = min(a, b) if c >= max(a, b);  max(a, b) if c <= min(a, b);  a + b - c otherwise

(the first row from the left, the first column from above, the first pixel from 0); the residual is kept
modulo 256 and
folded: 0, -1, 1, -2, 2, ... are written as 0, 1, 2, 3, 4, ... A value is then the only one with that residual
that puts its channel into 0 .. 255.
"""

from __future__ import annotations

import hashlib
import lzma
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise._files import PathLike
from equipoise.data.readers.files import DataFileError, MissingDataError
from reproduction.data.npz import read_npz

__all__ = ["decode_images", "read_shard", "unpack_cifar10"]


def read_shard(path: PathLike) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Images uint8 ``[n, 3, 32, 32]``, labels ``[n]`` and positions ``[n]`` (both int64) of one shard.

    Raises:
        MissingDataError, DataFileError: no such file, or a damaged one.
    """
    arrays = read_npz(path, ("labels", "index", "residual", "sha256"))
    labels, index = arrays["labels"].astype(np.int64), arrays["index"].astype(np.int64)
    try:
        images = decode_images(arrays["residual"].tobytes(), len(labels))
    except (lzma.LZMAError, EOFError, ValueError) as error:
        raise DataFileError(f"The shard {str(path)!r} is damaged ({error}). Fetch it again.") from None
    if hashlib.sha256(images.tobytes()).hexdigest() != str(arrays["sha256"]) or len(index) != len(labels):
        raise DataFileError(f"The shard {str(path)!r} is damaged: its checksum does not fit. Fetch it again.")
    return images, labels, index


def unpack_cifar10(folder: PathLike, target: PathLike) -> Path:
    """Write the shards of CIFAR-10 as the published binary files, byte for byte, for `--data cifar10`.

    Args:
        folder: with ``train-00.npz`` ... and ``test-00.npz`` ..., or with a folder ``cifar10`` that has them.
        target: where ``cifar-10-batches-bin`` is made.

    Returns:
        The folder that was made.

    Raises:
        MissingDataError, DataFileError: no shards, or a damaged one.
    """
    source = next(
        (place for place in (Path(folder), Path(folder) / "cifar10") if any(place.glob("*-00.npz"))), None
    )
    if source is None:
        raise MissingDataError(f"folder={str(folder)!r} holds no shards train-00.npz ..., test-00.npz ...")
    made = Path(target) / "cifar-10-batches-bin"
    made.mkdir(parents=True, exist_ok=True)
    for part, names in (("train", [f"data_batch_{i}" for i in range(1, 6)]), ("test", ["test_batch"])):
        shards = [read_shard(path) for path in sorted(source.glob(f"{part}-[0-9][0-9].npz"))]
        if not shards:
            raise MissingDataError(f"folder={str(source)!r} holds no {part} shards.")
        images, labels, index = (np.concatenate(arrays) for arrays in zip(*shards, strict=True))
        order = np.argsort(index, kind="stable")
        rows = np.hstack([labels[order, None].astype(np.uint8), images[order].reshape(len(order), -1)])
        for name, batch in zip(names, np.array_split(rows, len(names)), strict=True):
            (made / f"{name}.bin").write_bytes(batch.tobytes())
    return made


def decode_images(stream: bytes, n: int, size: int = 32) -> NDArray[np.uint8]:
    """The uint8 images ``[n, 3, size, size]`` in an xz stream of folded residuals.

    Raises:
        ValueError: the stream holds another number of pixels.
        lzma.LZMAError, EOFError: it is no complete xz stream.
    """
    folded = np.frombuffer(lzma.decompress(stream, format=lzma.FORMAT_XZ), np.uint8).astype(np.int16)
    residual = np.where(folded & 1, -((folded + 1) >> 1), folded >> 1).reshape(3, n, size, size)
    red, green, blue = (np.ascontiguousarray(plane.transpose(1, 2, 0)) for plane in residual)
    images = np.empty((n, 3, size, size), np.uint8)
    g = _unpredicted(green, None)
    images[:, 1] = g.transpose(2, 0, 1)
    for channel, plane in ((0, red), (2, blue)):
        images[:, channel] = (_unpredicted(plane, g) + g).transpose(2, 0, 1)
    return images


def _unpredicted(residual: NDArray[Any], green: NDArray[np.int16] | None) -> NDArray[np.int16]:
    """Values of a plane, int16 ``[h, w, n]``: all images at once, pixel by pixel in reading order.

    For a difference plane ``green`` is the plane it was taken from; the sum of both lies in 0 .. 255.
    """
    h, w, n = residual.shape
    values = np.empty((h, w, n), np.int16)
    for i in range(h):
        for k in range(w):
            if i and k:
                a, b, c = values[i, k - 1], values[i - 1, k], values[i - 1, k - 1]
                # the median of a, b and a + b - c is the same rule without cases
                predicted = np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), a + b - c))
            elif i:
                predicted = values[i - 1, k]
            elif k:
                predicted = values[i, k - 1]
            else:
                predicted = np.zeros(n, np.int16)
            shift = 0 if green is None else green[i, k]
            values[i, k] = ((predicted + residual[i, k] + shift) & 255) - shift
    return values
