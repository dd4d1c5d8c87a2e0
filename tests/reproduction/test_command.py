"""`python -m reproduction`: listings, experiments run to their files, attacks and planted bugs."""

import dataclasses
import json
import types

import pytest
import torch

from equipoise.audit.bounds import certify_known_law
from equipoise.testing.checks import Check
from reproduction import papers, planted_bugs
from reproduction.__main__ import main
from reproduction.attacks import ATTACKS, Finding
from reproduction.figures import Curve
from reproduction.findings import Findings, PaperExperiment, Table, Verdict


@pytest.fixture
def reproduce(capsys, monkeypatch):
    """Run a command line in this process: (exit code, standard output, standard error)."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)

    def run(line, *words):
        capsys.readouterr()
        code = main([*line.split(), *map(str, words)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def tiny(monkeypatch):
    """An experiment without training, as a module of its own."""

    def run(seeds, progress):
        progress(1, 1, "counting")
        value = float(len(seeds))
        return Findings(
            Table(["what", "count"], [["seeds", value]], note="counted"),
            [Curve("seeds", (0, 1), (1.0, value))],
            [Verdict.at_least("many seeds", value, 2), Verdict.at_most("hardly any", value, 1)],
            {("seeds", 1): value},
        )

    module = types.SimpleNamespace(
        EXPERIMENT=PaperExperiment("tiny", "Counting", "Counts its seeds.", run, default_seeds=3)
    )
    monkeypatch.setattr(papers, "EXPERIMENTS", {"tiny": "tiny_module"})
    monkeypatch.setattr(papers, "TITLES", {"tiny": "Counting"})
    monkeypatch.setattr("reproduction.run.EXPERIMENTS", {"tiny": "tiny_module"})
    monkeypatch.setattr(papers, "import_module", {"tiny_module": module}.__getitem__)


def test_what_there_is_is_listed(reproduce, tiny, monkeypatch):
    assert "tiny  Counting" in reproduce("")[1]
    assert "attacks" in reproduce("--help")[1]
    (found,) = json.loads(reproduce("--json")[1])["experiments"]
    assert (found["summary"], found["default_seeds"]) == ("Counts its seeds.", 3)
    row = planted_bugs.Planted("a bug", Check("a check", 0.5), Check("a check", 50.0))
    monkeypatch.setattr(planted_bugs, "find_planted", lambda seed: [row])
    assert json.loads(reproduce("planted-bugs --json")[1])["planted"][0]["found"]
    assert "a bug" in reproduce("planted-bugs")[1]


def test_experiment_prints_and_writes_all_verdicts(reproduce, tiny, tmp_path):
    code, out, _ = reproduce("tiny --seeds 2 --run-dir", tmp_path / "out")
    assert code == 0
    assert "MISSED" in out
    assert "hardly any" in out
    written = json.loads((tmp_path / "out" / "findings.json").read_text())
    assert [v["met"] for v in written["verdicts"]] == [True, False]
    assert written["command"] == "python -m reproduction tiny --seeds 2"
    line = json.loads((tmp_path / "out" / "result.jsonl").read_text())
    assert line.pop("processor_seconds") >= 0
    assert line == {
        "experiment": "tiny", "command": "python -m reproduction tiny --seeds 2", "seeds": 2,
        "seed_offset": 0, "met": 1, "missed": ["hardly any"], "numbers": [["seeds", 1, 2.0]],
    }  # fmt: skip
    assert (tmp_path / "out" / "figure.png").read_bytes()[1:4] == b"PNG"
    assert str(tmp_path) not in json.dumps(written)


def test_an_attack(reproduce, monkeypatch):
    finding = Finding("dp-c4", "a target", 4.0, certify_known_law([90.0] * 20, 1e-5), details={"runs": 20.0})
    monkeypatch.setitem(ATTACKS, "dp-c4", lambda seed: finding)
    (found,) = json.loads(reproduce("attacks dp-c4 --json")[1])["attacks"]
    assert found["succeeds"]
    assert found["certified_epsilon"] > 80
    assert "the claim fails" in reproduce("attacks dp-c4")[1]
    code, _, said = reproduce("attacks dpsgd")
    assert (code, "there is no attack 'dpsgd'" in said) == (2, True)


def test_a_picture_is_drawn_from_trainings(reproduce, monkeypatch, tmp_path):
    from reproduction import pictures

    short = dataclasses.replace(pictures.PICTURES["clip-sgd"], steps=20)
    monkeypatch.setattr(pictures, "PICTURES", {"clip-sgd": short})
    code, out, _ = reproduce("pictures clip-sgd --json --folder", tmp_path)
    ends = json.loads(out)["distances"]["clip-sgd"]
    start = float((pictures.PRIVATE.mean(0) - torch.tensor(pictures.START)).norm())
    assert code == 0
    # without clipping the distance shrinks by 0.9 per step, but for what sampling adds
    assert ends["no clipping"][0] == pytest.approx(start * 0.9**20, abs=0.1)
    # clip norm 0.5 moves by at most a tenth of it per step, but for the size of the sample
    assert ends["clip norm 0.5"][0] > start - 1.2
    assert (tmp_path / "clip-sgd.png").read_bytes().startswith(b"\x89PNG")
    assert reproduce("pictures dp-sdg")[0] == 2
