"""Shards give every pixel back and refuse damage, pickles are refused, long tails have their counts."""

from __future__ import annotations

import hashlib
import itertools
import lzma
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.data import Records
from equipoise.data.readers.files import DataFileError
from reproduction.data.cifar_shards import decode_images, read_shard
from reproduction.data.imbalance import imbalance_counts, imbalanced
from reproduction.data.npz import read_npz


def pictures(n: int, seed: int = 0, size: int = 32) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, (n, 3, size, size)).astype(np.uint8)


def encode(images):
    """The shards' coding, written down pixel by pixel from its description."""
    x, out = images.astype(int), bytearray()
    for plane in (x[:, 0] - x[:, 1], x[:, 1], x[:, 2] - x[:, 1]):
        for p, i, k in itertools.product(plane, *map(range, plane.shape[1:])):
            guess = p[i, k - 1] if k else p[i - 1, k] if i else 0
            if i and k:
                a, b, c = p[i, k - 1], p[i - 1, k], p[i - 1, k - 1]
                guess = min(a, b) if c >= max(a, b) else max(a, b) if c <= min(a, b) else a + b - c
            r = (p[i, k] - guess) % 256
            out.append(2 * r if r < 128 else 2 * (255 - r) + 1)
    return lzma.compress(bytes(out), format=lzma.FORMAT_XZ)


def test_shards_round_trip(tmp_path):
    smooth = (np.indices((2, 3, 6, 6)).sum(0) * 9 % 256).astype(np.uint8)
    for images in (pictures(3, size=6), smooth, np.full((1, 3, 6, 6), 255, np.uint8)):
        assert np.array_equal(decode_images(encode(images), len(images), 6), images)
    images, path = pictures(3), tmp_path / "train-00.npz"
    arrays = {
        "labels": np.array([4, 0, 9], np.uint8), "index": np.array([2, 0, 1], np.int32),
        "residual": np.frombuffer(encode(images), np.uint8),
        "sha256": np.array(hashlib.sha256(images.tobytes()).hexdigest()),
    }  # fmt: skip
    np.savez(path, **arrays)
    assert np.array_equal(read_shard(path)[0], images)
    for wrong, said in (
        ({"sha256": np.array("0" * 64)}, "checksum"),
        ({"residual": arrays["residual"][:-40]}, "damaged"),
    ):
        np.savez(path, **(arrays | wrong))
        with pytest.raises(DataFileError, match=said):
            read_shard(path)


class Runs:
    """Pickles to a call of ``os.mkdir``: reading it in earnest would leave a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
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


def test_the_published_counts():
    assert imbalance_counts(5000) == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    assert imbalance_counts(946.9) == [946, 567, 340, 204, 122, 73, 43, 26, 15, 9]


def test_a_selection_has_these_counts_and_is_the_same_again():
    label = torch.randint(10, (9469,), generator=torch.Generator().manual_seed(0))
    label[:9000] = torch.arange(9000) % 10
    whole = Records({"input": torch.arange(9469.0)[:, None], "label": label}, num_classes=10)
    first, again, other = (imbalanced(whole, 800, seed=seed) for seed in (0, 0, 1))
    batch = first[torch.arange(len(first))]
    assert batch["label"].bincount().tolist() == imbalance_counts(800)
    assert torch.equal(label[batch["input"][:, 0].long()], batch["label"])
    assert len(batch["input"].unique()) == len(first)
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    assert len(imbalanced(whole)) == sum(imbalance_counts(946.9))
