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
