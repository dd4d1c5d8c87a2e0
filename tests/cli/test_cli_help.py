import os
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version

import pytest

from equipoise.app.model_table import MODELS
from equipoise.app.option_checks import DATA_NAMES
from equipoise.app.settings import GROUPS, FederationSettings, RunSettings
from equipoise.cli import COMMANDS

EXAMPLES = {command.__name__: example for command, example in COMMANDS.items()}


def test_every_setting_of_a_training_stands_under_one_heading():
    grouped = [name for names in GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped))
    kinds = (RunSettings, FederationSettings)
    assert {item.name for kind in kinds for item in fields(kind)} - {"base"} <= set(grouped)


@pytest.mark.parametrize("name", ["", "schema", "schema init", *(command.__name__ for command in COMMANDS)])
def test_help_fits_a_terminal_of_80_columns(equipoise, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    found = equipoise(f"{name} --help")
    assert found.code == 0
    assert max(len(line) for line in found.out.splitlines()) <= 80
    for line in EXAMPLES.get(name, "").split("\n\n"):
        assert line in found.out
    if name not in ("", "schema"):
        assert found.out.count(f" equipoise {name} ") >= 2, (
            "one of them is the usage, and there is no example"
        )


def test_help_says_what_an_argument_is(equipoise):
    if tuple(map(int, version("click").split(".")[:2])) >= (8, 5):
        pytest.skip("click 8.5 hides the help of arguments; pyproject.toml asks for an older one")
    assert "The run folder." in equipoise("predict --help").out.split("─ Options ─")[0]


@pytest.mark.parametrize("name", ["train", "compare", "federate", "audit neighbours"])
def test_help_names_data_sets_and_models(equipoise, name):
    said = " ".join(equipoise(f"{name} --help").out.replace("│", " ").split())
    assert f"Names: {', '.join(DATA_NAMES)}" in said
    assert f"Names: {', '.join(MODELS)}" in said
    assert "…" not in said


def test_help_shows_headings_and_where_defaults_come_from(equipoise):
    said = equipoise("train --help").out
    for heading in ("Data", "Privacy", "Method", "Model and optimiser", "Run"):
        assert f"─ {heading} ─" in said
    assert "[default: by data and model]" in " ".join(said.split())


@pytest.mark.parametrize(
    ("words", "offered"),
    [("--method dp-c", "dp-c4-plus"), ("--data fash", "fashion-mnist"), ("--lear", "--learning-rate")],
)
def test_a_shell_completes_names_and_options(words, offered):
    environment = os.environ | {
        "_EQUIPOISE_COMPLETE": "complete_bash",
        "COMP_WORDS": f"equipoise train {words}",
        "COMP_CWORD": str(1 + len(words.split())),
    }
    program = [sys.executable, "-c", "from equipoise.cli import app; app(prog_name='equipoise')"]
    found = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert offered in found.stdout.split()


@pytest.mark.parametrize(("typed", "meant"), [("--lr", "--learning-rate"), ("--epsilom", "--epsilon")])
def test_near_misses_are_answered(equipoise, typed, meant):
    found = equipoise(f"train {typed} 1 --json")
    assert found.code == 2
    assert f"Did you mean '{meant}'?" in found.value["error"] or meant in found.value["error"]
