"""Exponential class imbalance: class j of m keeps n_0 r^(j / (m - 1)) records, the first class the most.

The long-tailed benchmarks ("HT" in the DC-DPSGD paper, after Cui et al. 2019, Cao et al. 2019): few records
in the last classes, which has nothing to do with heavy-tailed gradients. The test set stays balanced.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from equipoise.data.records import Records

__all__ = ["imbalance_counts", "imbalanced"]


def imbalance_counts(largest: float, num_classes: int = 10, ratio: float = 0.01) -> list[int]:
    """Records of each class, int(largest * ratio^(j / (num_classes - 1))).

    Args:
        largest: n_0 of the first class; a mean number a class may have a fraction.
        num_classes: m >= 2.
        ratio: of the last class to the first, in (0, 1].

    Example:
        >>> imbalance_counts(5000)
        [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    """
    if not (math.isfinite(largest) and largest >= 1):
        raise ValueError(f"largest={largest!r}: the first class needs at least one record")
    if num_classes < 2:
        raise ValueError(f"num_classes={num_classes!r}: an imbalance needs at least two classes")
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio={ratio!r}: the last class over the first lies in (0, 1]")
    return [int(largest * ratio ** (j / (num_classes - 1))) for j in range(num_classes)]


def imbalanced(
    records: Records,
    largest: float | None = None,
    *,
    num_classes: int = 10,
    ratio: float = 0.01,
    seed: int = 0,
) -> Records:
    """The records of an imbalanced selection, class by class, each class shuffled.

    Args:
        records: with a field "label" of classes 0 .. num_classes - 1.
        largest: n_0; the mean number of records a class when None.
        num_classes, ratio: as in `imbalance_counts`.
        seed: of NumPy's legacy generator, which the published selections use.

    Raises:
        ValueError: a class has fewer records than it should keep.

    The population of a training on them is the sum of the counts, which is to be stated like any other.

    Example:
        >>> few = Records({"input": torch.zeros(40, 1), "label": torch.arange(40) % 2})
        >>> imbalanced(few, num_classes=2, ratio=0.1)[:]["label"].bincount().tolist()
        [20, 2]
    """
    everything = records[torch.arange(len(records))]
    label = everything["label"].numpy()
    mean = len(records) / num_classes
    counts = imbalance_counts(mean if largest is None else largest, num_classes, ratio)
    rng = np.random.RandomState(seed)
    chosen = []
    for j, count in enumerate(counts):
        members = np.flatnonzero(label == j)
        if len(members) < count:
            raise ValueError(
                f"class {j} has {len(members)} records and should keep {count}: lower largest={largest!r}"
            )
        rng.shuffle(members)
        chosen.append(members[:count])
    index = torch.from_numpy(np.concatenate(chosen))
    return Records({name: value[index] for name, value in everything.items()})
