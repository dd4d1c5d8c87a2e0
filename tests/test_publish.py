"""A run of Python is published: its model in every form, its statement, and a card."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import equipoise as eq
from equipoise.publishing import FORMS, privacy_section
from equipoise.report.run_reader import Run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    torch.manual_seed(44)  # a seed of its own: its weights are known from then on
    model, place = nn.Linear(3, 1), tmp_path_factory.mktemp("published") / "run"
    training = eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch["x"]).square().sum(1),
        data={"x": torch.randn(200, 3)},
        sampling=eq.Poisson(20, population=200, steps=3),
        budget=eq.Budget(1.0, 1e-3),
        run=eq.Run(place, ema_decay=0.5),
        stages=[eq.Stage(0, "bias"), eq.Stage(1, "*")],
    )
    return training, training.run(lambda model: {"accuracy": 0.75}, keep_best=True, progress=False)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_holds_the_weights_that_are_published(trained, tmp_path, form):
    training, result = trained
    example = torch.randn(5, 3)
    if form == "onnx":
        pytest.importorskip("onnxscript")
        runtime = pytest.importorskip("onnxruntime")
    files = eq.publish(training, tmp_path, form=form, example=example)
    assert files == [FORMS[form], "README.md", "statement.json"]
    weights = load_file(result.run_dir / "model.safetensors")
    if form == "onnx":
        (found,) = runtime.InferenceSession(tmp_path / FORMS[form]).run(None, {"input": example.numpy()})
        wanted = nn.functional.linear(example, weights["weight"], weights["bias"])
        assert torch.allclose(torch.from_numpy(found), wanted, atol=1e-6)
    else:
        read = load_file if form == "safetensors" else torch.load
        again = read(tmp_path / FORMS[form])
        assert all(torch.equal(again[name], weights[name]) for name in weights)
    assert json.loads((tmp_path / "statement.json").read_text())["epsilon"] == result.epsilon
    card = (tmp_path / "README.md").read_text()
    assert "# Linear" in card
    assert "75.0%" in card
    assert [row[3:].partition("`")[0] for row in card.partition("## Files\n\n")[2].splitlines()] == [
        FORMS[form], "statement.json",
    ]  # fmt: skip
    assert result.statement.markdown() in card
    assert all(row in card for row in ("Parameters of step 1,", "from step 1 on: `bias`", "step 2 on: `*`"))
    assert eq.publish(result.run_dir, tmp_path) == ["model.safetensors", "README.md", "statement.json"]


def test_scores_have_their_intervals(trained):
    """Wilson's of 80 in 100 is that of the textbooks; a private score has that of its error."""
    statement = json.loads(trained[1].statement.to_json())
    statement["releases"][0]["name"] = "private score"
    found = {"accuracy": 0.8, "private_auc": 0.7, "private_auc_error": 0.05}
    row = {"step": 1, **{f"evaluation.{name}": value for name, value in found.items()}}
    section = privacy_section(Run("run", statement, [row], {"experiment": {"test_records": 100}}))
    assert "80.0% (95% interval 71.1% to 86.7%)" in section
    assert "0.7 (95% interval 0.602 to 0.798)" in section
    assert "error" not in section.partition("The unit")[0]


@pytest.mark.parametrize(
    ("of", "options", "why"),
    [
        (lambda training: training.model, {}, "without a folder"),
        (lambda training: training.folder.path, {"form": "onnx"}, "give model="),
        (lambda training: training, {"form": "pickle"}, "safetensors"),
        (lambda training: training, {"output": "run"}, "would be written over"),
    ],
)
def test_what_cannot_be_published_is_refused(trained, tmp_path, of, options, why):
    training, result = trained
    output = result.run_dir if options.pop("output", None) else tmp_path / "out"
    before = sorted(result.run_dir.rglob("*"))
    with pytest.raises(ValueError, match=why):
        eq.publish(of(training), output, **options)
    assert sorted(result.run_dir.rglob("*")) == before
    assert not (tmp_path / "out").exists()
