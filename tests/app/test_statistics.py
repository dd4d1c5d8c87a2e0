"""Sufficient statistics: sensitivity, the model that follows, its intervals, and its words in CSV and SQL."""

import csv
import io
import itertools
import sqlite3
from dataclasses import replace
from datetime import date, timedelta

import numpy as np
import pytest
import torch

from equipoise.app.build import assemble, build_training
from equipoise.app.coefficients import design_of, written
from equipoise.app.models import build_model, prepare_data
from equipoise.app.option_checks import SettingsError
from equipoise.app.settings import RunSettings
from equipoise.app.statistics import PARTS, SufficientStatistics, statistics_loss
from equipoise.app.tasks import in_units, outputs_of, task_of
from equipoise.data import Records
from equipoise.data.readers.schema import records_for_model, table_of

COLUMNS = {
    "age": {"type": "number", "low": 18, "high": 90, "missing": ["?"]},
    "income": {"type": "number", "low": 0, "high": 1000, "log": True},
    "o'town": {"type": "category", "values": ["Rome", "O'Slo", "Bern"], "other": False},
    "sex": {"type": "category", "values": ["f", "m"], "missing": ["?", ""]},
}
NUMBER = {"type": "number", "low": -5, "high": 20}
TARGETS = {
    "number": NUMBER,
    "logarithm": {**NUMBER, "log": True},
    "count": {**NUMBER, "low": 0},
    "classes": {"type": "category", "values": ["no", "yes"]},
}
NUMBERS = [("18", "0"), ("90", "1000"), ("54", "3"), ("?", "10")]
LONGEST = NUMBERS, ["Rome", "O'Slo", "Bern"], ["f", "m", "?", "none"]


def rows_of(tmp_path, target="number", population=40, weights=None):
    """Rows at the corners of the form and within, as the training records of a data set."""
    values = {"columns": {**COLUMNS, "y": TARGETS[target]}, "target": "y", "population": population}
    ends = ["no", "yes"] if target == "classes" else ["-5", "20"]
    cells = [[*pair, *rest] for pair, *rest in itertools.product(*LONGEST, ends)]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([[*COLUMNS, "y"], *cells])
    dataset, _ = records_for_model(path, values)
    fields = dict(dataset.test.fields)
    if weights is not None:
        fields["weight"] = weights(len(cells))
    train = Records(fields, num_classes=dataset.test.num_classes)
    return table_of(values).data_set(path, values, train, dataset.test, population), cells


def parts_of(model, fields):
    """Each record's part of the statistics, [n, parameters]."""
    losses = statistics_loss(model, dict(fields))
    parts = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    return torch.stack([torch.cat([one.flatten() for one in part]) for part in parts])


@pytest.mark.parametrize("target", ["number", "classes"])
@pytest.mark.parametrize("name", ["statistics", "statistics-by-groups"])
def test_a_row_moves_the_statistics_by_at_most_one(tmp_path, target, name):
    """By hand for every row: with it and without it; the longest row moves them by one."""
    dataset, _ = rows_of(tmp_path, target)
    dataset = prepare_data(name, dataset)
    model = build_model(name, dataset)
    for _ in range(2):  # at zero, and anywhere else
        parts = parts_of(model, dataset.train.fields)
        others = ~torch.eye(len(parts), dtype=torch.bool)
        moved = parts.sum(0) - torch.stack([parts[rest].sum(0) for rest in others])
        assert float(moved.norm(dim=1).max()) == pytest.approx(1.0, abs=1e-4)
        assert float(parts.norm(dim=1).max()) <= 1 + 1e-6
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
    lighter = {**dataset.train.fields, "weight": torch.full((len(dataset.train),), 0.25)}
    assert torch.allclose(parts_of(model, lighter), parts / 4)
    if name == "statistics-by-groups":
        groups = dataset.train.fields["group"]
        rest = dataset.train.subset(torch.arange(len(groups)) != 3).without("group").groups(10)
        assert torch.equal(rest, groups[torch.arange(len(groups)) != 3])
        assert len(groups.unique()) > 5


def fitted(model, dataset, noise=0.0, generator=None):
    """The model after its one step, by the formula of the sums."""
    statistics_loss(model, dict(dataset.train.fields)).sum().backward()
    for parameter in model.parameters():
        drawn = noise * torch.randn(parameter.shape, generator=generator)
        parameter.data = -parameter.grad / dataset.population + drawn
    model.noise.fill_(noise)
    return model


@pytest.mark.parametrize("name", ["statistics", "statistics-by-groups"])
def test_without_noise_it_is_weighted_least_squares(tmp_path, name):
    dataset, _ = rows_of(tmp_path, weights=lambda n: torch.linspace(0.1, 1, n))
    dataset = prepare_data(name, dataset)
    model = fitted(build_model(name, dataset), dataset)
    fields = dataset.train.fields
    x, t, root = model.inputs(fields["input"]), fields["target"], fields["weight"].sqrt()
    best = torch.linalg.lstsq(x.double() * root[:, None], (t * root).double()[:, None]).solution[:, 0]
    assert torch.allclose(model.coefficients(), best, atol=1e-4)
    assert torch.allclose(model(fields["input"])[:, 0], (x.double() @ best).float(), atol=1e-3)


def test_what_a_month_adds_is_its_coefficient(tmp_path):
    """y = 3 + 2 in May + 1 on a Sunday + a thousandth of a day, exactly; and the row is no longer than R."""
    visit = {"low": "2020-01-01", "high": "2020-12-31", "parts": ["days", "month", "weekday"]}
    columns = {"visit": {"type": "date", **visit}, "y": {"type": "number", "low": 0, "high": 10}}
    values = {"columns": columns, "target": "y", "population": 366}
    days = [date(2020, 1, 1) + timedelta(days=number) for number in range(366)]
    numbers = [3 + 2 * (day.month == 5) + (day.isoweekday() == 7) + n / 1000 for n, day in enumerate(days)]
    rows = [f"{day},{number}" for day, number in zip(days, numbers, strict=True)]
    (tmp_path / "rows.csv").write_text("\n".join(["visit,y", *rows]))
    dataset, _ = records_for_model(tmp_path / "rows.csv", values)
    dataset = prepare_data("statistics", replace(dataset, train=dataset.test, population=366))
    model = fitted(build_model("statistics", dataset), dataset)
    assert float(model.inputs(dataset.train.fields["input"]).norm(dim=1).max()) <= float(model.bound) + 1e-6
    table, sql, why = written(dict(model.state_dict()), table_of(values))
    found = {row["term"]: float(row["coefficient"]) for row in csv.DictReader(io.StringIO(table))}
    assert sql is None
    assert "date" in why
    terms = ("intercept", "visit month 5", "visit month 6", "visit weekday 7", "visit days since 2020-01-01")
    assert [found[term] for term in terms] == pytest.approx([3, 2, 0, 1, 1e-3], abs=2e-2)


@pytest.mark.parametrize(("name", "noise"), [("statistics", 2e-3), ("statistics-by-groups", 5e-4)])
def test_intervals_cover_and_a_wrong_noise_shows(name, noise):
    """95% of 60 trials times 4 coefficients; with half or twice the errors it would be 67% or 99.99%."""
    columns = {name: {"type": "number", "low": -1, "high": 1} for name in "abcy"}
    values = {"columns": columns, "target": "y", "population": 3000}
    generator, truth = torch.Generator().manual_seed(0), torch.tensor([0.1, 0.3, -0.2, 0.0])
    hits = []
    for _ in range(60):
        x = torch.rand(3000, 3, generator=generator) * 2 - 1
        y = truth[0] + x @ truth[1:] + 0.2 * torch.randn(3000, generator=generator)
        rows = Records({"input": x, "target": y.clamp(-1, 1)})
        dataset = prepare_data(name, table_of(values).data_set("t", values, rows, rows, 3000))
        model = build_model(name, dataset)
        one = SufficientStatistics(model.design, float(model.bound), 3000, groups=model.groups)
        model = fitted(one, dataset, noise, generator)
        covariance, degrees = model.covariance()
        reach = 1.96 if degrees > 100 else 2.262
        hits.append((model.coefficients() - truth).abs() < reach * covariance.diagonal().sqrt())
    assert 0.91 < float(torch.stack(hits).double().mean()) < 0.985


def test_rows_of_a_private_score_are_not_counted(tmp_path):
    """Scaled by the whole population, the sums would be those of 2000 rows and the intervals too narrow."""
    columns = 'a = {type = "number", low = 0, high = 1}\ny = {type = "category", values = ["0", "1"]}'
    text = f'population = 2000\ntarget = "y"\n[columns]\n{columns}\n'
    (tmp_path / "t.schema.toml").write_text(text)
    rows = [f"{row % 1000 / 1000},{row % 2}" for row in range(2000)]
    (tmp_path / "t.csv").write_text("\n".join(["a,y", *rows]))
    data = str(tmp_path / "t.csv")
    settings = {"model": "statistics", "delta": 1e-5, "epsilon": 8.0, "private_validation": 0.4}
    experiment = assemble(RunSettings(data=data, **settings))  # and no test rows
    build_training(experiment, on_disk=False).run(progress=False)
    assert isinstance(experiment.model, SufficientStatistics)
    assert float(experiment.model.sums()[0][0, 0, 0]) == pytest.approx(1200, rel=0.1)


@pytest.mark.parametrize(
    ("name", "target", "loss"),
    [
        ("statistics", "number", None),
        ("statistics", "logarithm", None),
        ("statistics-by-groups", "classes", None),
        ("logistic", "classes", None),
        ("logistic", "number", "huber:2"),
        ("logistic", "count", "poisson"),
        ("logistic", "logarithm", "logistic"),
    ],
)
def test_sql_predicts_what_the_model_does(tmp_path, name, target, loss):
    dataset, cells = rows_of(tmp_path, target)
    model = build_model(name, prepare_data(name, dataset))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    if isinstance(model, SufficientStatistics):
        model.noise.fill_(0.1)
    text, sql, _ = written(model.state_dict(), table_of(dataset.schema), loss)
    place = sqlite3.connect(":memory:")
    for function in ("EXP", "LN"):
        place.create_function(function, 1, {"EXP": np.exp, "LN": np.log}[function])
    place.execute('CREATE TABLE rows (age REAL, income REAL, "o\'town" TEXT, sex TEXT)')
    missing = [[None if cell == "?" else cell for cell in row[:4]] for row in cells]
    place.executemany("INSERT INTO rows VALUES (?, ?, ?, ?)", missing)
    found = torch.tensor(place.execute(f"SELECT {sql} FROM rows").fetchall())[:, 0].double()
    outputs = outputs_of(model, dataset.test)
    if target == "classes":
        wanted = outputs.double().softmax(1)[:, 1]
    else:
        wanted = in_units(task_of(dataset, loss).link(outputs)[:, 0], dataset)
    assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-4)
    terms = list(csv.DictReader(io.StringIO(text)))
    assert terms[0]["term"] == "intercept"
    assert ("low" in terms[0]) == (name != "logistic")
    if name == "statistics" and target == "number":  # one more year of age, two rows that differ in it alone
        (age,) = (float(row["coefficient"]) for row in terms if row["term"] == "age")
        income = sum(float(row["coefficient"]) for row in terms if row["term"].startswith("ln"))
        moved = float(wanted[cells.index(["90", "1000", *cells[0][2:]])] - wanted[0])
        assert moved == pytest.approx(72 * age + income * np.log(1001), rel=1e-2)


def test_what_does_not_fit_is_refused(tmp_path):
    for name, value in (("loss", "huber:1"), ("clip_norm", "0.1"), ("method", "dp-mf"), ("epochs", 2.0)):
        with pytest.raises(SettingsError, match="takes one release"):
            RunSettings(model="statistics", **{name: value}).check()
    settings = RunSettings(model="statistics").resolved()
    assert (settings.sampling, settings.epochs, settings.batch_size) == ("full-batch", 1, None)
    dataset, _ = rows_of(tmp_path)
    assert design_of(table_of(dataset.schema))[0].shape == (10, 9)
    with pytest.raises(ValueError, match="a table with a schema"):
        build_model("statistics", replace(dataset, schema=None))
    assert sum(share**2 for share in PARTS) == pytest.approx(1.0)
