"""Sufficient statistics beside SGD: coverage and width of intervals, accuracy and time.

python benchmarks/linear_statistics.py coverage [--trials 200]
python benchmarks/linear_statistics.py accuracy --adult FOLDER [--seeds 3]

Coverage is of made-up surveys of 10,000 rows: age, a skewed income, education of four values, sex of two, and
a score that is linear in them. Errors are of one size, or five times as large above the middle age. Each
trial draws rows, and noise of the plan's multiplier, anew. Rows of the output are CSV.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from scipy import stats

import equipoise as eq
from equipoise import data
from equipoise.app.build import assemble, build_training
from equipoise.app.models import build_model, prepare_data
from equipoise.app.settings import RunSettings
from equipoise.app.statistics import SufficientStatistics, statistics_loss
from equipoise.data import DataSet, Records
from equipoise.data.readers import schema

ROWS = 10_000
EPSILONS = (0.1, 1.0, 8.0)
DELTA = 1e-6
COLUMNS = {
    "age": {"type": "number", "low": -1, "high": 1},
    "income": {"type": "number", "low": -1, "high": 1},
    "education": {"type": "category", "values": ["none", "school", "college", "degree"], "other": False},
    "sex": {"type": "category", "values": ["f", "m"], "other": False},
}
VALUES = {"columns": {**COLUMNS, "score": COLUMNS["age"]}, "target": "score", "population": ROWS}
SGD = {
    "batch_size": 256.0,
    "epochs": 20.0,
    "clip_norm": "1",
    "learning_rate": 0.5,
    "momentum": 0.9,
    "schedule": "linear",
}
"""The recipe of tables."""
TRUTH = np.array([-0.2, 0.15, 0.3, 0.05, 0.1, 0.2, -0.08])
"""Of 1, age, income, three of education and one of sex."""


def survey(seed: int, unequal: bool = False) -> Records:
    """Rows in the code of the schema, in which no range cuts a score."""
    rng = np.random.default_rng(seed)
    age, income = rng.uniform(-1, 1, ROWS), rng.lognormal(-1.5, 0.8, ROWS).clip(0, 2) - 1
    education, sex = rng.integers(0, 4, ROWS), rng.integers(0, 2, ROWS)
    x = np.column_stack([age, income, np.eye(4)[education], np.eye(2)[sex]])
    size = 0.05 * np.where(age > 0, 5, 1) if unequal else 0.15
    errors = size * rng.uniform(-(3**0.5), 3**0.5, ROWS)
    score = TRUTH[0] + x[:, [0, 1, 3, 4, 5, 7]] @ TRUTH[1:] + errors
    assert abs(score).max() < 1
    return Records({"input": torch.tensor(x).float(), "target": torch.tensor(score).float()})


def fitted(name: str, rows: Records, noise: float) -> SufficientStatistics:
    """The model of a survey after its step, with the noise that the ledger would add."""
    dataset = schema.table_of(VALUES).data_set("survey", VALUES, rows, rows, ROWS)
    dataset = prepare_data(name, dataset)
    model = build_model(name, dataset)
    assert isinstance(model, SufficientStatistics)
    statistics_loss(model, dict(dataset.train.fields)).sum().backward()
    for parameter in model.parameters():
        parameter.data = (noise * torch.randn_like(parameter) - parameter.grad) / ROWS
    model.noise.fill_(noise / ROWS)
    return model


def multiplier(epsilon: float) -> float:
    """The noise of one full batch."""
    from equipoise.methods.base import Setting

    setting = Setting(sampling=eq.FullBatch(population=ROWS, steps=1), budget=eq.Budget(epsilon, DELTA))
    return eq.DPSGD(clip_norm=1.0).plan(setting).releases["gradient"].noise_multiplier


def coverage(trials: int) -> None:
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(
        [
            "model",
            "errors",
            "epsilon",
            "coverage",
            "lowest",
            "highest",
            "width_age",
            "width_degree",
            "rmse_age",
        ]
    )
    for name in ("statistics", "statistics-by-groups"):
        for errors in ("equal", "unequal"):
            for epsilon in EPSILONS:
                noise, hits, widths, off = multiplier(epsilon), [], [], []
                for trial in range(trials):
                    model = fitted(name, survey(trial, errors == "unequal"), noise)
                    covariance, degrees = model.covariance()
                    found = model.coefficients().numpy() - TRUTH
                    reach = stats.t.ppf(0.975, degrees) * covariance.diagonal().sqrt().numpy()
                    hits.append(abs(found) < reach)
                    widths.append(2 * reach)
                    off.append(found[1])
                by_term, width = np.mean(hits, 0), np.median(widths, 0)
                row = [
                    by_term.mean(),
                    by_term.min(),
                    by_term.max(),
                    width[1],
                    width[5],
                    np.sqrt(np.mean(np.square(off))),
                ]
                out.writerow([name, errors, epsilon, *(f"{number:.3f}" for number in row)])
                sys.stdout.flush()


def adult(folder: str) -> DataSet:
    """The census with its schema, which the command reads where a file is given."""
    values = schema.read_schema(Path(data.__file__).with_name("adult.schema.toml"))
    return replace(data.load("adult", folder), schema=values, name="adult.csv")


def accuracy(folder: str, seeds: int) -> None:
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["data", "model", "epsilon", "score", "lowest", "highest", "seconds"])
    rows = [survey(seed) for seed in (1000, 1001)]
    of_survey = schema.table_of(VALUES).data_set("survey", VALUES, *rows, ROWS)
    for dataset, score in ((adult(folder), "accuracy"), (of_survey, "rmse")):
        for model in ("statistics", "statistics-by-groups", "logistic"):
            for epsilon in EPSILONS:
                scores, began = [], time.process_time()
                for seed in range(seeds):
                    settings = RunSettings(data="adult", model=model, epsilon=epsilon, delta=DELTA, seed=seed)
                    if model == "logistic":
                        settings = replace(settings, **SGD)
                    experiment = assemble(settings, raw=dataset)
                    training = build_training(experiment, on_disk=False)
                    training.run(progress=False)
                    scores.append(experiment.task.evaluate(experiment.model, experiment.dataset)[score])
                seconds = (time.process_time() - began) / seeds
                row = (statistics.median(scores), min(scores), max(scores))
                out.writerow([dataset.name, model, epsilon, *(f"{one:.4f}" for one in row), f"{seconds:.1f}"])
                sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["coverage", "accuracy"])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--adult", help="Folder of the census.", metavar="FOLDER")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning)
    if given.what == "coverage":
        coverage(given.trials)
    else:
        accuracy(given.adult, given.seeds)
