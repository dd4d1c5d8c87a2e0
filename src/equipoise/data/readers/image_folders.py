"""Images in folders: a subfolder for each class, every image brought to one declared size.

The names of the subfolders are the classes. They are public by declaration, as the columns of a table are, so
that a class without an image needs a subfolder, too. The size is declared, never looked for. Each image is
turned upright, resized, and standardised by its own mean and deviation (`standardise_each`): no statistic of
the private images is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise._extras import of_extra
from equipoise._files import PathLike
from equipoise.data.readers.files import DataFileError, MissingDataError, refuse_same
from equipoise.data.readers.images import standardise_each
from equipoise.data.records import DataSet, Records, with_test_records

_ENDINGS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})


def load_images(
    path: PathLike,
    size: str,
    *,
    test: PathLike | None = None,
    test_share: float | None = None,
    population: int,
) -> DataSet:
    """The data set of a folder with a subfolder of images for each class.

    Args:
        path: of the private images.
        size: HEIGHTxWIDTH or HEIGHTxWIDTHxCHANNELS, public.
        test: a folder of the same form to evaluate on; what the evaluation says of it is published.
        test_share: without it, the share of the private images to evaluate on instead of training on them.
        population: the public number of images.

    Raises:
        MissingDataError, DataFileError: no such folder, no classes in it, an image that cannot be read.
    """
    refuse_same(path, test)
    classes = _classes(path)
    judges = None if test is None else _read(test, size, classes, labelled=True)
    rows = _read(path, size, classes, labelled=True)
    train, judges, left = with_test_records(rows, judges, test_share, population)
    schema = {"image_size": size, "classes": list(classes)}
    return _data_set(path, train, judges, left, schema)


def images_for_model(path: PathLike, values: Mapping[str, Any]) -> tuple[DataSet, bool]:
    """The images of a folder as the test records of a data set, by the schema that went with a model.

    Args:
        path: of a folder with a subfolder for each class, or of one with images that nobody sorted.
        values: of the schema.

    Returns:
        The data set, whose training record is made up, and whether the images are sorted into classes.

    Raises:
        DataFileError: the images or the schema cannot be used.
    """
    size, names = str(values.get("image_size")), tuple(map(str, values.get("classes", ())))
    labelled = any(child.is_dir() for child in _folder(path).iterdir())
    test = _read(path, size, names, labelled=labelled)
    blank = Records({name: torch.zeros_like(value[:1]) for name, value in test.fields.items()})
    return _data_set(path, blank, test, 1, {"image_size": size, "classes": list(names)}), labelled


def _data_set(
    path: PathLike, train: Records, test: Records, population: int, schema: dict[str, Any]
) -> DataSet:
    return DataSet(
        name=Path(path).resolve().name,
        train=train,
        test=test,
        population=population,
        num_classes=len(schema["classes"]),
        description=f"images of {schema['image_size']} pixels",
        class_names=tuple(schema["classes"]),
        schema=schema,
    )


def _folder(path: PathLike) -> Path:
    if not Path(path).is_dir():
        raise MissingDataError(f"The folder {str(path)!r} does not exist. Check the path.")
    return Path(path)


def _classes(path: PathLike) -> tuple[str, ...]:
    found = tuple(sorted(child.name for child in _folder(path).iterdir() if child.is_dir()))
    if len(found) < 2:
        raise DataFileError(
            f"The folder {str(path)!r} has fewer than two subfolders. Images are sorted into a subfolder for "
            "each class, which may be empty."
        )
    return found


def _read(path: PathLike, image_size: str, classes: tuple[str, ...], *, labelled: bool) -> Records:
    """The images below a folder in the order of their paths: input ``[n, channels, h, w]``, label ``[n]``."""
    found = re.fullmatch(r"(\d{1,4})x(\d{1,4})(?:x([13]))?", image_size)
    if found is None or "0" in found.groups():
        raise DataFileError(
            f"image_size={image_size!r} must be HEIGHTxWIDTH in pixels, such as 32x32, or 28x28x1 for "
            "grey images."
        )
    height, width, channels = map(int, found.groups(default="3"))
    root = _folder(path)
    if labelled and any(child.is_dir() and child.name not in classes for child in root.iterdir()):
        raise DataFileError(
            f"The folder {str(path)!r} has subfolders that are no classes of the training. It has "
            f"{', '.join(classes)}."
        )
    places = [(i, root / name) for i, name in enumerate(classes)] if labelled else [(0, root)]
    files = [
        (label, file)
        for label, place in places
        for file in sorted(place.rglob("*") if labelled else place.iterdir())
        if file.suffix.lower() in _ENDINGS and not file.name.startswith(".")
    ]
    if not files:
        raise DataFileError(f"The folder {str(path)!r} holds no images ({', '.join(sorted(_ENDINGS))}).")
    pixels = torch.empty(len(files), channels, height, width, dtype=torch.uint8)
    for i, (_, file) in enumerate(files):
        pixels[i] = _pixels(file, height, width, channels)
    return Records(
        {"input": standardise_each(pixels), "label": torch.tensor([label for label, _ in files])},
        num_classes=len(classes),
    )


def _pixels(file: Path, height: int, width: int, channels: int) -> Tensor:
    """One image, ``[channels, h, w]`` of 0 .. 255."""
    with of_extra():
        from PIL import Image, ImageOps

    try:
        with Image.open(file) as image:
            upright = ImageOps.exif_transpose(image).convert("L" if channels == 1 else "RGB")
            resized = upright.resize((width, height), Image.Resampling.BILINEAR)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataFileError(
            f"The image {str(file)!r} cannot be read ({type(error).__name__}). Repair or remove it."
        ) from None
    pixels = np.array(resized, dtype=np.uint8).reshape(height, width, channels)
    return torch.from_numpy(pixels).permute(2, 0, 1)
