"""Membership inference with shadow models: the likelihood ratio of a record's confidence.

K trainings see each a random half of N records. How sure a model is of record i's label, on a scale on which
it is about normal,

    phi_i = log(p_y / (1 - p_y)),

has one law in the models that saw the record and another in those that did not. Each model in turn is the
target; the others fit both laws for every record, and the score is

    L_i = log N(phi_i; m_in, s_in^2) - log N(phi_i; m_out, s_out^2).

Every record is present in every model with probability 1/2, independently. Balanced halves (every record in
exactly K/2 models) would let the assignment in the other models tell the one in the target.

This is how strong a familiar attacker is, who has as many records of the same kind and sees only the final
model; it certifies nothing.

Source: Carlini, Chien, Nasr, Song, Terzis and Tramer 2022, the online attack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from equipoise.audit.roc import Numbers, Roc, roc

__all__ = ["Shadows", "likelihood_ratios", "scaled_confidence", "train_shadows"]

MODELS_FOR_OWN_VARIANCE = 64
"""Below so many models all records share one variance per side, which K/2 values would estimate badly."""
LEAST_VARIANCE = 1e-12  # a variance; records of which every model is equally sure


@dataclass(frozen=True)
class Shadows:
    """What K models say of N records.

    Attributes:
        confidences: [K, N], phi.
        inside: [K, N] bool, which records each was trained on.
        scores: [K, N], L of each model as the target of the others.
    """

    confidences: Numbers
    inside: NDArray[np.bool_]
    scores: Numbers

    @property
    def roc(self) -> Roc:
        """One curve of all targets and records, with the same threshold for all."""
        return roc(self.scores, self.inside)


def scaled_confidence(logits: Tensor, labels: Tensor) -> Tensor:
    """phi = log(p_y / (1 - p_y)) = z_y - log sum_{j != y} e^{z_j}, [N] float64.

    Args:
        logits: z, [N, C] with C of at least 2.
        labels: y, [N].

    Example:
        >>> scaled_confidence(torch.tensor([[2.0, 0.5], [800.0, 0.0]]), torch.tensor([0, 1])).tolist()
        [1.5, -800.0]
    """
    own = torch.nn.functional.one_hot(labels, logits.shape[1]).bool()
    z = logits.double()
    return z[own] - z.masked_fill(own, -torch.inf).logsumexp(dim=1)


def train_shadows(
    observe: Callable[[int, Tensor], Tensor],
    records: int,
    models: int,
    *,
    seed: int,
    shared_variance: bool | None = None,
) -> Shadows:
    """Train K models on random halves and attack each with the help of the others.

    Args:
        observe: observe(number, inside [N] bool) -> phi [N]: trains on those records and asks about all.
        records: N.
        models: K, at least 4.
        seed: of the random assignment.
        shared_variance: as for `likelihood_ratios`; for fewer than 64 models where None.

    Raises:
        ValueError: too few models or records.
    """
    if models < 4 or records < 2:
        raise ValueError(
            f"models={models!r}, records={records!r}: at least 4 models, of which some saw a record and some "
            "did not, and 2 records are needed"
        )
    rng = torch.Generator().manual_seed(seed)
    inside = torch.rand(models, records, generator=rng) < 0.5
    found = torch.stack([observe(number, inside[number]).double() for number in range(models)]).numpy()
    shared = models < MODELS_FOR_OWN_VARIANCE if shared_variance is None else shared_variance
    return Shadows(found, inside.numpy(), likelihood_ratios(found, inside.numpy(), shared_variance=shared))


def likelihood_ratios(confidences: ArrayLike, inside: ArrayLike, *, shared_variance: bool = True) -> Numbers:
    """L of every record in every model, its laws fitted to the other models.

    Args:
        confidences: phi, [K, N].
        inside: bool, [K, N].
        shared_variance: one variance per side for all records; else one for each record.

    Returns:
        [K, N]; 0 where none of the others, or all of them, saw the record, or a side shows no variance.

    Example:
        >>> phi = np.array([[0.0], [0.1], [0.2], [5.0], [5.1], [5.2]])
        >>> inside = phi > 1
        >>> (likelihood_ratios(phi, inside) > 0)[:, 0].tolist()
        [False, False, False, True, True, True]
    """
    phi, present = np.asarray(confidences, dtype=np.float64), np.asarray(inside, dtype=bool)
    logs, known = [], np.ones(phi.shape, dtype=bool)
    centred = phi - phi.mean(axis=0)  # sums of squares lose fewer digits
    for side in (present, ~present):
        values = np.where(side, centred, 0.0)
        # of the models other than the row's own
        count = side.sum(axis=0) - side
        total, squares = values.sum(axis=0) - values, (values**2).sum(axis=0) - values**2
        mean = total / np.maximum(count, 1)
        spread = np.maximum(squares - total * mean, 0.0)
        freedom = np.maximum(count - 1, 0)
        variance = spread.sum(axis=1, keepdims=True) / np.maximum(freedom.sum(axis=1, keepdims=True), 1)
        if not shared_variance:
            variance = np.where(freedom > 0, spread / np.maximum(freedom, 1), variance)
        variance = np.maximum(variance, LEAST_VARIANCE)
        logs.append(-((centred - mean) ** 2) / (2 * variance) - np.log(variance) / 2)
        known &= (count > 0) & freedom.any(axis=1, keepdims=True)
    return np.where(known, logs[0] - logs[1], 0.0)
