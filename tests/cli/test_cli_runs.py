import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import torch
from safetensors.torch import load_file

from equipoise.app import option_checks as names
from equipoise.data.named import NAMED
from equipoise.training.metrics import MetricsLog


def test_predict(trained, equipoise, tmp_path):
    folder, found = trained
    output = tmp_path / "classes.txt"
    again = equipoise("predict", folder, "--output", output, "--json")
    assert again.code == 0
    assert again.value["accuracy"] == found["accuracy"]
    header, *rows = [line.split(",") for line in output.read_text().split()]
    assert header == ["prediction", *(f"p({digit})" for digit in "0123456789")]
    assert len(rows) == again.value["records"] == 360
    for found_class, *shares in rows:
        assert int(found_class) == shares.index(max(shares))
        assert sum(map(float, shares)) == pytest.approx(1, abs=1e-5)
    assert again.value["evaluation"]["auc"] == pytest.approx(found["evaluation"]["auc"], abs=1e-12)
    shown = equipoise("predict", folder, "--data", "digits")
    assert f"{found['accuracy']:.1%}" in shown.out
    for name in ("checkpoint", "private"):
        shutil.copytree(folder, tmp_path / "published", dirs_exist_ok=True)
        shutil.rmtree(tmp_path / "published" / name)
    assert equipoise("predict", tmp_path / "published", "--json").value["accuracy"] == found["accuracy"]


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


def test_interrupted_run_goes_on(equipoise, tmp_path):
    """SIGINT after a few steps: exit code 130, a whole folder; resume ends where an undisturbed run ends."""
    words = (
        "train --data digits --subset 300 --batch-size 60 --epochs 16 --noise-multiplier 8 --seed 1 "
        "--reproducible --json"
    )
    folder = tmp_path / "cut"
    metrics = folder / "metrics.jsonl"
    began, ended = [], threading.Event()

    def interrupt():
        while not ended.wait(0.01):
            if metrics.exists() and len(metrics.read_text().splitlines()) >= 3:
                began.append(True)
                os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        cut = equipoise(words, "--run-dir", folder)
    finally:
        ended.set()
        thread.join()
    assert began, "no step was taken"
    assert cut.code == 130, cut.err
    found, err = cut.value, cut.err
    assert found["finished"] is False
    assert 0 < found["steps"] < 80
    assert f"equipoise resume {folder}" in err
    assert "Traceback" not in err
    assert (folder / "report.html").exists()
    assert "the statement claims the whole plan" in err
    assert equipoise("verify", folder, "--json").value["unfinished"] is True
    assert f"unfinished: {found['steps']} of 80 steps" in equipoise("verify", folder).out
    shutil.copytree(folder, tmp_path / "ended")
    ended = equipoise("resume", tmp_path / "ended", "--stop-fixed-beforehand", "--json")
    assert (ended.code, ended.value["finished"], ended.value["steps"]) == (0, True, found["steps"])
    assert ended.value["epsilon"] < found["epsilon"]
    checked = equipoise("verify", tmp_path / "ended", "--json")
    assert (checked.code, checked.value["epsilon"]) == (0, ended.value["epsilon"])
    assert checked.value["unfinished"] is False
    assert any(text.startswith("stop:") for text in checked.value["not_checked"])
    again = equipoise("resume", tmp_path / "ended", "--json")
    assert again.value["epsilon"] == ended.value["epsilon"]

    resumed = equipoise("resume", folder, "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.value["finished"] is True
    assert resumed.value["steps"] == 80
    whole = equipoise(words, "--run-dir", tmp_path / "whole")
    assert resumed.value["epsilon"] == pytest.approx(whole.value["epsilon"], rel=1e-9)
    assert resumed.value["epsilon"] == found["epsilon"]
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
    (
        "calibrate --population 10 --batch-size 1 --epochs 1e30 --epsilon 1",
        "--epochs 1e+30 makes 1e+31 steps",
    ),
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
