from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.data.readers.cifar import load_cifar, read_cifar_binary
from equipoise.data.readers.files import DataFileError, MissingDataError
from equipoise.data.readers.images import standardise_each


def write_train(folder: Path) -> tuple[np.ndarray, list[int]]:
    folder.mkdir(parents=True, exist_ok=True)
    images = np.random.RandomState(0).randint(0, 256, (10, 3, 32, 32)).astype(np.uint8)
    for i in range(5):
        content = b"".join(bytes([label]) + images[label].tobytes() for label in (2 * i, 2 * i + 1))
        (folder / f"data_batch_{i + 1}.bin").write_bytes(content)
    return images, list(range(10))


@pytest.mark.parametrize("place", ["", "cifar10", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"])
def test_the_binary_layout_in_every_place(tmp_path, place: str):
    images, labels = write_train(tmp_path / place)
    records = load_cifar(tmp_path, "train")
    assert records.fields["label"].tolist() == labels
    assert torch.equal(records.fields["input"], standardise_each(torch.from_numpy(images)))


def test_damaged_files(tmp_path):
    write_train(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataFileError, match="truncated"):
        load_cifar(tmp_path, "train")
    path.unlink()
    with pytest.raises(MissingDataError, match=r"data_batch_3\.bin.*cifar-10-binary"):
        load_cifar(tmp_path, "train")
    path.write_bytes(b"")
    with pytest.raises(DataFileError, match="0 bytes"):
        read_cifar_binary(path)
