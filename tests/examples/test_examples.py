"""The examples run as they stand."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import dp_accounting
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str):
    specification = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_tar_shards():
    statement = load("tar_shards").main(workers=0)
    assert statement.guarantee == "proven"
    assert statement.releases[0]["used"] == 5


@pytest.mark.parametrize(("model", "views"), [("vae", 1), ("diffusion", 2)])
def test_synthetic_digits(model, views):
    assert 0 < load("synthetic_digits").main(model, views=views, steps=3) < 0.9


def test_fine_tuning_learns_completions_alone_and_packs_one_user_into_a_row(tmp_path):
    pytest.importorskip("transformers", reason="needs the extra hf")
    example = load("fine_tuning")
    tokenizer, users = example.make_tokenizer(), example.conversations(20, seed=0, shift=5)
    rows, single = example.Rows(tokenizer, users), example.Rows(tokenizer, users, packed=False)
    assert len(rows) == 20
    for number, mine in enumerate(users):
        said = [word for one in mine for word in f"{one[1]['content']} [end]".split()]
        learnt = [label for label in rows[number]["labels"].tolist() if label != -100]
        assert tokenizer.convert_ids_to_tokens(learnt) == said
        own = [single[i]["input_ids"] for i, owner in enumerate(single.owner) if owner == number]
        assert rows[number]["input_ids"].tolist() == torch.cat(own).tolist()
    small = "--users 200 --steps 4 --batch-size 32 --public-steps 2"
    for more, unit in (("", "user"), ("--no-packing", "user"), ("--plain", "none")):
        found = example.main([str(tmp_path / (more or "packed")), *f"{small} {more}".split()])
        assert (found["unit"], found["loss"] < found["loss_before"]) == (unit, True)
        if unit == "user":
            assert 7.9 < found["epsilon"] <= 8


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_consortium(tmp_path):
    """One comes late, one leaves, one is killed; each epsilon is dp_accounting's of its own statement."""
    folder = tmp_path / "out"
    found = load("consortium").main([str(folder), "--rounds", "3"])
    assert found["rounds"] == {"ulm": 3, "bonn": 2, "kiel": 2, "hof": 3, "trier": 2}
    assert found["absent"] == {"1": {1: "ConnectionError: the hospital's process is gone"}}
    for hospital, epsilon in found["epsilons"].items():
        statement = json.loads((folder / hospital / "statement.json").read_text())
        training, score = (row["mechanism"]["noise_multiplier"] for row in statement["releases"])
        step = dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(training))
        scored = dp_accounting.GaussianDpEvent(score)  # of a patient's bound, as that of the training
        sides = dp_accounting.SelfComposedDpEvent(step, 15), dp_accounting.SelfComposedDpEvent(scored, 3)
        exact = [dp_accounting.pld.PLDAccountant().compose(one).get_epsilon(1e-4) for one in sides]
        assert epsilon == pytest.approx(max(exact), rel=2e-3)
        assert (statement["unit"], statement["users"]) == ("user", {"records": 3, "rows": "mean"})
    assert all(name in Path(found["page"]).read_text() for name in found["epsilons"])


@pytest.mark.slow
def test_gpt2_with_adapters():
    pytest.importorskip("transformers", reason="needs the extra hf")
    pytest.importorskip("peft", reason="needs the extra hf")
    example = load("hf_gpt2_lora")
    statement = example.main(steps=4)
    assert statement.guarantee == "proven"
    assert 7.9 < statement.epsilon <= 8.0
    assert statement.releases[0]["used"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sst2", "e2e"])
def test_private_trainer(task, tmp_path):
    pytest.importorskip("transformers", reason="needs the extra hf")
    pytest.importorskip("peft", reason="needs the extra hf")
    folder = os.environ.get("EQUIPOISE_DATA")
    if folder is None or not (Path(folder) / task).exists():
        pytest.skip(f"needs {task} in the folder EQUIPOISE_DATA")
    changes = {"steps": 8, "batch": 64} if task == "e2e" else {}
    trainer = load("private_trainer").main(task, folder, str(tmp_path), **changes)
    log = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert len(log) >= 4
    assert log[-1]["eval_loss"] < log[0]["eval_loss"]
    if task == "sst2":  # 50.9% is one class for all
        assert log[-1]["eval_accuracy"] > 0.6
    assert trainer.statement().guarantee == "proven"
    assert 7.9 < trainer.statement().epsilon <= 8.0
    assert (tmp_path / "model/statement.json").exists()
