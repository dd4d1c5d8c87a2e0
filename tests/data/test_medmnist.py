from pathlib import Path

import numpy as np
import pytest

from equipoise.data.readers.files import DataFileError
from equipoise.data.readers.medmnist import load_medmnist


def write(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    folder.mkdir(exist_ok=True)
    np.savez(folder / "toy.npz", train_images=images, train_labels=labels)


@pytest.mark.parametrize(("shape", "expected"), [((3, 4, 4), (3, 1, 4, 4)), ((3, 4, 5, 3), (3, 3, 4, 5))])
@pytest.mark.parametrize("place", ["", "toy", "medmnist"])
def test_grey_and_colour(
    tmp_path: Path, shape: tuple[int, ...], expected: tuple[int, ...], place: str
) -> None:
    images = np.random.RandomState(0).randint(0, 256, shape).astype(np.uint8)
    write(tmp_path / place, images, np.array([[1], [0], [1]], np.uint8))
    records = load_medmnist(tmp_path, "train", name="toy", num_classes=2)
    x = records.fields["input"]
    assert tuple(x.shape) == expected
    assert records.fields["label"].tolist() == [1, 0, 1]
    pixel = images[1, 2, 3] if len(shape) == 3 else images[1, 2, 3, 0]
    standard = (pixel - images[1].mean()) / images[1].std()
    assert x[1, 0, 2, 3].item() == pytest.approx(standard, abs=1e-4)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((2, 4, 4), np.float32), np.zeros((2, 1), np.uint8), "uint8"),
        (np.zeros((2, 4, 4, 4, 3), np.uint8), np.zeros((2, 1), np.uint8), "expected"),
        (np.zeros((2, 4, 4), np.uint8), np.zeros((2, 3), np.uint8), "several labels"),
        (np.zeros((2, 4, 4), np.uint8), np.zeros((3, 1), np.uint8), "different numbers"),
        (np.zeros((2, 4, 4), np.uint8), np.full((2, 1), 2, np.uint8), "outside 0 .. 1"),
        (np.array([{}, {}], dtype=object), np.zeros((2, 1), np.uint8), "refused"),
    ],
)
def test_other_forms_are_refused(
    tmp_path: Path, images: np.ndarray, labels: np.ndarray, message: str
) -> None:
    write(tmp_path, images, labels)
    with pytest.raises(DataFileError, match=message):
        load_medmnist(tmp_path, "train", name="toy", num_classes=2)
    with pytest.raises(ValueError, match="part="):
        load_medmnist(tmp_path, "dev", name="toy", num_classes=2)
