import gzip
import math
from pathlib import Path

import pytest
import torch

from equipoise.data.named import NAMED
from equipoise.data.readers.files import DataFileError, MissingDataError
from equipoise.data.readers.schema import named_table
from equipoise.data.readers.tables import (
    Category,
    Hashed,
    Label,
    Number,
    Owner,
    Skip,
    Table,
    TargetNumber,
    Text,
    read_libsvm,
    read_table,
)
from equipoise.data.readers.text import HashingTokenizer

FORM = Table(
    (
        Number("age", 0, 100),
        Category("job", ("baker", "smith"), unknown="?"),
        Skip("id"),
        Number("gain", 0, 999, log=True),
        Label("class", ("low", "high"), strip="."),
    ),
    comment="|",
)


def write(folder: Path, text: str, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_typed_columns(tmp_path: Path, name: str) -> None:
    text = "|a comment\n75, smith, 17, 0, high.\n-5, ?, x, 999, low\n\n200,baker,,9,low\n\n"
    records = read_table(write(tmp_path, text, name), FORM)
    middle = 2 * math.log(10) / math.log(1000) - 1
    expected = torch.tensor([[0.5, 0, 1, -1], [-1, 0, 0, 1], [1, 1, 0, middle]])
    torch.testing.assert_close(records.fields["input"], expected)
    assert records.fields["label"].tolist() == [1, 0, 0]
    assert FORM.num_features == 4
    assert FORM.numeric_columns == (0, 3)


def test_a_missing_number_is_told_by_a_second_number(tmp_path: Path) -> None:
    form = Table((Number("age", 0, 100, unknown=""), Label("y", ("a", "b"))), header=True)
    records = read_table(write(tmp_path, "age,y\n75,a\n,b\n"), form)
    assert records.fields["input"].tolist() == [[0.5, 0.0], [0.0, 1.0]]
    assert form.numeric_columns == (0,)  # what tells of a missing number is none
    plain = Table((Number("age", 0, 100), Label("y", ("a", "b"))))
    with pytest.raises(DataFileError, match=r"line 2, column 'age': the cell is not a finite.*unknown="):
        read_table(write(tmp_path, "75,a\n,b\n"), plain)


def test_other_categories_hashed_ones_and_several_signs_for_unknown(tmp_path: Path) -> None:
    form = Table(
        (
            Category("job", ("baker", "smith"), unknown=("", "?"), other=True),
            Hashed("town", 3, unknown=("", "?")),
            Label("y", ("a", "b")),
        )
    )
    records = read_table(write(tmp_path, "smith,Rome,a\npilot,Rome,b\n?,,b\n"), form)
    smith, pilot, unknown = records.fields["input"].tolist()
    assert (smith[:3], pilot[:3], unknown) == ([0, 1, 0], [0, 0, 1], [0] * 6)
    assert smith[3:] == pilot[3:]
    assert sum(smith[3:]) == 1


def test_a_number_and_several_labels_as_targets(tmp_path: Path) -> None:
    path = write(tmp_path, "1,50,no,yes\n0,-7,yes,yes\n0,200,no,no\n")
    x, wage = Number("x", 0, 1), TargetNumber("wage", 0, 100)
    records = read_table(path, Table((x, wage, Skip("a"), Skip("b"))))
    assert records.fields["target"].tolist() == [0.0, -1.0, 1.0]
    table = Table((x, Skip("wage"), Label("a", ("no", "yes")), Label("b", ("no", "yes"))))
    assert (table.task, table.num_classes, table.class_names) == ("multi-label", 2, ("a", "b"))
    assert read_table(path, table).fields["target"].tolist() == [[0, 1], [1, 1], [0, 0]]
    assert list(read_table(path, table, targets=False).fields) == ["input"]


def test_text_that_holds_line_breaks_is_one_cell(tmp_path: Path) -> None:
    table = Table((Text("t", HashingTokenizer(50, 4)), Label("y", ("a", "b"))), header=True)
    records = read_table(write(tmp_path, 'y,t\na,"good\nfilm"\nb,"bad \u2028 one"\n'), table)
    assert torch.equal(records.fields["input"][0], HashingTokenizer(50, 4)(["good film"])[0])
    assert records.fields["label"].tolist() == [0, 1]


def test_parquet_has_the_records_of_csv(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    form = Table(
        (
            Number("age", 0, 100, unknown=""),
            Category("member", ("true", "false"), unknown=""),
            Label("y", ("a", "b")),
        ),
        header=True,
    )
    columns = {"y": ["a", "b", "a"], "more": [1, 2, 3], "age": [30, None, 41], "member": [True, False, None]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    expected = read_table(write(tmp_path, "age,member,y\n30,true,a\n,false,b\n41,,a\n"), form)
    found = read_table(tmp_path / "t.parquet", form)
    assert found.fingerprint() == expected.fingerprint()
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 secret")
    with pytest.raises(DataFileError, match="no whole Parquet file") as error:
        read_table(tmp_path / "broken.parquet", form)
    assert "secret" not in str(error.value)
    with pytest.raises(MissingDataError):
        read_table(tmp_path / "absent.parquet", form)


def generated(count: int, columns: str) -> str:
    """Rows of every kind of column, with missing cells, quotes, line breaks and empty lines."""
    cells = {
        "age": lambda i: "" if i % 11 == 0 else f"{i % 97}.{i * i % 1000:03d}",
        "gain": lambda i: f"{i * i % 99_991}" if i % 5 else ("1e4", "1_0", "7 ")[i % 3],
        "job": lambda i: ("baker", "smith", "?", '"pilot, ""first"""')[i % 4],
        "town": lambda i: f'"town\n{i * 7 % 301}"' if i % 3 else "",
        "note": lambda i: f"unused {i}",
        "who": lambda i: f"p{i // 4}",
        "wage": lambda i: f"{i * 37 % 151 - 20}",
        "a": lambda i: ("no", "yes")[i * i % 3 == 1],
        "b": lambda i: ("no", "yes")[i % 2],
        "class": lambda i: ("low", "high.", "high")[i * 31 % 3],
        "text": lambda i: f"The {i % 13} films of {i * i % 1009} aren't (all) bad",
    }
    names = columns.split()
    rows = [",".join(cells[name](i) for name in names) + ("\r\n" if i % 2 else "\n") for i in range(count)]
    return (
        "\ufeff" + ",".join(names) + "\n" + "".join("\n" * (i % 50 == 7) + row for i, row in enumerate(rows))
    )


@pytest.mark.parametrize(
    ("columns", "digest"),
    [
        ("age note gain job town class", "04c027182f000eff"),
        ("wage town age gain who job", "85e896b6e1bcda6a"),
        ("b job age a", "0049f68470fd9cd3"),
        ("class note text", "a929fb421f840f88"),
    ],
)
def test_the_bits_of_records_stay(tmp_path: Path, columns: str, digest: str) -> None:
    """Models that are published read rows as they did when they were trained."""
    known = {
        "age": Number("age", 0, 100, unknown=("", "?")),
        "gain": Number("gain", 0, 99_999, log=True),
        "job": Category("job", ("baker", "smith"), unknown="?", other=True),
        "town": Hashed("town", 17, unknown=""),
        "note": Skip("note"),
        "who": Owner("who"),
        "wage": TargetNumber("wage", 0, 100),
        "a": Label("a", ("no", "yes")),
        "b": Label("b", ("no", "yes")),
        "class": Label("class", ("low", "high"), strip="."),
        "text": Text("text", HashingTokenizer(999, 12)),
    }
    form = Table(tuple(known[name] for name in columns.split()), header=True)
    records = read_table(write(tmp_path, generated(2500, columns)), form)
    assert records.fingerprint()[:16] == digest


def test_encoding_of_a_row_does_not_depend_on_other_rows(tmp_path: Path) -> None:
    row = "40, baker, 1, 5, low\n"
    alone = read_table(write(tmp_path, row), FORM).fields["input"]
    among = read_table(write(tmp_path, row + "99, smith, 2, 900, high\n" * 3), FORM).fields["input"]
    assert torch.equal(alone[0], among[0])


def test_tabs_and_header(tmp_path: Path) -> None:
    form = Table((Number("x", 0, 1), Label("y", ("a", "b"))), delimiter="\t", header=True)
    assert len(read_table(write(tmp_path, "x\ty\n0.5\tb\n"), form)) == 1
    swapped = read_table(write(tmp_path, "more\ty\tx\n9\tb\t0.5\n"), form)
    assert (swapped.fields["input"].tolist(), swapped.fields["label"].tolist()) == ([[0.0]], [1])
    with pytest.raises(DataFileError, match="lacks the declared columns 'x', 'y'") as error:
        read_table(write(tmp_path, "0.5\tsecret\n0.5\tb\n"), form)
    assert "secret" not in str(error.value)  # a file without header: its first row is data
    with pytest.raises(DataFileError, match="repeats the declared columns 'x'"):
        read_table(write(tmp_path, "x\tx\ty\n1\t1\ta\n"), form)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("40, carpenter, 1, 5, low", r"line 2, column 'job': the cell is not a declared category"),
        ("nan, baker, 1, 5, low", r"column 'age': the cell is not a finite number"),
        ("inf, baker, 1, 5, low", r"column 'age': the cell is not a finite number"),
        (", baker, 1, 5, low", r"column 'age': the cell is not a finite number"),
        ("forty, baker, 1, 5, low", r"column 'age': the cell is not"),
        ("40, baker, 1, 5, middle", r"column 'class': the cell is not a declared class"),
        ("40, baker, 1, 5", "4 cells where 5"),
        ("40, baker, 1, 5, low, 6", "6 cells where 5"),
    ],
)
def test_bad_cells_name_their_place(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(DataFileError, match=message) as error:
        read_table(write(tmp_path, f"1, baker, 1, 1, low\n{row}\n"), FORM)
    assert not any(word in str(error.value) for word in ("carpenter", "forty", "middle"))


def test_empty_and_missing_tables(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match="no rows"):
        read_table(write(tmp_path, "|only a comment\n"), FORM)
    with pytest.raises(MissingDataError):
        read_table(tmp_path / "absent", FORM)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Number("x", 1, 1),
        lambda: Number("x", 0, math.inf),
        lambda: Category("x", ("a", "a")),
        lambda: Category("x", ()),
        lambda: Table((Number("x", 0, 1),)),
        lambda: Table((Label("y", ("a", "b")), Label("z", ("a", "b", "c")), Number("x", 0, 1))),
        lambda: Table((Label("y", ("a", "b")), TargetNumber("z", 0, 1), Number("x", 0, 1))),
        lambda: Table((Label("y", ("a", "b")), Text("t"), Number("x", 0, 1))),
        lambda: Table((Label("y", ("a", "b")), Number("x", 0, 1), Number("x", 0, 1))),
        lambda: Label("y", ("a", "a")),
        lambda: TargetNumber("y", 1, 1),
        lambda: Hashed("y", 1),
        lambda: Table((Label("y", ("a", "b")), Skip("x"))),
    ],
)
def test_declarations_are_checked(make) -> None:
    with pytest.raises(ValueError, match="column"):
        make()


def test_named_forms() -> None:
    adult, mushroom = named_table("adult"), named_table("mushroom")
    assert (len(adult.columns), adult.num_features, adult.num_classes) == (15, 104, 2)
    assert adult.numeric_columns == NAMED["adult"].numeric_columns == (0, 25, 60, 61, 62)
    assert (len(mushroom.columns), mushroom.num_classes) == (23, 2)


@pytest.mark.parametrize("name", ["rows", "rows.gz"])
def test_libsvm(tmp_path: Path, name: str) -> None:
    records = read_libsvm(write(tmp_path, "-1 1:0.5 4:-2 \n+1\n\n+1 2:1e1 # remark\n", name), 4)
    assert records.fields["input"].tolist() == [[0.5, 0, 0, -2], [0, 0, 0, 0], [0, 10, 0, 0]]
    assert records.fields["label"].tolist() == [0, 1, 1]
    assert records.num_classes == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("+1 5:1", r"indices rise within 1 \.\. 4"),
        ("+1 99999999999999999999:1", r"indices rise within 1 \.\. 4"),
        ("+1 0:1", r"indices rise within 1 \.\. 4"),
        ("+1 2:1 2:1", r"indices rise within 1 \.\. 4"),
        ("+1 3:1 2:1", r"indices rise within 1 \.\. 4"),
        ("+1 1:nan", "NaN or infinite"),
        ("+1 1:1e39", "NaN or infinite"),
        ("+1 1", "no libsvm file"),
        ("+1 a:1", "no libsvm file"),
        ("+1 1:a", "no libsvm file"),
        ("+1,-1 1:1", "no libsvm file"),
        ("2 1:1", r"label which is not one of -1 and \+1"),
        ("nan 1:1", "label which"),
        ("+1 qid:3 1:1", "qid"),
        ("+1 1:1 qid:3", "no libsvm file"),
    ],
)
def test_bad_libsvm_rows(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(DataFileError, match=message):
        read_libsvm(write(tmp_path, f"-1 1:1\n{row}\n"), 4)


def test_empty_libsvm(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match="no rows"):
        read_libsvm(write(tmp_path, "\n"), 4)
    with pytest.raises(ValueError, match="num_features"):
        read_libsvm(write(tmp_path, "\n"), 0)
