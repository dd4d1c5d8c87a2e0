"""Private scores: what a model is worth, measured on private records that it is not trained on.

A `Metric` puts each record at a place of a histogram, by itself. The sums over the records held apart get
noise and are booked like any release (`privacy.bounds.counts.histogram`); the numbers that are shown follow
from what was released.

| metric | places | the number |
|---|---|---|
| accuracy | wrong, right | share of the right ones |
| balanced accuracy | the same by class | mean over the classes of that share |
| auc | the score in [0, 1], by class | chance that a positive record is above a negative one |
| calibration | the largest probability, wrong or right | mean distance of probability and share |
| loss, error, recall, hits | a value in [0, 1] | its mean |

The error that stands beside a number is a standard deviation, by the parametric bootstrap: counts are drawn
anew from Poisson laws of the released ones, with noise of the known scale. Source: Efron and Tibshirani 1993.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from equipoise import _validate
from equipoise.training.record_source import BatchFormError

Outputs = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
"""(model, batch) -> the model's outputs [B, ...] and what they should be, [B, ...]."""

REPLICATES = 200
"""Of how many draws the error is the deviation: it is known to a twentieth (the root of 1 / 400).

A choice: more take longer after each evaluation, and fewer leave the error itself less certain.
"""


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """A share in [0, 1]; NaN where the noise is larger than the whole."""
    return torch.where(whole > 0, (part / whole).clamp(0, 1), math.nan)


def mean_place(counts: Tensor) -> Tensor:
    """Of places in [0, 1] the mean, from counts [..., 2]."""
    return _share(counts[..., 1], counts.sum(-1))


@dataclass(frozen=True)
class Metric:
    """Where a record stands in a histogram, and what the noised histogram says.

    Attributes:
        name: of the number.
        places: (outputs, labels) -> the place of each record, by itself, in [0, bins - 1], [B]; between two
            whole ones it counts at both. What is not finite is left out.
        read: noised counts [..., bins] -> the number, [...]; NaN where they give none.
        bins: K >= 2, how many places there are; public.
        larger_is_better: whether runs are to make the number large.
    """

    name: str
    places: Callable[[Tensor, Tensor], Tensor]
    read: Callable[[Tensor], Tensor] = mean_place
    bins: int = 2
    larger_is_better: bool = True


def _probabilities(outputs: Tensor) -> Tensor:
    """Of classes, [B, C], from their logits or, of two classes, from that of the second, [B] or [B, 1]."""
    if outputs.ndim == 1 or outputs.shape[1] == 1:
        outputs = torch.stack([torch.zeros_like(outputs.reshape(-1)), outputs.reshape(-1)], 1)
    return torch.softmax(outputs, 1)


def _class_of(labels: Tensor) -> Tensor:
    """[B], of labels [B] or [B, 1].

    Raises:
        BatchFormError: there are several labels of a record.
    """
    if labels.numel() != len(labels):
        raise BatchFormError(
            f"the score is of one class per record, and labels are {list(labels.shape)}: take 'accuracy', "
            "which is the share of right labels, or one of them: outputs=lambda model, batch: "
            "(model(...)[:, 0], batch[...][:, 0])"
        )
    return labels.reshape(-1)


def _is_right(outputs: Tensor, labels: Tensor) -> Tensor:
    return (_probabilities(outputs).argmax(1) == _class_of(labels)).float()


def accuracy() -> Metric:
    """The share of records whose largest logit is that of their class; of labels [B, K], of right ones."""

    def places(outputs: Tensor, labels: Tensor) -> Tensor:
        if labels.ndim > 1 and labels.shape[1] > 1 and labels.shape == outputs.shape:
            return ((outputs > 0) == (labels > 0.5)).float().flatten(1).mean(1)
        return _is_right(outputs, labels)

    return Metric("accuracy", places)


def balanced_accuracy(classes: int = 2) -> Metric:
    """The mean over the classes of the accuracy on their records; a class that noise hides is left out."""

    def read(counts: Tensor) -> Tensor:
        return _share(counts[..., 1::2], counts[..., ::2] + counts[..., 1::2]).nanmean(-1)

    def places(outputs: Tensor, labels: Tensor) -> Tensor:
        return 2 * _class_of(labels) + _is_right(outputs, labels)

    return Metric("balanced_accuracy", places, read, 2 * classes)


def auc(grid: int = 8) -> Metric:
    """The area under the curve of true over false positives, of two classes.

    Args:
        grid: on so many values, evenly from 0 to 1, the probability of the second class is counted. Within a
            step of it records are ranked by halves. More steps take in more noise: of 150 records with a
            noise multiplier of 4.4 the error is 0.09 at 8, and 0.16 at 32.

    Raises:
        BatchFormError: outputs of more classes than two.
    """

    def places(outputs: Tensor, labels: Tensor) -> Tensor:
        if outputs.ndim > 1 and outputs.shape[1] > 2:
            raise BatchFormError(
                f"auc is of two classes, and outputs hold {outputs.shape[1]}: take "
                f"'balanced_accuracy:{outputs.shape[1]}', or outputs= that gives two"
            )
        return _class_of(labels) * grid + _probabilities(outputs)[:, 1] * (grid - 1)

    def read(counts: Tensor) -> Tensor:
        negative, positive = counts.chunk(2, -1)
        below = negative.cumsum(-1) - negative / 2
        pairs = positive.sum(-1).clamp(min=0) * negative.sum(-1).clamp(min=0)
        return _share((positive * below).sum(-1), pairs)

    return Metric("auc", places, read, 2 * grid)


def calibration(grid: int = 11) -> Metric:
    """How far the largest probability is from the share of records that are right at it, on average.

    Args:
        grid: on so many values, evenly from 0 to 1, the probability is counted.
    """

    def places(outputs: Tensor, labels: Tensor) -> Tensor:
        return _is_right(outputs, labels) * grid + _probabilities(outputs).amax(1) * (grid - 1)

    def read(counts: Tensor) -> Tensor:
        wrong, right = counts.chunk(2, -1)
        apart = right - torch.linspace(0, 1, grid, dtype=counts.dtype) * (wrong + right)
        return _share(apart.abs().sum(-1), counts.sum(-1))

    return Metric("calibration_error", places, read, 2 * grid, larger_is_better=False)


def _bounded(name: str, values: Callable[[Tensor, Tensor], Tensor], bound: float) -> Metric:
    """The mean of a number in [0, bound], to which it is cut; what is not finite counts as the bound."""
    _validate.positive(bound=bound)

    def places(outputs: Tensor, labels: Tensor) -> Tensor:
        return (values(outputs, labels) / bound).nan_to_num(nan=1.0, posinf=1.0).clamp(0, 1)

    return Metric(name, places, lambda counts: bound * mean_place(counts), larger_is_better=False)


def loss(bound: float = 1.0) -> Metric:
    """The mean of the training's loss, in evaluation mode, cut to [0, bound]."""
    return _bounded("loss", lambda losses, _: losses, bound)


def error(bound: float = 1.0) -> Metric:
    """The mean distance of output and label, cut to [0, bound]."""
    return _bounded(
        "error",
        lambda out, label: (out - label.reshape(out.shape)).abs().reshape(len(out), -1).mean(1),
        bound,
    )


def recall(k: int = 10) -> Metric:
    """Of a record's relevant items the share among the k largest outputs [B, items]; the mean over records.

    Labels are the items' numbers, [B] or [B, most], filled up by -1.
    """

    def places(outputs: Tensor, labels: Tensor) -> Tensor:
        found, relevant = _found(outputs, labels, k)
        return found / relevant.clamp(min=1)

    return Metric("recall", places)


def hits(k: int = 10) -> Metric:
    """The share of records with a relevant item among the k largest outputs; labels as for `recall`."""
    return Metric("hits", lambda outputs, labels: _found(outputs, labels, k)[0].clamp(max=1))


def _found(outputs: Tensor, labels: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """How many relevant items are among the k largest outputs, and how many there are, [B]."""
    relevant, shown = labels.reshape(len(labels), -1), outputs.topk(k, 1).indices
    are_shown = (relevant[:, :, None] == shown[:, None]).any(2)
    return are_shown.float().sum(1), (relevant >= 0).float().sum(1)


METRICS: dict[str, Callable[..., Metric]] = {
    kind.__name__: kind for kind in (accuracy, balanced_accuracy, auc, calibration, loss, error, recall, hits)
}


def metric_of(given: Metric | str) -> Metric:
    """The metric itself, or the one of this name, behind which its number may stand: "loss:4", "recall:10".

    Raises:
        ValueError: there is none of that name.

    >>> metric_of("balanced-accuracy:10").bins
    20
    """
    if isinstance(given, Metric):
        return given
    name, _, number = str(given).replace("-", "_").partition(":")
    try:
        numbers = [] if not number else [float(number) if name in ("loss", "error") else int(number)]
        return METRICS[name](*numbers)
    except (KeyError, TypeError, ValueError) as cause:
        raise ValueError(
            f"metric={given!r} is none: give a Metric, or one of {', '.join(METRICS)}, with its number as in "
            "'loss:4' or 'recall:10'"
        ) from cause


@dataclass(frozen=True, eq=False)
class Score:
    """A noised score, of private records that are held apart from those that are trained on.

    Under add-or-remove-one the score is free beside the training: a record is on one side, and pays there.
    What is paid for a score of other data, or where a record is replaced, is taken from the budget.

    Args:
        metric: a `Metric`, or a name: "accuracy", "auc", "loss:4" (with the bound), "recall:10".
        data: further private records to score on, in the form of the training's; it is not proved that they
            are others, so both sides are paid for.
        share: in place of data, the chance with which each record (or user, with all records) is held apart,
            by a secret hash of its content, id or name. `sampling` then counts the records that are left.
        population: of `data`, a public number.
        times: how often it may be taken; public.
        outputs: (model, batch) -> (outputs, labels); by default those of "input" and "label".
        budget_share: of epsilon, for a score that is paid for.

    Raises:
        TypeError, ValueError: naming the argument.

    Example:
        >>> score = Score("auc", share=0.1)
        >>> list(score.read(torch.tensor([30.0, 0.0, 10.0, 20.0] * 16), noise_std=2.0))
        ['private_auc', 'private_auc_error']
    """

    metric: Any  # a Metric once it is made
    data: Any = field(default=None, repr=False)
    share: float | None = None
    population: int | None = None
    times: int = 10
    outputs: Outputs = lambda model, batch: (model(batch["input"]), batch["label"])
    budget_share: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "metric", metric_of(self.metric))
        if (self.share is None) != (self.data is not None and self.population is not None):
            raise TypeError("a Score needs either share, or data of its own with their public population")
        _validate.share(budget_share=self.budget_share, **({"share": self.share} if self.share else {}))
        _validate.count("how often the score is taken", times=self.times)

    @property
    def larger_is_better(self) -> bool:
        """As its metric has it."""
        return bool(self.metric.larger_is_better)

    def expected_error(self, records: float, noise_std: float) -> float:
        """The error of the number if so many records were spread evenly over the places."""
        even = torch.full((self.metric.bins,), records / self.metric.bins)
        return self.read(even, noise_std)[f"private_{self.metric.name}_error"]

    def read(self, counts: Tensor, noise_std: float) -> dict[str, float]:
        """The number that released counts [K] give, as "private_" and its name, and its error."""
        counts, generator = counts.detach().double().cpu(), torch.Generator().manual_seed(0)
        drawn = torch.poisson(counts.clamp(min=0).expand(REPLICATES, -1), generator=generator)
        drawn += noise_std * torch.randn(drawn.shape, generator=generator, dtype=torch.float64)
        name, read = f"private_{self.metric.name}", self.metric.read
        return {name: float(read(counts)), f"{name}_error": float(read(drawn).std())}
