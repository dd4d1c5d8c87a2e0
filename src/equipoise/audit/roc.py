"""How well scores tell present records from absent ones, and how well (epsilon, delta) lets them.

At every threshold "present" is said of a share FPR of the absent and a share TPR of the present records. If
the training is (epsilon, delta)-private for the presence of a record, any score of any attacker obeys

    TPR <= min(e^epsilon FPR + delta, 1 - e^-epsilon (1 - delta - FPR)).

Measured rates scatter around the true ones, so a point a little above the bound refutes nothing; `bounds`
certifies.

Source: Wasserman and Zhou 2010 (the bound on tests); Carlini et al. 2022 (rates at few false positives).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Roc:
    """A receiver operating characteristic, from (0, 0) to (1, 1).

    Attributes:
        false_positive: [T], rising, one entry per threshold.
        true_positive: [T], rising.
    """

    false_positive: Numbers
    true_positive: Numbers

    @property
    def area(self) -> float:
        """The chance that a present record scores above an absent one; ties count half."""
        return float(np.trapezoid(self.true_positive, self.false_positive))

    def at(self, level: ArrayLike) -> Numbers:
        """The largest TPR whose FPR is at most `level`."""
        where = np.searchsorted(self.false_positive, np.asarray(level, dtype=np.float64), side="right")
        return np.asarray(self.true_positive[where - 1])


def roc(scores: ArrayLike, present: ArrayLike) -> Roc:
    """The curve of scores of which large ones speak for presence.

    Args:
        scores: of records, any shape.
        present: bool, of the same shape; where all or none are, nothing is known: the diagonal.

    Raises:
        ValueError: shapes that differ, or a score that is no number.

    Example:
        >>> found = roc([3.0, 2.0, 1.0, 0.0], [True, False, True, False])
        >>> found.area, float(found.at(0.0)), float(found.at(0.5))
        (0.75, 0.5, 1.0)
    """
    values, inside = np.asarray(scores, dtype=np.float64), np.asarray(present, dtype=bool)
    if values.shape != inside.shape or np.isnan(values).any():
        raise ValueError(
            f"scores of shape {values.shape} with {int(np.isnan(values).sum())} that are no numbers, and "
            f"present of shape {inside.shape}: give one number for each record"
        )
    values, inside = values.ravel(), inside.ravel()
    if inside.all() or not inside.any():
        return Roc(np.array([0.0, 1.0]), np.array([0.0, 1.0]))
    order = np.argsort(-values, kind="stable")
    values, inside = values[order], inside[order]
    last = np.append(values[1:] != values[:-1], True)  # of records with the same score
    true, false = (np.concatenate([[0], np.cumsum(side)[last]]) / side.sum() for side in (inside, ~inside))
    return Roc(false, true)


def bound_on_roc(false_positive: ArrayLike, epsilon: float, delta: float) -> Numbers:
    """The largest TPR that (epsilon, delta) allows at these FPRs.

    Example:
        >>> bound_on_roc([0.0, 0.01, 1.0], np.log(2), 0.0).round(4).tolist()
        [0.0, 0.02, 1.0]
    """
    rate = np.asarray(false_positive, dtype=np.float64)
    few, many = np.exp(epsilon) * rate + delta, 1 - np.exp(-epsilon) * (1 - delta - rate)
    return np.clip(np.minimum(few, many), 0.0, 1.0)
