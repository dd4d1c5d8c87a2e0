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
import reprlib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

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
    "named_table",
    "read_schema",
    "records_for_model",
    "schema_file",
]

TO_FILL_IN = "FILL IN"
"""What stands where `describe_table` leaves a place to be filled in."""

_MISSING = ["", "?", "NA", "nan"]
_ROWS_LOOKED_AT = 1000
_MOST_VALUES = 100


class SchemaError(DataFileError):
    """A schema that cannot be used; the message names its file, the column, the key and the remedy."""


class _Declared(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Number(_Declared):
    type: Literal["number"]
    low: float
    high: float
    log: bool = False
    missing: list[str] | None = None


class _Category(_Declared):
    type: Literal["category"]
    values: list[str] | None = None
    buckets: int | None = None
    other: bool = True
    missing: list[str] | None = None
    strip: str = ""


class _Text(_Declared):
    type: Literal["text"]
    length: int = HashingTokenizer.length
    vocabulary: int = HashingTokenizer.vocabulary_size


class _Skip(_Declared):
    type: Literal["skip"]


_KINDS: dict[str, Any] = {"number": _Number, "category": _Category, "text": _Text, "skip": _Skip}


class Schema(_Declared):
    """What a schema file may hold."""

    format: int = 1
    population: Annotated[int | None, Field(ge=1, lt=2**53)] = None
    target: str | list[str] | None = None
    header: bool = True
    delimiter: str = ","
    comment: str | None = None
    missing: list[str] = []
    columns: dict[str, Annotated[_Number | _Category | _Text | _Skip, Field(discriminator="type")]]

    def column(self, name: str, learnt: bool) -> Column:
        """A declared column, as what is learnt or as an input; ValueError for one that cannot be it."""
        column = self.columns[name]
        missing = getattr(column, "missing", None)
        unknown = tuple(self.missing if missing is None else missing) or None
        match column:
            case _Category() if (column.values is None) == (column.buckets is None):
                raise ValueError(f"column {name!r}: a category needs either values or buckets.")
            case _Number(log=True) if learnt:
                raise ValueError(
                    f"the target {name!r} has log = true, which only inputs may have: a target is learnt on "
                    "the scale of its range. Put its logarithm into the table, with the range of that."
                )
            case _Number() if learnt:
                return TargetNumber(name, column.low, column.high)
            case _Category(values=list(values)) if learnt:
                return Label(name, tuple(values), column.strip)
            case _ if learnt:
                raise ValueError(
                    f"the target {name!r} must be a category with values = [...], its classes, or a number "
                    "with its range for a regression."
                )
            case _Number():
                return Number(name, column.low, column.high, column.log, unknown)
            case _Category(values=list(values)):
                return Category(name, tuple(values), unknown, column.other)
            case _Category(buckets=int(buckets)):
                return Hashed(name, buckets, unknown)
            case _Text():
                return Text(name, HashingTokenizer(column.vocabulary, column.length))
        return Skip(name)


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
    except (ValueError, RecursionError) as error:  # of tomllib, or of int for very many digits
        raise SchemaError(f"the schema {str(path)!r} is no TOML: {error}.") from None
    columns = values.get("columns")
    if isinstance(columns, dict) and owner in columns:
        columns[owner] = {"type": "skip"}
    if population is not None:
        values["population"] = population
    _checked(values, str(path))
    return values


def _to_fill_in(values: Mapping[str, Any]) -> list[str]:
    """The places of a schema that are left to be filled in."""
    parts = [("", values)]
    if isinstance(columns := values.get("columns"), Mapping):
        parts += [(f" of {name!r}", part) for name, part in columns.items() if isinstance(part, Mapping)]
    return [
        f"{key}{of}"
        for of, part in parts
        for key, value in part.items()
        if value in (TO_FILL_IN, [TO_FILL_IN])
    ]


def _checked(values: Mapping[str, Any], where: str) -> Schema:
    """The schema that a file called `where` holds; SchemaError for places to be filled in, and for faults."""
    left = _to_fill_in(values)
    if left:
        raise SchemaError(
            f"the schema {where!r} leaves places to be filled in: {', '.join(left)}. Take them from public "
            "knowledge, such as the form or its handbook. Learnt from the private rows they would tell of "
            "persons, and no epsilon would cover it. Values beyond a range are moved to its end."
        )
    try:
        return Schema.model_validate(dict(values))
    except ValidationError as error:
        # a key that is misspelt is told before the one that it leaves out
        first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    model: Any
    place, keys, model = f"the schema {where!r}", [str(key) for key in first["loc"]], Schema
    if len(keys) > 1 and keys[0] == "columns":
        place += f", column {keys[1]!r}"
        if len(keys) == 2:
            raise SchemaError(f"{place}: its type must be one of {', '.join(_KINDS)}.")
        keys, model = keys[3:], _KINDS[keys[2]]
    key, known = keys[0], list(model.model_fields)
    reason = f"{key} = {reprlib.repr(first['input'])}. {first['msg']}."
    if first["type"] == "extra_forbidden":
        reason = f"there is no key {key!r}.{suggestion(key, known)} It knows {', '.join(known)}."
    elif first["type"] == "missing":
        reason = f"{key} is missing. It knows {', '.join(known)}."
    raise SchemaError(f"{place}: {reason}")


def _table(
    values: Mapping[str, Any], named: str | None, where: str, owner: str | None = None
) -> tuple[Schema, Table, dict[str, Any]]:
    """The schema, the table that it declares, and its values with what is learnt: as named, or its own."""
    schema = _checked(values, where)
    given = named if named is not None else schema.target
    if given is None:
        raise SchemaError(
            f"the target is missing. Name the column to learn: --target COLUMN, or target = ... in {where!r}."
        )
    # a column's own name may hold a comma
    names = given if isinstance(given, list) else [given] if given in schema.columns else given.split(",")
    targets = [name.strip() for name in names]
    for name in targets:
        if name not in schema.columns:
            raise SchemaError(
                f"the target {name!r} is no column of the schema {where!r}."
                f"{suggestion(name, schema.columns)} It has {', '.join(schema.columns)}."
            )
        if name == owner:
            raise SchemaError(f"--owner names {owner!r}, which is the target: users are not what is learnt.")
    try:
        columns = tuple(schema.column(name, name in targets) for name in schema.columns)
        return (
            schema,
            Table(columns, schema.delimiter, schema.header, schema.comment),
            {**values, "target": targets},
        )
    except (ValueError, OverflowError) as error:
        raise SchemaError(f"the schema {where!r}: {error}") from None


def named_table(name: str) -> Table:
    """The declared columns of a named set, from its published description."""
    path = Path(__file__).with_name(f"{name}.schema.toml")
    return _table(read_schema(path), None, str(path))[1]


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
    where = str(schema or schema_file(path))
    values = read_schema(where, owner, population)
    declared, table, values = _table(values, target, where, owner)
    if declared.population is None:
        raise SchemaError(
            "the population is missing. It sets the sampling rate and the divisor of the noised sums, so it "
            "must be a public number that you state, not one counted from the private rows: --population "
            f"NUMBER, or population = ... in {where!r}. A round figure near the number of rows will do."
        )
    judges = None if test is None else read_table(test, table)
    rows = read_table(path, table if owner is None else _with_owner(table, owner, declared, where))
    train, judges, left = with_test_records(rows, judges, test_share, declared.population)
    return _data_set(path, values, table, train, judges, left)


def _with_owner(table: Table, owner: str, declared: Schema, where: str) -> Table:
    """The table whose column `owner` names the user of each row."""
    if owner not in declared.columns and not table.header:
        raise SchemaError(
            f"--owner names {owner!r}, which is no column of the schema {where!r}. A file without header "
            'needs all its columns declared in order; this one by type = "skip".'
        )
    columns = {column.name: column for column in table.columns}
    columns[owner] = Owner(owner, tuple(declared.missing))
    return replace(table, columns=tuple(columns.values()))


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
    _, table, values = _table(values, None, "config.json")
    first = next(rows_of_file(path, delimiter=table.delimiter, comment=table.comment), (0, []))[1]
    named = table.header or is_parquet(path)
    labelled = set(values["target"]) <= set(first) if named else len(first) == len(table.columns)
    fields = dict(read_table(path, table, targets=labelled).fields)
    if not labelled:
        name, kind = ("label", torch.int64) if table.task == "classification" else ("target", torch.float32)
        width = (table.num_classes,) if table.task == "multi-label" else ()
        fields[name] = torch.zeros(len(fields["input"]), *width, dtype=kind)
    blank = Records({name: torch.zeros_like(value[:1]) for name, value in fields.items()})
    return _data_set(path, values, table, blank, Records(fields), 1), labelled


def _data_set(
    path: PathLike, values: Mapping[str, Any], table: Table, train: Records, test: Records, population: int
) -> DataSet:
    first = table.targets[0]
    return DataSet(
        name=Path(path).name,
        train=train,
        test=test,
        population=population,
        num_classes=table.num_classes,
        description="rows of a table, encoded by a declared schema",
        class_names=table.class_names,
        vocabulary_size=None if table.text is None else table.text.tokenizer.vocabulary_size,
        task=table.task,
        target_range=(first.low, first.high) if isinstance(first, TargetNumber) else (-1.0, 1.0),
        schema=values,
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
    private = _first_rows(path, delimiter, header, _ROWS_LOOKED_AT)
    wanted = [name.strip() for name in target.split(",")] if target else []
    unknown = [name for name in wanted if name not in private]
    if unknown:
        near = "".join(suggestion(name, private) for name in unknown)  # no list: it may be a row of data
        raise SchemaError(
            f"--target names {', '.join(unknown)}, which is no cell of the first row of {str(path)!r}.{near} "
            "If the file has no header, say --no-header: its columns are then column-1, column-2, and so on."
        )
    public: Mapping[str, Iterable[str]] = {}
    if public_rows is not None:
        if is_same(path, public_rows):
            raise SchemaError(
                "--public-rows names the private rows themselves. Ranges and categories learnt from them "
                "would reveal persons, and no epsilon would cover it. Name a file that is public already."
            )
        public = _first_rows(public_rows, delimiter, header, None)
    columns = {name: _drafted(cells, public.get(name, ()), name in wanted) for name, cells in private.items()}
    values = {
        "format": 1,
        "population": TO_FILL_IN,
        **({"target": wanted if len(wanted) > 1 else wanted[0]} if wanted else {}),
        "header": header,
        "delimiter": delimiter,
        "missing": _MISSING,
    }
    text = (
        f"# The form of {Path(path).name}, written by `equipoise data describe`. Edit it: what stands here\n"
        "# is declared public. Types are guesses from the rows. Ranges and categories come from public\n"
        '# knowledge, never from the private rows. A column that names people is no input: type = "skip".\n'
    )
    for name, part in [("", values), *columns.items()]:
        bare = name if re.fullmatch("[A-Za-z0-9_-]+", name) else _toml(name)
        text += f"\n[columns.{bare}]\n" if part is not values else ""
        text += "".join(f"{key} = {_toml(value)}{_HINTS.get(key, '')}\n" for key, value in part.items())
        if name in wanted and part["type"] == "number":
            text += '# for classes instead of a regression: type = "category", values = ["0", "1"]\n'
    return text, _to_fill_in({**values, "columns": columns})


_HINTS = {
    "population": "   # the public number of rows; a round figure near it will do",
    "missing": "   # signs of no answer: a number gets a second one that says so, a category zeros",
    "buckets": "   # hashed; better: values = [...], where they are publicly known",
}


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
    values = sorted(set(known))
    if not 0 < len(values) <= _MOST_VALUES:
        return {"type": "category"} | ({"values": [TO_FILL_IN]} if learnt else {"buckets": 16})
    return {"type": "category", "values": values}


def _first_rows(
    path: PathLike, delimiter: str, header: bool, limit: int | None
) -> dict[str, tuple[str, ...]]:
    """The names of the columns, and their first cells."""
    rows = [cells for _, cells in islice(rows_of_file(path, delimiter=delimiter), limit)]
    names = rows[0] if rows else []
    other = other_delimiter(names)
    if other is not None:
        raise DataFileError(
            f"The first row of {str(path)!r} is one cell, so another sign stands between cells: give "
            f"--delimiter {other if len(other) == 3 else '$' + repr(chr(9))}."
        )
    if not header:
        names = [f"column-{i}" for i in range(1, len(names) + 1)]
    elif len(set(names)) < len(names) or not all(names) or any(_numbers([name]) for name in names):
        raise DataFileError(
            f"The first row of {str(path)!r} holds numbers, blanks or equal cells, so that it seems to be a "
            "row of data and no header. If the file has no header, say so: --no-header."
        )
    whole = [cells for cells in rows[header:] if len(cells) == len(names)]
    if not whole:
        raise DataFileError(f"The file {str(path)!r} holds no rows.")
    return dict(zip(names, zip(*whole, strict=True), strict=True))


def _numbers(cells: Iterable[str]) -> list[float]:
    """The cells as numbers; empty if one of them is none."""
    try:
        return [float(cell) for cell in cells]
    except ValueError:
        return []


def _toml(value: Any) -> str:
    """A value as TOML writes it: JSON's form of texts, lists, numbers and truth values is TOML's too."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
