"""A crash is no finding, and a key is read once."""

import os
import threading
from pathlib import Path

import pytest

from equipoise.cli import CRASHED, main
from equipoise.statements.sign import sign_files, signing_key

pytest.importorskip("cryptography")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    path = tmp_path / "key.pem"
    made = Ed25519PrivateKey.generate()
    path.write_bytes(made.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()))
    return path


def test_a_crash_has_a_code_of_its_own(monkeypatch, capsys):
    def broken(*_: object, **__: object) -> None:
        raise ImportError("no torch")

    monkeypatch.setattr("equipoise.statements.verify_run", broken)
    assert main(["verify", "."]) == CRASHED
    assert CRASHED not in (0, 1, 2, 130)
    assert "no torch" in capsys.readouterr().err


def test_signing_reads_its_key_once(tmp_path, key, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=lambda: pipe.write_bytes(key.read_bytes()), daemon=True).start()
    taken = []
    monkeypatch.setattr("equipoise.app.run_checks.is_federation", lambda folder: False)
    monkeypatch.setattr("equipoise.statements.sign_run", lambda run, key, **_: taken.append(key) or made)
    made = sign_files(signing_key(key), tmp_path, ["key.pem"])
    assert main(["sign", str(tmp_path), "--key", str(pipe)]) == 0
    assert taken[0].private_bytes_raw() == signing_key(key).private_bytes_raw()
