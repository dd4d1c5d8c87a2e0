"""A crash is no finding, and a key is read once."""

import os
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from equipoise.cli import CRASHED, main
from equipoise.cli.verify_command import read_key
from equipoise.statements.sign import KeyFileError, read_signature, sign_files, signing_key


@pytest.fixture
def key(tmp_path: Path) -> Path:
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


def test_keys_and_passwords_come_from_the_environment_and_rotate(tmp_path, key, monkeypatch):
    """A locked key in a variable signs without a prompt; a file of two keys verifies either's signature."""
    old, new = signing_key(key), Ed25519PrivateKey.generate()
    closed = form.BestAvailableEncryption(b"secret")
    locked = new.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, closed)
    monkeypatch.setenv("KEY", locked.decode())
    (tmp_path / "password").write_text("secret\n")
    assert read_key("env:KEY", str(tmp_path / "password")).private_bytes_raw() == new.private_bytes_raw()
    with pytest.raises(KeyFileError, match="assword"):
        read_key("env:KEY", "env:KEY")
    for source in (locked.decode(), "env:WRONGPW77", "WRONGPW77"):  # the secret in the place of its name
        with pytest.raises(KeyFileError) as caught:
            read_key(source, None)
        assert "WRONGPW77" not in str(caught.value)
        assert "BEGIN" not in str(caught.value)
    pem = old.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    line = new.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    (tmp_path / "keys").write_bytes(pem + b"\n" + line)
    for given, wanted in (("keys", [True, True, False]), (None, [None, None, None])):
        found = []
        for one in (old, new, Ed25519PrivateKey.generate()):
            (tmp_path / "s.json").write_text(sign_files(one, tmp_path, ["password"]).to_json())
            public = None if given is None else tmp_path / given
            found.append(read_signature(tmp_path / "s.json", public)[1][0].ok)
        assert found == wanted


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
