"""Comparisons: equal trials, equal budgets, one file a run, and nothing done twice."""

import json
import math
from dataclasses import replace

import pytest
import torch

from equipoise.app import compare as module
from equipoise.app.compare import compare
from equipoise.app.contenders import Comparison
from equipoise.app.settings import RunSettings, SettingsError
from equipoise.app.tasks import TASKS
from equipoise.data import DataSet, Records

BASE = RunSettings(data="digits", epsilon=3.0, epochs=1.0, batch_size=300.0, subset=900, reproducible=True)


@pytest.fixture
def trained(monkeypatch):
    """The trainings that were really done, as (method, clip rule, rate, seed); each takes a moment."""
    calls = []
    real = module.train_in_memory

    def counting(settings, *rest):
        calls.append((settings.method, settings.clip_rule, settings.learning_rate, settings.seed))
        return real(settings, *rest)

    monkeypatch.setattr(module, "train_in_memory", counting)
    return calls


@pytest.mark.wide
def test_whole_comparison_goes_on_where_it_was_stopped(tmp_path, trained, monkeypatch):
    comparison = Comparison(methods="dp-sgd,auto-s", base=BASE, seeds=2, trials=2)
    real = module.write_json

    def stops_after_three(path, content):
        if len(trained) > 3:
            raise KeyboardInterrupt
        real(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_json", stops_after_three)
        with pytest.raises(KeyboardInterrupt):
            compare(comparison, tmp_path, silent, print)
    assert len(list((tmp_path / "runs").iterdir())) == 3
    trained.clear()
    notes = []
    found = compare(comparison, tmp_path, lambda *note: notes.append(note[:2]), print)
    # two trials and two results a method, three of them known; the notes count all
    assert len(trained) == 5
    assert notes == [(done, 8) for done in range(8)]
    assert json.loads((tmp_path / "comparison.json").read_text()) == json.loads(json.dumps(found))
    trained.clear()
    assert compare(comparison, tmp_path, silent, print)["methods"] == found["methods"]
    assert trained == []
    # one more seed trains one more run a method, and another budget all of them
    more = compare(replace(comparison, seeds=3), tmp_path, silent, print)
    assert len(more["methods"][0]["scores"]) == 3
    assert [(rule, seed) for _, rule, _, seed in trained] == [("abadi", 2), ("auto_s", 2)]
    for row in found["methods"]:
        assert row["statement"]["guarantee"] == "proven"
        assert 2.9 < row["statement"]["epsilon"] <= 3.0
        assert row["learning_rate"] == max(row["trials"], key=lambda trial: trial[1])[0]
        assert row["curve"][-1][0] == row["steps"] == 3
        assert row["judges"] == 180
        assert row["statement"]["releases"][0]["sampling"]["population"] == 900


def silent(*note):
    """Shows no progress."""


def test_public_records_leave_the_private_set_of_all(tmp_path, trained):
    base = replace(BASE, public_records=100)
    found = compare(Comparison(methods="dp-sgd", base=base, seeds=1, trials=1), tmp_path, silent, print)
    assert len(trained) == 1
    assert (found["methods"][0]["trials"], found["methods"][0]["learning_rate"]) == ([], 3.0)
    assert found["population"] == 800
    assert found["methods"][0]["statement"]["releases"][0]["sampling"]["population"] == 800
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    for changes in ({"epsilon": 5.0}, {"public_records": 50}):
        other = Comparison(methods="dp-sgd", base=replace(base, **changes), seeds=1, trials=1)
        with pytest.raises(SettingsError, match=f"holds a comparison with another .*{next(iter(changes))}"):
            compare(other, tmp_path, silent, print)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before


@pytest.mark.parametrize("task", TASKS)
def test_the_score_is_that_of_the_task_and_finite_whatever_is_answered(task):
    truth = {
        "classification": torch.tensor([0, 1, 2, 1]),
        "regression": torch.tensor([-1.0, -0.5, 0.0, 1.0]),
        "multi-label": torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]),
    }[task]
    records = Records({"input": torch.zeros(4, 2), TASKS[task].field: truth})
    classes = {"regression": 1, "multi-label": 2}.get(task, 3)
    data = DataSet("toy", records, records, 4, classes, task=task, target_range=(0.0, 10.0))
    name, more_is_better = TASKS[task].main

    def score(outputs):
        return TASKS[task].main_score(outputs, records, data)

    outputs = torch.randn(4, classes, generator=torch.Generator().manual_seed(0))
    assert score(outputs) == pytest.approx(TASKS[task].scores(outputs, truth, data)[name])
    right = torch.eye(3)[truth] if task == "classification" else truth.reshape(4, -1).clone()
    right -= 0.5 if task == "multi-label" else 0.0
    assert score(right) == float(more_is_better)
    right[2, 0] = math.nan
    assert score(right) == (0.75 if more_is_better else 5.0)  # the range is 10 wide: sqrt(100 / 4)
    right[:] = math.inf
    assert score(right) == (0.0 if more_is_better else 10.0)


@pytest.mark.parametrize(
    ("methods", "options", "words"),
    [
        ("dp-sgdd", [], "dp-sgdd"),
        ("dp-sgd", ["auto-s.clip_norm=1"], "auto-s"),
        ("dp-sgd", ["dp-sgd.epsilon=8"], "all methods share"),
        ("dp-sgd,dp-sgd", [], "none twice"),
        ("", [], "at least one method"),
        ("dp-sgd", ["dp-sgd.anchor=8"], "method dp-sgd: --option anchor is not an option of"),
        ("dp-sgd,far=dp-mf", ["far.bands=64"], "method far: .*bands=64"),
    ],
)
def test_refuses_before_training(tmp_path, trained, methods, options, words):
    given = Comparison(methods=methods, base=BASE, option=options, seeds=1, trials=1)
    with pytest.raises(SettingsError, match=words):
        compare(given, tmp_path, silent, print)
    assert trained == []
