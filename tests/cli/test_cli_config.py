import json
import shutil

import jsonschema
import pytest

from equipoise.app.default_settings import recipes
from equipoise.app.settings import RunSettings


@pytest.fixture
def dry(equipoise, tmp_path):
    """The settings that a dry run of `train` answers, with a configuration file of these lines."""

    def run(lines, words=""):
        path = tmp_path / "run.toml"
        path.write_text(lines)
        found = equipoise.ok(f"train --dry-run --json {words} --config", path)
        return found.value

    return run


def test_a_file_gives_options_and_the_command_line_comes_first(dry):
    lines = 'data = "digits"\nepochs = 6\nlearning-rate = 2.5\nhardened = true\nseed = 4\nepsilon = 3\n'
    settings = dry(lines, "--epochs 4 --seed 5 --noise-multiplier 2")["settings"]
    assert (settings["epochs"], settings["seed"]) == (4, 5)
    assert (settings["learning_rate"], settings["hardened"], settings["method"]) == (2.5, True, "dp-sgd")
    assert settings["noise_multiplier"] == 2
    assert "epsilon" not in settings  # and what means nothing beside it is displaced
    lines = 'data = "digits"\nmomentum = 0.9\nbatch-size = 50\nepochs = 2\n'
    assert "momentum" not in dry(lines, "--optimizer adam --learning-rate 0.01")["settings"]
    assert "batch_size" not in dry(lines, "--sampling full-batch")["settings"]


def test_the_configuration_of_a_run_repeats_its_settings(equipoise, trained):
    folder, found = trained
    again = equipoise.ok("train --dry-run --json --config", folder / "config.json", "--run-dir", "elsewhere")
    assert again.value["settings"] == found["settings"]


SLIPS = {
    "learning_rat = 1": "no option of equipoise train. Did you mean --learning-rate?",
    "lr = 1": "Did you mean --learning-rate?",
    "noise-multiplier = 5\nnoise_multiplier = 1": "--noise-multiplier twice",
    "epochs = true": "--epochs is True",
    "views = 3.5": "--views is 3.5",
    'hardened = "yes"': "--hardened is 'yes'",
    "[epochs]\nmany = 3": "--epochs is {'many': 3}",
    "epochs = ": "is no TOML file",
}


def test_slips_in_a_file_are_answered(equipoise, tmp_path):
    path = tmp_path / "run.toml"
    for lines, said in SLIPS.items():
        path.write_text(lines)
        found = equipoise("train --dry-run --json --config", path)
        assert (found.code, said in found.value["error"]) == (2, True), found.value


def test_what_a_run_wrote_never_says_what_to_import(equipoise, tmp_path):
    config = {"experiment": {"data": "somewhere.else:records", "population": 900, "steps": 3}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert "name it again: --data somewhere.else:records" in equipoise.refused(
        "train --dry-run --json --config", path
    )


def test_every_recipe_suits_the_schema_of_the_configuration(equipoise):
    checker = jsonschema.Draft202012Validator(json.loads(equipoise("recipe --schema").out))
    for name in equipoise("recipe").out.split():
        values = {key: value for key, value in recipes()[name].items() if key != "clip_norm"}
        checker.validate(values)
        assert RunSettings(**recipes()[name]).resolved("linear").clip_norm
    assert not checker.is_valid({"epochs": -1})
    assert not checker.is_valid({"epoch": 1})


def test_a_run_that_set_rows_aside_is_repeated_with_its_population(equipoise, people, tmp_path):
    words = ("--data", people, "--population", 640)
    train = "train --test-share 0.2 --epochs 1 --noise-multiplier 2 --run-dir"
    equipoise.ok(train, tmp_path / "run", *words)
    moved = tmp_path / "people.csv"  # with no schema beside it: the run stores the one that it used
    shutil.copy(people, moved)
    again = equipoise.ok("train --dry-run --json --config", tmp_path / "run" / "config.json", "--data", moved)
    assert again.value["settings"]["population"] == 640
