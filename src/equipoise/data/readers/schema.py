"""The schema of a table: a TOML file that declares every column, and the data set that is read by it.

`describe_table` writes a first version to edit. It takes the names of the columns, which are public by
declaration, and guesses from the rows which columns are numbers. It never looks for ranges or categories in
private rows: they are left to be filled in, from public knowledge of the form, or taken from a file of public
rows. A schema that still has places to fill in is refused.

The values of a schema go with the model into the configuration of a run, so that the published folder is
enough to use the model.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from equipoise._files import PathLike
from equipoise._validate import suggestion
from equipoise.data.readers.files import DataFileError, MissingDataError, is_same, read_text, refuse_same
from equipoise.data.readers.tables import (
    Category,
    Column,
    Hashed,
    Label,
    Number,
    Owner,
    Skip,
    Table,
    TargetNumber,
    Text,
    is_parquet,
    other_delimiter,
    read_table,
    rows_of_file,
)
from equipoise.data.readers.text import HashingTokenizer
from equipoise.data.records import DataSet, Records, with_test_records

__all__ = [
    "TO_FILL_IN",
    "SchemaError",
    "describe_table",
    "load_table",
    "read_schema",
    "records_for_model",
    "schema_file",
    "table_of",
]

TO_FILL_IN = "FILL IN"
"""What stands where `describe_table` leaves a place to be filled in."""

_KEYS: dict[str, Any] = {
    "format": int,
    "population": int,
    "target": (str, list),
    "header": bool,
    "delimiter": str,
    "comment": str,
    "missing": list,
    "columns": dict,
}
_OF_TYPE: dict[str, dict[str, Any]] = {
    "number": {"low": (int, float), "high": (int, float), "log": bool, "missing": list},
    "category": {"values": list, "buckets": int, "other": bool, "missing": list, "strip": str},
    "text": {"length": int, "vocabulary": int},
    "skip": {},
}
_MISSING = ["", "?", "NA", "nan"]
_ROWS_LOOKED_AT = 1000
_MOST_VALUES = 100


class SchemaError(DataFileError):
    """A schema that cannot be used; the message names its file, the column, the key and the remedy."""


def schema_file(data: PathLike) -> Path:
    """Where the schema of a table is looked for.

    >>> str(schema_file("people.csv.gz"))
    'people.schema.toml'
    """
    path = Path(data)
    path = path.with_suffix("") if path.suffix == ".gz" else path
    return path.with_suffix(".schema.toml")


def read_schema(path: PathLike, owner: str | None = None, population: int | None = None) -> dict[str, Any]:
    """The values of a schema file, checked.

    Args:
        path: of the file.
        owner: the column that names users. It is no input, whatever the schema says of it.
        population: the public number of rows, whatever the schema says of it.

    Raises:
        MissingDataError: no such file; the message says which command writes one.
        SchemaError: it is no TOML, has keys that there are not, or places to be filled in.
    """
    if not Path(path).is_file():
        raise MissingDataError(
            f"the schema {str(path)!r} does not exist. `equipoise data describe TABLE` writes one to edit; "
            "--schema FILE names another file."
        )
    try:
        values = tomllib.loads(read_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SchemaError(f"the schema {str(path)!r} is no TOML: {error}.") from None
    if owner is not None and owner in (columns := values.get("columns") or {}):
        columns[owner] = {"type": "skip"}
    if population is not None:
        values["population"] = population
    check_schema(values, str(path))
    return values


def check_schema(values: Mapping[str, Any], where: str) -> None:
    """Refuse values that are no schema.

    Args:
        values: as the file holds them.
        where: its name, for messages.

    Raises:
        SchemaError: naming every place that is to be filled in, or the first key that is wrong.
    """
    open_size = values.get("population") == TO_FILL_IN
    _check_keys({**values, "population": 1} if open_size else values, _KEYS, f"the schema {where!r}")
    columns = values.get("columns")
    if not columns:
        raise SchemaError(f"the schema {where!r} declares no columns: [columns.NAME] with a type for each.")
    left = ["population"] if open_size else []
    for name, column in columns.items():
        place = f"the schema {where!r}, column {name!r}"
        kind = column.get("type") if isinstance(column, Mapping) else None
        if not isinstance(kind, str) or kind not in _OF_TYPE:
            raise SchemaError(f"{place}: its type must be one of {', '.join(_OF_TYPE)}.")
        empty = [key for key, value in column.items() if value in (TO_FILL_IN, [TO_FILL_IN])]
        left += [f"{key} of {name!r}" for key in empty]
        rest = {key: value for key, value in column.items() if key != "type" and key not in empty}
        _check_keys(rest, _OF_TYPE[kind], place)
        absent = [key for key in ("low", "high") if kind == "number" and key not in column]
        if kind == "category" and ("values" in column) == ("buckets" in column):
            absent = ["either values or buckets"]
        if absent:
            raise SchemaError(f"{place}: a {kind} needs {' and '.join(absent)}.")
    if left:
        raise SchemaError(
            f"the schema {where!r} leaves places to be filled in: {', '.join(left)}. Take them from public "
            "knowledge, such as the form or its handbook. Learnt from the private rows they would tell of "
            "persons, and no epsilon would cover it. Values beyond a range are moved to its end."
        )


def _check_keys(values: Mapping[str, Any], known: Mapping[str, Any], place: str) -> None:
    for key, value in values.items():
        if key not in known:
            raise SchemaError(
                f"{place}: there is no key {key!r}.{suggestion(key, known)} It knows {', '.join(known)}."
            )
        if not isinstance(value, known[key]) or (isinstance(value, bool) and known[key] is not bool):
            raise SchemaError(f"{place}: {key} is a {type(value).__name__}, which it cannot be.")
        if isinstance(value, int | float) and not abs(value) < 1e300:
            raise SchemaError(f"{place}: {key} must be a finite number, below 1e300.")
        if isinstance(value, list) and not all(isinstance(item, str) for item in value):
            raise SchemaError(f'{place}: {key} must be a list of texts, such as ["a", "b"].')


def targets_of(values: Mapping[str, Any], named: str | None, where: str) -> tuple[str, ...]:
    """What is learnt: as named (several separated by commas), or as the schema says.

    Raises:
        SchemaError: none is named, or one is no declared column.
    """
    given: Any = named if named is not None else values.get("target")
    if given is None:
        raise SchemaError(
            f"the target is missing. Name the column to learn: --target COLUMN, or target = ... in {where!r}."
        )
    # a column's own name may hold a comma
    names = given if isinstance(given, list) else [given] if given in values["columns"] else given.split(",")
    found = tuple(name.strip() for name in names)
    for name in found:
        if name not in values["columns"]:
            raise SchemaError(
                f"the target {name!r} is no column of the schema {where!r}."
                f"{suggestion(name, values['columns'])} It has {', '.join(values['columns'])}."
            )
    return found


def table_of(values: Mapping[str, Any], targets: Sequence[str], where: str) -> Table:
    """The table that a schema declares.

    Args:
        values: of the schema, checked.
        targets: the columns to learn.
        where: the schema's name, for messages.

    Raises:
        SchemaError: declarations that do not fit together.

    >>> columns = {"age": {"type": "number", "low": 0, "high": 99}}
    >>> columns["member"] = {"type": "category", "values": ["no", "yes"]}
    >>> table_of({"columns": columns}, ["member"], "people").task
    'classification'
    """
    signs = tuple(values.get("missing", ()))
    try:
        return Table(
            tuple(
                _target(name, column) if name in targets else _input(name, column, signs)
                for name, column in values["columns"].items()
            ),
            delimiter=values.get("delimiter", ","),
            header=values.get("header", True),
            comment=values.get("comment"),
        )
    except (ValueError, OverflowError) as error:
        raise SchemaError(f"the schema {where!r}: {error}") from None


def _input(name: str, column: Mapping[str, Any], signs: tuple[str, ...]) -> Column:
    unknown = tuple(column["missing"]) if "missing" in column else signs
    match column["type"]:
        case "number":
            return Number(
                name, float(column["low"]), float(column["high"]), column.get("log", False), unknown or None
            )
        case "category" if "buckets" in column:
            return Hashed(name, column["buckets"], unknown or None)
        case "category":
            return Category(name, tuple(column["values"]), unknown or None, column.get("other", True))
        case "text":
            usual = HashingTokenizer()
            return Text(
                name,
                HashingTokenizer(
                    column.get("vocabulary", usual.vocabulary_size), column.get("length", usual.length)
                ),
            )
    return Skip(name)


def _target(name: str, column: Mapping[str, Any]) -> Label | TargetNumber:
    if column.get("log"):
        raise ValueError(
            f"the target {name!r} has log = true, which only inputs may have: a target is learnt on the "
            "scale of its range. Put its logarithm into the table, with the range of that."
        )
    if column["type"] == "number":
        return TargetNumber(name, float(column["low"]), float(column["high"]))
    if column["type"] != "category" or "buckets" in column:
        raise ValueError(
            f"the target {name!r} must be a category with values = [...], its classes, or a number with its "
            "range for a regression."
        )
    return Label(name, tuple(column["values"]), column.get("strip", ""))


def load_table(
    path: PathLike,
    schema: PathLike | None = None,
    *,
    target: str | None = None,
    test: PathLike | None = None,
    test_share: float | None = None,
    population: int | None = None,
    owner: str | None = None,
) -> DataSet:
    """The data set of a table file, by its schema.

    Args:
        path: of the private rows.
        schema: the schema file; the one next to the rows by default.
        target: the column to learn, or several separated by commas; as the schema says by default.
        test: a file of rows to evaluate on; what the evaluation says of them is published.
        test_share: without it, the share of the private rows to evaluate on instead of training on them.
        population: the public number of rows; as the schema says by default.
        owner: the column that names the user of each row, for training records only.

    Raises:
        MissingDataError, DataFileError: files that are missing or broken, a schema that cannot be used.
    """
    if not Path(path).is_file():  # before its schema is asked for, which is looked for by its name
        raise MissingDataError(f"The file {str(path)!r} does not exist. Check the path.")
    refuse_same(path, test)
    where = schema or schema_file(path)
    values = read_schema(where, owner, population)
    targets = targets_of(values, target, str(where))
    if owner in targets:
        raise SchemaError(f"--owner names {owner!r}, which is the target: users are not what is learnt.")
    table = table_of(values, targets, str(where))
    size = values.get("population")
    if size is None:
        raise SchemaError(
            "the population is missing. It sets the sampling rate and the divisor of the noised sums, so it "
            "must be a public number that you state, not one counted from the private rows: --population "
            f"NUMBER, or population = ... in {str(where)!r}. A round figure near the number of rows will do."
        )
    judges = None if test is None else read_table(test, table)
    own = table if owner is None else _with_owner(table, owner, values, str(where))
    train, judges, left = with_test_records(read_table(path, own), judges, test_share, size)
    return table_data_set(Path(path).name, train, judges, left, values, table, targets)


def _with_owner(table: Table, owner: str, values: Mapping[str, Any], where: str) -> Table:
    """The table whose column `owner` names the user of each row."""
    there = [column.name for column in table.columns]
    if owner not in there and not table.header:
        raise SchemaError(
            f"--owner names {owner!r}, which is no column of the schema {where!r}. A file without header "
            'needs all its columns declared in order; this one by type = "skip".'
        )
    column = Owner(owner, tuple(values.get("missing", ())) or None)
    columns = [column if one.name == owner else one for one in table.columns]
    return replace(table, columns=(*columns, *([] if owner in there else [column])))


def records_for_model(path: PathLike, values: Mapping[str, Any]) -> tuple[DataSet, bool]:
    """The rows of a table as the test records of a data set, by the schema that went with a model.

    Args:
        path: of the rows, which may lack the columns that the model predicts.
        values: of the schema, with its target.

    Returns:
        The data set, whose training record is made up, and whether the rows hold what is predicted.

    Raises:
        DataFileError: the rows or the schema cannot be used.
    """
    where = "config.json"
    check_schema(values, where)
    targets = targets_of(values, None, where)
    table = table_of(values, targets, where)
    first = next(rows_of_file(path, delimiter=table.delimiter, comment=table.comment), ("", []))[1]
    named = table.header or is_parquet(path)
    labelled = set(targets) <= set(first) if named else len(first) == len(table.columns)
    fields = dict(read_table(path, table, targets=labelled).fields)
    if not labelled:
        count, task = len(fields["input"]), table.task
        shape = (count, len(targets)) if task == "multi-label" else (count,)
        name, kind = ("label", torch.int64) if task == "classification" else ("target", torch.float32)
        fields[name] = torch.zeros(shape, dtype=kind)
    blank = Records({name: torch.zeros_like(value[:1]) for name, value in fields.items()})
    return table_data_set(Path(path).name, blank, Records(fields), 1, values, table, targets), labelled


def table_data_set(
    name: str,
    train: Records,
    test: Records,
    population: int,
    values: Mapping[str, Any],
    table: Table,
    targets: Sequence[str],
) -> DataSet:
    """The data set of records that were read by a schema."""
    first = table.targets[0]
    return DataSet(
        name=name,
        train=train,
        test=test,
        population=population,
        num_classes=table.num_classes,
        description="rows of a table, encoded by a declared schema",
        class_names=table.class_names,
        vocabulary_size=None if table.text is None else table.text.tokenizer.vocabulary_size,
        task=table.task,
        target_range=(first.low, first.high) if isinstance(first, TargetNumber) else (-1.0, 1.0),
        schema={**values, "target": list(targets)},
        numeric_columns=table.numeric_columns,
    )


# ---- the first version of a schema


def describe_table(
    path: PathLike,
    *,
    header: bool = True,
    delimiter: str | None = None,
    target: str | None = None,
    public_rows: PathLike | None = None,
) -> tuple[str, list[str]]:
    """The text of a schema to edit, and the places that are left to be filled in.

    Args:
        path: of the private rows; of them the names of the columns are taken, and which are numbers.
        header: whether the first row holds the names.
        delimiter: between cells; a tab for ``.tsv`` by default, else a comma.
        target: the columns to learn, separated by commas.
        public_rows: a file of the same form whose rows are public: ranges and categories are taken from it.

    Raises:
        DataFileError: the first row holds no names.
    """
    delimiter = delimiter or ("\t" if ".tsv" in Path(path).suffixes else ",")
    header = header or is_parquet(path)
    names, columns = _first_rows(path, delimiter, header, _ROWS_LOOKED_AT)
    wanted = [name.strip() for name in target.split(",")] if target else []
    unknown = [name for name in wanted if name not in names]
    if unknown:
        near = "".join(suggestion(name, names) for name in unknown)  # no list: it may be a row of data
        raise SchemaError(
            f"--target names {', '.join(unknown)}, which is no cell of the first row of {str(path)!r}.{near} "
            "If the file has no header, say --no-header: its columns are then column-1, column-2, and so on."
        )
    known: dict[str, list[str]] = {}
    if public_rows is not None:
        if is_same(path, public_rows):
            raise SchemaError(
                "--public-rows names the private rows themselves. Ranges and categories learnt from them "
                "would tell of persons, and no epsilon would cover it. Name a file that is public already."
            )
        public_names, public_columns = _first_rows(public_rows, delimiter, header, None)
        known = dict(zip(public_names, public_columns, strict=True))
    lines = [
        f"# The form of {Path(path).name}, written by `equipoise data describe`. Edit it: what stands here",
        "# is declared public. Types are guesses from the rows. Ranges and categories come from public",
        '# knowledge, never from the private rows. A column that names people is no input: type = "skip".',
        "format = 1",
        f"population = {_toml(TO_FILL_IN)}   # the public number of rows; a round figure near it will do",
        *([f"target = {_toml(wanted if len(wanted) > 1 else wanted[0])}"] if wanted else []),
        f"header = {_toml(header)}",
        f"delimiter = {_toml(delimiter)}",
        f"missing = {_toml(_MISSING)}   # cells without an answer: a number gets a second one that says so,",
        "#                                     a category becomes zeros",
    ]
    left = ["population"]
    for name, cells in zip(names, columns, strict=True):
        numeric = _are_numbers(cells)
        bare = re.fullmatch("[A-Za-z0-9_-]+", name)
        lines += ["", f"[columns.{name if bare else _toml(name)}]"]
        found = known.get(name)
        if numeric and (found is None or _are_numbers(found)):
            low, high = _range(found or ())
            left += [f"{key} of {name!r}" for key in ("low", "high") if low == TO_FILL_IN]
            lines += ['type = "number"', f"low = {_toml(low)}", f"high = {_toml(high)}"]
            if name in wanted:
                lines.append('# for classes instead of a regression: type = "category", values = ["0", "1"]')
        else:
            lines += ['type = "category"']
            values = sorted({cell for cell in found or () if cell not in _MISSING})
            if values and len(values) <= _MOST_VALUES:
                lines += [f"values = {_toml(values)}"]
            elif name in wanted:
                lines += [f"values = {_toml([TO_FILL_IN])}"]
                left.append(f"values of {name!r}")
            else:
                lines += ["buckets = 16   # hashed; better: values = [...], where they are publicly known"]
    return "\n".join(lines) + "\n", left


def _first_rows(
    path: PathLike, delimiter: str, header: bool, limit: int | None
) -> tuple[list[str], list[list[str]]]:
    """The names of the columns and their first cells."""
    names: list[str] = []
    columns: list[list[str]] = []
    for _, cells in rows_of_file(path, delimiter=delimiter):
        if not names:
            names = cells if header else [f"column-{i}" for i in range(1, len(cells) + 1)]
            columns = [[] for _ in names]
            other = other_delimiter(cells)
            if other is not None:
                raise DataFileError(
                    f"The first row of {str(path)!r} is one cell, so another sign stands between cells: give "
                    f"--delimiter {other if len(other) == 3 else '$' + repr(chr(9))}."
                )
            if header:
                _check_names(path, names)
                continue
        if len(cells) == len(names):
            for column, cell in zip(columns, cells, strict=True):
                column.append(cell)
        if limit is not None and len(columns[0]) >= limit:
            break
    if not columns or not columns[0]:
        raise DataFileError(f"The file {str(path)!r} holds no rows.")
    return names, columns


def _check_names(path: PathLike, names: Sequence[str]) -> None:
    if len(set(names)) < len(names) or not all(names) or any(_is_number(name) for name in names):
        raise DataFileError(
            f"The first row of {str(path)!r} holds numbers, blanks or equal cells, so that it seems to be a "
            "row of data and no header. If the file has no header, say so: --no-header."
        )


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _are_numbers(cells: Iterable[str]) -> bool:
    present = [cell for cell in cells if cell not in _MISSING]
    return bool(present) and all(map(_is_number, present))


def _range(cells: Iterable[str]) -> tuple[float, float] | tuple[str, str]:
    numbers = [number for cell in cells if cell not in _MISSING and math.isfinite(number := float(cell))]
    if not numbers:
        return TO_FILL_IN, TO_FILL_IN
    low, high = min(numbers), max(numbers)
    return low, high if high > low else low + 1


def _toml(value: Any) -> str:
    """A value as TOML writes it: JSON's form of texts, lists, numbers and truth values is TOML's too."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
