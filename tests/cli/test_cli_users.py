"""`equipoise train --unit user`: tables whose rows belong to users, calibration and audits for users."""

import json

import pytest
import torch

from equipoise.app.build import assemble
from equipoise.app.data_loading import load_data
from equipoise.app.settings import RunSettings
from equipoise.data import DataSet, Records
from equipoise.data.readers.files import DataFileError
from equipoise.data.records import OWNER
from equipoise.privacy import Budget, Poisson, Unit, calibrate_noise_multiplier
from equipoise.statements.assumptions import Assumption
from tests.cli.conftest import write_patients

USERS = "--unit user --owner patient --records-per-user 2"
SMALL = "--epochs 4 --batch-size 150 --epsilon 8 --delta 1e-4 --seed 1 --json"


@pytest.mark.parametrize(("rows", "drawn", "population"), [("", "record", 480), ("mean", "user", 160)])
def test_a_table_of_users_is_trained_on_and_resumed(equipoise, patients, tmp_path, rows, drawn, population):
    run = tmp_path / "run"
    size = "--user-rows mean --population 200 --batch-size 40" if rows else ""
    words = ("--data", patients, "--test-share", "0.2", "--run-dir", run)
    found = equipoise.ok(f"train {SMALL} {USERS} {size}", *words)
    statement = found.value["statement"]
    assert {Assumption.HELD_OUT, Assumption.EVALUATED} & {*statement["assumptions"]} == {Assumption.HELD_OUT}
    assert "evaluated on and not trained on" in found.err
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
    again = equipoise("predict --json", run, "--data", patients)
    assert again.value["records"] == 600
    tried = equipoise("audit neighbours --json --positions 2", run)
    assert (tried.value["unit"], tried.value["holds"]) == ("user", True)


def split(path):
    named = {"unit": "user", "owner": "patient", "records_per_user": 2, "test_share": 0.3, "epsilon": 1.0}
    return RunSettings(data=str(path), **named)


def test_the_owner_is_no_input_and_a_user_is_never_split(patients):
    data, made = load_data(split(patients)), assemble(split(patients))
    assert data.input_shape == (1,)
    assert OWNER not in data.test.fields
    assert set(made.records.fields) == {"input", "label"}
    # users of three rows each: whole users are left
    assert set(made.owner.unique(dim=0, return_counts=True)[1].tolist()) == {3}
    assert len(made.records) + len(data.test) == 600


def test_one_user_more_leaves_the_others_where_they_are(patients, tmp_path):
    """Who is set aside, and who is trained on, follows from the own name alone."""

    def parts(path):
        fields = load_data(split(path)).train.fields
        rows = zip(fields["input"].tolist(), fields[OWNER].tolist(), strict=True)
        return {(tuple(value), tuple(owner)) for value, owner in rows}

    names = [0 if i // 3 == 7 else i // 3 for i in range(600)]
    fewer = write_patients(tmp_path / "fewer.csv", 600, names)
    assert len(parts(patients) ^ parts(fewer)) <= 12  # rows of the two users whose names changed


def test_a_row_without_an_owner_stops_the_command(tmp_path):
    path = write_patients(tmp_path / "people.csv", 30, ["" if i == 20 else i for i in range(30)])
    with pytest.raises(DataFileError, match="line 22, column 'patient': the cell names no user"):
        load_data(split(path))


def visits(**_):
    rows = {"input": torch.randn(90, 2), "label": torch.arange(90) % 2}
    owned = Records({**rows, "person": torch.arange(90) // 3})
    return DataSet("visits", train=owned, test=Records(rows), population=90, num_classes=2)


def test_a_function_names_users_by_a_field(monkeypatch):
    named = {"data": f"{__name__}:visits", "population": 90, "unit": "user", "records_per_user": 3}
    made = assemble(RunSettings(**named, owner="person", batch_size=30, epochs=1, epsilon=1.0))
    assert made.owner.tolist() == [i // 3 for i in range(90)]
    assert "person" not in made.records.fields
    for wrong in ("label", "people"):
        with pytest.raises(ValueError, match="it must name a field of the training records"):
            assemble(RunSettings(**named, owner=wrong))


def test_noise_for_users_is_calibrated(equipoise):
    words = "calibrate --population 10000 --batch-size 100 --steps 50 --delta 1e-6 --epsilon 3"
    found = equipoise(f"{words} --records-per-user 4 --json").value
    expected = calibrate_noise_multiplier(Poisson(100, 10_000, 50), Budget(3.0, 1e-6), unit=Unit("user", 4))
    assert found["noise_multiplier"] == pytest.approx(expected, rel=1e-3)
    assert (found["unit"], found["users"]) == ("user", {"records": 4, "rows": None})
    assert "users of at most 4 records each" in equipoise(f"{words} --records-per-user 4").out
