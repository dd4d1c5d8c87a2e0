"""`equipoise train --unit user`: tables whose rows belong to users, calibration and audits for users."""

import csv
import json

import numpy as np
import pytest
import torch

from equipoise.app.build import assemble
from equipoise.app.data_loading import load_data
from equipoise.app.settings import RunSettings
from equipoise.data import DataSet, Records
from equipoise.data.readers.files import DataFileError
from equipoise.data.records import OWNER
from equipoise.privacy import Budget, Poisson, Unit, calibrate_noise_multiplier

SCHEMA = """population = 600
target = "buys"
[columns.wage]
type = "number"
low = 0
high = 100
[columns.patient]
type = "number"
low = 0
high = 1000
[columns.buys]
type = "category"
values = ["no", "yes"]
"""
USERS = "--unit user --owner patient --records-per-user 2"
SMALL = "--epochs 4 --batch-size 150 --epsilon 8 --delta 1e-4 --seed 1 --json"


def write_rows(path, count, owners=None):
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["wage", "patient", "buys"])
        for i, wage in enumerate(rng.uniform(0, 100, count)):
            owner = i // 3 if owners is None else owners[i]
            writer.writerow([f"{wage:.2f}", owner, ["no", "yes"][int(wage > 50)]])


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    folder = tmp_path_factory.mktemp("users")
    write_rows(folder / "people.csv", 600)
    (folder / "people.schema.toml").write_text(SCHEMA)
    return folder / "people.csv"


@pytest.mark.parametrize(("rows", "drawn", "population"), [("", "record", 480), ("mean", "user", 160)])
def test_a_table_of_users_is_trained_on_and_resumed(equipoise, people, tmp_path, rows, drawn, population):
    run = tmp_path / "run"
    size = "--user-rows mean --population 200 --batch-size 40" if rows else ""
    words = ("--data", people, "--test-share", "0.2", "--run-dir", run)
    found = equipoise(f"train {SMALL} {USERS} {size}", *words)
    assert found.code == 0, found.err
    statement = found.value["statement"]
    assert (statement["unit"], statement["users"]) == ("user", {"records": 2, "rows": rows or None})
    assert statement["guarantee"] == "proven"
    assert found.value["epsilon"] <= 8
    assert f"about {40 if rows else 150} {drawn}s" in " ".join(found.err.split())
    config = json.loads((run / "config.json").read_text())
    assert config["schema"]["columns"]["patient"] == {"type": "skip"}
    assert "--unit user --owner patient --records-per-user 2" in config["command"]
    page = (run / "report.html").read_text()
    assert f"{population} training {drawn}s" in page
    assert "one particular user" in page
    assert equipoise("verify", run).code == 0
    assert equipoise("resume --json", run).value["epsilon"] == found.value["epsilon"]
    again = equipoise("predict --json", run, "--data", people)
    assert again.value["records"] == 600
    tried = equipoise("audit neighbours --json --positions 2", run)
    assert (tried.value["unit"], tried.value["holds"]) == ("user", True)


def test_the_owner_is_no_input_and_a_user_is_never_split(people):
    settings = RunSettings(
        data=str(people), unit="user", owner="patient", records_per_user=2, test_share=0.3, epsilon=1.0
    )
    data = load_data(settings)
    assert data.input_shape == (1,)
    assert OWNER not in data.test.fields
    made = assemble(settings)
    assert made.owner is not None
    assert set(made.records.fields) == {"input", "label"}
    # users of three rows each: whole users are left
    assert set(made.owner.unique(dim=0, return_counts=True)[1].tolist()) == {3}
    assert len(made.records) + len(data.test) == 600


def test_one_user_more_leaves_the_others_where_they_are(people, tmp_path):
    """Who is set aside, and who is trained on, follows from the own name alone."""

    def parts(path):
        data = load_data(
            RunSettings(
                data=str(path), schema=str(people.with_name("people.schema.toml")), unit="user",
                owner="patient", records_per_user=2, test_share=0.3,
            )
        )  # fmt: skip
        rows = zip(*(data.train.fields[name].tolist() for name in ("input", OWNER)), strict=True)
        return {(tuple(value), tuple(owner)) for value, owner in rows}

    names = [i // 3 for i in range(600)]
    write_rows(tmp_path / "fewer.csv", 600, [0 if name == 7 else name for name in names])
    before, after = parts(people), parts(tmp_path / "fewer.csv")
    assert len(before ^ after) <= 12  # rows of the two users whose names changed


def test_a_row_without_an_owner_stops_the_command(tmp_path):
    path = tmp_path / "people.csv"
    (tmp_path / "people.schema.toml").write_text(SCHEMA)
    write_rows(path, 30, ["" if i == 20 else i for i in range(30)])
    with pytest.raises(DataFileError, match="line 22, column 'patient': the cell names no user"):
        load_data(
            RunSettings(data=str(path), unit="user", owner="patient", records_per_user=1, test_share=0.5)
        )


def visits(**_):
    rows = {"input": torch.randn(90, 2), "label": torch.arange(90) % 2}
    return DataSet(
        "visits",
        train=Records({**rows, "person": torch.arange(90) // 3}),
        test=Records(rows),
        population=90,
        num_classes=2,
    )


def test_a_function_names_users_by_a_field(monkeypatch):
    named = {"data": f"{__name__}:visits", "population": 90, "unit": "user", "records_per_user": 3}
    made = assemble(RunSettings(**named, owner="person", batch_size=30, epochs=1, epsilon=1.0))
    assert made.owner.tolist() == [i // 3 for i in range(90)]
    assert "person" not in made.records.fields
    for wrong in ("label", "people"):
        with pytest.raises(ValueError, match="it must name a field of the training records"):
            assemble(RunSettings(**named, owner=wrong))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--owner patient", "--owner belongs to --unit user"),
        ("--owner patient --records-per-user 2", "--owner and --records-per-user belong to --unit user"),
        ("--unit user --records-per-user 2", "--unit user needs --owner"),
        ("--unit user --owner patient", "--unit user needs --records-per-user"),
        (f"{USERS} --data digits", "whose records have no owners"),
        (f"{USERS} --canaries 10", "canaries are single records"),
        (f"{USERS} --subset 100", "takes the first rows, whosever they are"),
        (f"{USERS} --public-records 100", "takes the last rows, whosever they are"),
        (f"{USERS.replace('2', '0')}", "--records-per-user is 0"),
        (f"{USERS} --sampling without-replacement", "--records-per-user 2: no accountant"),
        (f"{USERS} --method dp-mf", "--records-per-user 2"),
        (USERS.replace("patient", "buys"), "which is the target"),
        (USERS.replace("patient", "person"), "--owner names 'person', but the table has no such column"),
    ],
)
def test_slips_are_answered(equipoise, people, words, message):
    data = () if "--data" in words else ("--data", people, "--test-share", "0.2")
    found = equipoise(f"train {SMALL} --dry-run {words}", *data)
    assert found.code == 2
    assert message in found.value["error"]


def test_noise_for_users_is_calibrated(equipoise):
    words = "calibrate --population 10000 --batch-size 100 --steps 50 --delta 1e-6 --epsilon 3"
    found = equipoise(f"{words} --records-per-user 4 --json").value
    expected = calibrate_noise_multiplier(Poisson(100, 10_000, 50), Budget(3.0, 1e-6), unit=Unit("user", 4))
    assert found["noise_multiplier"] == pytest.approx(expected, rel=1e-3)
    assert (found["unit"], found["users"]) == ("user", {"records": 4, "rows": None})
    assert "users of at most 4 records each" in equipoise(f"{words} --records-per-user 4").out


@pytest.mark.wide
def test_a_method_is_audited_for_users(equipoise):
    found = equipoise("audit method dp-sgd --unit user --records-per-user 3 --json").value
    assert (found["unit"], found["users"]["records"], found["holds"]) == ("user", 3, True)
    assert found["certified_epsilon"] > 0.3
