"""The digits of scikit-learn: 1,797 handwritten digits of 8 x 8 pixels with values 0 .. 16, which need no
download. `digits.npz` holds them, so that a first training needs no optional package.

E. Alpaydin, C. Kaynak, "Optical recognition of handwritten digits", UCI Machine Learning Repository, 1998
(test part; Creative Commons Attribution 4.0).
The split into 1,437 training and 360 test records is fixed and public: it depends only on the number of
records.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from equipoise.data.readers.images import standardise_each
from equipoise.data.records import Records

_RECORDS, _TRAIN = 1797, 1437


def load_digits() -> tuple[Records, Records]:
    """The training and the test records, images ``[n, 1, 8, 8]`` standardised one by one (float32).

    >>> train, test = load_digits()
    >>> len(train), len(test), train.fields["input"].shape[1:]
    (1437, 360, torch.Size([1, 8, 8]))
    """
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        images, labels = (torch.from_numpy(file[name]) for name in ("images", "labels"))
    images = standardise_each(images.double().unsqueeze(1), scale=16.0)
    everything = Records({"input": images, "label": labels.long()}, num_classes=10)
    return everything.split(_TRAIN / _RECORDS, seed=0)
