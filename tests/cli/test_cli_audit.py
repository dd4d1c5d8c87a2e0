"""`equipoise audit`: methods, neighbours, runs, and what it refuses."""

from dataclasses import replace

import pytest

from equipoise.app.audits import finished_run
from equipoise.app.settings import RunSettings
from equipoise.testing import method_audit as mechanism


def test_a_method(equipoise, monkeypatch):
    small = mechanism.Design(mechanism.AUDITS["dp-sgd"].make, canaries=500, trainings=1)
    monkeypatch.setitem(mechanism.AUDITS, "dp-sgd", small)
    found = equipoise("audit method dp-sgd --epsilon 3 --seeds 2 --relation replace-one --json").value
    assert (found["relation"], found["requested_epsilon"]) == ("replace_one", 3.0)
    assert found["holds"]
    assert found["claimed_epsilon"] <= 3
    assert len(found["certificates"]) == 2
    said = equipoise("audit method dp-sgd").out
    assert "no contradiction" in said
    assert "proves no privacy" in said


def test_a_step_of_all_records_comes_close_to_the_claim(equipoise, monkeypatch):
    small = replace(mechanism.ONE_STEP["dp-sgd"], canaries=20_000)
    monkeypatch.setitem(mechanism.ONE_STEP, "dp-sgd", small)
    found = equipoise("audit method dp-sgd --one-step --json").value
    assert 1.5 < found["certified_epsilon"] <= found["claimed_epsilon"] <= 2


@pytest.mark.wide
def test_neighbours(equipoise, trained):
    """Of named data, and of the settings of a run."""
    found = equipoise("audit neighbours --positions 1 --json")
    assert (found.code, found.value["holds"]) == (0, True)
    assert {pair["change"] for pair in found.value["pairs"]} == {"add", "remove", "replace", "silent"}
    assert found.value["left_out"] == {}
    said = equipoise.ok("audit neighbours --positions 1 --threads 2", trained[0])
    assert "no sum moved farther than it may" in said.out
    assert "1 and 2 thread(s)" in said.out


def test_neighbours_that_move_too_far_end_with_1(equipoise, monkeypatch):
    found = finished_run.neighbours_of(RunSettings(epsilon=2.0, delta=1e-5), 1, 1, (1,))
    far = replace(found.pairs[0], movement=143.6, scale=-10.0)
    monkeypatch.setattr(finished_run, "neighbours_of", lambda *args: replace(found, pairs=(far,)))
    answer = equipoise("audit neighbours")
    assert answer.code == 1
    assert "TOO FAR" in answer.out
    assert "one record added, its numbers times -10, at place 0" in answer.out
    assert "with 1 thread(s), moved a sum by 143.6" in answer.out
    assert "guarantee does not hold" in answer.out


def test_a_refuted_claim_ends_with_1(equipoise, monkeypatch):
    found = mechanism.audit_method("dp-sgd", 2.0, canaries=100, trainings=1)
    certificate = replace(found.certificates[0], epsilon=9.0)
    refuted = replace(found, certificates=(certificate,))
    monkeypatch.setattr(mechanism, "audit_method", lambda *args, **options: refuted)
    answer = equipoise("audit method dp-sgd")
    assert answer.code == 1
    assert "refuted" in answer.out


def test_a_run_with_canaries(equipoise, tmp_path, trained):
    folder = str(tmp_path / "run")
    line = "train --data digits --epsilon 4 --canaries 100 --epochs 1 --json --reproducible --run-dir"
    assert equipoise(line, folder).code == 0
    found = equipoise("audit run --json", folder).value
    assert found["canaries"] == 100
    assert set(found["attacks"]) == {"black box", "white box"}
    assert all(attack["epsilon"] <= found["claimed_epsilon"] for attack in found["attacks"].values())
    for name in ("audit.json", "audit.png"):
        path = tmp_path / "run" / "private" / name
        assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "white box" in equipoise("audit run", folder).out
    assert "--canaries" in equipoise("audit run", trained[0]).err
    (tmp_path / "run" / "private" / "canary_scores.json").write_text('{"scores": [1, 2]}')
    assert "does not hold 100 scores" in equipoise("audit run", folder).err
