"""The readers of the bench: the sets and layouts that the package does not know."""

import os
import pickle

import numpy as np
import pytest
import torch

from benchmarks import data
from equipoise.data import DataFileError


def test_libsvm(tmp_path):
    path = tmp_path / "rows"
    path.write_text("-1 1:0.5 4:-2 \n+1\n\n+1 2:1e1 # remark\n")
    records = data.read_libsvm(path, 4)
    assert records.fields["input"].tolist() == [[0.5, 0, 0, -2], [0, 0, 0, 0], [0, 10, 0, 0]]
    assert records.fields["label"].tolist() == [0, 1, 1]
    path.write_text("2 1:1\n")
    with pytest.raises(DataFileError, match="label"):
        data.read_libsvm(path, 4)


def pictures(n: int) -> np.ndarray:
    return np.random.RandomState(0).randint(0, 256, (n, 3, 32, 32)).astype(np.uint8)


def test_cifar100_takes_the_fine_labels_of_either_layout(tmp_path):
    images = pictures(2)
    rows = [bytes([7, label]) + image.tobytes() for label, image in zip((99, 42), images, strict=True)]
    (tmp_path / "train.bin").write_bytes(b"".join(rows))
    content = {b"data": images.reshape(2, -1), b"fine_labels": [3, 98], b"coarse_labels": [0, 1]}
    (tmp_path / "test").write_bytes(pickle.dumps(content))
    found = data.cifar100(tmp_path)
    assert found.train.fields["label"].tolist() == [99, 42]
    assert found.test.fields["label"].tolist() == [3, 98]
    assert torch.equal(found.train.fields["input"], found.test.fields["input"])


def test_python_2_pickle_with_byte_strings_is_read(tmp_path):
    """The published files: protocol 2, str keys and buffers of Python 2, the old module path of numpy."""
    raw = pictures(1).tobytes()
    stream = b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03K\x06aU\x04dataq\x04"
    stream += b"cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06K\x00\x85U\x01b\x87Rq\x07"
    stream += b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01\x87Rq\x09"
    stream += b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tbK\x00"
    stream += b"T" + len(raw).to_bytes(4, "little") + raw + b"tbu."
    path = tmp_path / "test_batch"
    path.write_bytes(stream)
    images, labels = data.read_cifar_pickle(path, 10)
    assert images.tobytes() == raw
    assert labels.tolist() == [6]


class Runs:
    """Pickles to a call of `os.mkdir`: reading it in earnest would leave a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_would_run_code_is_refused(tmp_path, protocol):
    trap, path = tmp_path / "trap", tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({b"data": Runs(trap), b"labels": [0]}, protocol=protocol))
    with pytest.raises(DataFileError, match=r"mkdir.*refused"):
        data.read_cifar_pickle(path, 10)
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
def test_other_names_are_refused(tmp_path, stream: bytes):
    path = tmp_path / "x"
    path.write_bytes(stream)
    with pytest.raises(DataFileError, match="refused"):
        data.read_cifar_pickle(path, 10)
