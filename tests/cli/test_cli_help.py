import os
import subprocess
import sys

import pytest

from equipoise.cli import COMMANDS

EXAMPLES = {command.__name__: example for command, example in COMMANDS.items()}


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
