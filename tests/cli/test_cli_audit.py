"""`equipoise audit`: methods, steps with bugs and without, runs, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from equipoise.app.audits import finished_run, shadow_models
from equipoise.app.settings import RunSettings
from equipoise.audit import method_audit as mechanism
from equipoise.audit import one_step


def test_a_method(equipoise, monkeypatch):
    small = mechanism.Design(mechanism.AUDITS["dp-sgd"].make, canaries=500, trainings=1)
    monkeypatch.setitem(mechanism.AUDITS, "dp-sgd", small)
    found = equipoise("audit --method dp-sgd --epsilon 3 --seeds 2 --json").value
    assert found["holds"]
    assert found["claimed_epsilon"] <= 3
    assert len(found["certificates"]) == 2
    said = equipoise("audit --method dp-sgd").out
    assert "no contradiction" in said
    assert "proves no privacy" in said


def test_a_method_in_other_forms(equipoise, monkeypatch):
    small = mechanism.Design(mechanism.AUDITS["dp-sgd"].make, canaries=100, trainings=1, steps=2)
    monkeypatch.setitem(mechanism.AUDITS, "dp-sgd", small)
    found = equipoise("audit --method dp-sgd --relation replace-one --hardened --json").value
    assert (found["relation"], found["requested_epsilon"]) == ("replace_one", 2.0)
    assert found["claimed_epsilon"] <= 2


def test_options_of_a_method_are_those_of_a_training(equipoise, monkeypatch):
    small = replace(mechanism.AUDITS["dice-sgd"], canaries=100, trainings=1, steps=2)
    monkeypatch.setitem(mechanism.AUDITS, "dice-sgd", small)
    line = "audit --method dice-sgd --variant independent --option feedback.rate=0.5 --json"
    assert equipoise(line).value["holds"]


def test_a_step_clean_and_with_bugs(equipoise, monkeypatch):
    small = replace(mechanism.ONE_STEP["dp-sgd"], canaries=20_000)
    monkeypatch.setitem(mechanism.ONE_STEP, "dp-sgd", small)
    (row,) = equipoise("audit --one-step --method dp-sgd --json").value["one_step"]
    assert row["certified_epsilon"] < row["claimed_epsilon"] < row["certified_with_quiet_noise"]
    monkeypatch.setattr(one_step.Quiet, "noise_by", 1.0)
    answer = equipoise("audit --one-step --method dp-sgd")
    assert answer.code == 1
    assert "MISSED" in answer.out


@pytest.mark.wide
def test_neighbours(equipoise, trained):
    """Of named data, and of the settings of a run."""
    found = equipoise("audit --neighbours --positions 1 --json")
    assert (found.code, found.value["holds"]) == (0, True)
    assert {pair["change"] for pair in found.value["pairs"]} == {"add", "remove", "replace", "silent"}
    assert found.value["left_out"] == {}
    said = equipoise("audit --neighbours --positions 1 --threads 2", trained[0])
    assert said.code == 0
    assert "no sum moved farther than it may" in said.out
    assert "1 and 2 threads" in said.out


def test_neighbours_of_a_table(equipoise, people):
    """By the reader of `equipoise train`, and whatever its target asks for."""
    for target in ("buys", "wage"):
        found = equipoise(
            f"audit --neighbours --positions 1 --test-share 0.2 --target {target} --json --data", people
        )
        assert (found.code, found.value["holds"]) == (0, True)


@pytest.mark.wide
def test_shadow_models_of_a_table(equipoise, people, tmp_path):
    words = ("--data", people, "--test-share", "0.2", "--run-dir", tmp_path)
    found = equipoise("audit --shadow --models 4 --json", *words)
    assert found.code == 0, found.err
    assert found.value["data"] == "people.csv"
    assert found.value["trainings"]["private"]["epsilon"] <= 2
    refused = equipoise("audit --shadow --models 4 --json --target wage", *words)
    assert "made for regression" in refused.value["error"]


def test_neighbours_that_were_not_tried_are_told(equipoise):
    command = "audit --neighbours --positions 1 --method dc-dpsgd --variant top_share"
    found = equipoise(f"{command} --json")
    assert found.value["left_out"] == {"silent": "the method looks at all rows of a draw at once"}
    said = equipoise(command).out
    assert "Not tried: added, without its own part. The reason: the method looks at all rows" in said


def test_neighbours_that_move_too_far_end_with_1(equipoise, monkeypatch):
    found = finished_run.neighbours_of(RunSettings(epsilon=2.0, delta=1e-5), 1, 1, (1,))
    far = replace(found.pairs[0], movement=143.6, scale=-10.0)
    monkeypatch.setattr(finished_run, "neighbours_of", lambda *args: replace(found, pairs=(far,)))
    answer = equipoise("audit --neighbours")
    assert answer.code == 1
    assert "TOO FAR" in answer.out
    assert "one record added (the entering one's numbers times -10), at place 0" in answer.out
    assert "with 1 thread(s), moved a sum by 143.6" in answer.out
    assert "guarantee does not hold" in answer.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--neighbours --shadow", "takes one of"),
        ("--neighbours --one-step", "takes one of"),
        ("RUN --neighbours --method dp-c4", "from the run"),
        ("--neighbours --positions 0", "--positions"),
    ],
)
def test_neighbours_with_other_words_are_refused(equipoise, words, said):
    answer = equipoise(f"audit {words}")
    assert answer.code == 2
    assert said in answer.err


def test_a_refuted_claim_ends_with_1(equipoise, monkeypatch):
    found = mechanism.audit_method("dp-sgd", 2.0, canaries=100, trainings=1)
    certificate = replace(found.certificates[0], epsilon=9.0)
    monkeypatch.setattr(
        mechanism, "audit_method", lambda *args, **options: replace(found, certificates=(certificate,))
    )
    answer = equipoise("audit --method dp-sgd")
    assert answer.code == 1
    assert "refuted" in answer.out


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("audit", "none of them"),
        ("audit --method dp-sgd --shadow", "--method and --shadow"),
        ("audit --method dp-sgd --relation swap", "--relation"),
        ("audit --shadow --hardened", "only for --method"),
        ("audit --one-step --variant joint", "only for --method"),
        ("audit --one-step --method dp-sgd --seeds 2", "one seed"),
        ("audit --method dp-sgd --option tail=2", "not an option"),
        ("audit --method dice-sgd --hardened", "independent noise"),
        ("audit --method dpsgd", "must be one of"),
        ("audit --method dp-sgd --seeds 0", "--seeds"),
        ("audit --method dp-sgd --confidence 2", "--confidence"),
        ("audit --method dp-sgd --epsilon -1", "epsilon"),
        ("audit --shadow --models 3", "--models"),
        ("audit --shadow --data my_project:records", "named data sets"),
        ("audit --shadow --data peple", "a table such as people.csv"),
        ("audit --neighbours --data people.csv", "does not exist"),
        ("audit --method dp-sgd --target buys", "--target is for --shadow and --neighbours"),
        ("audit runs/a --test-share 0.2", "a run knows its own data"),
    ],
)
def test_what_it_refuses(equipoise, line, word):
    answer = equipoise(line)
    assert answer.code == 2
    assert word in answer.err


def test_shadow_models(equipoise, monkeypatch, tmp_path):
    of = {"area_under_curve": 0.5, "true_positives": {"0.01": 0.02}, "epsilon": 3.0}
    found = {
        "data": "digits",
        "model": "linear",
        "models": 6,
        "records": 100,
        "trainings": {"private": of, "not private": {**of, "epsilon": None}},
        "allowed": {"0.01": 0.2},
        "figure": "roc.png",
    }

    def audit_shadow(settings, models, folder, progress):
        assert (settings.data, settings.epsilon, models, folder) == ("digits", 3.0, 6, str(tmp_path))
        progress(1, 12)
        return found

    monkeypatch.setattr(shadow_models, "audit_shadow", audit_shadow)
    line = "audit --shadow --epsilon 3 --models 6"
    assert equipoise(f"{line} --json --run-dir", tmp_path).value == found
    shown = equipoise(f"{line} --run-dir", tmp_path).out
    assert "allowed by epsilon 3" in shown
    assert "20.00%" in shown


def test_a_run_with_canaries(equipoise, tmp_path):
    folder = str(tmp_path / "run")
    line = "train --data digits --epsilon 4 --canaries 100 --epochs 1 --json --reproducible --run-dir"
    assert equipoise(line, folder).code == 0
    found = equipoise("audit --json", folder).value
    assert found["canaries"] == 100
    assert set(found["attacks"]) == {"black box", "white box"}
    assert all(attack["epsilon"] <= found["claimed_epsilon"] for attack in found["attacks"].values())
    for name in ("audit.json", "audit.png"):
        path = tmp_path / "run" / "private" / name
        assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "white box" in equipoise("audit", folder).out


def test_a_run_without_canaries(equipoise, trained):
    answer = equipoise("audit", str(trained[0]))
    assert answer.code == 2
    assert "--canaries" in answer.err
