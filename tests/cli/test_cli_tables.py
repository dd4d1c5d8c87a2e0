"""`equipoise train --data people.csv`: tables, tasks, scores, and the published folder that predicts."""

import csv
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file
from sklearn import metrics

from equipoise.app.data_loading import load_data
from equipoise.app.models import build_model, prepare_data
from equipoise.app.settings import RunSettings
from equipoise.app.statistics import statistics_loss
from equipoise.cli.result_commands import UNPROTECTED
from equipoise.statements.assumptions import Assumption
from equipoise.training.metrics import MetricsLog

SMALL = "--epochs 6 --batch-size 150 --noise-multiplier 1 --seed 1 --json"


@pytest.fixture(scope="module")
def folder(people):
    return people.parent


def test_describe_writes_a_schema_to_edit(equipoise, folder, tmp_path):
    shutil.copy(folder / "people.csv", tmp_path)
    bare = equipoise("train --json --data", tmp_path / "people.csv").value["error"]
    for step in ("equipoise schema init", "people.schema.toml", "--test-share"):
        assert step in bare  # one message, whatever is missing
    assert "equipoise schema init" in equipoise("data describe people.csv --json").value["error"]
    found = equipoise.ok("schema init --target buys", tmp_path / "people.csv")
    assert "low of 'age', high of 'age'" in found.out
    assert "exists already" in equipoise.refused("schema init --json", tmp_path / "people.csv")
    refused = equipoise("train --test-share 0.2 --json --data", tmp_path / "people.csv")
    assert "leaves places to be filled in: population, low of 'age'" in refused.value["error"]


@pytest.mark.parametrize("model", ["logistic", "additive"])
def test_a_table_is_trained_on_and_its_published_folder_predicts(equipoise, folder, tmp_path, model):
    run, output, held_out = tmp_path / "run", tmp_path / "out.csv", folder / "held_out.csv"
    people_file = folder / "people.csv"
    data = ("--data", people_file, "--test", held_out, "--run-dir", run)
    found = equipoise.ok(f"train {SMALL} --model {model}", *data)
    assert Assumption.HELD_OUT not in found.value["statement"]["assumptions"]
    scores, baseline = found.value["evaluation"], found.value["baseline"]
    assert scores.keys() == {"accuracy", "balanced_accuracy", "f1", "auc"}
    assert scores["accuracy"] > 0.8 > baseline["accuracy"]
    checked = equipoise.ok(f"check {model} --json --data", folder / "people.csv").value
    assert checked["independence"] == found.value["statement"]["independence"]["model"] == "proved"
    config = json.loads((run / "config.json").read_text())
    assert str(folder) not in json.dumps(config)
    assert config["schema"]["columns"]["town"]["buckets"] == 4
    page = (run / "report.html").read_text()
    assert "none of them trained on" not in page  # nobody looked whether the files share rows

    for name in ("checkpoint", "private"):
        shutil.rmtree(run / name)
    again = equipoise("predict --json", run, "--data", held_out, "--output", output)
    assert again.value["evaluation"] == pytest.approx(scores)
    rows, people = read(output), read(held_out)
    truth, shares = [row["buys"] == "yes" for row in people], [float(row["p(yes)"]) for row in rows]
    assert metrics.roc_auc_score(truth, shares) == pytest.approx(scores["auc"])
    assert np.mean([row["prediction"] == "yes" for row in rows] == np.array(truth)) == scores["accuracy"]

    bare, alone = tmp_path / "bare.csv", tmp_path / "alone.csv"  # in another order, without the target
    write(bare, [{name: row[name] for name in ("member", "wage", "age", "town")} for row in people])
    unlabelled = equipoise("predict --json", run, "--data", bare, "--output", alone)
    assert unlabelled.value["evaluation"] == {}
    assert alone.read_text() == output.read_text()
    assert "--data FILE" in equipoise("predict --json", run).value["error"]
    other = equipoise("predict --json --data digits", run).value["error"]
    assert "the run was trained on another kind of data" in other
    kept = {file: file.read_bytes() for file in (held_out, people_file, *filter(Path.is_file, run.iterdir()))}
    for file in (*kept, run / "new.csv"):
        assert "writes over nothing" in equipoise.refused(
            "predict", run, "--data", held_out, "--output", file
        )
    assert all(file.read_bytes() == content for file, content in kept.items())
    write(tmp_path / "one.csv", [row for row in people if row["buys"] == "no"])
    one_class = equipoise.ok("predict", run, "--data", tmp_path / "one.csv")
    assert "no record that is evaluated on has the class 'yes'" in one_class.out


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def write(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize(
    ("target", "name", "least"), [("wage", "r2", 0.8), ("buys,member", "label_accuracy", 0.75)]
)
def test_regression_and_several_labels(equipoise, folder, tmp_path, target, name, least):
    """What is learnt of the wage stands in the row, as its age."""
    schema = (folder / "people.schema.toml").read_text()
    (tmp_path / "s.toml").write_text(schema.replace("buckets = 4", "buckets = 4, missing = []"))
    people, held_out = read(folder / "people.csv"), read(folder / "held_out.csv")
    for file, rows in (("people.csv", people), ("held_out.csv", held_out)):
        write(tmp_path / file, [row | {"age": row["wage"]} if target == "wage" else row for row in rows])
    words = f"--data {tmp_path}/people.csv --test {tmp_path}/held_out.csv --schema {tmp_path}/s.toml"
    run, output = tmp_path / "run", tmp_path / "out.csv"
    found = equipoise(f"train {SMALL} --learning-rate 0.2 {words} --target {target} --run-dir", run)
    assert found.code == 0, found.err
    scores = found.value["evaluation"]
    assert scores[name] > least
    again = equipoise("predict --json", run, "--output", output).value["evaluation"]
    assert again == pytest.approx(scores)
    if target == "wage":
        truth = [float(row["wage"]) for row in held_out]
        rmse = metrics.root_mean_squared_error(truth, [float(row["prediction"]) for row in read(output)])
        assert rmse == pytest.approx(scores["rmse"], rel=1e-4)
        assert found.value["baseline"]["rmse"] == pytest.approx(np.std(truth), rel=1e-5)
    else:
        assert read(output)[0].keys() == {"prediction", "p(buys)", "p(member)"}


@pytest.mark.parametrize(("target", "name"), [("wage", "error"), ("buys,member", "accuracy")])
def test_a_private_score_of_numbers_and_of_labels(equipoise, people, tmp_path, target, name):
    words = (
        f"train --data {people} --target {target} --batch-size 60 --epochs 1 --private-validation 0.2 --json"
    )
    found = equipoise.ok(words, "--run-dir", tmp_path / "run")
    assert found.value["evaluation"].keys() == {f"private_{name}", f"private_{name}_error"}
    statement = json.loads((tmp_path / "run/statement.json").read_text())
    (score,) = [one for one in statement["releases"] if one["name"] == "private score"]
    assert score["used"] == score["count"] > 0


def test_weights_own_losses_and_columns_that_are_kept(equipoise, folder, tmp_path, monkeypatch):
    """Half of the rows weigh nothing; a loss of the user's own is named again, and predict needs none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tilted.py").write_text(
        "def loss(outputs, target):\n    return (outputs[:, 0] - target).square()\n"
    )
    schema = (folder / "people.schema.toml").read_text()
    schema = schema.replace('{type = "category", buckets = 4}', '{type = "skip"}')
    schema = schema.replace("high = 100", "high = 100, log = true").replace('"buys"', '"wage"', 1)
    (tmp_path / "s.toml").write_text(f'{schema}counts = {{type = "weight", high = 20}}\n')
    for name in ("people.csv", "held_out.csv"):
        rows = read(folder / name)
        write(tmp_path / name, [{**row, "counts": 30 * (float(row["wage"]) > 50)} for row in rows])
    words = "--schema s.toml --data people.csv --test held_out.csv --run-dir run --loss tilted:loss"
    found = equipoise.ok(f"train {SMALL} --learning-rate 0.2 {words}")
    config = json.loads((tmp_path / "run/config.json").read_text())
    described = config["experiment"]["data_description"]
    assert "learnt: wage (0 to 100); weight: counts (0 to 20); left out: town" in described
    assert "a median" in described
    assert "--loss tilted:loss" in equipoise("resume --json run").value["error"]
    assert equipoise("resume --json run --loss tilted:loss").code == 0
    (tmp_path / "tilted.py").unlink()
    (tmp_path / "people.csv").write_text(  # no weights, and an id that the schema knows nothing of
        "id,age,wage,buys,member,town\n7,30,60.0,yes,no,Rome\n8,40,70.0,yes,yes,Oslo\n9,40,9.0,yes,yes,Oslo\n"
    )
    found = equipoise("predict --json run --data people.csv --output out.csv --keep id --keep town --by town")
    assert ["median" in found.value["warnings"][0], UNPROTECTED] == [True, *found.value["warnings"][1:]]
    assert found.value["by"]["Rome"]["records"] == 1
    assert found.value["by"]["Oslo"]["evaluation"].keys() == {"rmse", "mae", "r2"}
    rows = read(tmp_path / "out.csv")
    assert [(row["id"], row["town"]) for row in rows] == [("7", "Rome"), ("8", "Oslo"), ("9", "Oslo")]
    assert all(float(row["prediction"]) > 50 for row in rows)  # the others had no weight
    both = equipoise("predict --json run --data people.csv --by town --by id").value["by"]
    assert [group["records"] for group in both.values()] == [1, 1, 1]
    (tmp_path / "commas.csv").write_text(
        'id,age,wage,buys,member,town\nz,30,60,yes,no,"x, y"\n"y, z",40,70,no,yes,x\n'
    )
    apart = equipoise("predict --json run --data commas.csv --by town --by id").value["by"]
    assert [group["records"] for group in apart.values()] == [1, 1]
    wrong = equipoise("predict --json run --data people.csv --by twon").value["error"]
    assert "Did you mean town?" in wrong


def test_a_run_goes_on_with_the_coding_and_the_test_records_it_began_with(
    equipoise, folder, tmp_path, monkeypatch
):
    def stop(self, done, outcome, ledger):
        os.kill(os.getpid(), signal.SIGINT)
        return step(self, done, outcome, ledger)

    step, run = MetricsLog.step, tmp_path / "run"
    for name in ("people.csv", "held_out.csv", "people.schema.toml"):
        shutil.copy(folder / name, tmp_path)
    table, held_out, schema = (
        tmp_path / "people.csv",
        tmp_path / "held_out.csv",
        tmp_path / "people.schema.toml",
    )
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "step", stop)
        cut = equipoise(f"train {SMALL} --data {table} --test {held_out} --run-dir", run)
    assert cut.code == 130
    lines = held_out.read_text().splitlines(keepends=True)
    held_out.write_text("".join(lines[:51]))
    assert "(200 then, 50 now)" in equipoise.refused("resume", run)
    held_out.write_text("".join(lines))
    schema.write_text(schema.read_text().replace('["no", "yes"]', '["yes", "no"]').replace("600", "60000"))
    found = equipoise.ok("resume --json", run).value["evaluation"]
    assert equipoise.ok("predict --json", run, "--data", held_out).value["evaluation"] == pytest.approx(found)
    schema.unlink()
    equipoise.ok("audit neighbours --positions 1 --steps 1", run)


def pictures(folder, count):
    """Grey pictures: dark ones on the left in one class, on the right in the other, and a class of none."""
    rng = np.random.default_rng(0)
    for name in ("left", "right", "nobody"):
        (folder / name).mkdir(parents=True)
    for i in range(count):
        pixels = rng.integers(120, 255, (12, 10), dtype=np.uint8)
        pixels[:, slice(0, 5) if i % 2 else slice(5, 10)] //= 4
        Image.fromarray(pixels).save(folder / ("left" if i % 2 else "right") / f"{i:03d}.png")
    (folder / "left" / "notes.txt").write_text("no image")


def test_texts_train_hashed_words_on_all_records(equipoise, tmp_path):
    said = ['"Bad!, film {} \u4e2d",down', '"good, film {} \u4e2d",up']
    path, run = tmp_path / "notes.csv", tmp_path / "run"
    path.write_text("\n".join(["note,mood", *(said[i % 2].format(i % 7) for i in range(400)), ",up"]))
    path.with_suffix(".schema.toml").write_text(
        'population = 320\ntarget = "mood"\n[columns]\nnote = {type = "text"}\n'
        'mood = {type = "category", values = ["down", "up"]}\n'
    )
    found = equipoise.ok(
        "train --test-share 0.2 --epsilon 8 --epochs 20 --json --run-dir", run, "--data", path
    )
    settings = found.value["settings"]
    assert (settings["model"], settings["sampling"]) == ("hashed-words", "full-batch")
    assert found.value["statement"]["independence"] == {"data": "proved", "model": "proved"}
    assert found.value["evaluation"]["accuracy"] > 0.9
    assert equipoise("predict --json", run, "--data", path, "--output", tmp_path / "out.csv").code == 0


def test_images_in_folders(equipoise, tmp_path):
    run, output, test = tmp_path / "run", tmp_path / "out.csv", tmp_path / "test"
    pictures(tmp_path / "train", 300)
    pictures(test, 80)
    size = ("--image-size", "8x8x1", "--population", "300", "--model", "mlp-tanh")
    found = equipoise.ok(
        f"train {SMALL}", "--data", tmp_path / "train", "--test", test, "--run-dir", run, *size
    )
    assert found.value["accuracy"] > 0.9
    assert "auc" not in found.value["evaluation"]  # a class without a test image
    for name in ("checkpoint", "private"):
        shutil.rmtree(run / name)
    assert equipoise("predict --json", run, "--data", test).value["accuracy"] == found.value["accuracy"]
    bare = equipoise("predict --json", run, "--data", test / "left", "--output", output)
    assert (bare.value["records"], bare.value["evaluation"]) == (40, {})
    header, *rows = output.read_text().splitlines()
    assert header == "prediction,p(left),p(nobody),p(right)"
    assert np.mean([row.startswith("left,") for row in rows]) > 0.8


def test_every_run_sets_the_same_rows_aside(folder):
    """Scores on them are published: a run that trained on them would protect nobody."""
    settings = RunSettings(data=str(folder / "people.csv"), test_share=0.2)
    first, second, larger = (
        load_data(replace(settings, **changes)).test
        for changes in ({"seed": 1}, {"seed": 2}, {"test_share": 0.4})
    )
    assert first.fingerprint() == second.fingerprint()
    rows = larger.fields["input"].tolist()
    assert all(row in rows for row in first.fields["input"].tolist())


@pytest.mark.parametrize("name", ["statistics", "statistics-by-groups"])
def test_statistics_of_a_table_are_one_release(equipoise, folder, tmp_path, name):
    """Their noise is the ledger's, epsilon that of one Gaussian, and coefficients are exported."""
    run, noise = tmp_path / "run", 0.3
    data = ("--data", folder / "people.csv", "--test", folder / "held_out.csv", "--run-dir", run)
    found = equipoise.ok(f"train --model {name} --noise-multiplier {noise} --delta 1e-5 --json", *data)
    assert found.value["evaluation"]["accuracy"] > 0.9
    event = dp_accounting.GaussianDpEvent(noise)
    exact = dp_accounting.pld.PLDAccountant().compose(event).get_epsilon(1e-5)
    assert found.value["epsilon"] == pytest.approx(exact, rel=1e-2)
    assert equipoise("verify --json", run).code == 0
    assert found.value["settings"]["sampling"] == "full-batch"

    weights = load_file(run / "model.safetensors")
    settings = RunSettings(data=str(folder / "people.csv"), test=str(folder / "held_out.csv"), model=name)
    dataset = prepare_data(name, load_data(settings))
    model = build_model(name, dataset)
    statistics_loss(model, dict(dataset.train.fields)).sum().backward()
    left = [weights[n] + p.grad / 600 for n, p in model.named_parameters()]
    std = float(np.std(np.concatenate([one.flatten().numpy() for one in left])))
    assert float(weights["noise"]) == pytest.approx(noise / 600)
    assert std == pytest.approx(noise / 600, rel=0.25)  # about 90 numbers or more

    for part in ("checkpoint", "private"):
        shutil.rmtree(run / part)
    again = equipoise("predict --json", run, "--data", folder / "held_out.csv")
    assert again.value["evaluation"] == pytest.approx(found.value["evaluation"])
    assert again.value["warnings"] == [UNPROTECTED]  # the published folder does not know the file
    (unsaid,) = equipoise("export --json --format coefficients", run).value["warnings"]
    assert "no prediction.sql: SQL has no common words for town" in unsaid
    (wage,) = (row for row in read(run / "export/coefficients.csv") if row["term"] == "wage")
    assert 0 < float(wage["low"]) < float(wage["coefficient"]) < float(wage["high"])
    assert not (run / "export/prediction.sql").exists()  # the town is hashed
    assert "--format coefficients" in equipoise("export --json --format onnx", run).value["error"]
