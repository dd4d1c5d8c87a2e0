import json
import stat

import pytest
import torch
from safetensors.torch import load_file

PUBLISHABLE = {"statement.json", "metrics.jsonl", "model.safetensors", "report.html", "config.json"}


def test_run_folder(trained):
    folder, found = trained
    assert {path.name for path in folder.iterdir()} == PUBLISHABLE | {"checkpoint", "private"}
    assert found["run_dir"] == str(folder)
    assert found["finished"] is True
    assert found["steps"] == 12
    assert found["guarantee"] == "proven"
    assert 0.2 < found["accuracy"] <= 1
    statement = json.loads((folder / "statement.json").read_text())
    assert statement["epsilon"] == found["epsilon"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 12
    assert "<svg" in (folder / "report.html").read_text()


def test_what_may_be_published_names_no_machine_and_the_rest_is_closed_to_others(trained):
    folder, _ = trained
    for name in PUBLISHABLE - {"model.safetensors"}:
        assert str(folder.parent) not in (folder / name).read_text(), name
    for path in [folder / "private", *(folder / "private").iterdir(), *(folder / "checkpoint").iterdir()]:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_dry_run_spends_nothing(equipoise, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ledger = tmp_path / "ledger.jsonl"
    found = equipoise(f"train --data digits --noise-multiplier 2 --dry-run --json --ledger {ledger}")
    assert found.code == 0
    assert found.value["dry_run"] is True
    assert found.value["steps"] == 80
    assert found.value["parameters"] == 4810
    assert list(tmp_path.iterdir()) == []
    assert "nothing spent" in found.err


@pytest.mark.parametrize(
    ("words", "guarantee", "unproven", "said"),
    [
        (
            "dice-sgd --recipe as_published --noise-multiplier 2",
            "worst_case",
            ["update"],
            "no proven epsilon",
        ),
        (
            "dc-dpsgd --recipe as_published --variant code",
            "none",
            ["gradient"],
            "no proven noise for gradient",
        ),
        # what is not proven there leaves by the ledger's `disclose`, which no plan knows of
        ("dp-c4 --recipe as_published", "none", [], "no guarantee, so no epsilon"),
        ("sgd", "none", ["gradient"], "NOT PRIVATE: no noise, and so no epsilon"),
    ],
)
def test_a_dry_run_promises_no_epsilon_that_the_run_would_not_have(
    equipoise, words, guarantee, unproven, said
):
    found = equipoise(f"train --data digits --epochs 2 --dry-run --json --method {words}")
    assert found.code == 0, found.err
    assert (found.value["guarantee"], found.value["epsilon"]) == (guarantee, None)
    assert found.value["unproven"] == unproven
    assert said in found.err


def test_a_dry_run_counts_the_other_runs_of_the_journal(equipoise, tmp_path):
    words = f"train --data digits --epochs 1 --noise-multiplier 4 --json --ledger {tmp_path / 'ledger.jsonl'}"
    first = equipoise(words, "--run-dir", tmp_path / "one")
    dry = equipoise(words, "--dry-run")
    second = equipoise(words, "--run-dir", tmp_path / "two")
    assert first.value["epsilon"] < dry.value["epsilon"]
    assert dry.value["epsilon"] == pytest.approx(second.value["epsilon"])


def test_what_can_hardly_learn_is_warned_of_before_anything_is_spent(equipoise):
    words = "train --data digits --subset 100 --batch-size 10 --epochs 1 --dry-run --json"
    found = equipoise(f"{words} --epsilon 0.1 --optimizer adam")
    assert found.code == 0, found.err
    rate, noise = found.value["warnings"]
    assert rate.startswith("--learning-rate is 3")
    assert "4,810 parameters, 10 records per step, 10 steps" in noise
    assert noise in found.err
    assert "not below 1/population" in equipoise(f"{words} --epsilon 9 --delta 0.1").value["warnings"][0]
    fine = equipoise(f"{words} --subset 1000 --batch-size 200 --epsilon 50 --learning-rate 0.1")
    assert fine.value["warnings"] == []


def test_shared_ledger_adds_up(equipoise, tmp_path):
    words = "train --data digits --epochs 1 --noise-multiplier 4 --json"
    ledger = ["--ledger", tmp_path / "ledger.jsonl"]
    one = equipoise(words, *ledger, "--run-dir", tmp_path / "one")
    two = equipoise(words, *ledger, "--run-dir", tmp_path / "two")
    assert one.code == two.code == 0, two.err
    assert two.value["statement"]["other_runs"] == 1
    assert two.value["epsilon"] > 1.2 * one.value["epsilon"]
    three = equipoise(
        "train --data digits --epochs 1 --epsilon 0.5 --json",
        *ledger,
        "--run-dir",
        tmp_path / "three",
    )
    assert three.code == 2
    assert "budget of all runs in the shared ledger" in three.value["error"]


def test_reproducible_runs_agree_and_say_that_they_are_not_private(equipoise, tmp_path):
    words = "train --data digits --epochs 1 --noise-multiplier 2 --seed 5 --reproducible"
    first = equipoise(words, "--json", "--run-dir", tmp_path / "a")
    second = equipoise(words, "--run-dir", tmp_path / "b")
    assert first.code == second.code == 0
    assert first.value["private"] is False
    assert "NOT PRIVATE" in second.out
    models = [load_file(tmp_path / run / "model.safetensors") for run in "ab"]
    torch.testing.assert_close(*models, rtol=0, atol=0)  # the headers name two runs
    assert "NOT PRIVATE" in (tmp_path / "a" / "report.html").read_text()


def test_options_reach_the_training(equipoise, tmp_path):
    found = equipoise(
        "train --data digits --model logistic --epochs 1 --batch-size 400 --noise-multiplier 3 --ema 0.9 "
        "--clip-norm 0.7 --clip-rule auto_s --optimizer adam --learning-rate 0.01 --schedule cosine "
        f"--micro-batch-size 100 --views 2 --json --run-dir {tmp_path / 'run'}",
    )
    assert found.code == 0, found.err
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["optimizer"] == "Adam"
    assert config["sampling"]["expected_batch_size"] == 400
    assert config["settings"]["micro_batch_size"] == 100
    assert config["settings"]["ema_decay"] == 0.9
    assert config["settings"]["views"] == 2
    assert config["method"]["clip_rule"]["kind"] == "auto_s"
    assert config["model"]["parameters"] == 650
    release = found.value["statement"]["releases"][0]
    assert release["max_bound"] == 0.7
    assert release["mechanism"]["noise_multiplier"] == 3
    rates = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [row["learning_rate"] for row in rates if "learning_rate" in row]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data mnist", "folder"),
        ("--data digits --population 1500", "published with 1437"),
        ("--data no_such_module:records --population 10", "no_such_module"),
        ("--model no-such-net", "no-such-net"),
        ("--epsilon nan", "--epsilon is nan"),
        ("--epsilon 1 --noise-multiplier 1", "were both given"),
        ("--delta 1", "--delta is 1"),
        ("--epochs 0", "--epochs is 0"),
        ("--batch-size 5000", "the population is 1437"),
        ("--sampling full-batch --batch-size 50", "full-batch takes all records in every step"),
        ("--optimizer adam --momentum 0.5", "--momentum is 0.5, but --optimizer adam"),
        ("--noise-multiplier 0", "--noise-multiplier is 0"),
        ("--clip-norm 0", "--clip-norm is '0', but it must be a number above 0"),
        ("--clip-norm quantile:2", "between 0 and 1"),
        ("--clip-norm decay:1:2", "decay:START:RATE"),
        ("--clip-norm 1e308", "--clip-norm is '1e308'"),
        ("--clip-rule abbadi", "give one of abadi, auto_s, nsgd"),
        ("--optimizer lion", "sgd, adam or adamw"),
        ("--momentum 1", "--momentum is 1"),
        ("--ema 1.5", "--ema is 1.5"),
        ("--micro-batch-size 0", "--micro-batch-size is 0"),
        ("--weight-decay inf", "--weight-decay is inf"),
        ("--learning-rate 1e308", "--learning-rate is 1e+308"),
        ("--epochs 1e9 --dry-run", "--epochs 1e+09 makes 2e+09 steps"),
        ("--seed 1000000000000000000000000000000", "--seed is 1000000"),
        ("--device nowhere", "nowhere"),
        ("--epsilon three", "valid"),
        ("--epsilonn 3", "--epsilonn"),
        ("--score auc", "--score is auc"),
        ("--private-validation 0.1 --score f1", "'f1' is none"),
        ("--private-validation 0.1 --canaries 5", "made of test records"),
        ("--private-validation 0.1 --sampling without-replacement --batch-size 100", "fixed size"),
    ],
)
def test_bad_input_is_refused_before_anything_is_spent(equipoise, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    quick = [] if "noise-multiplier" in words or "epsilon" in words else ["--noise-multiplier", "2"]
    found = equipoise("train", *words.split(), *quick, "--json")
    assert found.code == 2, found.err
    assert message in found.value["error"]
    assert "Traceback" not in found.err
    assert not (tmp_path / "runs").exists()


def test_a_model_that_is_not_finite_is_told_and_has_no_score(equipoise, tmp_path):
    run = tmp_path / "run"
    words = "--data digits --epochs 2 --noise-multiplier 1 --weight-decay 1e38 --evaluate-every 1"
    found = equipoise(f"train {words} --run-dir {run} --json")
    assert found.code == 0
    assert found.value["finite"] is False
    assert found.value["accuracy"] is None
    assert found.value["evaluation"] == {"finite_answers": 0.0}
    assert "numbers are not finite" in found.err
    assert "test accuracy" not in equipoise("report", run).out
    assert "'cud' is no device" in equipoise("predict", run, "--device", "cud", "--json").value["error"]
    again = equipoise("predict", run, "--json")
    assert again.value["finite"] is False
    assert again.value["evaluation"] == {"finite_answers": 0.0}
    assert "numbers are not finite" in again.err
    assert equipoise("export", run, "--output", tmp_path / "out").code == 0
    assert "Accuracy" not in (tmp_path / "out" / "README.md").read_text()


def test_run_folder_in_use_is_refused(trained, equipoise):
    folder, _ = trained
    before = (folder / "statement.json").read_bytes()
    found = equipoise(f"train --data digits --noise-multiplier 2 --json --run-dir {folder}")
    assert found.code == 2
    assert "holds a run already" in found.value["error"]
    assert "equipoise resume" not in found.value["error"]  # it is finished
    assert (folder / "statement.json").read_bytes() == before


OWN = """
import torch
from torch import nn
from equipoise.data import DataSet, Records

def records():
    x = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    rows = Records({"input": x, "label": (x[:, 0] > 0).long()}, num_classes=2)
    return DataSet("own", train=rows, test=rows, population=1, num_classes=2)

def net(dataset):
    return nn.Linear(5, dataset.num_classes)

def without_parameter():
    return nn.Linear(5, 2)

def not_a_model(dataset):
    return 3

def not_data():
    return [1, 2]
"""


def test_own_data_and_model(equipoise, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_records.py").write_text(OWN)
    words = "train --noise-multiplier 1 --epochs 5 --batch-size 50 --json"
    data = "--data my_own_records:records --population 200"
    found = equipoise(f"{words} {data}", "--model", "my_own_records:net")
    assert found.code == 0, found.err
    assert found.value["statement"]["releases"][0]["sampling"]["population"] == 200
    assert found.value["run_dir"].startswith("runs/my_own_records-records-")
    own = ("--data", "my_own_records:records", "--model", "my_own_records:net")
    again = equipoise("predict", found.value["run_dir"], "--json", *own)
    assert again.value["accuracy"] == found.value["accuracy"]

    found = equipoise(f"{words} {data}", "--model", "my_own_records:without_parameter")
    assert found.code == 2
    assert "cannot be called with the data set" in found.value["error"]

    found = equipoise(f"{words} {data}", "--model", "my_own_records:not_a_model")
    assert found.code == 2
    assert "torch.nn.Module" in found.value["error"]
    found = equipoise(words, "--data", "my_own_records:not_data", "--population", "200")
    assert found.code == 2
    assert "DataSet" in found.value["error"]


def test_a_private_score_keeps_the_best_step(equipoise, tmp_path):
    folder = tmp_path / "run"
    words = "train --data digits --epochs 8 --epsilon 4 --private-validation 0.2 --score calibration:6 --json"
    found = equipoise(f"{words} --dry-run").value
    assert found["noise"].keys() == {"gradient", "private score"}
    assert found["passes"] == 1
    assert equipoise(f"{words} --run-dir", folder).code == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    name = "evaluation.private_calibration_error"
    scores = [row[name] for row in rows if name in row]
    assert scores[-1] == min(scores)
    assert json.loads((folder / "statement.json").read_text())["epsilon"] == pytest.approx(4, rel=0.01)
    assert "calibration error" in (folder / "report.html").read_text()
    assert equipoise("verify", folder).code == 0
