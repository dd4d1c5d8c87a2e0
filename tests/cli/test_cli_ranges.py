"""`equipoise schema ranges`: ranges from a noised histogram, booked in the journal that trainings share."""

import json
from unittest.mock import Mock

import dp_accounting
import numpy as np
import pytest
import torch

from equipoise.app import ranges
from equipoise.data.readers.schema import read_schema
from equipoise.training import Users

SCHEMA = """target = "y"
missing = ["", "-1"]
columns.y = {type = "number", low = 0, high = 1}
[columns.age]
type = "number"
low = "FILL IN"   # the least
high = "FILL IN"
[columns."in come"]
type = "number"
low = 0
high = "FILL IN"
"""


@pytest.fixture
def table(tmp_path):
    rng = np.random.default_rng(0)
    ages = ["", "-1", *(f"{age:.2f}" for age in rng.uniform(21, 95, 5))] * 600
    wages, answers = rng.uniform(150, 900, len(ages)), rng.integers(0, 2, len(ages))
    rows = [f"{age},{wage:.2f},{y}" for age, wage, y in zip(ages, wages, answers, strict=True)]
    rows[17] = "99999,150.0,0"  # one person alone moves no end
    (tmp_path / "t.csv").write_text("\n".join(["age,in come,y", *rows]))
    (tmp_path / "t.schema.toml").write_text(SCHEMA)
    return tmp_path / "t.csv"


def test_ranges_are_filled_in_and_booked(equipoise, table, tmp_path):
    ledger, run = tmp_path / "people.jsonl", tmp_path / "run"
    words = ("--epsilon", "1", "--ledger", ledger, "--json")
    missing = equipoise("schema ranges", table, *words)
    assert "no population is stated" in missing.value["error"]
    assert not ledger.exists()
    (tmp_path / "t.schema.toml").write_text(f"population = 4200\n{SCHEMA}")
    found = equipoise.ok("schema ranges", table, *words)
    assert found.value["ranges"] == {"age": [20, 100], "in come": [0, 1000]}
    columns = read_schema(tmp_path / "t.schema.toml")["columns"]
    assert (columns["age"]["low"], columns["age"]["high"], columns["in come"]["low"]) == (20, 100, 0)
    assert columns["in come"]["high"] == 1000
    assert "leaves no range" in equipoise("schema ranges", table, *words).value["error"]
    data = ("--data", table, "--test-share", "0.2", "--run-dir", run)
    equipoise.ok("train --model statistics --epsilon 2 --delta 1e-5 --json --ledger", ledger, *data)
    lines = map(json.loads, ledger.read_text().splitlines())
    plans = [line["plan"] for line in lines if line["type"] == "run"]
    assert len(plans) == 2
    assert equipoise("verify --json", run, "--ledger", ledger).code == 0
    multipliers = [plan["releases"][0]["mechanism"]["noise_multiplier"] for plan in plans]
    accountant = dp_accounting.pld.PLDAccountant()
    alone = accountant.compose(dp_accounting.GaussianDpEvent(multipliers[0])).get_epsilon(1e-5)
    both = accountant.compose(dp_accounting.GaussianDpEvent(multipliers[1])).get_epsilon(1e-5)
    assert (alone, both) == pytest.approx((1.0, 2.0), rel=0.01)


def test_an_end_agrees_with_the_one_that_is_stated(monkeypatch, tmp_path, table):
    """What lies beyond the stated end has no say: 150 to 900 are looked at from 400 on, or up to 300."""
    for low, high, wanted in ((400, None, (400, 1000)), (None, 300, (100, 300)), (2000, None, None)):
        text = SCHEMA.replace('low = 0\nhigh = "FILL IN"', f"low = {low}\nhigh = {high}")
        (tmp_path / "t.schema.toml").write_text("population = 4200\n" + text.replace("None", '"FILL IN"'))
        monkeypatch.setattr(ranges, "histogram", exact)
        assert ranges.fill_in_ranges(str(table), None, 1.0, "unused").get("in come") == wanted


def exact(numbers, population, epsilon, journal, unit):
    count = len(ranges.GRID)
    places = torch.bucketize(numbers, ranges.GRID[1:-1], right=True).where(numbers.isfinite(), count - 1)
    return torch.stack([row.bincount(minlength=count) for row in places]).double(), 1.0


def test_an_end_is_written_where_it_stands_or_nothing_is_spent(equipoise, table, tmp_path):
    """Neither the kind of quotes nor comments nor other columns mislead."""
    schema, ledger = tmp_path / "t.schema.toml", tmp_path / "people.jsonl"
    words = ("--epsilon", "1", "--ledger", ledger, "--json")
    text = """population = 4200 # low = "FILL IN", 'FILL IN'\r
target = "y"
missing = ["", "-1", "FILL IN"]
columns.age = {high = "FILL IN", type = "number", low = 'FILL IN'} # "FILL IN"
columns.note = {type = "category", values = ["FILL IN", 'low = "FILL IN"']}
columns.y = {type = "number", low = 0, high = 1}
["columns"."in come"]
"low" = 0
type = "number"
'high'='FILL IN' # high = "FILL IN"
"""
    for unclear in ('"""FILL IN"""', '"FILL\\u0020IN"'):
        schema.write_bytes(text.replace("'high'='FILL IN'", f"high = {unclear}").encode())
        before = schema.read_bytes()
        assert "leaves high of 'in come' to be filled in" in equipoise("schema ranges", table, *words).err
        assert schema.read_bytes() == before
        assert not ledger.exists()
    schema.write_bytes(text.encode())
    assert equipoise("schema ranges", table, *words).code == 0
    wanted = text.replace(
        '{high = "FILL IN", type = "number", low = \'FILL IN\'}', '{high = 100, type = "number", low = 20}'
    )
    assert schema.read_bytes().decode() == wanted.replace("'high'='FILL IN'", "'high'=1000")


def test_a_schema_that_cannot_be_written_costs_nothing(equipoise, table, tmp_path, monkeypatch):
    (tmp_path / "t.schema.toml").write_text(f"population = 4200\n{SCHEMA}")
    monkeypatch.setattr("os.replace", Mock(side_effect=PermissionError(13, "Permission denied")))
    ledger = tmp_path / "people.jsonl"
    assert equipoise("schema ranges", table, "--epsilon", "1", "--ledger", ledger).code != 0
    assert not ledger.exists()


def test_a_row_adds_at_most_one_and_the_noise_is_the_plans():
    """Cells of many copies of one row are its part; those of no row are the noise."""
    numbers = torch.tensor([[30.0] * 1000, [float("nan")] * 1000, [-7e12] * 1000], dtype=torch.double)
    cells, noise = ranges.histogram(numbers, 1000, 1.0, None)
    cells = cells[:, :-1]
    assert float(cells[0].max()) == pytest.approx(3**-0.5, abs=5 * noise)
    assert (int(cells[0].argmax()), int(cells[2].argmax())) == (int((ranges.GRID == 20).nonzero()), 0)
    rest = torch.cat([cells[0][cells[0] < 0.3], cells[1], cells[2][1:]])
    assert len(rest) > 200
    assert float(rest.std()) == pytest.approx(noise, rel=0.2)
    assert noise * 1000 == pytest.approx(3.73, rel=0.01)


@pytest.mark.parametrize("rows", [1, 5])
def test_all_rows_of_a_user_together_add_at_most_one(rows):
    """A hundred users with fifty rows each at one place add a hundred; five hundred of one row add that."""
    numbers = torch.tensor([[30.0] * 5000 + [3000.0] * 500], dtype=torch.double)
    owner = torch.tensor([*(number // 50 for number in range(5000)), *range(100, 600)])
    unit = Users(owner, records_per_user=rows, rows="mean")
    cells, noise = ranges.histogram(numbers, 600, 30.0, None, unit)
    one, many = (int((start == ranges.GRID).nonzero()) for start in (20, 2000))
    assert (600 * cells[0, [one, many]]).tolist() == pytest.approx([100, 500], abs=6 * 600 * noise)
    assert 600 * noise < 1


def test_ranges_of_users_and_of_rows_do_not_share_a_journal(equipoise, table, tmp_path):
    rows = table.read_text().splitlines()
    users = ["who", *(str(number // 3) for number in range(len(rows) - 1))]
    table.write_text("\n".join(f"{row},{user}" for row, user in zip(rows, users, strict=True)))
    (tmp_path / "t.schema.toml").write_text(f"population = 4200\n{SCHEMA}")
    ledger = ("--ledger", tmp_path / "people.jsonl", "--json")
    words = ("--epsilon", "8", "--owner", "who", "--records-per-user", "3", *ledger)
    assert equipoise("schema ranges", table, *words).value["ranges"]["in come"] == [0, 1000]
    named = "--unit user --owner who --records-per-user 3 --user-rows mean --population 1400"
    train = "train --model statistics --test-share 0.2 --epsilon 9 --delta 1e-5 --run-dir"
    equipoise.ok(f"{train} {tmp_path / 'run'} {named} --data", table, *ledger)
    other = equipoise(f"{train} {tmp_path / 'other'} --data", table, *ledger)
    assert "for one user, this one for one record" in other.value["error"]
