"""Shards give every pixel back, refuse damage, and unpack to the published files."""

import hashlib
import lzma
from pathlib import Path

import numpy as np
import pytest

from equipoise.data.readers.files import DataFileError
from reproduction.data.cifar_shards import decode_images, read_shard


def pictures(n: int, seed: int = 0, size: int = 32) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, (n, 3, size, size)).astype(np.uint8)


def write_shard(path: Path, images: np.ndarray, labels: list[int], index: list[int]) -> dict[str, np.ndarray]:
    arrays = {
        "labels": np.array(labels, np.uint8),
        "index": np.array(index, np.int32),
        "residual": np.frombuffer(encode(images), np.uint8),
        "sha256": np.array(hashlib.sha256(images.tobytes()).hexdigest()),
    }
    np.savez(path, **arrays)
    return arrays


def encode(images: np.ndarray) -> bytes:
    """The shards' coding, written down pixel by pixel from its description."""
    n, _, h, w = images.shape
    x = images.astype(int)
    planes = [x[:, 0] - x[:, 1], x[:, 1], x[:, 2] - x[:, 1]]
    out = bytearray()
    for plane in planes:
        for image in range(n):
            for i in range(h):
                for k in range(w):
                    p = plane[image]
                    if i and k:
                        a, b, c = p[i, k - 1], p[i - 1, k], p[i - 1, k - 1]
                        guess = min(a, b) if c >= max(a, b) else max(a, b) if c <= min(a, b) else a + b - c
                    else:
                        guess = p[i, k - 1] if k else p[i - 1, k] if i else 0
                    r = (p[i, k] - guess) % 256
                    out.append(2 * r if r < 128 else 2 * (255 - r) + 1)
    return lzma.compress(bytes(out), format=lzma.FORMAT_XZ)


def test_shards_round_trip(tmp_path: Path) -> None:
    smooth = (np.indices((2, 3, 6, 6)).sum(0) * 9 % 256).astype(np.uint8)
    for images in (pictures(3, size=6), smooth, np.full((1, 3, 6, 6), 255, np.uint8)):
        assert np.array_equal(decode_images(encode(images), len(images), 6), images)
    images = pictures(3)
    path = tmp_path / "train-00.npz"
    arrays = write_shard(path, images, [4, 0, 9], [2, 0, 1])
    assert np.array_equal(read_shard(path)[0], images)
    np.savez(path, **(arrays | {"sha256": np.array("0" * 64)}))
    with pytest.raises(DataFileError, match="checksum"):
        read_shard(path)
    np.savez(path, **(arrays | {"residual": arrays["residual"][:-40]}))
    with pytest.raises(DataFileError, match="damaged"):
        read_shard(path)
