"""`equipoise train --data people.csv`: tables, tasks, scores, and the published folder that predicts."""

import csv
import json
import shutil
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
from safetensors.torch import load_file
from sklearn import metrics

from equipoise.app.data_loading import load_data
from equipoise.app.models import build_model, prepare_data
from equipoise.app.settings import RunSettings
from equipoise.app.statistics import statistics_loss
from equipoise.cli.result_commands import UNPROTECTED
from equipoise.statements.assumptions import Assumption

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
    found = equipoise("schema init --target buys", tmp_path / "people.csv")
    assert found.code == 0
    assert "low of 'age', high of 'age'" in found.out
    again = equipoise("schema init --json", tmp_path / "people.csv")
    assert again.code == 2
    assert "exists already" in again.value["error"]
    refused = equipoise("train --test-share 0.2 --json --data", tmp_path / "people.csv")
    assert "leaves places to be filled in: population, low of 'age'" in refused.value["error"]


@pytest.mark.parametrize("model", ["logistic", "additive"])
def test_a_table_is_trained_on_and_its_published_folder_predicts(equipoise, folder, tmp_path, model):
    run = tmp_path / "run"
    data = ("--data", folder / "people.csv", "--test", folder / "held_out.csv", "--run-dir", run)
    found = equipoise(f"train {SMALL} --model {model}", *data)
    assert found.code == 0, found.err
    assert Assumption.HELD_OUT not in found.value["statement"]["assumptions"]
    scores, baseline = found.value["evaluation"], found.value["baseline"]
    assert scores.keys() == {"accuracy", "balanced_accuracy", "f1", "auc"}
    assert scores["accuracy"] > 0.8 > baseline["accuracy"]
    config = json.loads((run / "config.json").read_text())
    assert str(folder) not in json.dumps(config)
    assert config["experiment"]["data"] == "people.csv"
    assert config["schema"]["columns"]["town"]["buckets"] == 4
    page = (run / "report.html").read_text()
    assert "none of them trained on" not in page  # nobody looked whether the files share rows

    for name in ("checkpoint", "private"):
        shutil.rmtree(run / name)
    output = tmp_path / "out.csv"
    again = equipoise("predict --json", run, "--data", folder / "held_out.csv", "--output", output)
    assert again.value["evaluation"] == pytest.approx(scores)
    with output.open() as file:
        rows = list(csv.DictReader(file))
    with (folder / "held_out.csv").open() as file:
        truth = [row["buys"] == "yes" for row in csv.DictReader(file)]
    shares = [float(row["p(yes)"]) for row in rows]
    assert metrics.roc_auc_score(truth, shares) == pytest.approx(scores["auc"])
    assert np.mean([row["prediction"] == "yes" for row in rows] == np.array(truth)) == scores["accuracy"]

    with (folder / "held_out.csv").open() as file, (tmp_path / "bare.csv").open("w") as bare:
        for age, town, wage, _, member in csv.reader(file):
            bare.write(f"{member},{wage},{age},{town}\n")
    alone = tmp_path / "alone.csv"
    unlabelled = equipoise("predict --json", run, "--data", tmp_path / "bare.csv", "--output", alone)
    assert unlabelled.value["evaluation"] == {}
    assert alone.read_text() == output.read_text()
    assert "--data FILE" in equipoise("predict --json", run).value["error"]
    other = equipoise("predict --json --data digits", run).value["error"]
    assert "the run was trained on another kind of data" in other

    with (folder / "held_out.csv").open() as file:
        lines = [line for line in file if not line.rstrip().endswith(("yes,no", "yes,yes"))]
    (tmp_path / "one.csv").write_text("".join(lines))
    one_class = equipoise("predict", run, "--data", tmp_path / "one.csv")
    assert one_class.code == 0, one_class.err
    assert "no record that is evaluated on has the class 'yes'" in one_class.out


def test_a_run_on_a_table_is_resumed(equipoise, folder, tmp_path):
    run = tmp_path / "run"
    data = ("--data", folder / "people.csv", "--test-share", "0.25", "--run-dir", run)
    found = equipoise(f"train {SMALL}", *data)
    assert found.code == 0, found.err
    assert "evaluated on and not trained on" in found.err
    assert "test records, none of them trained on" in (run / "report.html").read_text()
    assert json.loads((run / "config.json").read_text())["experiment"]["population"] == 450
    named = set(found.value["statement"]["assumptions"])
    assert {Assumption.HELD_OUT, Assumption.EVALUATED} & named == {Assumption.HELD_OUT}
    again = equipoise("resume --json", run)
    assert again.value["epsilon"] == found.value["epsilon"]


@pytest.mark.parametrize(
    ("target", "names", "main", "least"),
    [
        ("wage", {"rmse", "mae", "r2"}, "r2", 0.8),
        ("buys,member", {"accuracy", "label_accuracy", "f1", "auc"}, "label_accuracy", 0.75),
    ],
)
def test_regression_and_several_labels(equipoise, folder, tmp_path, target, names, main, least):
    schema = tmp_path / "schema.toml"
    # what is learnt of the wage must stand in the row
    schema.write_text(
        (folder / "people.schema.toml").read_text().replace("buckets = 4", "buckets = 4\nmissing = []")
    )
    for name in ("people.csv", "held_out.csv"):
        with (folder / name).open() as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            row["age"] = row["wage"] if target == "wage" else row["age"]
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    run, people, held_out = (tmp_path / name for name in ("run", "people.csv", "held_out.csv"))
    words = ("--data", people, "--schema", schema, "--target", target, "--test", held_out, "--run-dir", run)
    found = equipoise(f"train {SMALL} --learning-rate 0.2", *words)
    assert found.code == 0, found.err
    assert found.value["evaluation"].keys() == names
    assert found.value["evaluation"][main] > least
    output = tmp_path / "out.csv"
    again = equipoise("predict --json", run, "--output", output)
    assert again.value["evaluation"] == pytest.approx(found.value["evaluation"])
    with output.open() as file:
        predicted = list(csv.DictReader(file))
    if target == "wage":
        truth = [float(row["wage"]) for row in rows]
        rmse = metrics.root_mean_squared_error(truth, [float(row["prediction"]) for row in predicted])
        assert rmse == pytest.approx(found.value["evaluation"]["rmse"], rel=1e-4)
        assert found.value["baseline"]["rmse"] == pytest.approx(np.std(truth), rel=1e-5)
    else:
        assert predicted[0].keys() == {"prediction", "p(buys)", "p(member)"}
    assert "report.html" in equipoise("report", run).out


def test_weights_own_losses_and_columns_that_are_kept(equipoise, folder, tmp_path, monkeypatch):
    """Half of the rows weigh nothing; a loss of the user's own is named again, and predict needs none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tilted.py").write_text(
        "def loss(outputs, target):\n    return (outputs[:, 0] - target).square()\n"
    )
    schema = (folder / "people.schema.toml").read_text()
    schema = schema.replace('[columns.town]\ntype = "category"\nbuckets = 4', '[columns.town]\ntype = "skip"')
    schema = schema.replace("high = 100", "high = 100\nlog = true").replace(
        'target = "buys"', 'target = "wage"'
    )
    (tmp_path / "s.toml").write_text(schema + '[columns.counts]\ntype = "weight"\nhigh = 20\n')
    for name in ("people.csv", "held_out.csv"):
        with (folder / name).open() as file:
            rows = [{**row, "counts": 30 if float(row["wage"]) > 50 else 0} for row in csv.DictReader(file)]
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    words = "--schema s.toml --data people.csv --test held_out.csv --run-dir run --loss tilted:loss"
    found = equipoise(f"train {SMALL} --learning-rate 0.2 {words}")
    assert found.code == 0, found.err
    assert (
        "a median" in json.loads((tmp_path / "run/config.json").read_text())["experiment"]["data_description"]
    )
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
    with (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["id"], row["town"]) for row in rows] == [("7", "Rome"), ("8", "Oslo"), ("9", "Oslo")]
    assert all(float(row["prediction"]) > 50 for row in rows)  # the others had no weight
    assert "town Oslo: 2 records, RMSE" in equipoise("predict run --data people.csv --by town").out
    both = equipoise("predict --json run --data people.csv --by town --by id").value["by"]
    assert sum(group["records"] for group in both.values()) == sum(
        group["records"] for group in found.value["by"].values()
    )
    assert all(", " in name for name in both)
    wrong = equipoise("predict --json run --data people.csv --by twon").value["error"]
    assert "Did you mean town?" in wrong


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train --data people.csv --json", "does not exist"),
        ("train --data digits --target a --json", "--target is for tables"),
        ("train --data nothing.csv --test a.csv --json", "does not exist"),
        ("train --data digits --task regression --json --dry-run", "made for classification"),
        ("train --data digits --class-weight 3 --json", "CLASS=NUMBER"),
        ("train --data digits --class-weight 3=-1 --json", "must be greater than 0"),
        ("train --data peple --json", "a table such as people.csv"),
        ("compare --data nothing.csv --test-share 0.2 --json", "does not exist"),
        ("federate --data people.csv --json", "does not exist"),
    ],
)
def test_what_is_refused(equipoise, words, message):
    found = equipoise(words)
    assert found.code == 2
    assert message in found.value["error"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Grey pictures: dark ones on the left in one class, on the right in the other."""
    from PIL import Image

    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for part, count in (("train", 150), ("test", 40)):
        for name in ("left", "right", "nobody"):
            (folder / part / name).mkdir(parents=True)
        for i in range(2 * count):
            pixels = rng.integers(120, 255, (12, 10), dtype=np.uint8)
            side = slice(0, 5) if i % 2 else slice(5, 10)
            pixels[:, side] //= 4
            Image.fromarray(pixels).save(folder / part / ("left" if i % 2 else "right") / f"{i:03d}.png")
    (folder / "train" / "left" / "notes.txt").write_text("no image")
    return folder


def test_texts_train_hashed_words_on_all_records(equipoise, tmp_path):
    rows = [
        f'"{"good" if i % 2 else "Bad!"}, film {i % 7} \u4e2d",{"up" if i % 2 else "down"}'
        for i in range(400)
    ]
    path, run = tmp_path / "notes.csv", tmp_path / "run"
    path.write_text("\n".join(["note,mood", *rows, ",up"]))
    path.with_suffix(".schema.toml").write_text(
        'population = 320\ntarget = "mood"\n[columns]\nnote = {type = "text"}\n'
        'mood = {type = "category", values = ["down", "up"]}\n'
    )
    found = equipoise("train --test-share 0.2 --epsilon 8 --epochs 20 --json --run-dir", run, "--data", path)
    assert found.code == 0, found.err
    assert (found.value["settings"]["model"], found.value["settings"]["sampling"]) == (
        "hashed-words",
        "full-batch",
    )
    assert found.value["statement"]["independence"] == {"data": "proved", "model": "proved"}
    assert found.value["evaluation"]["accuracy"] > 0.9
    assert equipoise("predict --json", run, "--data", path, "--output", tmp_path / "out.csv").code == 0


def test_images_in_folders(equipoise, photos, tmp_path):
    run = tmp_path / "run"
    size = ("--image-size", "8x8x1", "--population", "300", "--model", "mlp-tanh")
    words = ("--data", photos / "train", "--test", photos / "test", "--run-dir", run, *size)
    found = equipoise(f"train {SMALL}", *words)
    assert found.code == 0, found.err
    assert found.value["accuracy"] > 0.9
    assert "auc" not in found.value["evaluation"]  # a class without a test image
    for name in ("checkpoint", "private"):
        shutil.rmtree(run / name)
    again = equipoise("predict --json", run, "--data", photos / "test")
    assert again.value["accuracy"] == found.value["accuracy"]
    output = tmp_path / "out.csv"
    bare = equipoise("predict --json", run, "--data", photos / "test" / "left", "--output", output)
    assert (bare.value["records"], bare.value["evaluation"]) == (40, {})
    header, *rows = output.read_text().splitlines()
    assert header == "prediction,p(left),p(nobody),p(right)"
    assert np.mean([row.startswith("left,") for row in rows]) > 0.8


@pytest.mark.parametrize("command", ["train", "compare", "federate"])
def test_no_command_evaluates_on_the_private_rows(equipoise, folder, command):
    found = equipoise(f"{command} --json --data", folder / "people.csv", "--test", folder / "people.csv")
    assert found.code == 2
    assert "holds private records of --data" in found.value["error"]


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
    found = equipoise(f"train --model {name} --noise-multiplier {noise} --delta 1e-5 --json", *data)
    assert found.code == 0, found.err
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
    with (run / "export/coefficients.csv").open() as file:
        wage = next(row for row in csv.DictReader(file) if row["term"] == "wage")
    assert 0 < float(wage["low"]) < float(wage["coefficient"]) < float(wage["high"])
    assert not (run / "export/prediction.sql").exists()  # the town is hashed
    assert "--format coefficients" in equipoise("export --json --format onnx", run).value["error"]


@pytest.mark.parametrize(
    ("score", "said"),
    [
        ("accuracy", "of one class per record"),
        ("auc", "of one class per record"),
        ("error:2000", "error:0.5"),
        ("error:many", "many"),
    ],
)
def test_a_score_that_says_nothing_of_a_number_is_refused(equipoise, people, tmp_path, score, said):
    words = f"train --data {people} --target wage --batch-size 60 --epochs 1 --private-validation 0.2"
    found = equipoise(words, "--score", score, "--run-dir", tmp_path / "run")
    assert found.code == 2
    assert said in found.err
    assert not (tmp_path / "run").exists()


def test_several_labels_are_scored_by_the_share_of_right_ones(equipoise, people, tmp_path):
    words = f"train --data {people} --target buys,member --batch-size 60 --epochs 1 --private-validation 0.2"
    found = equipoise(f"{words} --json --run-dir", tmp_path / "run")
    assert found.code == 0, found.err
    assert 0 < found.value["evaluation"]["private_accuracy"] < 1
    refused = equipoise(f"{words} --score auc --json --run-dir", tmp_path / "other")
    assert "of one class per record" in refused.value["error"]


def test_a_number_is_scored_by_its_error(equipoise, people, tmp_path):
    words = f"train --data {people} --target wage --batch-size 60 --epochs 1 --private-validation 0.2 --json"
    found = equipoise(words, "--run-dir", tmp_path / "run")
    assert found.code == 0, found.err
    assert 0 < found.value["evaluation"]["private_error"] < 1
