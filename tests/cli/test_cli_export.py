import csv
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import equipoise as eq
from equipoise.app.build import assemble
from equipoise.app.settings import RunSettings
from equipoise.publishing import FORMS


@pytest.mark.parametrize(("form", "read"), [("safetensors", load_file), ("state-dict", torch.load)])
def test_weights_are_those_of_the_run(equipoise, trained, tmp_path, form, read):
    folder, _ = trained
    found = equipoise(f"export {folder} --format {form} --json --output {tmp_path}")
    assert found.code == 0, found.out
    weights = load_file(folder / "model.safetensors")
    again = read(tmp_path / found.value["files"][0])
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert (tmp_path / "statement.json").read_bytes() == (folder / "statement.json").read_bytes()


def test_the_card_holds_the_statement_and_nothing_private(equipoise, trained, tmp_path):
    folder, found = trained
    assert equipoise(f"export {folder} --output {tmp_path}").code == 0
    card = (tmp_path / "README.md").read_text()
    for words in (
        "# mlp-tanh on digits",
        "## Guarantee: proven",
        "- Method: dp-sgd",
        "A person may own several",
    ):
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


def test_onnx_answers_as_the_model_does(equipoise, trained, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    folder, _ = trained
    found = equipoise(f"export {folder} --format onnx --json --output {tmp_path}")
    assert found.err == ""
    assert found.code == 0, found.out
    experiment = assemble(RunSettings(data="digits"))
    model = eq.load_model(experiment.model, folder / "model.safetensors").eval()
    inputs = experiment.dataset.test.fields["input"][:7]
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    (outputs,) = session.run(None, {"input": inputs.numpy()})
    assert torch.allclose(torch.from_numpy(outputs), model(inputs), atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_the_exported_folder_of_a_table_is_enough(equipoise, people, tmp_path, monkeypatch, form):
    if form == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    run, data = tmp_path / "run", ("--data", people, "--test", people.with_name("held_out.csv"))
    words = "train --model additive --epochs 2 --batch-size 150 --noise-multiplier 1 --json --run-dir"
    assert equipoise(words, run, *data).code == 0
    out = tmp_path / "out"
    found = equipoise(f"export {run} --format {form} --json --data", data[3], "--output", out)
    assert found.code == 0, found.out
    assert (
        json.loads((out / "schema.json").read_text())
        == json.loads((run / "config.json").read_text())["schema"]
    )
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


@pytest.mark.parametrize("name", ["README.md", "model.safetensors", "statement.json"])
def test_files_of_others_are_not_written_over(equipoise, trained, tmp_path, name):
    folder, _ = trained
    (tmp_path / name).write_text("another's")
    found = equipoise(f"export {folder} --json --output {tmp_path}")
    assert found.code == 2
    assert f"where {name} would be written over" in found.value["error"]
    assert (tmp_path / name).read_text() == "another's"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert equipoise(f"export {folder} --output {tmp_path / 'new'}").code == 0
    again = equipoise(f"export {folder} --format state-dict --json --output {tmp_path / 'new'}")
    assert again.code == 0, again.err
