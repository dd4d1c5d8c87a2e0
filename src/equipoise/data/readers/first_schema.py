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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from equipoise._files import PathLike
from equipoise._validate import suggestion
from equipoise.data.readers.files import DataFileError, is_same
from equipoise.data.readers.schema import TO_FILL_IN, SchemaError, places_to_fill_in
from equipoise.data.readers.tables import read_cells

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
    header: bool = True,
    delimiter: str | None = None,
    target: str | None = None,
    public_rows: PathLike | None = None,
) -> tuple[str, list[str]]:
    """The text of a schema to edit, and the places that are left to be filled in.

    Args:
        path: of the private rows; of them the names of the columns are taken, and which are numbers or
            differ in nearly every row.
        header: whether the first row holds the names.
        delimiter: between cells; a tab for ``.tsv`` by default, else a comma.
        target: the columns to learn, separated by commas.
        public_rows: a file of the same form whose rows are public: ranges and categories are taken from it.

    Raises:
        DataFileError: the first row holds no names.
    """
    delimiter = delimiter or ("\t" if ".tsv" in Path(path).suffixes else ",")
    private = _columns(path, delimiter, header, _ROWS_LOOKED_AT)
    wanted = [name.strip() for name in target.split(",")] if target else []
    unknown = [name for name in wanted if name not in private]
    if unknown:
        near = "".join(suggestion(name, private) for name in unknown)  # no list: it may be a row of data
        raise SchemaError(
            f"--target names {', '.join(unknown)}, which is no cell of the first row of {str(path)!r}.{near} "
            "If the file has no header, say --no-header: its columns are then column-1, column-2, and so on."
        )
    public: dict[str, list[str]] = {}
    if public_rows is not None:
        if is_same(path, public_rows):
            raise SchemaError(
                "--public-rows names the private rows themselves. Ranges and categories learnt from them "
                "would reveal persons, and no epsilon would cover it. Name a file that is public already."
            )
        public = _columns(public_rows, delimiter, header, None)
    columns = {name: _drafted(cells, public.get(name, ()), name in wanted) for name, cells in private.items()}
    for name, part in columns.items():  # an answer that may be missing costs the column an input
        signs = [sign for sign in _MISSING if not public or sign in public.get(name, ())]
        if name not in wanted and part["type"] != "skip" and signs:
            part["missing"] = signs
    values = {
        "format": 1,
        "population": TO_FILL_IN,
        **({"target": wanted if len(wanted) > 1 else wanted[0]} if wanted else {}),
        "header": header,
        "delimiter": delimiter,
    }
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


def _columns(path: PathLike, delimiter: str, header: bool, most: int | None) -> dict[str, list[str]]:
    """The names of the columns, and their first cells."""
    cells = read_cells(path, header=header, delimiter=delimiter, most=most)
    names = cells.names or [f"column-{i + 1}" for i in range(cells.rows.shape[1])]
    if len(set(names)) < len(names) or not all(names) or any(_numbers([name]) for name in names):
        raise DataFileError(
            f"The first row of {str(path)!r} holds numbers, blanks or equal cells, so that it seems to be a "
            "row of data and no header. If the file has no header, say so: --no-header."
        )
    if cells.rows.empty:
        raise DataFileError(f"The file {str(path)!r} holds no rows.")
    return {name: [cell.strip() for cell in cells.rows[at]] for at, name in enumerate(names)}


def _numbers(cells: Iterable[str]) -> list[float]:
    """The cells as numbers; empty if one of them is none."""
    try:
        return [float(cell) for cell in cells]
    except ValueError:
        return []


def _toml(value: Any) -> str:
    """A value as TOML writes it: JSON's form of texts, lists, numbers and truth values is TOML's too."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
