"""The schema of a table: a TOML file that declares every column, and the records that are read by it.

Every column is declared, from public knowledge of the form that was filled in, and encoded cell by cell:

* a number in a declared range [low, high] becomes 2 (x - low) / (high - low) - 1, in [-1, 1]; values beyond
  the range are moved to its end; on a logarithmic scale x is first replaced by log(1 + x - low), and the
  range likewise; where a sign for "unknown" is declared, a second number says whether it stood there;
* a category becomes a one-hot vector over the declared values, and over one more place for all others where
  that is declared; a declared sign for "unknown" becomes zeros;
* a date becomes numbers in a declared range (days, year) and zeros and ones (month, weekday), as one column;
* a category whose values nobody knows beforehand is hashed: one-hot over a declared number of places;
* a text becomes token ids by a hash, which needs no vocabulary.

Means, deviations, ranges or lists of categories learnt from the private rows would be unaccounted queries on
them: the appearance of one more column would tell that somebody with a rare category is in the data.

The values of a schema go with the model into the configuration of a run, so that the published folder is
enough to use the model.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import reprlib
import tomllib
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from itertools import accumulate, chain
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch

from equipoise._extras import of_extra
from equipoise._files import PathLike, schema_file
from equipoise._validate import suggestion
from equipoise.data.readers.files import DataFileError, MissingDataError, read_text, refuse_same
from equipoise.data.readers.tables import Cells, read_cells
from equipoise.data.readers.text import MOST_TOKENS, MOST_WORDS, HashingTokenizer
from equipoise.data.records import ASIDE, MEDIAN, OWNER, WEIGHT, DataSet, Records, with_test_records

with of_extra():
    import pandas as pd
    from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

TO_FILL_IN = "FILL IN"
"""What stands where a first version of a schema leaves a place to be filled in."""
MOST_CUT = 0.03
"""The share of public rows beyond a range, or in no declared category, that is not worth a warning."""


class SchemaError(DataFileError):
    """A schema that cannot be used; the message names its file, the column, the key and the remedy."""


def has_comma(cell: str) -> bool:
    """Whether a cell is a number that is written with a comma, which is not read as a number.

    >>> has_comma("1,5"), has_comma("1.234,5"), has_comma("1.5"), has_comma("1, 5")
    (True, True, False, False)
    """
    return re.fullmatch(r"[-+]?[\d.]*,[\d.,]*", cell) is not None


def _finite(cell: str, or_else: str = "") -> float:
    try:
        # Python reads 9_9 and digits of other scripts as numbers; in a table they are damage.
        number = float(cell) if cell.isascii() and "_" not in cell else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            "the cell is a number with a comma. Write it with a point, and nothing between thousands: 1234.5."
            if has_comma(cell)
            else f"the cell is not a finite number. Repair the row, or drop it{or_else}."
        )
    return number


# ---- columns: `encode` codes a cell of an input, `learn` one of a target; ValueError for a cell that misfits


class _Declared(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Number(_Declared):
    """A number with its public range.

    >>> age = Number(type="number", low=0, high=100, missing=[""])
    >>> age.encode("75"), age.encode(""), age.learn("250")
    ([0.5, 0.0], [0.0, 1.0], 1.0)
    """

    type: Literal["number"]
    low: float
    high: float
    log: bool = False
    missing: list[str] | None = None

    @model_validator(mode="after")
    def _is_a_range(self) -> Number:
        if not (self.low < self.high and math.isfinite(2 * (self.high - self.low))):
            raise ValueError(f"the range low={self.low} .. high={self.high} must be finite and not empty")
        return self

    @property
    def width(self) -> int:
        return 2 if self.missing else 1

    def encode(self, cell: str) -> list[float]:
        if cell in (self.missing or ()):
            return [0.0, 1.0]
        or_else = ", or declare the column a category, or the sign for a missing number: missing = [...]"
        return [self.learn(cell, or_else), 0.0][: self.width]

    def learn(self, cell: str, or_else: str = "") -> float:
        value, span = min(max(_finite(cell, or_else), self.low), self.high) - self.low, self.high - self.low
        if self.log:
            value, span = math.log1p(value), math.log1p(span)
        return 2.0 * value / span - 1.0


class Category(_Declared):
    """A category of declared values, or one that is hashed by CRC-32 to a number of buckets.

    >>> pet = Category(type="category", values=["cat", "dog"], missing=["?"])
    >>> pet.encode("dog"), pet.encode("axolotl"), pet.encode("?"), pet.learn("dog")
    ([0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0], 1)
    """

    type: Literal["category"]
    values: list[str] | None = None
    buckets: Annotated[int, Field(ge=2, le=2**16)] | None = None
    other: bool = True
    missing: list[str] | None = None
    strip: str = ""

    @model_validator(mode="after")
    def _has_places(self) -> Category:
        if (self.values is None) == (self.buckets is None):
            raise ValueError("a category needs either values or buckets")
        if self.values is not None and (not self.values or len(set(self.values)) < len(self.values)):
            raise ValueError("values must be distinct and at least one")
        never = [word for word in (*(self.values or ()), *(self.missing or ())) if word != word.strip()]
        if never:
            raise ValueError(
                f"no cell is {never[0]!r}: blanks around a cell are left out. Leave them out here"
            )
        return self

    @property
    def width(self) -> int:
        return self.buckets or len(self.values or ()) + self.other

    def encode(self, cell: str) -> list[float]:
        found = [0.0] * self.width
        if cell in (self.missing or ()):
            return found
        if self.buckets:
            found[zlib.crc32(cell.encode()) % self.buckets] = 1.0
        elif cell in (self.values or ()):
            found[(self.values or []).index(cell)] = 1.0
        elif self.other:
            found[-1] = 1.0
        else:
            raise ValueError(
                "the cell is not a declared category. Declare it if it is publicly known to occur, take "
                "other = true, or drop the row."
            )
        return found

    def learn(self, cell: str) -> int:
        values, cell = self.values or [], cell.rstrip(self.strip) if self.strip else cell
        if cell not in values:
            raise ValueError("the cell is not a declared class. Repair the row, drop it, or declare it.")
        return values.index(cell)


class Date(_Declared):
    """A day by some of its parts, which share a length of at most 1; the range is public.

    >>> visit = Date(type="date", low="2024-01-01", high="2024-12-31", parts=["days"], missing=[""])
    >>> visit.encode("2024-12-31"), visit.encode(""), visit.encode("1999-05-05")
    ([1.0, 0.0], [0.0, 1.0], [-1.0, 0.0])
    """

    type: Literal["date"]
    low: str
    high: str
    parts: Annotated[list[Literal["days", "year", "month", "weekday"]], Field(min_length=1)] = ["days"]
    format: str = "%Y-%m-%d"
    missing: list[str] | None = None

    @model_validator(mode="after")
    def _is_a_range(self) -> Date:
        if not date.fromisoformat(self.low) < date.fromisoformat(self.high):
            raise ValueError(f"the range low={self.low!r} .. high={self.high!r} must not be empty")
        return self

    def codes(self, day: date = date.min) -> list[tuple[str, float, float, float]]:
        """Of each code its name, the scale and shift that it has, and the number of the day that it is of."""
        low, high = date.fromisoformat(self.low), date.fromisoformat(self.high)
        share, inside = len(self.parts) ** -0.5, min(max(day, low), high)

        def within(name: str, number: int, first: int, last: int) -> tuple[str, float, float, float]:
            span = max(1, last - first)
            return name, 2 * share / span, -share * (first + last) / span, number

        found: dict[str, list[tuple[str, float, float, float]]] = {
            "days": [within(f"days since {low}", (inside - low).days, 0, (high - low).days)],
            "year": [within("year", inside.year, low.year, high.year)],
            "month": [(f"month {n}", share, 0.0, day.month == n) for n in range(2, 13)],
            "weekday": [(f"weekday {n}", share, 0.0, day.isoweekday() == n) for n in range(2, 8)],
        }
        return [*chain(*(found[part] for part in self.parts))]

    @property
    def width(self) -> int:
        return len(self.codes()) + bool(self.missing)

    def encode(self, cell: str) -> list[float]:
        if cell in (self.missing or ()):
            return [0.0] * (self.width - 1) + [1.0]
        try:
            day = datetime.strptime(cell, self.format).date()
        except ValueError:
            raise ValueError(
                f"the cell is no date of the form {self.format}. Repair the row, drop it, or declare format "
                "or the sign for a missing date."
            ) from None
        found = [scale * number + shift for _, scale, shift, number in self.codes(day)]
        return found + [0.0] * bool(self.missing)


class Weight(_Declared):
    """A number above 0 that the loss of its row is multiplied by, over the public upper bound.

    >>> Weight(type="weight", low=1, high=50).learn("20"), Weight(type="weight", low=1, high=50).learn("90")
    (0.4, 1.0)
    """

    type: Literal["weight"]
    low: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    high: Annotated[float, Field(gt=0, allow_inf_nan=False)]

    def learn(self, cell: str) -> float:
        return min(max(_finite(cell), self.low), self.high) / self.high


class _Text(_Declared):
    """Text as token ids; it is then the only input."""

    type: Literal["text"]
    length: Annotated[int, Field(ge=1, le=MOST_WORDS)] = HashingTokenizer.length
    vocabulary: Annotated[int, Field(ge=2, le=MOST_TOKENS)] = HashingTokenizer.vocabulary_size

    def encode(self, cell: str) -> list[int]:
        return HashingTokenizer(self.vocabulary, self.length).ids(cell)


class _Skip(_Declared):
    type: Literal["skip"]


_Column = Annotated[Number | Category | Date | Weight | _Text | _Skip, Field(discriminator="type")]
_KINDS: dict[str, Any] = {
    "number": Number, "category": Category, "date": Date, "weight": Weight, "text": _Text, "skip": _Skip,
}  # fmt: skip


class Table(_Declared):
    """What a schema file holds: the columns of a table, and what is learnt of it.

    That is a category, a number, or several categories of two values each.
    """

    format: Literal[1] = 1
    population: Annotated[int | None, Field(ge=1, lt=2**53)] = None
    target: str | list[str] | None = None
    header: bool = True
    delimiter: str = ","
    comment: str | None = None
    missing: list[str] = []
    columns: dict[str, _Column]

    @model_validator(mode="after")
    def _is_usable(self) -> Table:
        for name, column in self.columns.items():
            if isinstance(column, Number | Category | Date) and column.missing is None:
                column.missing = self.missing
            both = set(getattr(column, "values", None) or ()) & set(getattr(column, "missing", None) or ())
            if both:
                raise ValueError(
                    f"{min(both)!r} is a value of column {name!r} and a sign for a missing one. Give the "
                    "column missing = [...] of its own"
                )
        if not self.targets:
            raise ValueError(
                "the target is missing. Name the column to learn: --target COLUMN, or target = ..."
            )
        if len(set(self.targets)) < len(self.targets):
            raise ValueError("a target is named twice")
        for name in self.targets:
            if name not in self.columns:
                near = suggestion(name, self.columns)
                raise ValueError(f"the target {name!r} is no column.{near} It has {', '.join(self.columns)}")
            column = self.columns[name]
            if not isinstance(column, Number) and not getattr(column, "values", None):
                raise ValueError(
                    f"the target {name!r} must be a category with values = [...], its classes, or a number "
                    "with its range for a regression"
                )
        if len(self.weights) > 1:
            raise ValueError(f"{' and '.join(self.weights)} are weights, and a row has one")
        if len(self.targets) > 1 and any(len(getattr(c, "values", ())) != 2 for c in self.learnt):
            raise ValueError("several targets must be categories of two values each")
        kinds = [type(column) for column in self.inputs.values()]
        if not kinds or (_Text in kinds and len(kinds) > 1):
            raise ValueError(
                "the columns must hold an input, and a text is the only one: skip the other columns"
            )
        return self

    @property
    def targets(self) -> tuple[str, ...]:
        """The columns that are learnt; a column's own name may hold a comma."""
        given = self.target or []
        names = [given] if isinstance(given, str) and given in self.columns else given
        return tuple(name.strip() for name in (names.split(",") if isinstance(names, str) else names))

    @property
    def learnt(self) -> list[Number | Category]:
        """The columns of the targets."""
        return [self.columns[name] for name in self.targets]  # type: ignore[misc]

    @property
    def inputs(self) -> dict[str, Number | Category | Date | _Text]:
        """The columns that are neither skipped, nor learnt, nor weights."""
        columns = self.columns.items()
        return {n: c for n, c in columns if n not in self.targets and not isinstance(c, _Skip | Weight)}

    @property
    def weights(self) -> dict[str, Weight]:
        """The column of weights, where there is one."""
        return {name: c for name, c in self.columns.items() if isinstance(c, Weight)}

    @property
    def task(self) -> str:
        """``classification``, ``regression`` or ``multi-label``."""
        if len(self.targets) > 1:
            return "multi-label"
        return "regression" if isinstance(self.learnt[0], Number) else "classification"

    @property
    def numeric_columns(self) -> tuple[int, ...]:
        """Places of the numbers in the encoding of a row, without those that say that a number is missing."""
        columns = [column for column in self.inputs.values() if not isinstance(column, _Text)]
        starts = accumulate((column.width for column in columns), initial=0)
        return tuple(at for at, column in zip(starts, columns, strict=False) if isinstance(column, Number))

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes; the labels of a multi-label table, and none of a regression."""
        return self.targets if len(self.targets) > 1 else tuple(getattr(self.learnt[0], "values", ()))

    @property
    def _in_words(self) -> str:
        """Which columns go in, with their ranges, and which do not."""

        def said(name: str) -> str:
            ends = [getattr(self.columns[name], end, None) for end in ("low", "high")]
            words = [f"{end:g}" if isinstance(end, float) else end for end in ends]
            return name if words[1] is None else f"{name} ({words[0]} to {words[1]})"

        skipped = [name for name, column in self.columns.items() if isinstance(column, _Skip)]
        groups = {
            "inputs": [*self.inputs], "learnt": self.targets, "weight": [*self.weights], "left out": skipped
        }  # fmt: skip
        most = 40  # a choice: a page can still be read
        return "; ".join(
            f"{what}: {', '.join(map(said, names[:most]))}"
            + (f" and {len(names) - most} more" if len(names) > most else "")
            for what, names in groups.items()
            if names
        )

    def data_set(
        self, path: PathLike, values: Mapping[str, Any], train: Records, test: Records, population: int
    ) -> DataSet:
        """Records of a file with what is publicly known of them."""
        first, texts = self.learnt[0], [c for c in self.inputs.values() if isinstance(c, _Text)]
        is_log = isinstance(first, Number) and first.log
        return DataSet(
            name=Path(path).name,
            train=train,
            test=test,
            population=population,
            num_classes=len(self.class_names) or 1,
            description=f"rows of a table; {self._in_words}" + (f"; {MEDIAN}" if is_log else ""),
            class_names=self.class_names,
            vocabulary_size=texts[0].vocabulary if texts else None,
            task=self.task,
            target_range=(first.low, first.high) if isinstance(first, Number) else (-1.0, 1.0),
            target_log=is_log,
            schema={**values, "target": list(self.targets)},
            numeric_columns=self.numeric_columns,
        )


# ---- the file of a schema


def read_schema(path: PathLike, **given: Any) -> dict[str, Any]:
    """The values of a schema file; `table_of` checks them.

    Args:
        path: of the file, or of the ``config.json`` of a run, which stores the schema that was used.
        given: values that are taken whatever the file says; None leaves those of the file.

    Raises:
        MissingDataError: no such file; the message says which command writes one.
        SchemaError: it is no TOML, and no configuration of a run on a table.
    """
    if not Path(path).is_file():
        raise MissingDataError(
            f"the schema {str(path)!r} does not exist. `equipoise schema init TABLE` writes one to edit; "
            "--schema FILE names another file."
        )
    try:
        text = read_text(path)
        values = json.loads(text)["schema"] if Path(path).suffix == ".json" else tomllib.loads(text)
    except (KeyError, TypeError):
        raise SchemaError(
            f"{str(path)!r} holds no schema: it is no config.json of a run on a table."
        ) from None
    except (ValueError, RecursionError) as error:  # of tomllib, or of int for very many digits
        raise SchemaError(
            f"the schema {str(path)!r} is no {Path(path).suffix[1:].upper()}: {error}."
        ) from None
    return values | {key: value for key, value in given.items() if value is not None}


def places_to_fill_in(values: Mapping[str, Any]) -> list[str]:
    """The places of a schema that are left to be filled in."""
    parts = [("", values)]
    if isinstance(columns := values.get("columns"), Mapping):
        parts += [(f" of {name!r}", part) for name, part in columns.items() if isinstance(part, Mapping)]
    return [
        f"{key}{of}"
        for of, part in parts
        for key, value in part.items()
        if value == TO_FILL_IN or (isinstance(value, list) and TO_FILL_IN in value)
    ]


def table_of(values: Mapping[str, Any], where: str = "config.json") -> Table:
    """The table that a schema declares.

    Args:
        values: of the schema.
        where: what messages call the schema.

    Raises:
        SchemaError: it has places to be filled in, or keys and values that it cannot have.
    """
    if left := places_to_fill_in(values):
        raise SchemaError(
            f"the schema {where!r} leaves places to be filled in: {', '.join(left)}. Take them from public "
            "knowledge, such as the form or its handbook. Learnt from the private rows they would tell of "
            "persons, and no epsilon would cover it. Values beyond a range are moved to its end."
        )
    try:
        return Table.model_validate(dict(values))
    except ValidationError as error:
        # a key that is misspelt is told before the one that it leaves out
        first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    place, reason = f"the schema {where!r}", first["msg"].removeprefix("Value error, ")
    keys, known = [str(key) for key in first["loc"]], list(Table.model_fields)
    if len(keys) > 1 and keys[0] == "columns":
        place += f", column {keys[1]!r}"
        known = list(_KINDS[keys[2]].model_fields) if len(keys) > 2 else []
        keys = keys[3:]
    if keys and first["type"] == "extra_forbidden":
        reason = f"there is no key {keys[0]!r}.{suggestion(keys[0], known)} It knows {', '.join(known)}"
    elif first["type"].startswith("union_tag"):
        reason = f"type = {reprlib.repr(first['input'].get('type'))}, but there are {', '.join(_KINDS)}"
    elif keys:
        value = "" if first["type"] == "missing" else f" = {reprlib.repr(first['input'])}"
        reason = f"{keys[0]}{value}. {reason}"
    raise SchemaError(f"{place}: {reason}.")


# ---- the rows


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
        test: a file of rows to evaluate on; what the evaluation says of them is published. A range that cuts
            many of their numbers is warned of, and so is a category that is none of the declared for many.
        test_share: without it, the share of the private rows to evaluate on instead of training on them.
            Which ones follows from their cells, or their owner, and so is the same whatever the schema.
        population: the public number of rows; as the schema says by default.
        owner: the column that names the user of each row, for training records only. It is no input,
            whatever the schema says of it.

    Raises:
        MissingDataError, DataFileError: files that are missing or broken, a schema that cannot be used.
    """
    if not Path(path).is_file():  # before its schema is asked for, which is looked for by its name
        raise MissingDataError(f"The file {str(path)!r} does not exist. Check the path.")
    refuse_same(path, test)
    where = str(schema or schema_file(path))
    values = read_schema(where, target=target, population=population)
    if owner is not None and owner == values.get("target"):
        raise SchemaError(f"--owner names {owner!r}, which is the target: users are not what is learnt.")
    if owner is not None and owner in values.get("columns", ()):
        values["columns"][owner] = {"type": "skip"}
    table = table_of(values, where)
    if table.population is None:
        raise SchemaError(
            "the population is missing. It sets the sampling rate and the divisor of the noised sums, so it "
            "must be a public number that you state, not one counted from the private rows: --population "
            f"NUMBER, or population = ... in {where!r}. A round figure near the number of rows will do."
        )
    judges = None if test is None else read_rows(test, table, evaluated=1.0)
    rows = read_rows(path, table, owner=owner, evaluated=0.0 if test else test_share or 0.0)
    return table.data_set(path, values, *with_test_records(rows, judges, test_share, table.population))


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
    table = table_of(values)
    fields = dict(read_rows(path, table, targets=None, evaluated=1.0).fields)
    labelled = len(fields) > 1
    if not labelled:
        name, kind = ("label", torch.int64) if table.task == "classification" else ("target", torch.float32)
        width = (len(table.targets),) if table.task == "multi-label" else ()
        fields[name] = torch.zeros(len(fields["input"]), *width, dtype=kind)
    blank = Records({name: torch.zeros_like(value[:1]) for name, value in fields.items()})
    return table.data_set(path, values, blank, Records(fields), 1), labelled


def cells_of(path: PathLike, values: Mapping[str, Any], names: Sequence[str]) -> list[list[str]]:
    """The cells of some columns of a table, declared or not, as they stand; by the form of a schema.

    Raises:
        DataFileError: the table has no such column, or no header.
    """
    form = {key: values[key] for key in ("header", "delimiter", "comment") if values.get(key) is not None}
    cells = read_cells(path, **form)
    there = cells.names or []
    if wrong := [name for name in names if there.count(name) != 1]:
        raise DataFileError(
            f"{cells.place()}: the header names no one column {', '.join(map(repr, wrong))}."
            f"{suggestion(wrong[0], there)} A file without header has no columns to name."
        )
    return [[cell.strip() for cell in cells.rows[there.index(name)]] for name in names]


def read_rows(
    path: PathLike,
    table: Table,
    *,
    targets: bool | None = True,
    owner: str | None = None,
    evaluated: float = 0.0,
) -> Records:
    """The rows of a CSV, TSV or Parquet file: input float32 ``[n, d]`` and what is learnt.

    Text gives the input int64 ``[n, length]``. What is learnt is ``label`` int64 ``[n]`` of a classification,
    ``target`` float32 ``[n]`` of a regression, in [-1, 1], or ``target`` ``[n, labels]`` of zeros and ones.
    Where a column holds weights, ``weight`` float32 ``[n]`` is their share of the upper bound.

    Args:
        path: of the file; ``.gz`` is unpacked, ``.parquet`` needs the package pyarrow.
        table: the declared columns.
        targets: None reads those of a file that has them, as all others must.
        owner: the column that names users: ``owner`` is then int64 ``[n, 2]``, a digest of 16 bytes, the
            same for the same name, whoever else is there.
        evaluated: the share of the rows that are evaluated on, and so not private: of them a warning names
            each range beyond which many numbers lie, and each category that is none of the declared for many.
            Below 1 the field ``aside``, bool ``[n]``, says which these are.

    Raises:
        MissingDataError, DataFileError: no such file, a row with too few or too many cells, a cell that does
            not fit its column; the message names file, line and column.
    """
    cells = read_cells(path, header=table.header, delimiter=table.delimiter, comment=table.comment)
    declared = list(table.columns)
    if cells.names is None:
        bare = [name for name in declared if name not in table.targets]
        names = bare if targets is None and cells.rows.shape[1] == len(bare) else declared
        if cells.rows.shape[1] != len(names):
            raise DataFileError(
                f"{cells.place(0)}: {cells.rows.shape[1]} cells where {len(names)} columns are expected."
            )
    else:
        names = cells.names
    learnt = table.targets if targets or set(table.targets) <= set(names) else ()
    weights = table.weights if targets else {}
    read = [*table.inputs, *learnt, *weights, *([] if owner is None else [owner])]
    if wrong := [name for name in read if names.count(name) != 1]:
        raise DataFileError(_misfit(cells, names, wrong, owner))
    if cells.rows.empty:
        raise DataFileError(f"The file {str(path)!r} holds no rows.")

    def coded(name: str, encode: Callable[[str], Any]) -> np.ndarray:
        return _coded(cells, names.index(name), name, encode)

    inputs = np.concatenate([coded(name, column.encode) for name, column in table.inputs.items()], 1)
    fields = {"input": torch.from_numpy(inputs)}
    if learnt:
        columns = zip(table.targets, table.learnt, strict=True)
        found = torch.from_numpy(np.stack([coded(name, column.learn) for name, column in columns], 1))
        found = found.float() if table.task == "multi-label" else found[:, 0]
        fields["label" if table.task == "classification" else "target"] = found
    for name, weight in weights.items():
        fields[WEIGHT] = torch.from_numpy(coded(name, weight.learn))
    if owner is not None:
        fields[OWNER] = torch.from_numpy(coded(owner, lambda cell: _user(cell, table.missing)))
    if evaluated < 1 and (unused := [name for name in names if name not in (*declared, owner)]):
        said = ", ".join(unused[:20]) + (f" and {len(unused) - 20} more" if len(unused) > 20 else "")
        warnings.warn(f"not used, since the schema does not declare them: {said}.", stacklevel=2)
    public = cells.rows
    if 0 < evaluated < 1:
        if owner is not None:  # a user is trained on or evaluated on, never both
            aside = Records({OWNER: fields[OWNER]}).which_aside(evaluated, seed=0, by=OWNER)
        else:  # by the cells as they stand, so that another schema sets the same rows aside
            written = [
                digest_of("\0".join(map(str.strip, row))) for row in cells.rows.itertuples(index=False)
            ]
            aside = Records({"cells": torch.tensor(written)}).which_aside(evaluated, seed=0)
        fields[ASIDE] = aside
        public = public[aside.numpy()]
    rows = f"{'test ' if evaluated < 1 else ''}rows of {Path(path).name!r}"
    for name in [*table.inputs, *learnt, *weights] if evaluated else ():
        column = table.columns[name]
        if (
            isinstance(column, Number | Weight) or name in table.inputs
        ):  # a class that is not declared is an error
            cells_of_it = public[names.index(name)].str.strip()
            _warn_of_misfits(rows, name, column, cells_of_it, name in table.inputs)
    return Records(fields, num_classes=len(table.class_names) if "label" in fields else None)


def _warn_of_misfits(rows: str, name: str, column: Any, cells: pd.Series[str], is_input: bool) -> None:
    """Say how many public cells a range cuts, or are in no declared category where `other` is not chosen."""
    if isinstance(column, Number | Weight):
        numbers = pd.to_numeric(cells, errors="coerce")
        missing = cells.isin(getattr(column, "missing", None) or ())  # such as 999
        misfits = ~missing & ((numbers < column.low) | (numbers > column.high))
        said = (
            f"lie beyond the range low = {column.low:g}, high = {column.high:g}, and count as its ends. "
            "Widen the range in the schema unless you want that, or "
            + 'declare codes for no answer, such as 999, there: missing = ["", "999"].' * is_input
            + "drop rows whose number is a code for no answer, such as 999." * (not is_input)
        )
    elif isinstance(column, Category) and column.values and "other" not in column.model_fields_set:
        misfits = ~cells.isin([*column.values, *(column.missing or ())])
        said = (
            'are none of the declared values, and count as "other". Declare them in the schema, or other = '
            "true if you want that."
        )
    else:
        return
    if (share := float(misfits.mean())) > MOST_CUT:
        warnings.warn(f"column {name!r}: {share:.0%} of the {rows} {said}", stacklevel=3)


def _coded(cells: Cells, at: int, name: str, encode: Callable[[str], Any]) -> np.ndarray:
    """The codes of a column's cells, each distinct one computed once."""
    which, distinct = pd.factorize(cells.rows[at])
    codes, wrong = [], dict[int, str]()
    for i, cell in enumerate(distinct):
        try:
            codes.append(encode(cell.strip()))
        except ValueError as error:
            wrong[i] = str(error)
    if wrong:
        rows = np.flatnonzero(np.isin(which, [*wrong]))
        more = f" Cells of this column that do not fit: {len(rows):,}." if len(rows) > 1 else ""
        raise DataFileError(f"{cells.place(int(rows[0]))}, column {name!r}: {wrong[which[rows[0]]]}{more}")
    found = np.array(codes)
    return (found.astype(np.float32) if found.dtype == np.float64 else found)[which]


def _user(cell: str, missing: list[str]) -> list[int]:
    if not cell or cell in missing:
        raise ValueError(
            "the cell names no user, and rows of unknown users would count as one user's. Name the user, or "
            "drop the row."
        )
    return digest_of(cell)


def digest_of(text: str) -> list[int]:
    """The 16 bytes, as two numbers, that stand for an owner's name."""
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), np.int64).tolist()


def _misfit(cells: Cells, names: list[str], wrong: list[str], owner: str | None) -> str:
    """What is wrong with a header; its names are not shown, it may be a row of data."""
    if wrong == [owner] and owner not in names:
        return (
            f"{cells.place()}: --owner names {owner!r}, but the table has no such column. Name the one that "
            "says which user a row belongs to. A file without header needs all its columns declared in "
            'order, this one by type = "skip".'
        )
    lacking = [name for name in wrong if name not in names]
    # only what differs in case is named: another cell may be one of a row of data
    near = [name for name in names if name.lower() in {word.lower() for word in lacking}]
    meant = f" The file has {', '.join(map(repr, near))}." if near else ""
    return (
        f"{cells.place()}: the header {'lacks' if lacking else 'repeats'} the declared columns "
        f"{', '.join(map(repr, lacking or wrong))}.{meant} Correct the names"
        + ("." if cells.lines is None else ", or declare that the file has no header: header = false.")
    )
