"""What the command line trains and reports for each task: loss, scores, baseline and predictions.

The scores are those of scikit-learn, on the test records, whose figures are published as they are. Next to
them stands what a model without inputs would reach there: the commonest class, or the mean.

A class weight multiplies the losses of the class, before the gradient of a record is clipped. It is a public
number that somebody chose: one that follows from the counts of the private records would reveal them. The
weight of a record is a part of it; it multiplies its loss by at most 1.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.app.option_checks import LOSSES, SettingsError, is_code
from equipoise.data import DataSet, Records
from equipoise.data.readers.custom import load_function
from equipoise.data.records import WEIGHT
from equipoise.gradients.engine_inputs import Loss


@dataclass(frozen=True)
class Task:
    """What there is to know of a task.

    Attributes:
        field: of a record, which holds what is learnt.
        losses: (outputs ``[B, ...]``, what is learnt ``[B, ...]``, weights of classes or None) -> ``[B]``.
        link: from outputs to predictions; of a regression to numbers between -1 and 1.
        scores: (outputs, what is learnt, the data set) -> figures by name.
        baseline: (what is learnt on the test records, the data set) -> figures of a model without inputs, and
            what it answers, in words.
        main: the score that tells first whether anything was learnt, and whether more of it is better.
    """

    field: str
    losses: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    scores: Callable[[Tensor, Tensor, DataSet], dict[str, float]]
    baseline: Callable[[Tensor, DataSet], tuple[dict[str, float], str]]
    main: tuple[str, bool]
    link: Callable[[Tensor], Tensor] = staticmethod(lambda outputs: outputs)

    def evaluate(self, model: nn.Module, dataset: DataSet) -> dict[str, float]:
        """The scores on the test records."""
        return self.scores_of(outputs_of(model, dataset.test), dataset)

    def scores_of(self, outputs: Tensor, dataset: DataSet) -> dict[str, float]:
        """The scores of answers on the test records; where some are not finite, the share of the others."""
        finite = outputs.isfinite().all(1)
        if not bool(finite.all()):
            return {"finite_answers": float(finite.double().mean())}
        return self.scores(self.link(outputs), dataset.test.fields[self.field], dataset)

    def main_score(self, outputs: Tensor, records: Records, dataset: DataSet) -> float:
        """The main score of answers on records, always a finite number.

        An answer that is not finite is wrong: it counts 0 among shares, and an error as wide as the target's
        range among numbers.
        """
        name, more_is_better = self.main
        finite = outputs.isfinite().all(1)
        share = float(finite.double().mean())
        found = 0.0
        if share:
            found = self.scores(self.link(outputs[finite]), records.fields[self.field][finite], dataset)[name]
        if more_is_better:
            return share * found
        low, high = dataset.target_range
        return math.hypot(math.sqrt(share) * found, math.sqrt(1 - share) * (high - low))


@torch.no_grad()
def outputs_of(model: nn.Module, records: Records, chunk: int = 256) -> Tensor:
    """What the model answers for every record, ``[n, outputs]``, on the CPU."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    inputs = records.fields["input"]
    parts = [model(inputs[start : start + chunk].to(device)).cpu() for start in range(0, len(records), chunk)]
    model.train(was_training)
    return torch.cat(parts)


def loss_of(dataset: DataSet, class_weights: Mapping[str, float], name: str | None = None) -> Loss:
    """The loss of a data set's task, per record, times the record's weight where it has one.

    Args:
        dataset: whose classes the weights name.
        class_weights: by the name of a class; 1 where none is given.
        name: of the loss, as for `task_of`; or ``package.module:function`` of outputs ``[B, ...]`` and what
            is learnt ``[B, ...]`` that returns losses ``[B]``.

    Raises:
        SettingsError: a class that there is not, or weights where there are no classes.
    """
    task, weights = task_of(dataset, name), None
    own = load_function(str(name)) if is_code(name) else None
    if class_weights:
        numbered = () if dataset.task == "regression" else tuple(map(str, range(dataset.num_classes)))
        names = dataset.class_names or numbered
        unknown = [name for name in class_weights if name not in names]
        if unknown:
            raise SettingsError(
                f"--class-weight names {', '.join(map(repr, class_weights))}, but the classes of "
                f"{dataset.name!r} are {', '.join(map(repr, names)) or 'none: it is a regression'}."
            )
        weights = torch.tensor([float(class_weights.get(name, 1.0)) for name in names])
    weighted = WEIGHT in dataset.train.fields

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        outputs, learnt = model(batch["input"]), batch[task.field]
        by_class = None if weights is None else weights.to(outputs.device)
        losses = task.losses(outputs, learnt, by_class) if own is None else own(outputs, learnt)
        return losses * batch[WEIGHT] if weighted else losses

    return loss


def task_of(dataset: DataSet, loss: str | None = None) -> Task:
    """The task of a data set, with another loss where one is named.

    Args:
        dataset: whose task and range of the target it is.
        loss: a word of `equipoise.app.option_checks.LOSSES` and its number; of others scores know nothing.

    Raises:
        SettingsError: the loss is of another task, or of counts, and the range does not begin at 0.
    """
    task = TASKS[dataset.task]
    word, _, number = (loss or "").partition(":")
    if word not in LOSSES or (word == "logistic" and dataset.task != "regression"):
        return task
    low, high = dataset.target_range
    if dataset.task != "regression":
        raise SettingsError(
            f"--loss is {loss}, a loss of numbers, and {dataset.name!r} is made for {dataset.task}. Leave it "
            "out, take logistic, or learn a column of numbers."
        )
    if word == "poisson" and (low != 0 or dataset.target_log):
        raise SettingsError(
            "--loss is poisson, for counts from 0 on: the target must have low = 0 and no log = true. Take "
            "another loss, or declare it so."
        )
    span = math.log1p(high - low) if dataset.target_log else high - low
    value = float(number or 0)

    def share(target: Tensor) -> Tensor:
        return (target + 1) / 2

    table: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
        "squared": (lambda f, t: (f - t).square(), task.link),
        "huber": (lambda f, t: F.huber_loss(f, t, reduction="none", delta=2 * value / span), task.link),
        "quantile": (lambda f, t: torch.maximum(value * (t - f), (value - 1) * (t - f)), task.link),
        # of the mean over the upper bound, which is public
        "poisson": (lambda f, t: f.exp() - f * share(t), lambda f: 2 * f.exp() - 1),
        "logistic": (
            lambda f, t: F.binary_cross_entropy_with_logits(f, share(t), reduction="none"),
            lambda f: 2 * f.sigmoid() - 1,
        ),
    }
    losses, link = table[word]
    return replace(task, losses=lambda outputs, learnt, weights: losses(outputs[:, 0], learnt), link=link)


def absent_warning(dataset: DataSet) -> str | None:
    """A sentence where a class has no test record, so that scores that need all classes are not given."""
    if dataset.task != "classification" or not len(dataset.test):
        return None
    counts = dataset.test.fields["label"].bincount(minlength=dataset.num_classes).tolist()
    names = dataset.class_names or tuple(map(str, range(dataset.num_classes)))
    absent = [repr(name) for name, count in zip(names, counts, strict=True) if not count]
    if not absent:
        return None
    more = ", ..." if len(absent) > 5 else ""
    return (
        f"no record that is evaluated on has the class {', '.join(absent[:5])}{more}. There is no AUC then, "
        "and the other scores say nothing of it. Evaluate on records of every class."
    )


# ---- classification


def _class_losses(outputs: Tensor, label: Tensor, weights: Tensor | None) -> Tensor:
    losses = F.cross_entropy(outputs, label, reduction="none")
    return losses if weights is None else losses * weights[label]


def _class_scores(outputs: Tensor, label: Tensor, dataset: DataSet) -> dict[str, float]:
    from sklearn import metrics

    found = outputs.argmax(1)
    scores = {"accuracy": float((found == label).double().mean())}
    truth, guess = label.numpy(), found.numpy()
    binary = dataset.num_classes == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a class that is never predicted, or not among the test records
        scores["balanced_accuracy"] = float(metrics.balanced_accuracy_score(truth, guess))
        scores["f1"] = float(
            metrics.f1_score(truth, guess, average="binary" if binary else "macro", zero_division=0.0)
        )
        if len(np.unique(truth)) == dataset.num_classes:
            shares = outputs.double().softmax(1).numpy()
            shares /= shares.sum(1, keepdims=True)
            by = (outputs[:, 1].double() - outputs[:, 0].double()).numpy() if binary else shares
            scores["auc"] = float(metrics.roc_auc_score(truth, by, multi_class="ovr"))
    return scores


def _class_baseline(label: Tensor, dataset: DataSet) -> tuple[dict[str, float], str]:
    counts = label.bincount(minlength=dataset.num_classes)
    share = float(counts.max()) / len(label)
    return {"accuracy": share}, "always giving the commonest class"


# ---- regression


def _squares(outputs: Tensor, target: Tensor, weights: Tensor | None) -> Tensor:
    return (outputs[:, 0] - target).square()


def _errors(outputs: Tensor, target: Tensor, dataset: DataSet) -> dict[str, float]:
    from sklearn import metrics

    truth, guess = (in_units(values, dataset).numpy() for values in (target, outputs[:, 0]))
    return {
        "rmse": float(metrics.root_mean_squared_error(truth, guess)),
        "mae": float(metrics.mean_absolute_error(truth, guess)),
        "r2": float(metrics.r2_score(truth, guess)) if len(truth) > 1 else 0.0,
    }


def in_units(values: Tensor, dataset: DataSet) -> Tensor:
    """Numbers in [-1, 1] in the units of the target's range, in double precision."""
    (low, high), shares = dataset.target_range, (values.double() + 1) / 2
    return low + ((shares * math.log1p(high - low)).expm1() if dataset.target_log else shares * (high - low))


def _mean_baseline(target: Tensor, dataset: DataSet) -> tuple[dict[str, float], str]:
    values = in_units(target, dataset)
    return {"rmse": float(values.std(correction=0))}, "always giving the mean of the test records"


# ---- multi-label


def _label_losses(outputs: Tensor, target: Tensor, weights: Tensor | None) -> Tensor:
    losses = F.binary_cross_entropy_with_logits(outputs, target, reduction="none")
    return (losses if weights is None else losses * weights).sum(1)


def _label_scores(outputs: Tensor, target: Tensor, dataset: DataSet) -> dict[str, float]:
    from sklearn import metrics

    truth, guess = target.numpy().astype(int), (outputs > 0).numpy().astype(int)
    scores = {
        "accuracy": float((truth == guess).all(1).mean()),
        "label_accuracy": float((truth == guess).mean()),
        "f1": float(metrics.f1_score(truth, guess, average="macro", zero_division=0.0)),
    }
    if bool(((truth.sum(0) > 0) & (truth.sum(0) < len(truth))).all()):
        scores["auc"] = float(metrics.roc_auc_score(truth, outputs.double().numpy(), average="macro"))
    return scores


def _labels_baseline(target: Tensor, dataset: DataSet) -> tuple[dict[str, float], str]:
    commonest = (target.double().mean(0) >= 0.5).to(target.dtype)
    right = target == commonest
    return (
        {"accuracy": float(right.all(1).double().mean()), "label_accuracy": float(right.double().mean())},
        "always giving the commonest answer for each label",
    )


TASKS: dict[str, Task] = {
    "classification": Task("label", _class_losses, _class_scores, _class_baseline, ("accuracy", True)),
    "regression": Task("target", _squares, _errors, _mean_baseline, ("rmse", False)),
    "multi-label": Task("target", _label_losses, _label_scores, _labels_baseline, ("label_accuracy", True)),
}
"""By the name that a data set gives."""
