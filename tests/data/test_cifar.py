import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from equipoise.data.readers.cifar import load_cifar, read_cifar_binary, read_cifar_pickle
from equipoise.data.readers.files import DataFileError, MissingDataError
from equipoise.data.readers.images import standardise_each
from equipoise.data.readers.npz import read_npz


def pictures(n: int, seed: int = 0, size: int = 32) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, (n, 3, size, size)).astype(np.uint8)


def binary(images: np.ndarray, labels: list[int], coarse: int | None = None) -> bytes:
    rows = []
    for image, label in zip(images, labels, strict=True):
        head = [label] if coarse is None else [coarse, label]
        rows.append(bytes(head) + image.tobytes())
    return b"".join(rows)


def write_train(folder: Path, layout: str) -> tuple[np.ndarray, list[int]]:
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = pictures(10), list(range(10))
    for i in range(5):
        part, numbers = images[2 * i : 2 * i + 2], labels[2 * i : 2 * i + 2]
        if layout == "bin":
            (folder / f"data_batch_{i + 1}.bin").write_bytes(binary(part, numbers))
        else:
            content = {b"data": part.reshape(2, -1), b"labels": numbers}
            (folder / f"data_batch_{i + 1}").write_bytes(pickle.dumps(content, protocol=2))
    return images, labels


@pytest.mark.parametrize("layout", ["bin", "py"])
@pytest.mark.parametrize("place", ["", "cifar10", "cifar-10-batches-{}", "cifar10/cifar-10-batches-{}"])
def test_both_layouts_in_every_place(tmp_path: Path, layout: str, place: str) -> None:
    import torch

    images, labels = write_train(tmp_path / place.format(layout), layout)
    records = load_cifar(tmp_path, "train")
    assert records.fields["label"].tolist() == labels
    assert torch.equal(records.fields["input"], standardise_each(torch.from_numpy(images)))


def test_cifar100_takes_the_fine_labels(tmp_path: Path) -> None:
    images = pictures(2)
    (tmp_path / "train.bin").write_bytes(binary(images, [99, 42], coarse=7))
    assert load_cifar(tmp_path, "train", num_classes=100).fields["label"].tolist() == [99, 42]
    path = tmp_path / "test"
    path.write_bytes(
        pickle.dumps({b"data": images.reshape(2, -1), b"fine_labels": [3, 98], b"coarse_labels": [0, 1]})
    )
    assert load_cifar(tmp_path, "test", num_classes=100).fields["label"].tolist() == [3, 98]


def test_python_2_pickle_with_byte_strings_is_read(tmp_path: Path) -> None:
    """The published files: protocol 2, str keys and buffers of Python 2, the old module path of numpy."""
    raw = pictures(1).tobytes()
    stream = b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03K\x06aU\x04dataq\x04"
    stream += b"cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06K\x00\x85U\x01b\x87Rq\x07"
    stream += b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01\x87Rq\x09"
    stream += b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tbK\x00"
    stream += b"T" + len(raw).to_bytes(4, "little") + raw + b"tbu."
    path = tmp_path / "test_batch"
    path.write_bytes(stream)
    images, labels = read_cifar_pickle(path, 10)
    assert images.tobytes() == raw
    assert labels.tolist() == [6]


class Runs:
    """Pickles to a call of ``os.mkdir``: reading it in earnest would leave a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, protocol: int) -> None:
    trap, path = tmp_path / "trap", tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({b"data": Runs(trap), b"labels": [0]}, protocol=protocol))
    with pytest.raises(DataFileError, match=r"mkdir.*refused"):
        read_cifar_pickle(path, 10)
    assert not trap.exists()


@pytest.mark.parametrize(
    "stream",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cnumpy\nload\n.",
        b"cnumpy.core.multiarray\nfromfile\n.",
        b"c_codecs\nencode\n(Vx\nVrot13\ntR.",
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\ndtype\n(I0\ntS'b'\ntR.",
    ],
)
def test_other_names_are_refused(tmp_path: Path, stream: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(stream)
    with pytest.raises(DataFileError, match="refused"):
        read_cifar_pickle(path, 10)


@pytest.mark.parametrize(
    "content",
    [
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]},
        {b"data": np.zeros((2, 3072), np.float32), b"labels": [0, 1]},
        {b"data": np.zeros((2, 9), np.uint8), b"labels": [0, 1]},
        {b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": [0, 1]},
        [1, 2],
    ],
)
def test_pickles_of_other_content(tmp_path: Path, content: object) -> None:
    path = tmp_path / "x"
    path.write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(DataFileError, match="does not hold"):
        read_cifar_pickle(path, 10)


def test_damaged_files(tmp_path: Path) -> None:
    write_train(tmp_path, "bin")
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataFileError, match="truncated"):
        load_cifar(tmp_path, "train")
    path.unlink()
    with pytest.raises(MissingDataError, match=r"data_batch_3\.bin"):
        load_cifar(tmp_path, "train")
    path.write_bytes(b"")
    with pytest.raises(DataFileError, match="0 bytes"):
        read_cifar_binary(path, 10)
    path = tmp_path / "cut"
    path.write_bytes(pickle.dumps({b"data": pictures(1).reshape(1, -1), b"labels": [0]}, protocol=2)[:1000])
    with pytest.raises(DataFileError, match="no readable pickle"):
        read_cifar_pickle(path, 10)
    with pytest.raises(MissingDataError, match="binary layout"):
        load_cifar(tmp_path, "test")
    with pytest.raises(ValueError, match="num_classes"):
        load_cifar(tmp_path, "test", num_classes=20)


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
