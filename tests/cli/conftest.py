"""Helpers of the command-line tests: run a command in this process, with its output and exit code."""

import json
from dataclasses import dataclass

import pytest

from equipoise.cli import main


@dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def value(self):
        """The one JSON object on standard output; anything else there makes this fail."""
        return json.loads(self.out)


@pytest.fixture
def equipoise(capsys, monkeypatch):
    # a terminal of fixed width without colours, whatever runs the tests
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)

    def run(line, *words):
        """`line` is split at spaces; further words are taken as they are."""
        capsys.readouterr()
        code = main([*line.split(), *(str(word) for word in words)])
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A small finished run on digits, shared by the tests that only read it: (folder, JSON answer)."""
    import contextlib
    import io

    folder = tmp_path_factory.mktemp("runs") / "small"
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = main(
            f"train --data digits --epochs 6 --noise-multiplier 2 --seed 3 --run-dir {folder} --json".split()
        )
    assert code == 0
    return folder, json.loads(out.getvalue())
