"""Run folders of earlier versions: finished ones verify, others name who resumes them."""

from __future__ import annotations

import json

import pytest
from small_problems import resumed, saved, training

import equipoise as eq
from equipoise.statements.assumptions import ALLOWED, DATA, MODEL, ROUNDED


@pytest.fixture
def unfinished(tmp_path):
    saved(training(steps=3, folder=tmp_path / "run"))
    return tmp_path / "run"


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def before_numbers(config):
    del config["engine"], config["version"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda config: config.update(engine=1, version="0.0.7"), "equipoise==0.0.7"),
        (before_numbers, "the version that began it"),
    ],
)
def test_an_unfinished_run_of_an_earlier_version_names_who_resumes_it(unfinished, change, named):
    edit(unfinished / "config.json", change)
    before = (unfinished / "private" / "journal.jsonl").read_bytes()
    with pytest.raises(ValueError, match=named):
        resumed(unfinished).close()
    assert (unfinished / "private" / "journal.jsonl").read_bytes() == before


def test_another_version_with_the_same_engine_resumes(unfinished):
    edit(unfinished / "config.json", lambda config: config.update(version="0.0.7"))
    resumed(unfinished).close()


def test_a_finished_run_of_an_earlier_version_verifies(tmp_path):
    folder = tmp_path / "run"
    training(steps=2, folder=folder).run(progress=False)

    def earlier(held):
        held["assumptions"] = [
            t for t in held["assumptions"] if t != ROUNDED and not t.startswith((MODEL, DATA))
        ]
        held["assumptions"] += [ALLOWED, "rounding is not counted, said in other words"]
        held.pop("independence", None)
        held.pop("noise_tail", None)

    def edited():
        return [finding.subject for finding in eq.verify_run(folder).findings if finding.ok is False]

    edit(folder / "statement.json", earlier)
    edit(folder / "config.json", lambda config: config.update(assumptions=[]))
    assert edited() == ["assumptions"]  # of this version it would be
    edit(folder / "config.json", before_numbers)
    assert edited() == []
