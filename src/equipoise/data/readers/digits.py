"""The digits of scikit-learn: 1,797 handwritten digits of 8 x 8 pixels with values 0 .. 16, which need no
download.

E. Alpaydin, C. Kaynak, "Optical recognition of handwritten digits", UCI Machine Learning Repository, 1998.
The split into 1,437 training and 360 test records is fixed and public: it depends only on the number of
records.
"""

from __future__ import annotations

import numpy as np
import torch

from equipoise.data.readers.images import standardise_each
from equipoise.data.records import Records

__all__ = ["load_digits"]


_RECORDS, _TRAIN = 1797, 1437


def load_digits() -> tuple[Records, Records]:
    """The training and the test records, images ``[n, 1, 8, 8]`` standardised one by one (float32).

    >>> train, test = load_digits()
    >>> len(train), len(test), train.fields["input"].shape[1:]
    (1437, 360, torch.Size([1, 8, 8]))
    """
    from sklearn import datasets

    bunch = datasets.load_digits()
    images = standardise_each(torch.from_numpy(np.asarray(bunch.images)).unsqueeze(1), scale=16.0)
    everything = Records(
        {"input": images, "label": torch.from_numpy(np.asarray(bunch.target)).long()}, num_classes=10
    )
    return everything.split(_TRAIN / _RECORDS, seed=0)
