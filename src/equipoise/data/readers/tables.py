"""The cells of CSV, TSV and Parquet files as text.

Python's own reader goes through text files: it tells where in the file a row ends, which every message names,
and how many cells it has. (pandas fills a row that is too short with empty cells, which would then pass for
missing answers.)

No error shows what a cell holds, not even what stands in the place of a header: messages go to logs.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, time
from itertools import islice
from pathlib import Path
from typing import Any

from equipoise._extras import of_extra
from equipoise._files import PathLike
from equipoise.data.readers.files import DataFileError, MissingDataError, read_text

with of_extra():
    import pandas as pd


@dataclass(frozen=True)
class Cells:
    """The rows of a table file.

    Attributes:
        path: of the file.
        names: what the header calls the columns, as `named` gives them; None where there is no header.
        rows: the cells, columns numbered from 0. Blanks around a cell may be left.
        lines: of the file, where the rows end; None of Parquet.
    """

    path: PathLike
    names: list[str] | None
    rows: pd.DataFrame
    lines: list[int] | None = None

    def place(self, row: int | None = None) -> str:
        """How messages call a row, or the header."""
        if self.lines is None:
            return repr(str(self.path)) + ("" if row is None else f", row {row + 1}")
        at = 0 if row is None else row + (self.names is not None)
        return f"{str(self.path)!r}, line {self.lines[at]}"


def named(names: Iterable[str]) -> list[str]:
    """The names of columns, where those without one, such as the index of a data frame, get their number.

    >>> named(["", "age"])
    ['column-1', 'age']
    """
    return [name or f"column-{number}" for number, name in enumerate(names, 1)]


def read_cells(
    path: PathLike,
    *,
    header: bool = True,
    delimiter: str = ",",
    comment: str | None = None,
    most: int | None = None,
) -> Cells:
    """The rows of a table file as text.

    Args:
        path: a CSV or TSV file (plain or ``.gz``), or a Parquet file, which has names always.
        header: whether the first row of a text file holds the names of the columns.
        delimiter: between cells.
        comment: rows that begin with it are passed over.
        most: rows to read; all by default.

    Raises:
        MissingDataError, DataFileError: no such file; one that is broken or empty; rows of different length.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "people.csv"
    >>> _ = path.write_text('name,age\\n"Ann,\\nthe older", 30\\n')
    >>> cells = read_cells(path)
    >>> cells.names, cells.rows.to_numpy().tolist(), cells.place(0)[-6:]
    (['name', 'age'], [['Ann,\\nthe older', '30']], 'line 3')
    """
    if Path(path).suffix == ".parquet":
        return _parquet(path, most)
    if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n':
        raise DataFileError(
            f"delimiter={delimiter!r} cannot stand between cells. Give one ASCII character, such as a "
            "semicolon."
        )
    text = read_text(path)
    if "\0" in text:  # where pandas would end the cell
        raise DataFileError(f"The file {str(path)!r} holds zero bytes, so it is no text. Fetch it again.")
    quoted = rf'(?<![^\n{re.escape(delimiter)}]) *"(?:[^"]|"")*"'  # it begins where a cell does
    if comment and comment in text:  # a quoted cell may hold a line that looks like one
        remark = rf"(?<![^\n]) *{re.escape(comment)}.*"
        text = re.sub(rf"({quoted})|{remark}", lambda found: found[1] or "", text)
    if '" ' in text or '"\t' in text:  # the strict reader takes no blanks after a quoted cell
        blank = " " if delimiter == "\t" else " \t"
        text = re.sub(rf"({quoted})(?:[{blank}]+(?=[{re.escape(delimiter)}\r\n]|$))?", r"\1", text)
    lines = list(io.StringIO(text, newline=""))
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)
    ends, rows, begins = list[int](), list[list[str]](), 1
    try:
        for row in islice(reader, None if most is None else most + header):
            if len(row) > 1 or lines[reader.line_num - 1].strip(" \t\r\n"):  # not blank
                ends.append(reader.line_num)
                rows.append(row)
            begins = reader.line_num + 1
    except csv.Error:  # read otherwise, all to the next quotation marks would become one cell
        raise DataFileError(
            f"{str(path)!r}, line {begins}: in this row a cell begins with quotation marks that are not "
            'closed at its end. Close them, and write those within a quoted cell twice: "a ""word""".'
        ) from None
    if not rows:
        raise DataFileError(f"The file {str(path)!r} holds no rows.")
    width = len(rows[0])
    is_remark = header and not comment and rows[0][0].startswith("#")
    if header and not is_remark and width == 1 and (other := re.search(r"[;\t|,]", rows[0][0])):
        raise DataFileError(
            f"{str(path)!r}: the header is one cell, so another sign stands between cells: declare delimiter "
            f"= {json.dumps(other[0])} in the schema, or give --delimiter to `schema init` (a tab is $'\\t')."
        )
    for line, row in zip(ends, rows, strict=True):
        if len(row) != width:
            raise DataFileError(
                f"{str(path)!r}, line {line}: {len(row)} cells where {width} columns are expected."
                + is_remark * ' If lines that begin with # are remarks, declare comment = "#" in the schema, '
                + is_remark * "or give --comment to `schema init`."
            )
    names = named(map(str.strip, rows[0])) if header else None
    cells = pd.DataFrame(rows[int(header) :], columns=range(width), dtype=object)
    return Cells(path, names, cells, ends)


def _parquet(path: PathLike, most: int | None) -> Cells:
    with of_extra():
        from pyarrow import ArrowException, parquet, types
    if not Path(path).is_file():
        raise MissingDataError(f"The file {str(path)!r} does not exist. Check the path.")
    try:
        found = parquet.ParquetFile(path).read().slice(0, most)
    except (ArrowException, OSError) as error:
        raise DataFileError(
            f"The file {str(path)!r} is no whole Parquet file ({type(error).__name__}). Fetch it again."
        ) from None
    for name, kind in zip(found.column_names, found.schema.types, strict=True):
        if kind.num_fields or types.is_nested(kind):
            raise DataFileError(
                f"{str(path)!r}, column {name!r} holds {kind}, and a cell is one value: flatten it first."
            )
    try:
        columns = [[_as_text(value) for value in column.to_pylist()] for column in found.columns]
    except UnicodeDecodeError:
        raise DataFileError(f"{str(path)!r} holds bytes that are no UTF-8: save them as text.") from None
    return Cells(path, named(found.column_names), pd.DataFrame(dict(enumerate(columns)), dtype=object))


def _as_text(value: Any) -> str:
    """A cell of a Parquet file as it would stand in a CSV file; a missing one is empty."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case bytes():
            return value.decode()
        case float() if value.is_integer():  # whole numbers that a missing one made fractions
            return str(int(value))
        case datetime() if value.time() == time():  # days that a writer gave hours
            return str(value.date())
    return str(value)
