import csv
import gzip
import io
import random
import tomllib
from pathlib import Path

import pytest

from equipoise.data.readers.files import DataFileError, MissingDataError
from equipoise.data.readers.schema import SchemaError, Table, read_rows, table_of
from equipoise.data.readers.tables import read_cells


def form(columns: str, **settings: object) -> Table:
    """A table of columns `name = {...}`, a line each, with the settings of a schema."""
    target = settings.pop("target", "y")
    values = {"target": target, "header": False, **settings, "columns": tomllib.loads(columns)}
    return table_of(values)


LABEL = 'y = {type = "category", values = ["a", "b"]}\n'
PLAIN = """
age = {type = "number", low = 0, high = 100}
job = {type = "category", values = ["baker", "smith"], missing = ["?"], other = false}
id = {type = "skip"}
gain = {type = "number", low = 0, high = 999, log = true}
y = {type = "category", values = ["low", "high"], strip = "."}
"""
FORM = form(PLAIN, comment="|")


def write(folder: Path, text: str, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def test_a_missing_number_is_said_by_a_second_number(tmp_path):
    table = form('age = {type = "number", low = 0, high = 100, missing = [""]}\n' + LABEL, header=True)
    records = read_rows(write(tmp_path, "age,y\n75,a\n,b\n"), table)
    assert records.fields["input"].tolist() == [[0.5, 0.0], [0.0, 1.0]]
    assert table.numeric_columns == (0,)  # what says that a number is missing is none
    plain = form('age = {type = "number", low = 0, high = 100}\n' + LABEL)
    with pytest.raises(DataFileError, match=r"line 2, column 'age': the cell is not a finite.*missing ="):
        read_rows(write(tmp_path, "75,a\n,b\n"), plain)


def test_parquet_has_the_records_of_csv(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = form(
        'age = {type = "number", low = 0, high = 100}\n'
        'member = {type = "category", values = ["true", "false"]}\n' + LABEL,
        header=True,
        missing=[""],
    )
    columns = {"y": ["a", "b", "a"], "more": [1, 2, 3], "age": [30, None, 41], "member": [True, False, None]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    expected = read_rows(write(tmp_path, "age,member,y\n30,true,a\n,false,b\n41,,a\n"), table)
    assert read_rows(tmp_path / "t.parquet", table).fingerprint() == expected.fingerprint()
    as_written = {"y": [b"a", b"b", b"a"], "age": [30.0, None, 41.0], "member": columns["member"]}
    parquet.write_table(pyarrow.table(as_written), tmp_path / "t.parquet")
    assert read_rows(tmp_path / "t.parquet", table).fingerprint() == expected.fingerprint()
    parquet.write_table(pyarrow.table(columns | {"more": [[1], [2], [3]]}), tmp_path / "t.parquet")
    with pytest.raises(DataFileError, match=r"'more' holds list.*flatten"):
        read_rows(tmp_path / "t.parquet", table)
    columns["member"][1] = columns["y"][1] = None
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    with pytest.raises(DataFileError, match="row 2, column 'y'"):
        read_rows(tmp_path / "t.parquet", table)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 secret")
    with pytest.raises(DataFileError, match="no whole Parquet file") as error:
        read_rows(tmp_path / "broken.parquet", table)
    assert "secret" not in str(error.value)
    with pytest.raises(MissingDataError):
        read_rows(tmp_path / "absent.parquet", table)


def generated(count: int, columns: str) -> str:
    """Rows of every kind of column, with missing cells, quotes, line breaks and empty lines."""
    cells = {
        "age": lambda i: "" if i % 11 == 0 else f"{i % 97}.{i * i % 1000:03d}",
        "gain": lambda i: f"{i * i % 99_991}" if i % 5 else ("1e4", "10", "7 ")[i % 3],
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
    ("columns", "target", "digest"),
    [
        ("age note gain job town class", "class", "04c027182f000eff"),
        ("wage town age gain who job", "wage", "85e896b6e1bcda6a"),
        ("b job age a", "b,a", "0049f68470fd9cd3"),
        ("class note text", "class", "a929fb421f840f88"),
    ],
)
def test_the_bits_of_records_stay(tmp_path, columns: str, target: str, digest: str):
    """Models that are published read rows as they did when they were trained."""
    known = {
        "age": 'type = "number", low = 0, high = 100, missing = ["", "?"]',
        "gain": 'type = "number", low = 0, high = 99_999, log = true',
        "job": 'type = "category", values = ["baker", "smith"], missing = ["?"]',
        "town": 'type = "category", buckets = 17, missing = [""]',
        "note": 'type = "skip"',
        "who": 'type = "skip"',
        "wage": 'type = "number", low = 0, high = 100',
        "a": 'type = "category", values = ["no", "yes"]',
        "b": 'type = "category", values = ["no", "yes"]',
        "class": 'type = "category", values = ["low", "high"], strip = "."',
        "text": 'type = "text", vocabulary = 999, length = 12',
    }
    declared = "".join(f"{name} = {{{known[name]}}}\n" for name in columns.split())
    table = form(declared, header=True, target=target)
    path = write(tmp_path, generated(2500, columns))
    records = read_rows(path, table, owner="who" if "who" in columns else None)
    assert records.fingerprint()[:16] == digest


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("40, carpenter, 1, 5, low", r"line 3, column 'job': the cell is not a declared category"),
        ("nan, baker, 1, 5, low", r"column 'age': the cell is not a finite number"),
        ("inf, baker, 1, 5, low", r"column 'age': the cell is not a finite number"),
        (", baker, 1, 5, low", r"column 'age': the cell is not a finite number"),
        ("forty, baker, 1, 5, low", r"column 'age': the cell is not"),
        ("9_9, baker, 1, 5, low", r"column 'age': the cell is not"),
        ("\uff19, baker, 1, 5, low", r"column 'age': the cell is not"),
        ("40, baker, 1, 5, middle", r"column 'y': the cell is not a declared class"),
        ("40, baker, 1, 5", "line 3: 4 cells where 5"),
        ("40, baker, 1, 5, low, 6", "line 3: 6 cells where 5"),
        ("40, baker, 1, 5, low,", "line 3: 6 cells where 5"),
        ('""', "line 3: 1 cells where 5"),
        ('40, "baker\n\n', "line 3: in this row a cell begins with quotation marks"),
        ('40, baker, "1, 5, low\n41, baker, "1", 5, low', "line 3: in this row a cell begins with quotation"),
        ('"40", "ba""ker\n", "1, 5, low', "line 3: in this row a cell begins with quotation marks"),
        ('"4,5", baker, 1, 5, low', "column 'age': the cell is a number with a comma"),
        ("40, baker\0secret, 1, 5, low", "zero bytes"),
    ],
)
def test_bad_cells_name_their_place(tmp_path, row: str, message: str):
    with pytest.raises(DataFileError, match=message) as error:
        read_rows(write(tmp_path, f"1, baker, 1, 1, low\n\n{row}\n2, baker, 1, 1, low\n"), FORM)
    assert not any(word in str(error.value) for word in ("carpenter", "forty", "middle", "secret"))


def test_blanks_around_quotation_marks_are_left_out(tmp_path):
    found = read_cells(write(tmp_path, '"a" , "b"" ,c"\t \n "d",e" \n"f" ,"g\n" '), header=False)
    assert found.rows.map(str.strip).to_numpy().tolist() == [["a", 'b" ,c'], ["d", 'e"'], ["f", "g"]]
    apart = read_cells(write(tmp_path, '"a" \t"b"\t""\t\n'), header=False, delimiter="\t")
    assert apart.rows.to_numpy().tolist() == [["a", "b", "", ""]]


def test_advice_is_of_the_kind_of_column(tmp_path):
    kinds = {
        "a": 'type = "number", low = 0, high = 1',
        "t": 'type = "number", low = 0, high = 1, missing = [""]',
        "w": 'type = "weight", high = 1',
    }
    table = form("".join(f"{name} = {{{kind}}}\n" for name, kind in kinds.items()), target="t")
    for row, wants_missing in ((",1,1", True), ("1,,1", False), ("1,1,", False)):
        with pytest.raises(DataFileError, match="not a finite number") as error:
            read_rows(write(tmp_path, row), table)
        assert ("missing = [...]" in str(error.value)) == wants_missing
    for row, wants_missing in (("9,1,1", True), ("1,9,1", False), ("1,1,9", False)):
        with pytest.warns(UserWarning, match="lie beyond the range") as warned:
            read_rows(write(tmp_path, row), table, evaluated=1.0)
        assert ("missing = [" in str(warned[0].message)) == wants_missing


def test_a_column_without_a_name_has_its_number(tmp_path):
    table = form('column-1 = {type = "number", low = 0, high = 9}\n' + LABEL, header=True)
    by_text = read_rows(write(tmp_path, ",y\n4,a\n5,b\n"), table)
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"": [4, 5], "y": ["a", "b"]}), tmp_path / "t.parquet")
    assert read_rows(tmp_path / "t.parquet", table).fingerprint() == by_text.fingerprint()
    parquet.write_table(pyarrow.table({"x": [4, 5], "y": ["a", "b"]}), tmp_path / "t.parquet")
    with pytest.raises(DataFileError, match="lacks the declared columns 'column-1'") as error:
        read_rows(tmp_path / "t.parquet", table)
    assert "header = false" not in str(error.value)


def test_a_first_row_that_is_too_long_is_no_row(tmp_path):
    """pandas would take the first column for an index, or leave the last cells out."""
    with pytest.raises(DataFileError, match="line 1: 6 cells where 5"):
        read_rows(write(tmp_path, "1, baker, 1, 1, low, 9\n1, baker, 1, 1, low, 9\n"), FORM)
    with pytest.raises(DataFileError, match="line 2: 5 cells where 6"):
        read_rows(write(tmp_path, "1, baker, 1, 1, low, 9\n1, baker, 1, 1, low\n"), FORM)


NUMBER, NOTE = 'x = {type = "number", low = 0, high = 1}\n', 't = {type = "text"}\n'


@pytest.mark.parametrize("columns", [NUMBER, LABEL, LABEL + NOTE + NUMBER, "y" + NOTE[1:] + NUMBER])
def test_declarations_are_checked(columns):
    with pytest.raises(SchemaError):
        form(columns)


def rows_by_csv(text: str) -> list[tuple[int, list[str]]]:
    """Lines and cells as Python's own reader has them, without blank lines."""
    lines = list(io.StringIO(text, newline=""))
    rows = csv.reader(lines, skipinitialspace=True)
    return [
        (rows.line_num, [cell.strip() for cell in row])
        for row in rows
        if len(row) > 1 or lines[rows.line_num - 1].strip(" \t\r\n")
    ]


def test_500_mangled_tables_are_read_as_they_stand_or_refused_without_a_cell(tmp_path):
    rng = random.Random(3)
    marks = [",", "\n", "\r\n", '"', '""', " ", "\t", "\x0b", "\u2028", "\x00", ",,", "\ufeff", "é"]
    cells = ["secret1", "7531", " 8642 ", '"secret2"', '"secret\n3"', '""', "", '"se""cret4"', "50"]
    outcomes = {"read": 0, "refused": 0}
    for _ in range(500):
        width, count = rng.randint(1, 4), rng.randint(1, 6)
        text = "\n".join(",".join(rng.choices(cells, k=width)) for _ in range(count))
        for _ in range(rng.choice((0, 0, 1, 2, 3))):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice(marks) + text[at + rng.randint(0, 2) :]
        path = write(tmp_path, text)
        expected = rows_by_csv(text.removeprefix("\ufeff"))
        try:
            found = read_cells(path, header=False)
        except DataFileError as error:
            outcomes["refused"] += 1
            said = str(error).replace(str(path), "")
            assert not any(cell in said for cell in ("secret", "7531", "8642"))
            widths = {len(row) for _, row in expected}
            assert "\x00" in text or "quotation marks" in said or len(widths) != 1
            continue
        outcomes["read"] += 1
        assert [row for _, row in expected] == [
            [cell.strip() for cell in row] for row in found.rows.to_numpy().tolist()
        ]
        places = [found.place(row) for row in range(len(expected))]
        assert places == [f"{str(path)!r}, line {line}" for line, _ in expected]
    assert min(outcomes.values()) > 50
