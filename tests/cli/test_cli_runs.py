import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from equipoise.app import option_checks as names
from equipoise.data.named import NAMED
from equipoise.training.metrics import MetricsLog


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_has_the_exit_code_of_its_signal(equipoise, tmp_path, monkeypatch, number, code):
    def stop(self, done, outcome, ledger):
        os.kill(os.getpid(), number)
        return step(self, done, outcome, ledger)

    step = MetricsLog.step
    monkeypatch.setattr(MetricsLog, "step", stop)
    words = "train --log=json --data digits --subset 100 --batch-size 50 --epochs 2 --noise-multiplier 8"
    found = equipoise(words, "--run-dir", tmp_path / "cut")
    assert found.code == code, found.err
    assert found.err.count("stopped") == 1
    *events, answer = map(json.loads, found.out.splitlines())
    kinds = [event["event"] for event in events]
    assert [kind for kind in kinds if kind != "progress"] == ["start", "checkpoint", "stop"]
    assert events[-1]["reason"] == number.name
    assert not answer["finished"]


def test_interrupted_run_goes_on(equipoise, tmp_path, monkeypatch):
    """SIGINT after a few steps: exit code 130, a whole folder; resume ends where an undisturbed run ends."""
    words = (
        "train --data digits --subset 300 --batch-size 60 --epochs 4 --noise-multiplier 8 --seed 1 "
        "--reproducible --json --run-dir"
    )
    folder, step, ended = tmp_path / "cut", MetricsLog.step, tmp_path / "ended"

    def interrupt(self, done, outcome, ledger):
        if done == 7:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, done, outcome, ledger)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "step", interrupt)
        cut = equipoise(words, folder)
    assert cut.code == 130, cut.err
    found = cut.value
    assert (found["finished"], found["steps"]) == (False, 7)
    assert f"equipoise resume {folder}" in cut.err
    assert "Traceback" not in cut.err
    assert (folder / "report.html").exists()
    assert "the statement claims the whole plan" in cut.err
    assert equipoise("verify", folder, "--json").value["unfinished"] is True
    shutil.copytree(folder, ended)
    stopped = equipoise("resume", ended, "--stop-fixed-beforehand", "--json")
    assert (stopped.code, stopped.value["finished"], stopped.value["steps"]) == (0, True, 7)
    assert stopped.value["epsilon"] < found["epsilon"]
    checked = equipoise("verify", ended, "--json")
    assert (checked.code, checked.value["epsilon"]) == (0, stopped.value["epsilon"])
    assert checked.value["unfinished"] is False
    assert any(text.startswith("stop:") for text in checked.value["not_checked"])
    assert equipoise("resume", ended, "--json").value["epsilon"] == stopped.value["epsilon"]

    resumed = equipoise.ok("resume", folder, "--json")
    assert (resumed.value["finished"], resumed.value["steps"]) == (True, 20)
    whole = equipoise(words, tmp_path / "whole")
    assert resumed.value["epsilon"] == pytest.approx(whole.value["epsilon"], rel=1e-9)
    assert (resumed.value["epsilon"], resumed.value["private"]) == (found["epsilon"], False)
    models = [load_file(tmp_path / run / "model.safetensors") for run in ("cut", "whole")]
    torch.testing.assert_close(*models, rtol=0, atol=0)  # the headers name two runs


WITHOUT_TORCH = [
    ("--help", "calibrate"),
    ("--version", "equipoise"),
    ("train --epsilon -1", "--epsilon is -1"),
    ("train --clip-rule mine:Cauchy", "give --method module:Class, and the rule by its kind"),
    ("train --lr 1", "No such option '--lr'. Did you mean '--learning-rate'?"),
    ("compare --sigma 1", "Methods are compared at one budget: give --epsilon"),
    ("federate --unit user", "A record at one owner is protected"),
    ("compare --data digts", "Did you mean digits?"),
    ("compare --methods dp-sgd,dpsgd", "--methods names 'dpsgd'. Did you mean dp-sgd?"),
    ("train --data people.xlsx", "or a table such as people.csv"),
    ("calibrate --population 9 --batch-size 1 --epochs 1e30 --epsilon 1", "--epochs 1e+30 makes 9e+30 steps"),
    ("federate --rounds 99999999", "--rounds 99999999 makes 5e+08 steps"),
    ("train --data my.module:records", "--population is missing"),
    ("train --method dpsgd", "Did you mean dp-sgd?"),
    ("train --model mlp", "Did you mean mlp-tanh?"),
    ("methods dpsgd", "Did you mean dp-sgd?"),
    ("train digits mlp-tanh", "unexpected extra arguments (digits mlp-tanh)"),
    ("trian", "No such command 'trian'. Did you mean 'train'?\n"),
    ("predict {broken}", "model.safetensors is damaged. Restore"),
    ("resume {damaged}", "settings.json is damaged"),
    ("resume {newer}", "warp is no setting"),
    ("federate --method fedpcpd", "Did you mean fedpcdp?"),
    ("federate --method fedavg:dp-sdg", "Did you mean fedavg:dp-sgd?"),
    ("experiment", "python -m reproduction"),
    ("advise --data digits", "docs/methods/index.md"),
    ("federate --clients 0", "--clients is 0"),
    ("federate --run-dir {broken}", "holds something else"),
]


def test_help_and_slips_are_answered_before_torch_is_loaded(tmp_path):
    contents = {"broken": '{"data": "digits"}', "damaged": "{", "newer": '{"data": "digits", "warp": 9}'}
    for name, settings in contents.items():
        (tmp_path / name / "checkpoint").mkdir(parents=True)
        (tmp_path / name / "checkpoint" / "settings.json").write_text(settings)
        (tmp_path / name / "model.safetensors").write_bytes(b"junk")
        (tmp_path / name / "config.json").write_text("{}")
    code = (
        "import sys, equipoise.cli as cli\n"
        "for line in sys.stdin.read().splitlines():\n"
        "    cli.main(line.split())\n"
        "    print('torch' in sys.modules, flush=True)\n"
        "    print('----', flush=True)\n"
    )
    places = {name: tmp_path / name for name in contents}
    lines = "\n".join(words.format(**places) for words, _ in WITHOUT_TORCH)
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"COLUMNS": "2000"}, input=lines, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True,
    )  # fmt: skip
    answers = done.stdout.split("----\n")[:-1]
    assert len(answers) == len(WITHOUT_TORCH)
    for (words, text), answer in zip(WITHOUT_TORCH, answers, strict=True):
        assert text in answer, words
        assert answer.endswith("False\n"), f"{words} loads torch"


def test_what_is_known_before_loading_is_the_librarys():
    same = "app/option_checks.py has the names of data.NAMED in their order, since the table is slow to load"
    assert tuple(NAMED) == names.DATA_NAMES, same
