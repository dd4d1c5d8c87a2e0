"""`calibrate`, `check`, `compare`, `export` and `methods`; and folders that cannot be used."""

import csv
import errno
import json
import os
import shutil
import sys
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from equipoise.cli import warn_once
from equipoise.methods import METHODS, find
from equipoise.methods.configuration import defaults
from equipoise.publishing import FORMS
from equipoise.training.folder.run_folder import RunFolder
from equipoise.training.population import population_told_elsewhere


def test_a_warning_is_said_once_whatever_resets_the_filters(capsys, monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warn_once()
        for said in ("device=cpu", "device=cpu", "another"):
            with population_told_elsewhere():
                warnings.warn(said, stacklevel=1)
    assert capsys.readouterr().err == "Warning: --device cpu\nWarning: another\n"


SETTING = "calibrate --population 60000 --batch-size 256 --steps 4700 --delta 1e-5"


def test_epsilon_and_noise_multiplier_belong_together(equipoise, tmp_path):
    found = equipoise(SETTING, "--noise-multiplier", 1, "--json").value
    assert found["epsilon"] == pytest.approx(1.571, rel=0.005)
    assert found["cross_check_rdp"] == pytest.approx(1.761, rel=0.005)
    found = equipoise(SETTING, "--epsilon", 1.571, "--json", "--run-dir", tmp_path / "new").value
    assert found["noise_multiplier"] == pytest.approx(1.0, rel=0.01)
    assert 1.571 * 0.99 <= found["epsilon"] <= 1.571
    assert json.loads((tmp_path / "new" / "calibration.json").read_text()) == found


@pytest.mark.parametrize(("epochs", "steps"), [(2.5, 25), (2.51, 26), (0.3, 3)])
def test_epochs_instead_of_steps(equipoise, epochs, steps):
    """The fewest steps that make as many passes, so that epsilon is never that of a shorter run."""
    found = equipoise(
        f"calibrate --population 1000 --batch-size 100 --epochs {epochs} --noise-multiplier 4 --json"
    )
    assert found.value["steps"] == steps


MODELS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(64, 10), how

    def forward(self, x):
        out = self.layer(x.flatten(1))
        if self.how == "place":
            out = out * torch.arange(len(x)).add(1).sign().unsqueeze(1)
        if self.how == "branch" and bool(x.isnan().any()):
            raise ValueError("no picture")
        if self.how == "mixed":
            out = out - out.mean(0)
        return out


apart, place, branch, mixed = (
    lambda dataset, how=how: Net(how) for how in ("apart", "place", "branch", "mixed")
)
"""


@pytest.mark.parametrize(
    ("how", "word", "said"),
    [
        ("apart", "proved", ""),
        ("place", "compared", "checked_models.py, line 14"),
        ("branch", "compared", "checked_models.py, line 15"),
        ("mixed", "refused", "checked_models.py, line 18"),
    ],
)
def test_a_proof_or_what_stands_against_it(how, word, said, equipoise, tmp_path, monkeypatch):
    (tmp_path / "checked_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "checked_models", raising=False)
    found = equipoise(f"check checked_models:{how} --data digits --json")
    assert (found.code, found.value["independence"]) == (int(how != "apart"), word), found.err
    assert said in found.value["reason"]


def test_compare_writes_a_page_and_answers_json(equipoise, tmp_path):
    line = "compare --methods dp-sgd,auto-s --epochs 1 --subset 600 --batch-size 300 --seeds 1 --trials 1"
    answer = equipoise.ok(f"{line} --option auto-s.learning-rate=2 --json --run-dir", tmp_path)
    assert [m["learning_rate"] for m in answer.value["methods"]] == [3.0, 2.0]
    page = Path(answer.value["page"]).read_text(encoding="utf-8")
    assert "2 methods on digits" in page
    assert "digits: 8 x 8 grey images of handwritten digits." in page
    assert str(tmp_path) not in page
    # a second call takes the runs from the folder and shows the table
    again = equipoise(f"{line} --option auto-s.learning-rate=2 --run-dir", tmp_path)
    assert "auto-s" in again.out
    assert "not accounted" in again.out


def test_methods_say_what_they_are(equipoise):
    answer = equipoise.ok("methods")
    for name in METHODS:
        assert name in answer.out
        assert find(name).card.summary.split()[0] in answer.out
    assert equipoise("methods --json").value["methods"][0]["guarantee"] in ("proven", "worst_case")


def test_every_option_is_explained(equipoise):
    """By the docstring of its class, which is the one place where it is written down."""
    for row in equipoise("methods --json").value["methods"]:
        assert row["meanings"].keys() == row["options"].keys()
        unexplained = [name for name, text in row["meanings"].items() if not text]
        for option, kinds in row["kinds"].items():
            for kind, found in kinds.items():
                fields = row["options_of_kinds"][option][kind]
                unexplained += [f"{option}={kind}" for _ in range(not found["summary"])]
                unexplained += [f"{option}={kind}.{name}" for name in fields if not found["meanings"][name]]
        assert unexplained == [], row["name"]
    out = " ".join(equipoise("methods dp-c4").out.split())
    assert "schedule.period m >= 1; by default half the anchor batch" in out


def test_the_listed_options_are_the_fields(equipoise):
    for row in equipoise("methods --json").value["methods"]:
        direct = {name for name in row["options"] if "." not in name}
        assert {*direct, "public"} == {*defaults(find(row["name"])), "public"}
        assert ("as_published" in row["recipes"]) == ("published" in METHODS[row["name"]])
        assert ("variant" in row["options"]) == ("library" in row["variants"])


@pytest.mark.parametrize("name", ["dice-sgd", "dc-dpsgd", "adaptive-rms"])
def test_the_listed_variants_are_those_that_a_method_takes(equipoise, name):
    (row,) = equipoise(f"methods {name} --json").value["methods"]
    every = {variant for some in row["variants"].values() for variant in some}
    for recipe, variants in row["variants"].items():
        kind, config = find(name, recipe), {"name": name, "recipe": recipe}
        assert kind.from_config(config).variant == kind.from_config(config | {"variant": variants[0]}).variant
        for variant in every - set(variants):
            with pytest.raises(ValueError, match="variant"):
                kind.from_config(config | {"variant": variant})


COMMANDS = {
    "train": "train --data digits --subset 200 --batch-size 50 --epochs 1",
    "federate": "federate --data digits --subset 200 --clients 2 --rounds 1 --local-steps 1",
    "calibrate": "calibrate --population 1000 --batch-size 1000 --steps 1 --noise-multiplier 20",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_in_the_place_of_the_folder(equipoise, tmp_path, command):
    (tmp_path / "taken").write_text("mine")
    for place in (tmp_path / "taken", tmp_path / "taken" / "sub"):
        found = equipoise(COMMANDS[command], "--run-dir", place)
        assert found.code == 2
        assert str(place) in found.err
        assert "Errno" not in found.err
    assert (tmp_path / "taken").read_text() == "mine"


def test_what_the_system_refuses_names_argument_and_remedy(tmp_path, monkeypatch):
    for number, words in (
        (errno.EACCES, "you may not write there; name a folder of your own"),
        (errno.EROFS, "its device can only be read"),
        (errno.ENOSPC, "no space is left on the device; free some"),
    ):
        failing = Mock(side_effect=OSError(number, os.strerror(number), str(tmp_path / "new")))
        with monkeypatch.context() as patch:
            patch.setattr(Path, "mkdir", failing)
            with pytest.raises(OSError, match=f"^folder='{tmp_path}/new': {words}"):
                RunFolder(tmp_path / "new").create()


def test_the_card_holds_the_statement_and_nothing_private(equipoise, trained, tmp_path):
    folder, found = trained
    assert equipoise(f"export {folder} --output {tmp_path}").code == 0
    assert (tmp_path / "statement.json").read_bytes() == (folder / "statement.json").read_bytes()
    card = (tmp_path / "README.md").read_text()
    for words in ("mlp-tanh on digits", "Guarantee: proven", "dp-sgd", "A person may own several"):
        assert words in card
    assert f"{found['accuracy']:.1%}" in card
    assert str(folder.parent) not in card


def test_a_run_without_a_guarantee_has_a_card_that_says_so(equipoise, tmp_path):
    run = tmp_path / "run"
    assert equipoise(f"train --data digits --epochs 1 --method sgd --json --run-dir {run}").code == 0
    assert equipoise(f"export {run}").code == 0
    card = (run / "export" / "README.md").read_text()
    assert "carries no privacy guarantee" in card
    assert "A person may own several" not in card


@pytest.mark.parametrize("form", FORMS)
def test_the_exported_folder_of_a_table_is_enough(equipoise, people, tmp_path, monkeypatch, form):
    if form == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    run, data = tmp_path / "run", ("--data", people, "--test", people.with_name("held_out.csv"))
    words = "train --model additive --epochs 2 --batch-size 150 --noise-multiplier 1 --json --run-dir"
    assert equipoise(words, run, *data).code == 0
    out = tmp_path / "out"
    equipoise.ok(f"export {run} --format {form} --json --data", data[3], "--output", out)
    config = json.loads((run / "config.json").read_text())
    assert json.loads((out / "schema.json").read_text()) == config["schema"]
    told = tmp_path / "told.csv"
    assert equipoise("predict --json", run, "--data", data[3], "--output", told).code == 0

    shutil.copy(data[3], out / "rows.csv")
    monkeypatch.chdir(out)
    code = (out / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    names = {}
    exec(code, names)  # as the card says
    shares = torch.as_tensor(names["outputs"]).softmax(1)
    with told.open() as file:
        expected = [[float(row["p(no)"]), float(row["p(yes)"])] for row in csv.DictReader(file)]
    assert torch.allclose(shares, torch.tensor(expected), atol=1e-5)
    assert names["rows"].class_names == ("no", "yes")


def test_files_of_others_are_not_written_over(equipoise, trained, tmp_path):
    folder, _ = trained
    for name in ("README.md", "model.safetensors", "statement.json"):
        (tmp_path / name).write_text("another's")
        assert f"where {name} would be written over" in equipoise.refused(
            f"export {folder} --json --output {tmp_path}"
        )
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "another's")]
        (tmp_path / name).unlink()
    assert equipoise(f"export {folder} --output {tmp_path / 'new'}").code == 0
    again = equipoise.ok(f"export {folder} --format state-dict --json --output {tmp_path / 'new'}")
    weights, exported = (
        load_file(folder / "model.safetensors"),
        torch.load(tmp_path / "new" / again.value["files"][0]),
    )
    assert all(torch.equal(weights[name], exported[name]) for name in weights.keys() | exported.keys())
