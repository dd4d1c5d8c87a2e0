"""The digits of scikit-learn: 1,797 handwritten digits of 8 x 8 pixels with values 0 .. 16, which need no
download.

E. Alpaydin, C. Kaynak, "Optical recognition of handwritten digits", UCI Machine Learning Repository, 1998.
The split into 1,437 training and 360 test records is fixed and public: it depends on the number of records
alone.
"""

from __future__ import annotations

import numpy as np
import torch

from equipoise.data.readers.images import standardise_each
from equipoise.data.records import DataSet, Records

__all__ = ["load_digits"]


_RECORDS, _TRAIN = 1797, 1437


def load_digits() -> DataSet:
    """The digits, images ``[1, 8, 8]`` standardised one by one (float32), ten classes.

    >>> digits = load_digits()
    >>> len(digits.train), len(digits.test), digits.population, digits.input_shape
    (1437, 360, 1437, (1, 8, 8))
    """
    from sklearn import datasets

    bunch = datasets.load_digits()
    images = standardise_each(torch.from_numpy(np.asarray(bunch.images)).unsqueeze(1), scale=16.0)
    everything = Records(
        {"input": images, "label": torch.from_numpy(np.asarray(bunch.target)).long()}, num_classes=10
    )
    train, test = everything.split(_TRAIN / _RECORDS, seed=0)
    return DataSet(
        name="digits",
        train=train,
        test=test,
        population=_TRAIN,
        num_classes=10,
        description="8 x 8 grey images of handwritten digits, standardised one by one",
        class_names=tuple("0123456789"),
    )
