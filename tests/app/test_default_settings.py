"""The published accuracies belong to these numbers: whoever changes a default measures again."""

import json

import pytest

from equipoise import cli
from equipoise.app.default_settings import default_settings, recipes
from equipoise.app.option_checks import SettingsError
from equipoise.app.settings import RunSettings

# batch size, epochs, epsilon, clip norm, learning rate, decay of the averaged weights
MEASURED = {
    ("digits", "mlp-tanh"): (718.5, 40, 3.0, 0.1, 3.0, None),
    ("mnist", "cnn-tanh"): (2048, 40, 2.93, 0.1, 3.0, 0.98),
    ("mnist", "patches-linear"): (8192, 60, 2.93, 0.5, 5.0, 0.9),
    ("fashion-mnist", "patches-linear"): (8192, 40, 2.7, 0.1, 50.0, 0.9),
    ("cifar10", "patches-linear"): (16_384, 20, 3.0, 0.1, 200.0, 0.95),
    ("fashion-mnist", "cnn-tanh"): (2048, 40, 2.7, 0.1, 4.0, 0.98),
}


@pytest.mark.parametrize("pair", list(MEASURED), ids="-".join)
def test_default_settings_are_those_that_were_measured(pair: tuple[str, str]) -> None:
    defaults = default_settings(*pair)
    assert (
        defaults.batch_size,
        defaults.epochs,
        defaults.epsilon,
        defaults.clip_norm,
        defaults.learning_rate,
        defaults.ema,
    ) == MEASURED[pair]
    assert (defaults.optimizer, defaults.momentum, defaults.schedule) == ("sgd", 0.9, "constant")
    assert defaults.clip_rule == "abadi"


def test_delta_is_below_one_over_the_population() -> None:
    for population in (1, 1437, 99_999, 100_000, 123_456, 10**6, 10**6 + 1, 10**9):
        delta = RunSettings(data="digits").resolved(population=population).delta
        assert delta is not None
        assert delta * population < 1
        assert delta == 1e-5 or delta * population <= 0.1
    assert RunSettings(data="digits", delta=0.1).resolved(population=10**6).delta == 0.1


@pytest.mark.parametrize(("epsilon", "rate", "ema"), [(1, 100, 0.95), (3, 200, 0.95), (7.53, 400, 0.9)])
def test_colour_pictures_have_settings_for_each_measured_budget(epsilon, rate, ema) -> None:
    for model in (None, "patches-linear"):
        settings = RunSettings(data="cifar10", model=model, epsilon=epsilon).resolved()
        assert (settings.model, settings.learning_rate, settings.ema) == ("patches-linear", rate, ema)
    given = RunSettings(data="cifar10", epsilon=epsilon, learning_rate=7.0, ema=0.5).resolved()
    assert (given.learning_rate, given.ema) == (7.0, 0.5)


def test_drawn_features_are_those_that_were_measured() -> None:
    kinds = {name: default_settings(name, "patches-linear").features for name in ("digits", "mnist")}
    assert kinds == {"digits": "strokes", "mnist": "upright-strokes"}
    for name in ("fashion-mnist", "cifar10"):
        assert RunSettings(data=name, model="patches-linear").resolved().features == "deep-things"
    own = RunSettings(data="my.module:images", population=100, model="patches-linear")
    assert own.resolved().features == "deep-things"
    assert RunSettings(data="mnist", model="logistic").resolved().features is None
    with pytest.raises(SettingsError, match="--features is things, but only patches-linear"):
        RunSettings(model="logistic", features="things").check()


def test_a_recipe_is_named_after_its_data() -> None:
    for name, recipe in recipes().items():
        assert name.startswith(recipe.get("data", name))
        if "data" in recipe:
            found = default_settings(recipe["data"], recipe["model"], recipe["epsilon"])
            assert found.learning_rate == recipe["learning_rate"]
    others = [default_settings("digits", "no-such-model"), default_settings("my.csv", "logistic")]
    assert [found.schedule for found in others] == ["constant", "linear"]


def test_features_are_computed_once_and_the_folder_is_named(tmp_path, monkeypatch, capsys) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("EQUIPOISE_CACHE", str(cache))
    small = {"strokes": {"dictionaries": ((16, 3, 2),), "pictures": 200}}
    monkeypatch.setattr("equipoise.app.models.DRAWN_FEATURES", small)
    command = ["train", "--data", "digits", "--model", "patches-linear", "--json", "--epochs", "1"]
    command += ["--run-dir"]
    assert cli.main([*command, str(tmp_path / "a"), "--dry-run"]) == 0
    dry = capsys.readouterr()
    assert json.loads(dry.out)["dry_run"] is True
    assert "features    not computed here" in dry.err
    assert not cache.exists()
    assert cli.main([*command, str(tmp_path / "a")]) == 0
    first = capsys.readouterr()
    assert json.loads(first.out)["settings"] == json.loads(dry.out)["settings"]
    assert str(cache) in first.err
    files = {path: path.stat().st_mtime_ns for path in cache.glob("features-*.safetensors")}
    assert len(files) == 2  # training and test records
    assert cli.main([*command, str(tmp_path / "b")]) == 0
    assert "computing features of" not in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in cache.glob("features-*.safetensors")} == files


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("options", [True, 1, [1], {"a": float("nan")}, {"a": b"x"}]),
        ("class_weights", [True, ["yes"], {"yes": 0}, {"yes": "2"}]),
        ("clip_norm", [True, ["1"], b"1"]),
        ("epochs", [True, "1", 0, -1, 1e300, 10**400, float("nan")]),
        ("population", [True, 1.5, 0, 2**63]),
        ("sampling", ["poison", 1]),
        ("hardened", [1, "yes"]),
    ],
)
def test_values_of_another_kind_are_refused_by_name(name, values):
    for value in values:
        with pytest.raises(SettingsError, match=f"--{name.rstrip('s').replace('_', '-')}"):
            RunSettings(**{name: value})


def test_a_file_keeps_every_digit_of_a_clip_norm():
    assert RunSettings(clip_norm=0.123456789).clip_norm == "0.123456789"
