"""Losses of the command line: what a model without inputs learns is the statistic that each stands for."""

import numpy as np
import pytest
import torch

from equipoise.app.option_checks import SettingsError, is_code
from equipoise.app.settings import RunSettings
from equipoise.app.tasks import in_units, loss_of, task_of
from equipoise.data import DataFileError, DataSet, Records

VALUES = np.random.default_rng(0).gamma(2.0, 8.0, 2000).clip(0, 99)
WEIGHTS = np.random.default_rng(1).uniform(0, 1, 2000).round(1)


def data_of(log=False, weights=None, low=0.0, high=100.0):
    shares = np.log1p(VALUES - low) / np.log1p(high - low) if log else (VALUES - low) / (high - low)
    fields = {"input": torch.zeros(2000, 1), "target": torch.tensor(2 * shares - 1)}
    if weights is not None:
        fields["weight"] = torch.tensor(weights)
    rows = Records(fields)
    return DataSet("toy", rows, rows, 2000, 1, task="regression", target_range=(low, high), target_log=log)


def heaviest_half(values, share):
    """The weighted quantile."""
    order = np.argsort(values)
    return values[order][np.searchsorted(WEIGHTS[order].cumsum(), share * WEIGHTS.sum())]


@pytest.mark.parametrize(
    ("loss", "log", "weights", "statistic"),
    [
        ("squared", False, None, VALUES.mean()),
        (None, False, WEIGHTS, np.average(VALUES, weights=WEIGHTS)),
        ("squared", True, None, np.expm1(np.log1p(VALUES).mean())),
        ("huber:0.01", False, None, np.median(VALUES)),
        ("huber:1000", True, None, np.expm1(np.log1p(VALUES).mean())),
        ("quantile:0.9", False, None, np.quantile(VALUES, 0.9)),
        ("quantile:0.25", True, WEIGHTS, heaviest_half(VALUES, 0.25)),
        ("poisson", False, None, VALUES.mean()),
        ("logistic", False, WEIGHTS, np.average(VALUES, weights=WEIGHTS)),
    ],
)
def test_the_best_constant_is_the_statistic(loss, log, weights, statistic):
    dataset = data_of(log, weights)
    task, losses = task_of(dataset, loss), loss_of(dataset, {}, loss)
    constant = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.double))
    optimizer = torch.optim.Rprop([constant], lr=0.01)
    for _ in range(400):
        optimizer.zero_grad()
        found = losses(lambda inputs: constant.expand(len(inputs), 1), dict(dataset.train.fields))
        assert found.shape == (2000,)
        found.mean().backward()
        optimizer.step()
    assert float(in_units(task.link(constant.detach()), dataset)) == pytest.approx(statistic, rel=0.01)


def test_losses_that_do_not_fit_are_refused():
    for word in (
        "huber",
        "huber:0",
        "quantile:1",
        "squared:2",
        "poison",
        "a:b:c",
        "huber:-1",
        "quantile:0.0",
    ):
        with pytest.raises(SettingsError, match="--loss is"):
            RunSettings(loss=word).check()
    for word in (
        "huber:2",
        "huber:.5",
        "huber:1e3",
        "quantile:.05",
        "quantile:0.5",
        "poisson",
        "my.losses:tilted",
    ):
        RunSettings(loss=word).check()
    with pytest.raises(SettingsError, match="low = 0"):
        task_of(data_of(low=-1.0), "poisson")
    labels = Records({"input": torch.zeros(2, 1), "label": torch.tensor([0, 1])})
    classes = DataSet("toy", labels, labels, 2, 2)
    with pytest.raises(SettingsError, match="made for classification"):
        task_of(classes, "huber:1")
    assert task_of(classes, "logistic").main == ("accuracy", True)
    with pytest.raises(DataFileError, match="'weight' of train"):
        data_of(weights=3 * WEIGHTS)
    assert (is_code("huber:2"), is_code("mine:loss")) == (False, True)
