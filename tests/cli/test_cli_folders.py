"""A folder that cannot be used: the option, the reason and the remedy, before anything is spent."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from equipoise.training.folder.run_folder import RunFolder

COMMANDS = {
    "train": "train --data digits --subset 200 --batch-size 50 --epochs 1",
    "federate": "federate --data digits --subset 200 --clients 2 --rounds 1 --local-steps 1",
    "calibrate": "calibrate --population 1000 --batch-size 1000 --steps 1 --noise-multiplier 20",
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("inside", ["", "/sub"])
def test_a_file_in_the_place_of_the_folder(equipoise, tmp_path, command, inside):
    (tmp_path / "taken").write_text("mine")
    found = equipoise(command, "--run-dir", f"{tmp_path / 'taken'}{inside}")
    assert found.code == 2
    assert f"{tmp_path / 'taken'}{inside}" in found.err
    assert "Errno" not in found.err
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EACCES, "you may not write there; name a folder of your own"),
        (errno.EROFS, "its device can only be read"),
        (errno.ENOSPC, "no space is left on the device; free some"),
    ],
)
def test_what_the_system_refuses_names_argument_and_remedy(tmp_path, monkeypatch, number, words):
    def refused(self, *args, **kwargs):
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(OSError, match=f"^folder='{tmp_path}/new': {words}"):
        RunFolder(tmp_path / "new").create()


def test_a_disk_that_is_full_later_is_told_by_the_option(equipoise, tmp_path, monkeypatch):
    def full(self, *args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(Path, "write_text", full)
    found = equipoise(COMMANDS["calibrate"], "--run-dir", tmp_path / "run")
    assert found.code == 2
    assert f"'{tmp_path}/run/calibration.json': no space is left on the device" in found.err


@pytest.mark.parametrize("command", ["resume", "predict", "audit neighbours", "audit run"])
def test_a_run_that_was_begun_from_python(equipoise, tmp_path, command):
    """Its folder names no data and no model; the message says what Python calls take it."""
    (tmp_path / "config.json").write_text("{}")
    found = equipoise(command, tmp_path)
    assert found.code == 2
    said = " ".join(found.err.split())
    assert "serve runs of the command line. For one begun from Python call" in said
    assert all(name in said for name in ("PrivateTraining.resume", "load_model", "audit_neighbours"))
