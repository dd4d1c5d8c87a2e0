"""Files of others are read whole or refused in words; nothing is waited for."""

import os

import pytest

from equipoise._run_files import LARGEST_OBJECT, each_row, read_file, read_object
from equipoise.report import RunFolderError


def pipe(path):
    os.mkfifo(path)


def folder(path):
    path.mkdir()


def large(path):
    with path.open("wb") as file:
        file.truncate(LARGEST_OBJECT + 1)  # a hole: takes no room


def of(content):
    return lambda path: path.write_bytes(content)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (pipe, "no regular file"),
        (folder, "no regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "no regular file"),
        (large, "more than the"),
        (of(b"[" * 100_000), "not valid JSON"),
        (of(b'{"a": 1'), "not valid JSON"),
        (of(b"\xff\xfe{}"), "not valid JSON"),
        (of(b'{"a": ' + b"9" * 5000 + b"}"), "not valid JSON"),
        (of(b'{"a": {"b": 1, "b": 2}}'), "twice"),
        (of(b"[1]"), "holds a list"),
    ],
)
def test_what_is_no_object_is_refused_in_words(tmp_path, make, words):
    make(tmp_path / "x.json")
    with pytest.raises(RunFolderError, match=words):
        read_object(tmp_path / "x.json")


def test_what_is_one_is_read(tmp_path):
    (tmp_path / "x").write_bytes(b'{"a": 1}\n{"a\n{"a": 2}\n[3]\n{"a"')
    assert list(each_row(tmp_path / "x")) == [{"a": 1}, {"a": 2}]
    (tmp_path / "x").write_bytes(b'{"a": [1, null]}')
    assert read_object(tmp_path / "x") == {"a": [1, None]}
    assert read_file(tmp_path / "x", largest=16) == b'{"a": [1, null]}'
    with pytest.raises(FileNotFoundError):
        read_object(tmp_path / "y")
