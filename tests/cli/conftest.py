"""Helpers of the command-line tests: run a command in this process, with its output and exit code."""

import contextlib
import csv
import io
import json
from dataclasses import dataclass

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization as ser
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from equipoise.cli import main

SCHEMA = """population = 600
target = "buys"
missing = [""]
[columns]
age = {type = "number", low = 18, high = 90}
town = {type = "category", buckets = 4}
wage = {type = "number", low = 0, high = 100}
buys = {type = "category", values = ["no", "yes"]}
member = {type = "category", values = ["no", "yes"]}
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

    def ok(line, *words):
        """What a command answers that must succeed."""
        answer = run(line, *words)
        assert answer.code == 0, answer.err + answer.out
        return answer

    def refused(line, *words):
        """The words of a command that must end with 2."""
        answer = run(line, *words)
        assert answer.code == 2, answer.err + answer.out
        return answer.err

    run.ok, run.refused = ok, refused
    return run


def quietly(line):
    """The JSON answer of a command that must succeed, for fixtures of more than one test."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert main(line.split()) == 0
    return json.loads(out.getvalue())


def write_key(folder, name="key", form=ser.PrivateFormat.PKCS8, password=None):
    """An issuer's key in a file and the public one beside it: (key, public)."""
    key, public = Ed25519PrivateKey.generate(), folder / f"{name}.pub"
    lock = ser.BestAvailableEncryption(password) if password else ser.NoEncryption()
    (folder / name).write_bytes(key.private_bytes(ser.Encoding.PEM, form, lock))
    openssh, pem = ser.PublicFormat.OpenSSH, ser.PublicFormat.SubjectPublicKeyInfo
    is_openssh = form is ser.PrivateFormat.OpenSSH
    forms = (ser.Encoding.OpenSSH, openssh) if is_openssh else (ser.Encoding.PEM, pem)
    public.write_bytes(key.public_key().public_bytes(*forms))
    return folder / name, public


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


PATIENTS = """population = 600
target = "buys"
[columns]
wage = {type = "number", low = 0, high = 100}
patient = {type = "number", low = 0, high = 1000}
buys = {type = "category", values = ["no", "yes"]}
"""


def write_patients(path, count, owners=None):
    """Rows of users: three each, or those named; a schema beside it."""
    owners = owners or [i // 3 for i in range(count)]
    rows = zip(np.random.default_rng(0).uniform(0, 100, count), owners, strict=True)
    lines = [f"{wage:.2f},{owner},{['no', 'yes'][int(wage > 50)]}" for wage, owner in rows]
    path.write_text("\n".join(["wage,patient,buys", *lines]))
    path.with_suffix(".schema.toml").write_text(PATIENTS)
    return path


@pytest.fixture(scope="session")
def patients(tmp_path_factory):
    """600 rows of 200 patients; not to be changed."""
    return write_patients(tmp_path_factory.mktemp("users") / "patients.csv", 600)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A small finished run on digits, shared by the tests that only read it: (folder, JSON answer)."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    words = "train --data digits --epochs 6 --noise-multiplier 2 --seed 3 --json --run-dir"
    return folder, quietly(f"{words} {folder}")
