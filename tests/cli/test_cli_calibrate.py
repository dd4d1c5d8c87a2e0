import json

import pytest

SETTING = "calibrate --population 60000 --batch-size 256 --steps 4700 --delta 1e-5"


def test_epsilon_for_a_noise_multiplier(equipoise):
    found = equipoise(SETTING, "--noise-multiplier", 1, "--json")
    assert found.code == 0
    assert found.value["epsilon"] == pytest.approx(1.571, rel=0.005)
    assert found.value["cross_check_rdp"] == pytest.approx(1.761, rel=0.005)
    assert found.value["noise_multiplier"] == 1


def test_noise_multiplier_for_an_epsilon(equipoise, tmp_path):
    found = equipoise(SETTING, "--epsilon", 1.571, "--json", "--run-dir", tmp_path / "new")
    assert found.code == 0
    assert found.value["noise_multiplier"] == pytest.approx(1.0, rel=0.01)
    assert 1.571 * 0.99 <= found.value["epsilon"] <= 1.571
    assert json.loads((tmp_path / "new" / "calibration.json").read_text()) == found.value


@pytest.mark.parametrize(("epochs", "steps"), [(2.5, 25), (2.51, 26), (2.59, 26), (0.3, 3)])
def test_epochs_instead_of_steps(equipoise, epochs, steps):
    """The fewest steps that make as many passes, so that epsilon is never that of a shorter run."""
    found = equipoise(
        f"calibrate --population 1000 --batch-size 100 --epochs {epochs} --noise-multiplier 4 --json"
    )
    assert found.value["steps"] == steps


def test_table_for_people(equipoise):
    found = equipoise("calibrate --population 1000 --batch-size 1000 --steps 10 --noise-multiplier 20")
    assert found.code == 0
    # a batch of four times the population does not exist, so the table has two columns
    assert "250" in found.out
    assert "4,000" not in found.out
    assert "noise multiplier 20.00  gives  epsilon" in found.out


@pytest.mark.parametrize(
    ("population", "given", "delta"),
    [(60_000, "", 1e-5), (200_000, "", 1e-7), (10**8, "", 1e-9), (200_000, "--delta 1e-6", 1e-6)],
)
def test_delta_follows_the_population(equipoise, population, given, delta):
    command = f"calibrate --batch-size 256 --steps 10 --noise-multiplier 2 --json --population {population}"
    assert equipoise(command, *given.split()).value["delta"] == delta


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--steps 10 --noise-multiplier 1 --epsilon 1", "exactly one of --noise-multiplier and --epsilon"),
        ("--noise-multiplier 1", "exactly one of --steps and --epochs"),
        ("--steps 0 --noise-multiplier 1", "--steps is 0"),
        ("--steps 10 --noise-multiplier 0", "clip-sgd"),
        ("--steps 10 --noise-multiplier 1 --delta 2", "--delta is 2"),
        ("--steps 10 --noise-multiplier 1 --relation swap", "--relation is 'swap'"),
        (
            "--steps 10 --noise-multiplier 1 --batch-size 2000",
            "--batch-size is 2000, but --population is 1000",
        ),
        ("--steps 10 --noise-multiplier 1 --sampling without-replacement", "replace_one"),
        ("--steps ten --noise-multiplier 1", "integer"),
        ("--steps 10 --noise 1", "--noise"),
    ],
)
def test_bad_input(equipoise, words, message):
    found = equipoise("calibrate", "--population", 1000, "--batch-size", 100, *words.split(), "--json")
    assert found.code == 2
    assert message in found.value["error"]
    assert message in found.err
    assert "Traceback" not in found.err
