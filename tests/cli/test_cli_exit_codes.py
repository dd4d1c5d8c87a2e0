"""A crash is no finding, a key is read once, and a signature by an unknown key is not a yes."""

import os
import threading
from pathlib import Path

import pytest

from equipoise.cli import CRASHED, main
from equipoise.statements import recompute
from equipoise.statements.sign import read_signature, sign_files, signing_key

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


def test_a_signature_by_an_unknown_key_is_unchecked(tmp_path, key):
    (tmp_path / "statement.json").write_text("{}")
    made = sign_files(signing_key(key), tmp_path, ["statement.json"])
    (tmp_path / "sig.json").write_text(made.to_json())
    _, (finding,) = read_signature(tmp_path / "sig.json", None)
    assert finding.ok is None
    assert isinstance(finding, recompute.Finding)


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
