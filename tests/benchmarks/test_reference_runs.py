"""The reference runs repeat bit for bit, and each kind of difference is told."""

import copy
import json

import pytest

from benchmarks import reference_runs
from benchmarks.reference_runs import compare, machine, made

HERE, ELSEWHERE = machine(), {"processor": "another one"}


@pytest.fixture(scope="module")
def found():
    return {"dp-sgd": made("dp-sgd")}


def test_a_run_repeats(tmp_path, monkeypatch, found, capsys):
    file = tmp_path / "runs.json"
    file.write_text(json.dumps({"machine": HERE, "runs": found}))
    monkeypatch.setattr("sys.argv", ["", "--compare", str(file), "--only", "dp-sgd"])
    with pytest.raises(SystemExit) as end:
        reference_runs.main()
    assert not end.value.code
    assert capsys.readouterr().out.count("same") == 5
    assert all(found["dp-sgd"]["checks"].values())


@pytest.mark.parametrize(
    ("part", "value", "where", "column"),
    [
        ("weights", "0" * 32, HERE, "weights"),
        ("weights", "0" * 32, ELSEWHERE, None),
        ("norm", 1.0, ELSEWHERE, "weights"),
        ("epsilon", {"0.0001": 0.84159734843962}, HERE, "epsilon"),
        ("epsilon", {"0.0001": 0.8415973}, ELSEWHERE, "epsilon"),
        ("journal", {"bounds": "0" * 12}, HERE, "journal"),
        ("assumptions", ["the moon is round"], HERE, "assumptions"),
        ("checks", {"verifies": False}, HERE, "checks"),
        ("failed", "ValueError: no", HERE, "checks"),
    ],
)
def test_what_differs_is_told(found, capsys, part, value, where, column):
    before = {"machine": where, "runs": copy.deepcopy(found)}
    run = before["runs"]["dp-sgd"]
    run[part] = {**run[part], **value} if isinstance(value, dict) else value
    assert compare(before, HERE, found.items()) == (column not in (None, "assumptions"))
    told = capsys.readouterr().out
    assert (f"  {column}: " in told) == (column is not None)
    away = where == ELSEWHERE
    assert told.count("not compared") == away + (away and column != "weights")
    assert max(map(len, told.splitlines())) <= 80
