"""Tables: CSV, TSV and Parquet files with typed columns, and libsvm files.

Every column is declared, from public knowledge of the form that was filled in, and encoded cell by cell:

* a number in a declared range [low, high] becomes 2 (x - low) / (high - low) - 1, in [-1, 1]; values beyond
  the range are moved to its end; on a logarithmic scale x is first replaced by log(1 + x - low), and the
  range likewise; where a sign for "unknown" is declared, a second number says whether it stood there;
* a category becomes a one-hot vector over the declared values, and over one more place for all others where
  that is declared; a declared sign for "unknown" becomes zeros;
* a category whose values nobody knows beforehand is hashed: one-hot over a declared number of places;
* a text becomes token ids by a hash, which needs no vocabulary.

Means, deviations, ranges or lists of categories learnt from the private rows would be unaccounted queries on
them: the appearance of one more column would tell that somebody with a rare category is in the data.

No error shows what a cell holds, not even what stands in the place of a header: messages go to logs.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equipoise import _validate
from equipoise._files import PathLike
from equipoise.data.readers.files import DataFileError, MissingDataError, read_bytes, read_text
from equipoise.data.readers.text import HashingTokenizer
from equipoise.data.records import OWNER, Records

__all__ = [
    "Category",
    "Column",
    "Hashed",
    "Label",
    "Number",
    "Owner",
    "Skip",
    "Table",
    "TargetNumber",
    "Text",
    "is_parquet",
    "other_delimiter",
    "place_of",
    "read_libsvm",
    "read_table",
    "rows_of_file",
]

_Signs = str | tuple[str, ...] | None
_ROWS_AT_ONCE = 1024  # their cells stay in the cache of a processor: half the time of 4,096


def _means_unknown(cell: str, unknown: _Signs) -> bool:
    return cell == unknown if isinstance(unknown, str) else unknown is not None and cell in unknown


@dataclass(frozen=True)
class _Ranged:
    """A column of numbers with a public range."""

    name: str
    low: float
    high: float

    def __post_init__(self) -> None:
        if not (self.low < self.high and math.isfinite(2 * (self.high - self.low))):
            raise ValueError(
                f"column {self.name!r}: the range low={self.low} .. high={self.high} must be finite and not "
                "empty."
            )

    def _scaled(self, cell: str, log: bool) -> float:
        try:
            number = float(cell)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise DataFileError(
                "the cell is not a finite number. Repair the row, drop it, declare the column a category, or "
                "declare the sign for a missing number: Number(..., unknown=...), or missing = [...] in a "
                "schema file."
            )
        value, span = min(max(number, self.low), self.high) - self.low, self.high - self.low
        if log:
            value, span = math.log1p(value), math.log1p(span)
        return 2.0 * value / span - 1.0


@dataclass(frozen=True)
class _Valued:
    """A column of declared values."""

    name: str
    values: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.values or len(set(self.values)) != len(self.values):
            raise ValueError(f"column {self.name!r}: values must be distinct and at least one.")


@dataclass(frozen=True)
class Number(_Ranged):
    """A numeric column with its public range; ``unknown`` is the sign (or signs) for a missing number.

    With it the encoding has a second number: 0 where the cell holds a number, and for a missing one 1, after
    the middle of the range.

    >>> Number("age", 0, 100).encode("75"), Number("gain", 0, 1e5, log=True).encode("0")
    ([0.5], [-1.0])
    >>> age = Number("age", 0, 100, unknown="")
    >>> age.encode("75"), age.encode("")
    ([0.5, 0.0], [0.0, 1.0])
    """

    log: bool = False
    unknown: _Signs = None

    @property
    def width(self) -> int:
        """Numbers in the encoding."""
        return 1 if self.unknown is None else 2

    def encode(self, cell: str) -> list[float]:
        """The encoding of one cell; DataFileError for what is no finite number."""
        if _means_unknown(cell, self.unknown):
            return [0.0, 1.0]
        return [self._scaled(cell, self.log), 0.0][: self.width]


@dataclass(frozen=True)
class Category(_Valued):
    """A column of declared values; ``unknown`` is the sign for a missing one, which is encoded as zeros.

    With ``other`` a value that was not declared goes to one more place; without it, it is an error.

    >>> Category("sex", ("Female", "Male"), unknown="?").encode("Male")
    [0.0, 1.0]
    >>> Category("pet", ("cat", "dog"), other=True).encode("axolotl")
    [0.0, 0.0, 1.0]
    """

    unknown: _Signs = None
    other: bool = False

    @property
    def width(self) -> int:
        """Numbers in the encoding."""
        return len(self.values) + self.other

    def encode(self, cell: str) -> list[float]:
        """The encoding of one cell; DataFileError for a value that was not declared."""
        found = [0.0] * self.width
        if _means_unknown(cell, self.unknown):
            return found
        if cell not in self.values and not self.other:
            raise DataFileError(
                "the cell is not a declared category. Declare it if it is publicly known to occur, take "
                "other=True, or drop the row."
            )
        found[self.values.index(cell) if cell in self.values else -1] = 1.0
        return found


@dataclass(frozen=True)
class Hashed:
    """A column of categories that nobody knows beforehand: one-hot over ``buckets`` places by a public hash.

    The hash is CRC-32 of the value's UTF-8 bytes. Two values may share a place. ``unknown`` is the sign for a
    missing one, which is encoded as zeros.

    >>> Hashed("city", 4).encode("Paris"), Hashed("city", 4, unknown="").encode("")
    ([0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0])
    """

    name: str
    buckets: int
    unknown: _Signs = None

    def __post_init__(self) -> None:
        if not 2 <= self.buckets <= 2**16:
            raise ValueError(
                f"column {self.name!r}: buckets={self.buckets} must be at least 2 and at most {2**16}."
            )

    @property
    def width(self) -> int:
        """Numbers in the encoding."""
        return self.buckets

    def encode(self, cell: str) -> list[float]:
        """The encoding of one cell."""
        found = [0.0] * self.buckets
        if not _means_unknown(cell, self.unknown):
            found[zlib.crc32(cell.encode()) % self.buckets] = 1.0
        return found


@dataclass(frozen=True)
class Text:
    """A column of text, as token ids; it is then the only input."""

    name: str
    tokenizer: HashingTokenizer = field(default_factory=HashingTokenizer)

    def encode(self, cell: str) -> list[int]:
        """The token ids of one cell."""
        return self.tokenizer.ids(cell)


@dataclass(frozen=True)
class Label(_Valued):
    """The class: a value's position in ``values`` is its number; ``strip`` is cut from the end."""

    strip: str = ""

    def encode(self, cell: str) -> list[int]:
        """The class number of one cell; DataFileError for a value that was not declared."""
        cell = cell.rstrip(self.strip) if self.strip else cell
        if cell not in self.values:
            raise DataFileError("the cell is not a declared class. Repair the row, drop it, or declare it.")
        return [self.values.index(cell)]


@dataclass(frozen=True)
class TargetNumber(_Ranged):
    """The number that a regression is after, with its public range, which becomes [-1, 1].

    >>> TargetNumber("wage", 0, 100).encode("250")
    [1.0]
    """

    def encode(self, cell: str) -> list[float]:
        """The scaled number of one cell, moved to the range's end beyond it; DataFileError for no number."""
        return [self._scaled(cell, log=False)]


@dataclass(frozen=True)
class Skip:
    """A column that is not used."""

    name: str


@dataclass(frozen=True)
class Owner:
    """The column that names the user of each row: no input. ``unknown`` are signs that name nobody.

    A cell becomes a digest of 16 bytes, as two whole numbers: the same for the same name, whoever else is
    there.
    """

    name: str
    unknown: _Signs = None

    def encode(self, cell: str) -> list[int]:
        """The digest of one cell; DataFileError where it names nobody."""
        if not cell or _means_unknown(cell, self.unknown):
            raise DataFileError(
                "the cell names no user, and rows of unknown users would count as one user's. Name the user, "
                "or drop the row."
            )
        return np.frombuffer(hashlib.blake2b(cell.encode(), digest_size=16).digest(), np.int64).tolist()


_Input = Number | Category | Hashed
_Target = Label | TargetNumber
Column = _Input | Text | _Target | Skip | Owner


@dataclass(frozen=True)
class Table:
    """The declared form of a table file: its columns, and what is learnt of them.

    Its targets are one `Label` (classification), one `TargetNumber` (regression), or several `Label` of two
    values each, of which the second means "has it" (multi-label).

    Attributes:
        columns: of a file without header, one for each column in order.
        delimiter: between cells; blanks around cells are dropped.
        header: whether the first row holds the column names. The declared ones are then found by name, in any
            order, and columns that are not declared are passed over. Parquet files have names always.
        comment: rows that begin with it are passed over.
        quotes: whether a cell in quotation marks may hold delimiters and line breaks; if not, they are signs
            like others.
    """

    columns: tuple[Column, ...]
    delimiter: str = ","
    header: bool = False
    comment: str | None = None
    quotes: bool = True

    def __post_init__(self) -> None:
        pairs = all(isinstance(column, Label) and len(column.values) == 2 for column in self.targets)
        if len(self.targets) != 1 and not (self.targets and pairs):
            raise ValueError(
                "columns must hold exactly one Label, one TargetNumber, or several Labels of two values "
                f"each, not {[column.name for column in self.targets]}."
            )
        texts = [column.name for column in self.columns if isinstance(column, Text)]
        if len(texts) + bool(self.num_features) > 1:
            raise ValueError(
                f"columns {texts} hold text, which is then the only input: skip the other columns."
            )
        if self.num_features == 0 and not texts:
            raise ValueError("columns hold no input: there is nothing to learn from.")
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names):
            raise ValueError("columns: their names must be distinct.")

    @property
    def targets(self) -> tuple[_Target, ...]:
        """What is learnt."""
        return tuple(column for column in self.columns if isinstance(column, _Target))

    @property
    def task(self) -> str:
        """``classification``, ``regression`` or ``multi-label``."""
        if len(self.targets) > 1:
            return "multi-label"
        return "classification" if isinstance(self.targets[0], Label) else "regression"

    @property
    def text(self) -> Text | None:
        """The column of text, or None where the inputs are numbers."""
        return next((column for column in self.columns if isinstance(column, Text)), None)

    @property
    def num_features(self) -> int:
        """Numbers in the encoding of a row."""
        return sum(column.width for column in self.columns if isinstance(column, _Input))

    @property
    def numeric_columns(self) -> tuple[int, ...]:
        """Places of the numbers in the encoding of a row, without those that say that a number is missing."""
        inputs = [column for column in self.columns if isinstance(column, _Input)]
        starts = accumulate((column.width for column in inputs), initial=0)
        return tuple(at for at, column in zip(starts, inputs, strict=False) if isinstance(column, Number))

    @property
    def num_classes(self) -> int:
        """Declared classes; the number of labels of a multi-label table, 1 of a regression."""
        return len(self.class_names) or 1

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes; the labels of a multi-label table, and none of a regression."""
        first = self.targets[0]
        if len(self.targets) > 1:
            return tuple(column.name for column in self.targets)
        return first.values if isinstance(first, Label) else ()


def is_parquet(path: PathLike) -> bool:
    """Whether a file is read as Parquet, by its name."""
    return Path(path).suffix == ".parquet"


def place_of(path: PathLike, number: int) -> str:
    """How messages call a row of `rows_of_file`."""
    return repr(str(path)) + (f", {'row' if is_parquet(path) else 'line'} {number}" if number else "")


def rows_of_file(
    path: PathLike,
    *,
    delimiter: str = ",",
    comment: str | None = None,
    quotes: bool = True,
    columns: Sequence[str] | None = None,
) -> Iterator[tuple[int, list[str]]]:
    """The rows of a table file as text: (their line, their cells); the names first where it is Parquet.

    A line is that of the file, in which a quoted cell may take several, and of Parquet the number of the row.
    Python's reader of CSV says how many cells a row has; that of pandas fills a short row with blanks, which
    would then pass for missing cells.

    Args:
        path: a CSV or TSV file (plain or ``.gz``), or a Parquet file.
        delimiter, comment, quotes: of a text file, as those of `Table`.
        columns: of a Parquet file, the only ones to read; those that it lacks are left out.

    Raises:
        MissingDataError, DataFileError: no such file; one that is broken.
    """
    if is_parquet(path):
        yield from enumerate(_parquet_rows(path, columns))
        return
    text = io.StringIO(read_text(path), newline="")
    try:
        rows = csv.reader(
            text,
            delimiter=delimiter,
            skipinitialspace=True,
            quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE,
        )
    except (TypeError, ValueError):
        raise DataFileError(
            f"delimiter={delimiter!r} cannot stand between cells. Give one character, such as a semicolon."
        ) from None
    try:
        for row in rows:
            empty = not row or (len(row) == 1 and not row[0].strip())
            if not (empty or (comment and row[0].startswith(comment))):
                yield rows.line_num, [cell.strip() for cell in row]
    except csv.Error as error:
        raise DataFileError(f"{place_of(path, rows.line_num)}: {error}.") from None


def _parquet_rows(path: PathLike, columns: Sequence[str] | None) -> Iterator[list[str]]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the file {str(path)!r} is read by the package pyarrow: pip install pyarrow, or "
            "write the rows as CSV."
        ) from error
    if not Path(path).is_file():
        raise MissingDataError(f"The file {str(path)!r} does not exist. Check the path.")
    try:
        with parquet.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if columns is None or name in columns]
            yield names
            for batch in file.iter_batches(columns=names):
                for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    yield [_as_text(value) for value in row]
    except ArrowException as error:
        raise DataFileError(
            f"The file {str(path)!r} is no whole Parquet file ({type(error).__name__}). Fetch it again."
        ) from None


def _as_text(value: Any) -> str:
    """A cell of a Parquet file as it would stand in a CSV file; a missing one is empty."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


def read_table(path: PathLike, table: Table, *, targets: bool = True) -> Records:
    """The rows of a CSV, TSV or Parquet file: input float32 ``[n, num_features]`` and what is learnt.

    Text gives the input int64 ``[n, length]``. What is learnt is ``label`` int64 ``[n]`` of a classification,
    ``target`` float32 ``[n]`` of a regression, in [-1, 1], or ``target`` ``[n, labels]`` of zeros and ones.
    Where a column names users, ``owner`` is int64 ``[n, 2]``.

    Args:
        path: of the file; ``.gz`` is unpacked, ``.parquet`` needs the package pyarrow.
        table: the declared columns.
        targets: False reads the inputs only; the file may then lack the columns of the targets.

    Raises:
        MissingDataError, DataFileError: no such file, a row with too few or too many cells, a cell that does
            not fit its column; the message names file, line and column.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "people.csv"
    >>> _ = path.write_text("30, yes, a\\n50, no, b\\n")
    >>> form = Table((Number("age", 0, 100), Category("member", ("no", "yes")), Label("group", ("a", "b"))))
    >>> read_table(path, form).fields["input"].tolist()
    [[-0.4000000059604645, 0.0, 1.0], [0.0, 1.0, 0.0]]
    """
    declared = [column for column in table.columns if targets or not isinstance(column, _Target)]
    read = [column for column in declared if not isinstance(column, Skip)]
    names = [column.name for column in read]
    rows = rows_of_file(
        path, delimiter=table.delimiter, comment=table.comment, quotes=table.quotes, columns=names
    )
    nothing = DataFileError(f"The file {str(path)!r} holds no rows.")
    number, first = next(rows, (0, None))
    if first is None:
        raise nothing
    if table.header or is_parquet(path):
        width, places = len(first), _places_by_name(place_of(path, number), first, read)
    else:
        rows = chain([(number, first)], rows)
        there = table.columns if len(first) == len(table.columns) else declared
        width, places = len(there), [there.index(column) for column in read]
    parts: dict[str, list[np.ndarray]] = {}
    while block := list(islice(rows, _ROWS_AT_ONCE)):
        for number, cells in block:
            if len(cells) != width:
                raise DataFileError(
                    f"{place_of(path, number)}: {len(cells)} cells where {width} columns are expected."
                )
        for name, kinds in {"input": _Input | Text, "target": _Target, OWNER: Owner}.items():
            found = [
                _encoded(path, column, [(number, cells[at]) for number, cells in block])
                for column, at in zip(read, places, strict=True)
                if isinstance(column, kinds)
            ]
            if found:
                parts.setdefault(name, []).append(np.concatenate(found, 1))
    if not parts:
        raise nothing
    fields = {name: torch.from_numpy(np.concatenate(part)) for name, part in parts.items()}
    if targets and table.task == "multi-label":
        fields["target"] = fields["target"].float()
    elif targets:
        fields["label" if table.task == "classification" else "target"] = fields.pop("target")[:, 0]
    return Records(fields, num_classes=table.num_classes if table.task == "classification" else None)


def _encoded(path: PathLike, column: Any, cells: list[tuple[int, str]]) -> np.ndarray:
    """The encodings of a column's cells, each distinct one computed once; cells come with their lines."""
    codes: dict[str, int] = {}
    which = [codes.setdefault(cell, len(codes)) for _, cell in cells]
    found = []
    for cell, code in codes.items():
        try:
            found.append(column.encode(cell))
        except DataFileError as error:
            place = place_of(path, cells[which.index(code)][0])
            raise DataFileError(f"{place}, column {column.name!r}: {error}") from None
    encoded = np.array(found)
    return (encoded.astype(np.float32) if encoded.dtype == np.float64 else encoded)[which]


def _places_by_name(place: str, names: list[str], read: Sequence[Column]) -> list[int]:
    """Where the header has the declared columns; its names are not shown, it may be a row of data."""
    missing = [column for column in read if column.name not in names]
    wrong = missing or [column for column in read if names.count(column.name) > 1]
    if not wrong:
        return [names.index(column.name) for column in read]
    if all(isinstance(column, Owner) for column in missing) and missing:
        raise DataFileError(
            f"{place}: --owner names {missing[0].name!r}, but the header has no such column. Name the column "
            "that says which user a row belongs to."
        )
    other = other_delimiter(names)
    remedy = (
        "Correct the names, or declare that the file has no header: header = false."
        if other is None
        else f"The row is one cell, so another sign stands between cells: declare delimiter = {other}."
    )
    raise DataFileError(
        f"{place}: the header {'lacks' if missing else 'repeats'} the declared columns "
        f"{', '.join(repr(column.name) for column in wrong)}. {remedy}"
    )


def other_delimiter(cells: Sequence[str]) -> str | None:
    """The sign that seems to stand between cells where a row was read as one cell, as TOML writes it.

    >>> other_delimiter(["age;wage"]), other_delimiter(["age", "wage"])
    ('";"', None)
    """
    signs = {";": '";"', "\t": '"\\t"', "|": '"|"', ",": '","'}
    return next((word for sign, word in signs.items() if len(cells) == 1 and sign in cells[0]), None)


def read_libsvm(path: PathLike, num_features: int) -> Records:
    """A libsvm file (``label index:value ...``, indices from 1; plain or ``.gz``) as dense float32 ``[n,
    num_features]``.

    Args:
        path: the file, whose labels are -1 and +1, the classes 0 and 1.
        num_features: the public number of features; never the largest index found.

    Raises:
        MissingDataError, DataFileError: no such file; an unknown label, an index outside 1 .. num_features
            or not increasing, a value that is not finite.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "rows"
    >>> _ = path.write_text("+1 1:0.5 3:2\\n-1 2:1\\n")
    >>> read_libsvm(path, 3).fields["input"].tolist()
    [[0.5, 0.0, 2.0], [0.0, 1.0, 0.0]]
    """
    from sklearn.datasets import load_svmlight_file

    _validate.count("the public number of features", num_features=num_features)
    try:
        rows, labels, queries = load_svmlight_file(
            io.BytesIO(read_bytes(path)), n_features=num_features, zero_based=False, query_id=True
        )
    except (ValueError, OverflowError):
        raise DataFileError(
            f"The file {str(path)!r} is no libsvm file (label index:value ...) whose indices rise within 1 "
            f".. {num_features}."
        ) from None
    # scikit-learn checks the form of each cell, and that indices increase and lie in range. It takes any
    # number for a label, NaN and infinities for values, and qid:NUMBER for a cell, which it then leaves out.
    if len(labels) == 0:
        raise DataFileError(f"The file {str(path)!r} holds no rows.")
    if len(queries):
        raise DataFileError(f"The file {str(path)!r} has qid cells: it is made for ranking, not for classes.")
    if not np.isin(labels, (-1, 1)).all():
        raise DataFileError(f"The file {str(path)!r} has a label which is not one of -1 and +1.")
    fields = {"input": torch.from_numpy(rows.toarray()).float(), "label": torch.from_numpy(labels > 0).long()}
    return Records(fields, num_classes=2)  # which refuses values that are not finite
