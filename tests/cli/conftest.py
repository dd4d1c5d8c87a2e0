"""Helpers of the command-line tests: run a command in this process, with its output and exit code."""

import csv
import json
from dataclasses import dataclass

import numpy as np
import pytest

from equipoise.cli import main

SCHEMA = """population = 600
target = "buys"
missing = [""]
[columns.age]
type = "number"
low = 18
high = 90
[columns.town]
type = "category"
buckets = 4
[columns.wage]
type = "number"
low = 0
high = 100
[columns.buys]
type = "category"
values = ["no", "yes"]
[columns.member]
type = "category"
values = ["no", "yes"]
"""


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
    # a terminal so wide that no sentence is wrapped, whatever runs the tests
    monkeypatch.setenv("COLUMNS", "2000")
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)

    def run(line, *words):
        """`line` is split at spaces; further words are taken as they are."""
        capsys.readouterr()
        code = main([*line.split(), *(str(word) for word in words)])
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return run


def write_rows(path, count, seed):
    """A table of made-up people, of the form that `SCHEMA` declares."""
    rng = np.random.default_rng(seed)
    age, wage = rng.uniform(18, 90, count), rng.uniform(0, 100, count)
    towns = rng.choice(["Rome", "Oslo", ""], count)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "town", "wage", "buys", "member"])
        for a, t, w in zip(age, towns, wage, strict=True):
            row = ["no", "yes"][int(w > 50)], ["no", "yes"][int(a > 50)]
            writer.writerow([f"{a:.1f}" if a > 20 else "", t, f"{w:.2f}", *row])


@pytest.fixture(scope="session")
def people(tmp_path_factory):
    """people.csv with 600 rows, beside held_out.csv with 200 and people.schema.toml; not to be changed."""
    folder = tmp_path_factory.mktemp("tables")
    write_rows(folder / "people.csv", 600, 0)
    write_rows(folder / "held_out.csv", 200, 1)
    (folder / "people.schema.toml").write_text(SCHEMA)
    return folder / "people.csv"


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
