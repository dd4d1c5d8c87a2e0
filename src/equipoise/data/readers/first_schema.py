"""The first version of a schema, to be edited.

It takes the names of the columns, which are public by declaration, and guesses from the rows which columns
are numbers, and which differ in nearly every row, as ids do. It never looks for ranges or categories in
private rows: they are left to be filled in, from public knowledge of the form, or taken from a file of
public rows.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from equipoise._files import PathLike
from equipoise._validate import suggestion
from equipoise.data.readers.files import DataFileError, is_same
from equipoise.data.readers.schema import TO_FILL_IN, SchemaError, has_comma, places_to_fill_in
from equipoise.data.readers.tables import named, read_cells

_MISSING = ["", "?", "NA", "N/A", "n/a", "nan", "null"]
_ROWS_LOOKED_AT = 1000
_MOST_VALUES = 100
_UNIQUE, _WORDS = 0.9, 3
"""The share of distinct cells above which a column is taken for a name, and the words of a cell, on average,
above which it is taken for notes, even if many are the same."""
_HINTS = {
    "population": "for example 2000: the public number of rows; a round figure near it will do",
    "low": 'for example 0, or of a date "2024-01-01": the least that the form allows',
    "high": 'for example 120, or "2024-12-31": the most that the form allows; more counts as this',
    "values": 'for example ["no", "yes"]: all classes',
    "missing": "signs of no answer, coded by an input more; leave the line out if there is always one",
    "skip": "no input: cells that nearly every row has to itself, or of many words, as ids, names and notes",
    "buckets": 'hashed; better, where they are publicly known: values = ["north", "south"]',
}


def first_schema(
    path: PathLike,
    *,
    header: bool | None = None,
    delimiter: str | None = None,
    comment: str | None = None,
    target: str | None = None,
    public_rows: PathLike | None = None,
) -> tuple[str, list[str]]:
    """The text of a schema to edit, and the places that are left to be filled in.

    Args:
        path: of the private rows; of them the names of the columns are taken, and which are numbers or
            differ in nearly every row.
        header: whether the first row holds the names; by default it does, and is refused if it seems data.
        delimiter: between cells; a tab for ``.tsv`` by default, else a comma.
        comment: lines that begin with it are passed over.
        target: the columns to learn, separated by commas.
        public_rows: a file of the same form whose rows are public: ranges and categories are taken from it.

    Raises:
        DataFileError: the first row holds no names.
    """
    delimiter = delimiter or ("\t" if ".tsv" in Path(path).suffixes else ",")
    private = _columns(path, delimiter, comment, header, _ROWS_LOOKED_AT)
    wanted = [name.strip() for name in target.split(",")] if target else []
    unknown = [name for name in wanted if name not in private]
    if unknown:
        near = "".join(suggestion(name, private) for name in unknown)  # no list: it may be a row of data
        bare = " If that row is data, say --no-header: its columns are then column-1, column-2, and so on."
        raise SchemaError(
            f"--target names {', '.join(unknown)}, which is no cell of the first row of {str(path)!r}.{near}"
            + bare * (Path(path).suffix != ".parquet")
        )
    public: dict[str, list[str]] = {}
    if public_rows is not None:
        if is_same(path, public_rows):
            raise SchemaError(
                "--public-rows names the private rows themselves. Ranges and categories learnt from them "
                "would reveal persons, and no epsilon would cover it. Name a file that is public already."
            )
        public = _columns(public_rows, delimiter, comment, header, None)
    columns = {name: _drafted(cells, public.get(name, ()), name in wanted) for name, cells in private.items()}
    for name, part in columns.items():  # an answer that may be missing costs the column an input
        signs = [sign for sign in _MISSING if not public or sign in public.get(name, ())]
        if name not in wanted and part["type"] != "skip" and signs:
            part["missing"] = signs
    values = {
        "format": 1,
        "population": TO_FILL_IN,
        **({"target": wanted if len(wanted) > 1 else wanted[0]} if wanted else {}),
        "header": header is not False,
        "delimiter": delimiter,
        **({"comment": comment} if comment else {}),
    }
    if commas := [name for name, cells in private.items() if _have_commas(cells)]:
        warnings.warn(
            f"not read as numbers, since they are written with a comma: {', '.join(commas)}. Write the file "
            "anew with points and nothing between thousands, as 1234.5, and begin again.",
            stacklevel=2,
        )
    text = (
        f"# The form of {Path(path).name}, written by `equipoise schema init`. Edit it: what stands here is\n"
        "# declared public. Types are guesses from the rows. Ranges and categories come from public\n"
        '# knowledge, never from the private rows. A column that names people is no input: type = "skip".\n'
    )
    for name, part in [("", values), *columns.items()]:
        bare = name if re.fullmatch("[A-Za-z0-9_-]+", name) else _toml(name)
        text += f"\n[columns.{bare}]\n" if part is not values else ""
        for key, value in part.items():
            left = value in (TO_FILL_IN, [TO_FILL_IN])
            hint = _HINTS.get(value if value == "skip" else key)
            hint = hint if left or value == "skip" or key in ("missing", "buckets") else None
            text += f"{key} = {_toml(value)}" + (f"   # {hint}\n" if hint else "\n")
        if name in wanted and part["type"] == "number":
            text += '# for classes instead of a regression: type = "category", values = ["0", "1"]\n'
    return text, places_to_fill_in({**values, "columns": columns})


def _drafted(cells: Iterable[str], public: Iterable[str], learnt: bool) -> dict[str, Any]:
    """What to declare of a column, by whether its cells are numbers and by public cells of it."""
    answers, known = ([cell for cell in part if cell not in _MISSING] for part in (cells, public))
    numbers = _numbers(known)
    if _is_count(answers) and not learnt:
        return {"type": "skip"}
    if _numbers(answers) and (numbers or not known):
        finite = [number for number in numbers if math.isfinite(number)]
        if not finite:
            return {"type": "number", "low": TO_FILL_IN, "high": TO_FILL_IN}
        low, high = min(finite), max(finite)
        return {"type": "number", "low": low, "high": high if low < high else low + 1}
    if answers and all(re.fullmatch(r"\d{4}-\d\d-\d\d", cell) for cell in (*answers, *known)):
        ends = (min(known), max(known)) if known else (TO_FILL_IN, TO_FILL_IN)
        return {"type": "date", "low": ends[0], "high": ends[1], "parts": ["days", "month", "weekday"]}
    values = sorted(set(known))
    words = sum(len(answer.split()) for answer in answers)
    is_free = words > _WORDS * len(answers) or len(set(answers)) > _UNIQUE * len(answers)
    if not known and not learnt and is_free:
        return {"type": "skip"}
    if not 0 < len(values) <= _MOST_VALUES:
        return {"type": "category"} | ({"values": [TO_FILL_IN]} if learnt else {"buckets": 16})
    return {"type": "category", "values": values}


def _columns(
    path: PathLike, delimiter: str, comment: str | None, header: bool | None, most: int | None
) -> dict[str, list[str]]:
    """The names of the columns, and their first cells."""
    cells = read_cells(path, header=header is not False, delimiter=delimiter, comment=comment, most=most)
    if cells.rows.empty:
        raise DataFileError(f"The file {str(path)!r} holds no rows.")
    names = cells.names or named([""] * cells.rows.shape[1])
    if len(set(names)) < len(names):
        bare = "" if cells.lines is None else " If the first row is data, say --no-header."
        raise DataFileError(f"{cells.place()}: two columns have the same name. Rename one.{bare}")
    columns = {name: [cell.strip() for cell in cells.rows[at]] for at, name in enumerate(names)}
    if header is None and cells.lines is not None and not _is_header(columns):
        raise DataFileError(
            f"{cells.place()}: this row holds numbers or blanks, so that it may be one of data. Say "
            "--no-header if it is, or --header if it holds the names of the columns."
        )
    return columns


def _is_header(columns: dict[str, list[str]]) -> bool:
    """Whether a first row is none of data: without numbers and blanks, or with a word above numbers.

    An index without a name is as good a sign: in a row of data it would count.
    """
    unnamed = set(named([""] * len(columns))) & columns.keys()
    words = [name for name in columns if not (name in unnamed or name in _MISSING or _numbers([name]))]
    answers = ([cell for cell in columns[name] if cell not in _MISSING] for name in words)
    is_index = any(_is_count(columns[name]) for name in unnamed)
    return len(words) == len(columns) or is_index or any(map(_numbers, answers))


def _is_count(cells: list[str]) -> bool:
    """Whether the cells number the rows, as the index of a data frame does, which no answer would."""
    first = int(cells[:1] == ["1"])
    return len(cells) > 2 and cells == [str(first + i) for i in range(len(cells))]


def _have_commas(cells: list[str]) -> bool:
    """Whether the cells are numbers, and some are written with a comma."""
    answers = [cell for cell in cells if cell not in _MISSING]
    return any(map(has_comma, answers)) and all(has_comma(one) or _numbers([one]) for one in answers)


def _numbers(cells: Iterable[str]) -> list[float]:
    """The cells as numbers; empty if one of them is none."""
    try:
        return [float(cell) for cell in cells]
    except ValueError:
        return []


def _toml(value: Any) -> str:
    """A value as TOML writes it: JSON's form of texts, lists, numbers and truth values is TOML's too."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
