import gzip
import math
import struct
import sys
from pathlib import Path

import pytest

from equipoise import data
from equipoise.data.readers.custom import load_dataset, load_function


def test_unknown_name_lists_the_choices():
    with pytest.raises(ValueError, match=r"'minst' is not.*digits, mnist, .*package\.module:function"):
        data.load("minst")


@pytest.mark.parametrize("name", [name for name, entry in data.NAMED.items() if entry.files])
def test_missing_folder_and_files_say_what_belongs_where(name: str, tmp_path: Path):
    with pytest.raises(data.MissingDataError) as caught:
        data.load(name)
    assert all(file in str(caught.value) for file in data.NAMED[name].files)
    with pytest.raises(data.MissingDataError) as caught:
        data.load(name, tmp_path)
    assert data.NAMED[name].files[0] in str(caught.value)
    # whoever gave it as --data-dir finds no other name for it
    assert f"data folder {str(tmp_path)!r}" in str(caught.value)
    assert "folder=" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match="not a folder"):
        data.load(name, tmp_path / "absent")


def test_a_part_of_a_named_set_is_refused(tmp_path):
    for part in ("train", "t10k"):
        for kind, shape in (("images-idx3", (2, 28, 28)), ("labels-idx1", (2,))):
            head = struct.pack(">HBB", 0, 8, len(shape)) + struct.pack(f">{len(shape)}I", *shape)
            content = gzip.compress(head + bytes(math.prod(shape)))
            (tmp_path / f"{part}-{kind}-ubyte.gz").write_bytes(content)
    with pytest.raises(data.DataFileError, match=r"hold 2 training records.*60000"):
        data.load("mnist", tmp_path)


SOURCE = """
import torch
from equipoise.data import DataSet, Records

def make(folder=None):
    rows = Records({"input": torch.zeros(3, 2), "label": torch.tensor([0, 1, 0])})
    return DataSet(folder or "mine", rows, rows, population=3, num_classes=2)

def number():
    return 7

constant = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_data_for_test.py").write_text(SOURCE)
    (tmp_path / "my_broken_data_for_test.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_data_for_test", raising=False)
    return "my_data_for_test"


def test_data_of_the_users_own(module: str):
    assert load_dataset(f"{module}:make").population == 3
    assert load_dataset(f"{module}:make", population=10).population == 10
    assert load_dataset(f"{module}:make", folder="there").name == "there"
    with pytest.raises(TypeError, match="returned a int"):
        load_dataset(f"{module}:number")
    with pytest.raises(data.DataFileError, match="population=0"):
        load_dataset(f"{module}:make", population=0)


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("{}", ValueError, "form package.module:function"),
        ("{}:no such", ValueError, "form package.module:function"),
        ("{}:absent", ValueError, "has no 'absent'"),
        ("{}:constant", TypeError, "not a function"),
        ("module_that_is_not_there:f", ValueError, "there is no module"),
        ("my_broken_data_for_test:f", ModuleNotFoundError, "a_module_that_is_not_there"),
    ],
)
def test_custom_names_are_checked(module: str, spec: str, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        load_function(spec.format(module))
