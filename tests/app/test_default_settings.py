"""The published accuracies belong to these numbers: whoever changes a default measures again."""

import pytest

from equipoise.app.default_settings import default_settings
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
    ("notes.csv", "hashed-words"): (None, 100, 3.0, 0.2, 150.0, 0.95),
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


@pytest.mark.parametrize("model", ["hashed-words", "statistics"])
def test_a_recipe_may_take_all_records_unless_other_draws_are_named(model: str) -> None:
    assert RunSettings(model=model).resolved().sampling == "full-batch"
    assert RunSettings(model="hashed-words", batch_size=64).resolved().sampling is None
    assert RunSettings(model="hashed-words", sampling="poisson", batch_size=64).resolved().batch_size == 64
    with pytest.raises(SettingsError, match=r"--batch-size is 64.*one release of all rows"):
        RunSettings(model="statistics", batch_size=64).resolved()


def test_delta_is_below_one_over_the_population() -> None:
    for population in (1, 1437, 99_999, 100_000, 123_456, 10**6, 10**6 + 1, 10**9):
        delta = RunSettings(data="digits").resolved(population=population).delta
        assert delta is not None
        assert delta * population < 1
        assert delta == 1e-5 or delta * population <= 0.1
    assert RunSettings(data="digits", delta=0.1).resolved(population=10**6).delta == 0.1


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
