"""verify, sign, search: what a data owner and a stranger can tell of a real run folder."""

import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization as ser
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

import equipoise as eq
from equipoise.cli import CRASHED, main
from equipoise.cli.verify_command import read_key
from equipoise.privacy import Journal, PrivateSearch
from equipoise.report import RunFolderError, write_report
from equipoise.statements import charge_search, statement_from_journal
from equipoise.statements.assumptions import always
from equipoise.statements.sign import KeyFileError, read_signature, sign_files, signing_key
from tests.cli.conftest import write_key


@pytest.fixture
def run(trained, tmp_path):
    """A copy of a finished run that a test may change."""
    return shutil.copytree(trained[0], tmp_path / "run")


@pytest.fixture
def keys(tmp_path):
    return write_key(tmp_path)


def edit(path, **changes):
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | changes))


def published_part(run, to):
    shutil.copytree(run, to, ignore=shutil.ignore_patterns("private", "checkpoint"))
    return to


def wrong_in(found):
    return [f["subject"] for f in found["findings"] if f["ok"] is False]


def test_a_run_is_consistent_for_its_keeper_and_for_a_stranger(run, equipoise, tmp_path):
    found = equipoise.ok("verify", run, "--json")
    assert found.value["consistent"]
    assert found.value["with_journal"]
    assert found.value["signer"] is None
    assert "consistent with the journal" in " ".join(equipoise("verify", run).out.split())
    found = equipoise("verify", published_part(run, tmp_path / "published"), "--json")
    assert (found.code, found.value["with_journal"], found.value["consistent"]) == (0, False, True)


def test_an_edited_epsilon_is_caught(run, equipoise, tmp_path):
    edit(run / "statement.json", epsilon=0.5)
    assert equipoise("verify", run, "--json").code == 1
    found = equipoise("verify", published_part(run, tmp_path / "published"), "--json")
    assert found.code == 1
    assert wrong_in(found.value) == ["epsilon", "metrics"]
    assert "not consistent, so no page was made. epsilon: " in equipoise.refused("report", run, "--json")
    file = equipoise("verify", run / "statement.json", "--json").value["error"]
    assert f"Give the folder that it lies in: {run}" in file
    assert "NOT CONSISTENT" in equipoise("verify", run).out
    assert equipoise("sign", run, "--key", write_key(tmp_path)[0], "--json").code == 2


@pytest.mark.parametrize("form", [ser.PrivateFormat.PKCS8, ser.PrivateFormat.OpenSSH])
def test_a_signed_run(run, equipoise, tmp_path, form):
    key, public = write_key(tmp_path, form=form)
    signed = equipoise.ok("sign", run, "--key", key, "--json")
    found = equipoise("verify", run, "--key", public, "--json")
    assert (found.code, found.value["signer"]) == (0, signed.value["signer"])
    (tmp_path / "other").mkdir()
    _, other = write_key(tmp_path / "other")
    assert wrong_in(equipoise("verify", run, "--key", other, "--json").value) == ["signature"]
    (run / "model.safetensors").rename(tmp_path / "model")
    shutil.copy(tmp_path / "other" / "key", run / "model.safetensors")
    assert wrong_in(equipoise("verify", run, "--key", other, "--json").value) == [
        "model", "signature", "files",
    ]  # fmt: skip
    (tmp_path / "model").rename(run / "model.safetensors")
    (run / "statement.sig.json").unlink()
    assert equipoise("verify", run, "--key", public, "--json").code == 1, "a signature left out"
    assert equipoise("verify", run, "--json").code == 0


def test_the_model_of_another_run_is_caught(run, equipoise, tmp_path, keys):
    other = tmp_path / "other"
    train = ("train", "--data", "digits", "--epochs", 0.1, "--epsilon", 3, "--run-dir", other)
    equipoise.ok(*train, "--json")
    shutil.copy(other / "model.safetensors", run / "model.safetensors")
    assert wrong_in(equipoise("verify", run, "--json").value) == ["model"]
    assert "model.safetensors is that of another run" in equipoise.refused(
        "sign", run, "--key", keys[0], "--json"
    )


def test_what_nobody_signed_is_listed(run, equipoise, keys):
    def unsigned():
        return [
            line for line in equipoise.ok("verify", run, "--json").value["not_checked"] if "unsigned" in line
        ]

    assert "the scores, report.html" in unsigned()[0]
    equipoise.ok("sign", run, "--key", keys[0])
    assert not unsigned()


def test_the_page_of_a_copied_folder_is_the_one_that_was_signed(run, equipoise, tmp_path, keys):
    equipoise.ok("report", run)
    equipoise.ok("sign", run, "--key", keys[0])
    copy = shutil.copytree(run, tmp_path / "secret patients")
    equipoise.ok("report", copy)
    assert equipoise("verify", copy, "--key", keys[1], "--json").code == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_output_that_is_full_is_no_inconsistency(run):
    command = [sys.executable, "-m", "equipoise", "verify", run, "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment, check=False)
    assert ended.returncode not in (0, 1)


def test_a_full_disk_names_its_file_and_the_run_to_go_on_with(run, equipoise):
    page, old = run / "report.html", resource.getrlimit(resource.RLIMIT_FSIZE)
    before = page.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, old[1]))
    try:
        said = equipoise.refused("report", run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert f"{str(page)!r}: " in said
    assert f"equipoise resume {run}" in said
    assert page.read_bytes() == before


def test_a_run_without_its_configuration_is_told_so(run, equipoise):
    (run / "config.json").unlink()
    assert "holds no config.json" in equipoise.refused("predict", run)


def test_journal_and_statement_edited_together_are_caught_by_the_signature(run, equipoise, keys):
    """The last release is taken out of the journal and the statement computed anew: consistent, but false."""
    assert equipoise("sign", run, "--key", keys[0], "--json").code == 0
    journal, statement = run / "private" / "journal.jsonl", json.loads((run / "statement.json").read_text())
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    last = max(entry["index"] for entry in entries if entry["type"] == "release")
    left = [entry for entry in entries if entry.get("index") != last]
    journal.write_text("".join(json.dumps(entry) + "\n" for entry in left))
    assumptions = [*always("record"), *json.loads((run / "config.json").read_text())["assumptions"]]
    entries = Journal(journal, read_only=True).entries()
    again = statement_from_journal(entries, statement["run"], statement["delta"], assumptions=assumptions)
    (run / "statement.json").write_text(again.to_json())
    write_report(run)
    found = wrong_in(equipoise("verify", run, "--json").value)
    assert found == ["metrics", "files", "signed journal"], "the metrics still hold the last step"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [row for row in rows if row["step"] < rows[-1]["step"]]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    write_report(run)
    assert wrong_in(equipoise("verify", run, "--json").value) == ["files", "signed journal"]
    (run / "statement.sig.json").unlink()
    assert equipoise("verify", run, "--json").code == 0, "without the signature nobody could tell"


def without(run, key):
    values = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({k: v for k, v in values.items() if k != key}))
    write_report(run)


SKIPPED = {
    "metrics.jsonl": lambda run: (run / "metrics.jsonl").unlink(),
    "no settings": lambda run: without(run, "settings"),
    "no plan": lambda run: without(run, "plan"),
}


@pytest.mark.parametrize("what", SKIPPED)
def test_a_check_that_was_skipped_is_told(run, equipoise, what):
    before = equipoise("verify", run, "--json").value["not_checked"]
    assert not [line for line in before if what in line]
    SKIPPED[what](run)
    found = equipoise.ok("verify", run, "--json")
    assert [line for line in found.value["not_checked"] if what in line]
    assert "Not checked: " in equipoise("verify", run).out


def test_an_edited_signature_or_signed_file_is_caught(run, equipoise, keys):
    equipoise("sign", run, "--key", keys[0])
    made = json.loads((run / "statement.sig.json").read_text())
    for changes in (
        {"files": {**made["files"], "statement.json": "0" * 64}},
        {"files": {**made["files"], "../../secret": "0" * 64}},
        {"journal": None},
        {"signature": made["public_key"]},
        {"format": "another"},
        {"public_key": "x"},
    ):
        edit(run / "statement.sig.json", **{**made, **changes})
        assert equipoise("verify", run, "--key", keys[1], "--json").code == 1, changes
    edit(run / "statement.sig.json", **made)
    for name in ("model.safetensors", "metrics.jsonl"):
        whole = (run / name).read_bytes()
        (run / name).write_bytes(whole + b"\n")
        found = equipoise("verify", run, "--key", keys[1], "--json")
        assert found.code == 1
        assert name in next(f["detail"] for f in found.value["findings"] if f["subject"] == "files")
        (run / name).write_bytes(whole)


def test_keys_that_cannot_be_used(run, equipoise, tmp_path, monkeypatch):
    def refused(*words):
        found = equipoise("sign", run, "--json", *words)
        assert found.code == 2
        return found.value["error"]

    assert f"equipoise sign {run} --key key.pem" in refused()
    assert "the path of a file" in refused("--key", tmp_path / "no")  # it repeats no key
    (tmp_path / "wrong").write_text("no key at all")
    assert "openssl" in refused("--key", tmp_path / "wrong")
    other = X25519PrivateKey.generate()
    content = other.private_bytes(ser.Encoding.PEM, ser.PrivateFormat.PKCS8, ser.NoEncryption())
    (tmp_path / "wrong").write_bytes(content)
    assert "Ed25519" in refused("--key", tmp_path / "wrong")
    assert equipoise("verify", run, "--key", tmp_path / "wrong", "--json").code == 2
    key, _ = write_key(tmp_path, password=b"secret")
    for word, code in (("secret", 0), ("false", 2)):
        monkeypatch.setattr("typer.prompt", lambda *_, word=word, **__: word)
        assert equipoise("sign", run, "--key", key, "--json").code == code


def test_a_search_is_charged_once(run, equipoise, keys):
    before = json.loads((run / "statement.json").read_text())
    equipoise("sign", run, "--key", keys[0])
    assert charge_search(run, PrivateSearch(5)).epsilon > before["epsilon"]
    write_report(run)
    again = equipoise("verify", run, "--json")
    assert again.value["consistent"]
    assert again.value["signer"] is None, "the signature was of another statement"
    after = json.loads((run / "statement.json").read_text())
    assert after["search"] == {"mean": 5.0, "shape": 1.0}
    assert before["assumptions"][:-1] == after["assumptions"][:-1] != before["assumptions"]
    assert "Search for settings" in (run / "report.html").read_text()
    with pytest.raises(RunFolderError, match="already"):
        charge_search(run, PrivateSearch(5))
    edit(run / "statement.json", search=None, epsilon=before["epsilon"])
    assert equipoise("verify", run, "--json").code == 1


def test_a_journal_elsewhere(run, equipoise, tmp_path):
    (run / "private" / "journal.jsonl").rename(tmp_path / "shared")
    assert not equipoise("verify", run, "--json").value["with_journal"]
    assert equipoise("verify", run, "--ledger", tmp_path / "shared", "--json").value["with_journal"]
    (run / "private" / "ledger_file").write_text(str(tmp_path / "shared"))
    assert eq.verify_run(run).with_journal
    (tmp_path / "shared").unlink()
    assert "not there any more" in equipoise("verify", run, "--json").value["error"]
    assert equipoise("verify", run, "--ledger", tmp_path / "none", "--json").code == 2


def test_a_crash_has_a_code_of_its_own(monkeypatch, capsys):
    def broken(*_: object, **__: object) -> None:
        raise ImportError("no torch")

    monkeypatch.setattr("equipoise.statements.verify_run", broken)
    assert main(["verify", "."]) == CRASHED
    assert CRASHED not in (0, 1, 2, 130)
    assert "no torch" in capsys.readouterr().err


def test_keys_and_passwords_come_from_the_environment_and_rotate(tmp_path, keys, monkeypatch):
    """A locked key in a variable signs without a prompt; a file of two keys verifies either's signature."""
    old, new = signing_key(keys[0]), Ed25519PrivateKey.generate()
    closed = ser.BestAvailableEncryption(b"secret")
    locked = new.private_bytes(ser.Encoding.PEM, ser.PrivateFormat.PKCS8, closed)
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
    pem = old.public_key().public_bytes(ser.Encoding.PEM, ser.PublicFormat.SubjectPublicKeyInfo)
    line = new.public_key().public_bytes(ser.Encoding.OpenSSH, ser.PublicFormat.OpenSSH)
    (tmp_path / "both").write_bytes(pem + b"\n" + line)
    for given, wanted in (("both", [True, True, False]), (None, [None, None, None])):
        found = []
        for one in (old, new, Ed25519PrivateKey.generate()):
            (tmp_path / "s.json").write_text(sign_files(one, tmp_path, ["password"]).to_json())
            public = None if given is None else tmp_path / given
            found.append(read_signature(tmp_path / "s.json", public)[1][0].ok)
        assert found == wanted


def test_signing_reads_its_key_once(tmp_path, keys, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=lambda: pipe.write_bytes(keys[0].read_bytes()), daemon=True).start()
    taken = []
    monkeypatch.setattr("equipoise.app.run_checks.is_federation", lambda folder: False)
    monkeypatch.setattr("equipoise.statements.sign_run", lambda run, key, **_: taken.append(key) or made)
    made = sign_files(signing_key(keys[0]), tmp_path, ["key"])
    assert main(["sign", str(tmp_path), "--key", str(pipe)]) == 0
    assert taken[0].private_bytes_raw() == signing_key(keys[0]).private_bytes_raw()
