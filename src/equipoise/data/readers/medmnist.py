"""MedMNIST-style archives: one npz with ``{train,val,test}_images`` and ``_labels``.

J. Yang et al., "MedMNIST v2: a large-scale lightweight benchmark for 2D and 3D biomedical image
classification", Scientific Data 10, 2023. Images are standardised one by one; the validation part is left
aside.
"""

from __future__ import annotations

import numpy as np
import torch

from equipoise._files import PathLike
from equipoise.data.readers.files import DataFileError, find_file
from equipoise.data.readers.images import standardise_each
from equipoise.data.readers.npz import read_npz
from equipoise.data.records import Records

__all__ = ["load_medmnist"]


def load_medmnist(folder: PathLike, part: str, *, name: str, num_classes: int) -> Records:
    """The ``train``, ``val`` or ``test`` part of ``name.npz``: images ``[n, c, h, w]`` float32, labels int64
    ``[n]``.

    Grey images ``[n, h, w]`` get one channel, colour images ``[n, h, w, 3]`` three.

    Raises:
        MissingDataError, DataFileError: no such file, a damaged one, or arrays of another form.
    """
    if part not in ("train", "val", "test"):
        raise ValueError(f"part={part!r} must be 'train', 'val' or 'test'.")
    path = find_file(folder, f"{name}.npz", subfolders=[name, "medmnist"])
    arrays = read_npz(path, (f"{part}_images", f"{part}_labels"))
    images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
    if images.dtype != np.uint8 or not (images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)):
        raise DataFileError(
            f"{part}_images of {str(path)!r} is {images.dtype}{list(images.shape)}; uint8 [n, h, w] or [n, "
            "h, w, 3] is expected."
        )
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise DataFileError(
            f"{part}_labels of {str(path)!r} is {labels.dtype}{list(labels.shape)}; one class number a "
            "record is expected (sets with several labels per record are not supported)."
        )
    pixels = torch.from_numpy(images)
    pixels = pixels.unsqueeze(1) if images.ndim == 3 else pixels.permute(0, 3, 1, 2).contiguous()
    return Records(
        {"input": standardise_each(pixels), "label": torch.from_numpy(labels.astype(np.int64))},
        num_classes=num_classes,
    )
